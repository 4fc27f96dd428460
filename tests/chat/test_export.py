"""The conversation as a file for others."""

import json
import stat
from pathlib import Path

import pytest

from exl2chat.chat.events import Message
from exl2chat.chat.export import write_export
from exl2chat.errors import ChatError, UsageError

TALK = (
    Message("u1", None, "user", "What is\n\u2028 🐈?"),
    Message("a1", "u1", "assistant", "```\na cat\r\n```", model="SmolLM2"),
)


def test_markdown(tmp_path: Path) -> None:
    write_export(tmp_path / "x.md", "md", "cats", TALK, "Be brief.")
    assert (tmp_path / "x.md").read_bytes().decode() == (
        "# cats\n\n## System\n\nBe brief.\n\n## You\n\nWhat is\n\u2028 🐈?\n\n## SmolLM2\n\n```\na cat\r\n```\n"
    )


def test_text(tmp_path: Path) -> None:
    write_export(tmp_path / "x.txt", "txt", "", TALK, None)
    assert (tmp_path / "x.txt").read_bytes().decode() == "You: What is\n\u2028 🐈?\n\nSmolLM2: ```\na cat\r\n```\n"


def test_openai_messages(tmp_path: Path) -> None:
    write_export(tmp_path / "x.json", "json", "cats", TALK, "Be brief.")
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": TALK[0].text},
            {"role": "assistant", "content": TALK[1].text},
        ]
    }


def test_an_export_is_private_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    write_export(path, "md", "", TALK, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(UsageError, match="already"):
        write_export(path, "md", "other", TALK, None)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="nowhere"):
        write_export(tmp_path / "nowhere" / "x.md", "md", "", TALK, None)
