"""Where templates are found, what they may do, and what happens to those that misbehave."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from exl2chat.errors import ModelError
from exl2chat.model.folder import open_folder
from exl2chat.model.sandbox import MAX_SOURCE, Sandbox
from exl2chat.model.template import ChatTemplate, find_template, open_template
from exl2chat.model.tokenizer import open_tokenizer
from tests.model.tokenizer_files import KINDS, write_tokenizer


def template(source: str, folder: Path) -> ChatTemplate:
    return ChatTemplate(Sandbox(source, "model"), open_tokenizer(write_tokenizer(folder, "byte_level")))


def render(source: str, folder: Path, text: str = "hi", **options: Any) -> str:
    return template(source, folder).render([("user", text)], **options).visible


def test_the_file_comes_before_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level", chat_template="in the config")
    assert find_template(open_folder(tmp_path))[0] == "in the config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "in the json"}))
    assert find_template(open_folder(tmp_path))[0] == "in the json"
    (tmp_path / "chat_template.jinja").write_text("in the file")
    assert find_template(open_folder(tmp_path))[0] == "in the file"


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}], "r"),
        ({"default": "d", "x": "y"}, "d"),
    ],
)
def test_named_templates(value: Any, chosen: str, tmp_path: Path) -> None:
    assert find_template(write_tokenizer(tmp_path, "byte_level", chat_template=value))[0] == chosen


@pytest.mark.parametrize("value", [5, [], {}, ["text"], [{"name": "default"}], [{"name": [1]}], {"default": 5}])
def test_a_malformed_template_entry_is_one_clear_line(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat_template is neither"):
        find_template(write_tokenizer(tmp_path, "byte_level", chat_template=value))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_template_gets_a_plain_one(kind: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, kind, chat_template=None, eos_token="</s>")
    plain = open_template(folder, open_tokenizer(folder))
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    expected = "<s>Be brief.\n\nUser: a\nAssistant: b</s>\nUser: c\nAssistant:"
    assert plain.render(turns).visible == expected
    assert plain.stop_ids == open_tokenizer(folder).eos_ids
    assert plain.stop_strings == ("\nUser:",)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_ids_are_what_the_template_ends_a_reply_with(kind: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, kind)
    tokenizer = open_tokenizer(folder)
    found = open_template(folder, tokenizer)
    assert found.stop_ids == {tokenizer.id_of("<|im_end|>")}
    assert found.stop_strings == ()


def test_a_template_without_an_end_token_stops_at_its_next_heading(tmp_path: Path) -> None:
    source = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    found = template(source, tmp_path)
    assert found.stop_ids == frozenset()
    assert found.stop_strings == ("\n\n### user:",)
    found = template("{% for m in messages %}{{ m.content }}{{ '-' * 1000000 }}{% endfor %}", tmp_path)
    assert found.stop_strings == ("-" * 100,)


def test_a_system_text_the_template_refuses_or_drops_goes_to_the_user(tmp_path: Path) -> None:
    drops = "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + drops
    for source in (drops, refuses):
        found = template(source, tmp_path)
        assert found.render([("system", "S"), ("user", "U"), ("assistant", "A")]).visible == "[S\n\nU][A]"
        assert found.render([("system", "S"), ("assistant", "A")]).visible == "[S][A]"
        assert found.render([("user", "U")]).visible == "[U]"


def test_a_reply_the_template_cuts_cannot_be_continued(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be continued"):
        template("{{ messages[0].content }}", tmp_path).render([("user", "a"), ("assistant", "b")], continue_final=True)


def test_what_a_template_is_given(tmp_path: Path) -> None:
    seen = render(
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token is defined }}{{ tools }}{{ documents }}"
        "{{ add_generation_prompt }}{{ strftime_now('%Y') }}{{ messages | tojson }}",
        tmp_path,
        text="<é>",
        add_generation_prompt=False,
    )
    messages = json.dumps([{"role": "user", "content": "<é>"}], ensure_ascii=False)
    assert seen == f"<s><|im_end|><unk>FalseNoneNoneFalse{datetime.now():%Y}{messages}"


HOSTILE = {
    "attribute walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "import": "{{ __import__('os').system('id') }}",
    "include": "{% include '/etc/passwd' %}",
    "import statement": "{% import '/etc/passwd' as x %}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "endless loop": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "huge range": "{{ range(10**12) | list }}",
    "huge repeat": "{{ 'a' * 3000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "wide format": "{{ '%999999999d' | format(1) }}",
    "wide precision": "{{ '%.999999999f' | format(1) }}",
    "wide str.format": "{{ '{:>999999999}'.format(1) }}",
    "syntax": "{% if %}",
    "unclosed": "{% for m in messages %}",
    "unknown tag": "{% frobnicate %}",
    "unknown filter": "{{ 1 | frobnicate }}",
    "undefined call": "{{ nothing() }}",
    "undefined attribute": "{{ nothing.at.all }}",
    "division": "{{ 1 // 0 }}",
    "long date": "{{ strftime_now('%Y' * 200) }}",
    "surrogate date": "{{ strftime_now('\\ud800') }}",
    "raise nothing": "{{ raise_exception() }}",
    "raise a novel": "{{ raise_exception('x' * 1000000) }}",
    "too large": " " * (MAX_SOURCE + 1),
    "too much text": "{% for i in range(1000) %}" + "x" * 10_000 + "{% endfor %}",
    "deep list": "{% set n = namespace(x=1) %}{% for i in range(3000) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_clear_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        render(HOSTILE[name], tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["__globals__", "__class__", "__self__", "__code__", "func"])
def test_functions_given_to_a_template_show_nothing_of_python(name: str, tmp_path: Path) -> None:
    source = f"{{{{ raise_exception.{name} is defined }}}}{{{{ strftime_now.{name} is defined }}}}"
    assert render(source, tmp_path) == "FalseFalse"


def test_a_long_conversation_has_fuel_enough(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "byte_level")
    found = open_template(folder, open_tokenizer(folder))
    turns = [(role, f"text {i}") for i in range(1000) for role in ("user", "assistant")]
    assert found.render(turns).visible.count("<|im_end|>") == 2000
