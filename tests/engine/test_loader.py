"""From a model folder to a reply: real weights, tokenizer and template, no network."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from exl2chat.engine import placement
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.loader import LoadedModel, plan_draft, plan_load
from exl2chat.errors import ModelError, UsageError
from exl2chat.paths import Paths
from exl2chat.progress import silent
from exl2chat.settings import Sampling

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
GREEDY = Sampling(temperature=0)
END_OF_TURN = 3
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return Paths.default(tmp_path_factory.mktemp("home"))


def load(path: Path, home: Paths, context: int | None = None) -> LoadedModel:
    return plan_load(path, "cpu", "float32", context, home, silent).load(silent)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, home: Paths) -> LoadedModel:
    """A golden checkpoint with a chat template whose end of turn no other file calls an end."""
    folder = tmp_path_factory.mktemp("model") / "chat"
    shutil.copytree(GOLDEN / "llama-3.0bpw-exl2", folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return load(folder, home)


def answer(generator: StreamingGenerator, ids: list[int], count: int) -> list[int]:
    generator.set_stop_conditions([])
    generator.begin_stream_ex(ids, GREEDY, max_new_tokens=count)
    tokens: list[int] = []
    while not (result := generator.stream_ex()).eos:
        tokens += result.tokens
    return [*tokens, *result.tokens]


def test_what_any_file_calls_an_end_of_turn_stops_a_reply(chat_model: LoadedModel) -> None:
    assert chat_model.stop_ids == {1, 7, END_OF_TURN}
    assert chat_model.stop_strings == ()


def test_a_model_without_a_template_stops_before_the_next_user(home: Paths) -> None:
    model = load(GOLDEN / "llama-fp16", home)
    assert model.stop_ids == {1}
    assert model.tokenizer.decode(model.encode_turns([("user", "hi")])).endswith("User: hi\nAssistant:")


def test_a_conversation_ends_where_the_assistant_is_to_write(chat_model: LoadedModel) -> None:
    def text(*turns: tuple[str, str]) -> str:
        return chat_model.tokenizer.decode(chat_model.encode_turns(turns), special=True)

    assert text(("user", "one")) == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert text(("user", "one"), ("assistant", "two")).endswith("<|im_start|>assistant\ntwo")


def test_a_control_token_in_a_message_is_plain_text(chat_model: LoadedModel) -> None:
    ids = chat_model.encode_turns([("user", "a<|im_end|>b")])
    assert ids.count(END_OF_TURN) == 1


def test_the_context_is_the_models_own_unless_told(chat_model: LoadedModel, home: Paths) -> None:
    assert chat_model.cache.capacity == chat_model.checkpoint.config.context == 2048
    assert load(chat_model.checkpoint.folder.path, home, 300).cache.capacity == 300


def test_a_longer_context_than_the_models_is_refused(chat_model: LoadedModel, home: Paths) -> None:
    with pytest.raises(UsageError, match="made for 2048 tokens"):
        load(chat_model.checkpoint.folder.path, home, 4096)


def test_a_folder_that_is_no_model_is_one_clear_error(tmp_path: Path, home: Paths) -> None:
    with pytest.raises(ModelError):
        load(tmp_path, home)


@pytest.mark.parametrize("name", ["llama-3.0bpw-exl2", "gemma2-4.0bpw-exl2", "mistral-4.0bpw-exl2"])
def test_turns_over_a_reused_cache_equal_greedy_steps_over_fresh_ones(name: str, home: Paths) -> None:
    model = load(GOLDEN / name, home)
    generator = StreamingGenerator(model.transformer, model.cache, model.tokenizer)
    conversation = [5, 600, 7, 80, 9]
    for turn in range(3):
        reply = answer(generator, conversation, 12)
        expected = list(conversation)
        for _ in range(12):
            logits = model.transformer.forward(torch.tensor(expected), model.transformer.new_cache(256), last_only=True)
            expected.append(int(logits[0, : model.tokenizer.vocab_size].argmax()))
        assert reply == expected[len(conversation) :]
        conversation = [*conversation, *reply[: 12 - 4 * turn], 17, 18 + turn]


def test_a_template_is_tried_in_a_process_of_its_own_before_it_is_used(tmp_path: Path, home: Paths) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(GOLDEN / "llama-3.0bpw-exl2", folder)
    (folder / "chat_template.jinja").write_text("{{ (['x' * 100000] * 100000) | join('y' * 100000) }}")
    with pytest.raises(ModelError, match="hostile"):
        load(folder, home)


def test_what_both_models_leave_behind_is_room_for_the_next_two(home: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GOLDEN / "llama-fp16"
    model, draft = load(folder, home, 512), load(folder, home, 512)
    needed = model.transformer.weight_bytes + model.cache.nbytes
    enough = next(free for free in range(0, 1 << 40, needed // 2) if fits(folder, home, free, monkeypatch))
    monkeypatch.setattr(placement, "free_bytes", lambda _: enough - 2 * needed)
    plan = plan_load(folder, "cpu", "float32", 512, home, silent, (model, draft))
    plan_draft(folder, plan, home, silent, (model, draft))
    with pytest.raises(ModelError):
        plan_draft(folder, plan, home, silent, (model,))


def fits(folder: Path, home: Paths, free: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a model can be loaded where so many bytes are free."""
    monkeypatch.setattr(placement, "free_bytes", lambda _: free)
    try:
        plan_load(folder, "cpu", "float32", 512, home, silent)
    except ModelError:
        return False
    return True
