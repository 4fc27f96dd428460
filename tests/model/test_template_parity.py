"""Every template under tests/data/templates renders as transformers renders it, byte for byte."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from exl2chat.errors import ModelError
from exl2chat.model.sandbox import Sandbox
from exl2chat.model.template import ChatTemplate
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from tests.model.tokenizer_files import write_tokenizer

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
NAMES = sorted(str(path.relative_to(TEMPLATES).with_suffix("")) for path in TEMPLATES.glob("*/*.jinja"))

SYSTEM = ("system", "You are terse.  ")
USER = ("user", ' Hi <b>there</b> "é" \\ 😀\n')
ASSISTANT = ("assistant", "<think>\nhm\n</think>\n\nHello! ")
AGAIN = ("user", "And {{ 2*2 }}?\r\n\r\nx")
REPLY = ("assistant", "Four\n")
PART = ("assistant", "The answer is ")
CASES: dict[str, tuple[list[tuple[str, str]], bool, bool]] = {
    "system and user": ([SYSTEM, USER], True, False),
    "user alone": ([USER], True, False),
    "several turns": ([USER, ASSISTANT, AGAIN, REPLY, USER], True, False),
    "system and several turns": ([SYSTEM, USER, ASSISTANT, AGAIN], True, False),
    "no generation prompt": ([SYSTEM, USER, ASSISTANT], False, False),
    "continuation": ([USER, REPLY, AGAIN, PART], False, True),
    "continuation after system": ([SYSTEM, USER, ("assistant", "a")], False, True),
}
# templates that have no place for a system text: Gemma's raise, macro drops it. It goes in front of the user's.
NO_SYSTEM = {"axolotl/gemma", "trl/gemma", "trl/gemma_training", "own/macro"}


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return open_tokenizer(write_tokenizer(Path(folder), "byte_level", eos_token="</s>"))


def expected(source: str, turns: list[tuple[str, str]], generate: bool, continue_final: bool) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    names = dict(tokenizer().names)
    rendered, _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=generate,
        continue_final_message=continue_final,
        **names,
    )
    return str(rendered[0])


def folded(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if turns[0][0] != "system":
        return turns
    return [("user", f"{turns[0][1]}\n\n{turns[1][1]}"), *turns[2:]]


@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers_does(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_bytes().decode()
    template = ChatTemplate(Sandbox(source, name), tokenizer())
    for case, (turns, generate, continue_final) in CASES.items():
        seen = folded(turns) if name in NO_SYSTEM else turns
        rendered = template.render(turns, add_generation_prompt=generate, continue_final=continue_final)
        assert rendered.visible == expected(source, seen, generate, continue_final), case
        assert rendered.neutralised == 0


def test_there_are_templates_of_every_family() -> None:
    families = "llama mistral mixtral qwen2 qwen3 gemma phi smollm2 chatml zephyr vicuna alpaca tinyllama deepseek"
    more = "cohere granite falcon openchat yi solar internlm2 hermes lfm2 glm4 exaone nemotron starling metharme aya"
    missing = [family for family in f"{families} {more}".split() if not any(family in name for name in NAMES)]
    assert not missing
    assert len(NAMES) >= 60


@pytest.mark.parametrize("name", ["axolotl/mistral_v1", "own/mixtral", "trl/gemma"])
def test_an_order_of_turns_that_the_template_refuses_is_one_clear_line(name: str) -> None:
    template = ChatTemplate(Sandbox((TEMPLATES / f"{name}.jinja").read_text(), name), tokenizer())
    with pytest.raises(ModelError, match="refuses this conversation") as caught:
        template.render([USER, USER, USER])
    assert "\n" not in str(caught.value)
