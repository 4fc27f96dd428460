"""Steps in flight on the GPU against the same model with its logits brought to the host, token by token."""

import random
from pathlib import Path

import pytest
import torch

from exl2chat.engine import device_decoder
from exl2chat.engine.drafting import ModelDrafter
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.replies import choosing
from exl2chat.engine.replies.choosing import Chooser
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.replies.language import Language
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ChatError
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.progress import silent
from exl2chat.settings import Sampling

CUDA = torch.device("cuda")
GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").iterdir())
PROMPT = list(range(5, 40))
PENALTIES = Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, penalty_range=20, seed=3)
SETTINGS = (
    Sampling(temperature=0),
    Sampling(seed=1),
    Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=2),
    Sampling(temperature=1.0, top_p=1.0, min_p=0.02, seed=2**63 - 1),
    PENALTIES,
)


def generator(folder: Path, capacity: int = 128) -> StreamingGenerator:
    checkpoint = open_checkpoint(folder)
    model = Transformer.load(checkpoint, CUDA, torch.float16, silent)
    subject = StreamingGenerator(model, model.new_cache(capacity), open_tokenizer(checkpoint.folder))
    subject.set_stop_conditions([])
    return subject


def reply(subject: StreamingGenerator, prompt: list[int], settings: Sampling, count: int | None) -> list[int]:
    subject.begin_stream_ex(prompt, settings, max_new_tokens=count)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens[len(prompt) :]


def host_replies(folder: Path) -> list[list[int]]:
    """What comes of it when the host samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "known_to_device", lambda _: False)
        subject = generator(folder)
        return [reply(subject, PROMPT, settings, 60) for settings in SETTINGS]


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_replies_are_those_of_the_host_sampling_step_by_step(folder: Path) -> None:
    subject = generator(folder)
    assert [reply(subject, PROMPT, settings, 60) for settings in SETTINGS] == host_replies(folder)


@pytest.mark.parametrize("folder", GOLDEN[:3], ids=lambda folder: folder.name)
def test_drafts_that_are_drawn_there_are_those_of_the_host(folder: Path) -> None:
    """Without penalties, which there count drafts too."""
    checkpoint = open_checkpoint(folder)
    model = Transformer.load(checkpoint, CUDA, torch.float16, silent)
    language = Language(open_tokenizer(checkpoint.folder), model.config.vocab_size)
    there, here = (ModelDrafter(model, model.new_cache(128), language.size) for _ in range(2))
    assert there._steps is not None
    here._steps = None
    for settings in SETTINGS[:4]:
        chooser = Chooser(Job((tuple(PROMPT),), 60, settings), PROMPT, language)
        there.begin(chooser)
        here.begin(chooser)
        for length in (20, 21, 28, 24, 125):
            tokens = (PROMPT * 4)[:length]
            drafts = there.propose(tokens, 7)
            assert drafts == here.propose(tokens, 7)
            assert len(drafts) == min(7, 129 - length)


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_replies_do_not_depend_on_how_many_steps_are_in_flight(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [reply(generator(GOLDEN[0]), PROMPT, settings, 60) for settings in SETTINGS]
    monkeypatch.setattr(device_decoder, "DEPTH", depth)
    subject = generator(GOLDEN[0])
    assert [reply(subject, PROMPT, settings, 60) for settings in SETTINGS] == expected


def wander(subject: StreamingGenerator) -> list[list[int]]:
    """The sequences of many replies, most of them dropped, each on from somewhere in the last."""
    chance, conversation, sequences = random.Random(1), PROMPT, []
    for _ in range(40):
        subject.begin_stream_ex(conversation, chance.choice(SETTINGS), max_new_tokens=30)
        for _ in range(chance.choice((0, 1, 2, 3, 5, 40))):
            subject.stream_ex()
        sequences.append(subject.tokens)
        conversation = [*subject.tokens[: chance.randint(1, len(subject.tokens))][:80], chance.randrange(200)]
    return sequences


def test_streams_dropped_anywhere_leave_nothing_behind() -> None:
    ours = wander(generator(GOLDEN[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "known_to_device", lambda _: False)
        assert ours == wander(generator(GOLDEN[0]))


def test_no_step_in_flight_writes_beyond_the_context() -> None:
    subject = generator(GOLDEN[0], capacity=100)
    storage = subject._cache.storage
    storage[..., 99:, :] = 77
    assert len(reply(subject, PROMPT, Sampling(seed=1), None)) == 100 - len(PROMPT)
    torch.cuda.synchronize()
    assert bool((storage[..., 99:, :] == 77).all())
    assert subject._cache.length == 99


def test_a_stop_id_ends_the_reply_that_steps_in_flight_went_on_with() -> None:
    whole = reply(generator(GOLDEN[0]), PROMPT, SETTINGS[2], 40)
    end = next(token for i, token in enumerate(whole) if i > 5 and token not in whole[:i])
    subject = generator(GOLDEN[0])
    subject.set_stop_conditions([end])
    assert reply(subject, PROMPT, SETTINGS[2], 40) == whole[: whole.index(end) + 1]


def test_logits_that_are_not_numbers_end_the_reply_and_no_more() -> None:
    subject = generator(GOLDEN[0])
    expected = reply(subject, PROMPT, Sampling(seed=1), 20)
    subject.begin_stream_ex(PROMPT, Sampling(seed=1), max_new_tokens=20)
    subject.stream_ex()
    scale = subject._model.weights.layers[0].attention_norm.scale
    kept = scale.clone()
    scale.fill_(float("nan"))
    with pytest.raises(ChatError, match="not numbers"):
        [subject.stream_ex() for _ in range(10)]
    scale.copy_(kept)
    subject._cache.truncate(0)
    assert reply(subject, PROMPT, Sampling(seed=1), 20) == expected
