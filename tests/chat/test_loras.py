"""Which LoRAs a reply is asked to use."""

import os
from pathlib import Path

import pytest

from exl2chat.chat.events import Notice
from exl2chat.link.protocol import LoraUse
from tests.model.lora_files import make_lora

from .conftest import Start, replies


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder and the home, with LoRAs of these names in it."""
    for name in ("a", "b:c", "d", "e", "here"):
        make_lora(tmp_path / name, {"model.layers.0.self_attn.q_proj": (4, 4)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


async def test_each_reply_uses_what_is_set_when_it_begins(start: Start, folders: Path) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say("none", f"/lora ~/a:0.5, b:c,{folders}/d:-1,", "three", "/lora e", "one", "/lora off", "none")
    assert [request.loras for request in chat.generated] == [
        (),
        (LoraUse(f"{folders}/a", 0.5), LoraUse(f"{folders}/b:c"), LoraUse(f"{folders}/d", -1)),
        (LoraUse(f"{folders}/e"),),
        (),
    ]
    await chat.say("/set lora here", "/lora", "relative")
    assert chat.generated[-1].loras == (LoraUse(os.path.abspath("here")),)


async def test_changing_them_loads_no_model(start: Start) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("one", "/lora a", "two")
    assert len(chat.generated) == 2
    assert len(chat.loads) == 1


@pytest.mark.parametrize("line", ["/lora {}", "/set lora here, {}", "/lora {}/nosuch:0.5"])
async def test_a_folder_that_is_no_lora_is_refused_when_it_is_given(start: Start, tmp_path: Path, line: str) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("/lora here", line.format(tmp_path))
    assert chat.last(Notice).level == "error"
    assert str(tmp_path) in chat.last(Notice).text
    await chat.say("hi")
    assert chat.generated[-1].loras == (LoraUse(str(tmp_path / "here")),)
