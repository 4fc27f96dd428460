"""Drafts whose tokens the GPU draws: replies, and the cache that they leave, are those of one token at a time."""

import random
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
import torch

from exl2chat.engine.drafting import Drafter, ForcedDrafter, ModelDrafter, SuffixDrafter
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator
from exl2chat.engine.paced_drafts import Source
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ChatError
from exl2chat.kernels import compile_for
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.progress import silent
from exl2chat.settings import Sampling
from tests.engine.speculative import DRAFTERS, Always, Guided

CUDA = torch.device("cuda")
GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").iterdir())
FOLDER = GOLDEN[0]
PROMPT = list(range(5, 40))
COUNT = 60
MOST = 7
SETTINGS = (
    Sampling(temperature=0),
    Sampling(seed=1),
    Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=2),
    Sampling(temperature=1.0, top_p=1.0, min_p=0.02, seed=2**63 - 1),
)
PENALTIES = Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, penalty_range=20, seed=3)


class Chance(Guided):
    """Any number of drafts, each of them right in seven of ten."""

    def __init__(self) -> None:
        chance = random.Random(5)
        super().__init__(lambda token: token if chance.random() < 0.7 else (token + 1) % 200)
        self._count = chance.randint

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return super().propose(tokens, self._count(0, count))


def generator(model: Transformer, folder: Path, *drafters: Drafter, capacity: int = 128) -> StreamingGenerator:
    """One that follows every idea of `drafters`."""
    tokenizer = open_tokenizer(open_checkpoint(folder).folder)
    subject = StreamingGenerator(model, model.new_cache(capacity), tokenizer, speculate="off")
    subject._decoder._sources = [Source(drafter, Always(MOST)) for drafter in drafters]  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    return subject


def load(folder: Path) -> Transformer:
    model = Transformer.load(open_checkpoint(folder), CUDA, torch.float16, silent)
    cache = model.new_cache(128)
    steps = [torch.zeros(rows, dtype=torch.int64, device=CUDA) for rows in range(1, MOST + 2)]
    with torch.inference_mode():
        compile_for(lambda: [model.step(tokens, cache, False) for tokens in steps], silent)
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load(FOLDER)


def reply(subject: StreamingGenerator, prompt: list[int], settings: Sampling, count: int | None = COUNT) -> list[int]:
    subject.begin_stream_ex(prompt, settings, max_new_tokens=count)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens


def stored(subject: StreamingGenerator) -> torch.Tensor:
    """Keys and values of all but the last token."""
    torch.cuda.synchronize()
    return subject._cache.storage.flatten(3, 4)[..., : len(subject.tokens) - 1, :]


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_replies_and_caches_are_those_without_drafts(folder: Path) -> None:
    model = load(folder)
    drafters = {**{name: make() for name, make in DRAFTERS.items()}, "chance": Chance()}
    off = generator(model, folder)
    subjects = {name: generator(model, folder, drafter) for name, drafter in drafters.items()}
    for settings in SETTINGS:
        expected = reply(off, PROMPT, settings)
        for name, subject in subjects.items():
            drafters[name].sequence = expected
            assert reply(subject, PROMPT, settings) == expected, name
            assert torch.equal(stored(subject), stored(off)), name
            drafted, accepted, _ = subject.speculated
            assert drafted > 10
            assert {"right": accepted == drafted > 45, "wrong": accepted == 0}.get(name, 0 < accepted < drafted), name


@pytest.mark.parametrize("most", range(1, MOST + 1))
def test_any_number_of_drafts_may_be_right(model: Transformer, most: int) -> None:
    drafter = Guided(lambda token: token)
    subject = generator(model, FOLDER, drafter)
    subject._decoder._sources = [Source(drafter, Always(most))]  # type: ignore[arg-type]
    for settings in SETTINGS:
        drafter.sequence = reply(generator(model, FOLDER), PROMPT, settings)
        assert reply(subject, PROMPT, settings) == drafter.sequence
        assert subject.speculated.accepted == subject.speculated.drafted > (COUNT - 4) * most // (most + 1) - 2


def test_ngrams_are_the_default_and_come_true(model: Transformer) -> None:
    tokenizer = open_tokenizer(open_checkpoint(FOLDER).folder)
    subject = StreamingGenerator(model, model.new_cache(128), tokenizer)
    sources = subject._decoder._sources
    assert [type(source.drafter) for source in sources] == [ForcedDrafter, SuffixDrafter]
    subject._decoder._sources = [source._replace(pace=Always(4)) for source in sources]  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    off, accepted = generator(model, FOLDER), 0
    for settings in (SETTINGS[0], Sampling(temperature=0.3, top_k=2, seed=4), PENALTIES):
        assert reply(subject, PROMPT, settings, 80) == reply(off, PROMPT, settings, 80)
        accepted += subject.speculated.accepted
    assert subject.speculated.drafted == 0  # penalties count token by token
    assert accepted > 10


def test_a_draft_model_feeds_them(model: Transformer) -> None:
    off = generator(model, FOLDER)
    subject = generator(model, FOLDER, ModelDrafter(model, model.new_cache(128), off._size))
    for settings in (*SETTINGS, PENALTIES):
        expected = reply(off, PROMPT, settings)
        assert reply(subject, PROMPT, settings) == expected
        assert subject.speculated.accepted > 40


def test_limits_end_a_reply_within_a_run_of_drafts(model: Transformer) -> None:
    drafter = Guided(lambda token: token)
    whole = reply(generator(model, FOLDER), PROMPT, SETTINGS[2])
    drafter.sequence = whole
    subject = generator(model, FOLDER, drafter)
    for count in (1, 2, 3, 4, 5, 9, 13, 20):
        assert reply(subject, PROMPT, SETTINGS[2], count) == whole[: len(PROMPT) + count]
    end = next(token for i, token in enumerate(whole) if i > len(PROMPT) + 9 and token not in whole[len(PROMPT) : i])
    subject.set_stop_conditions([end])
    place = whole.index(end, len(PROMPT))
    assert reply(subject, PROMPT, SETTINGS[2]) == whole[: place + 1]


def test_no_draft_is_written_beyond_the_context(model: Transformer) -> None:
    drafter = Guided(lambda token: token)
    for capacity in range(60, 70):
        expected = reply(generator(model, FOLDER, capacity=capacity), PROMPT, SETTINGS[1], None)
        drafter.sequence = [*expected, *PROMPT]
        subject = generator(model, FOLDER, drafter, capacity=capacity)
        storage = subject._cache.storage.flatten(3, 4)
        storage[..., capacity - 1 :, :] = 77
        assert reply(subject, PROMPT, SETTINGS[1], None) == expected
        torch.cuda.synchronize()
        assert bool((storage[..., capacity - 1 :, :] == 77).all())


def test_the_host_draws_among_them(model: Transformer) -> None:
    """Where a banned string began, and where more is forbidden: then tokens that have arrived are of no use."""
    extras = Extras(banned_strings=("a", "e"))
    rewound = accepted = 0

    def sequence(subject: StreamingGenerator, settings: Sampling) -> list[int]:
        nonlocal rewound
        subject.begin_stream_ex(PROMPT, settings, max_new_tokens=COUNT, extras=extras)
        while not (result := subject.stream_ex(banned=[9, 10] if len(subject.tokens) % 17 == 0 else ())).eos:
            rewound += result.suppressed != ""
        return subject.tokens

    for settings in SETTINGS[1:]:
        expected = sequence(generator(model, FOLDER), settings)
        drafter = Guided(lambda token: token)
        drafter.sequence = expected
        subject = generator(model, FOLDER, drafter)
        assert sequence(subject, settings) == expected
        accepted += subject.speculated.accepted
    assert rewound > 2
    assert accepted > 20


def wander(subject: StreamingGenerator, drafter: Chance | None, known: list[list[int]]) -> list[list[int]]:
    """The sequences of many replies, most of them dropped or aborted, each on from somewhere in the last."""
    chance, conversation, sequences = random.Random(1), PROMPT, []
    for turn in range(40):
        stopped = Event()
        if drafter is not None:
            drafter.sequence = known[turn]
        subject.begin_stream_ex(
            conversation, chance.choice((*SETTINGS, PENALTIES)), max_new_tokens=30, abort=stopped.is_set
        )
        for _ in range(chance.choice((0, 1, 2, 3, 5, 7, 12, 40))):
            subject.stream_ex()
        if chance.random() < 0.5:
            stopped.set()
            subject.stream_ex()
        sequences.append(list(subject.tokens))
        conversation = [*subject.tokens[: chance.randint(1, len(subject.tokens))][:80], chance.randrange(200)]
    return sequences


def test_streams_dropped_anywhere_leave_nothing_behind(model: Transformer) -> None:
    expected = wander(generator(model, FOLDER), None, [])
    drafter = Chance()
    assert wander(generator(model, FOLDER, drafter), drafter, expected) == expected


def test_logits_that_are_not_numbers_end_the_reply_and_no_more() -> None:
    model, drafter = load(FOLDER), Guided(lambda token: token)
    subject = generator(model, FOLDER, drafter)
    drafter.sequence = reply(subject, PROMPT, SETTINGS[1])
    subject.begin_stream_ex(PROMPT, SETTINGS[1], max_new_tokens=COUNT)
    for _ in range(8):
        subject.stream_ex()
    scale = model.weights.layers[0].attention_norm.scale
    kept = scale.clone()
    scale.fill_(float("nan"))
    with pytest.raises(ChatError, match="not numbers"):
        [subject.stream_ex() for _ in range(30)]
    scale.copy_(kept)
    subject._cache.truncate(0)
    assert reply(subject, PROMPT, SETTINGS[1]) == drafter.sequence
