"""The controller and its session: what is remembered, read-only sessions, full disks, leaving."""

import asyncio
import errno
import os
from pathlib import Path

import msgspec
import pytest

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import FillPrompt, Message, Notice, ReplyText
from exl2chat.chat.session import Session
from exl2chat.link.scripted import Hold, Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings

from . import conftest
from .conftest import HELD, Start, replies
from .faults import FailingDisk
from .test_controller_loads import KeepingEngine


async def test_the_session_restores_what_was_set_in_it(start: Start, paths: Paths) -> None:
    chat = await (await start(replies("a"), Session.create(paths))).ready()
    await chat.say("/model org/other", "/system Be brief.", "/set temperature 0.25", "/theme nord", "hi")
    id = chat.controller.session.id
    await chat.say("/new", "/set temperature 1.5", "/system off", "/model smollm2", "hello", f"/open {id}")
    settings = chat.controller.settings
    assert (settings["model"], settings["system"]) == ("org/other", "Be brief.")
    assert settings.lookup("temperature") == (0.25, "session")
    assert settings["theme"] == "nord"
    assert chat.loads[-1].model == "org/other"
    assert chat.texts == ["hi", "a"]


@pytest.mark.parametrize("then", ["/retry", "/rename x", "/stop"])
async def test_what_is_set_is_saved_without_another_message(start: Start, paths: Paths, then: str) -> None:
    chat = await (await start(replies("a", "b"), Session.create(paths))).ready()
    await chat.say("hi", "/set temperature 0.33", then)
    await chat.controller.close()
    assert Session.open("last", paths).settings["temperature"] == 0.33


async def test_what_is_set_in_an_empty_chat_makes_no_file(start: Start, paths: Paths) -> None:
    chat = await (await start(replies("a"), Session.create(paths))).ready()
    await chat.say("/set temperature 0.33", "/rename x")
    await chat.controller.close()
    assert not list(paths.sessions.glob("*"))


async def test_the_context_of_a_resumed_chat_is_as_full_as_its_last_reply_left_it(start: Start, paths: Paths) -> None:
    chat = await (await start(replies("a", "b c"), Session.create(paths))).ready()
    assert chat.controller.context_used == 0
    await chat.say("hi", "more")
    assert chat.controller.context_used == 9
    await chat.controller.close()
    again = await start(Script(), Session.open("last", paths))
    assert again.controller.context_used is None  # no model counts yet
    await again.ready()
    assert again.controller.context_used == 9
    await again.say("/undo")
    assert again.controller.context_used == 8
    reply = again.controller.path[-1]
    again.controller.add_message(msgspec.structs.replace(reply, id="other", model="another"))
    assert again.controller.context_used is None
    again.controller.add_message(msgspec.structs.replace(reply, id="uncounted", stats=None))
    assert again.controller.context_used is None


async def test_a_model_that_was_not_loaded_is_not_saved(
    start: Start, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "ScriptedEngine", KeepingEngine)
    chat = await (await start(replies("a"), Session.create(paths))).ready()
    await chat.say("hi", "/model org/broken")
    await chat.until(lambda: "still answers" in chat.last(Notice).text)
    await chat.controller.close()
    assert Session.open("last", paths).settings["model"] == "smollm2"


async def test_opening_a_session_does_not_write(start: Start, paths: Paths) -> None:
    session = Session.create(paths)
    session.add(Message("u1", None, "user", "hi"))
    session.close()
    before = session.file.read_bytes()
    chat = await (await start(settings=Settings().with_layer("flag", {"temperature": 1.0}))).ready()
    await chat.say("/open hi", "/new")
    assert session.file.read_bytes() == before


async def test_a_flag_wins_over_the_session(start: Start, paths: Paths) -> None:
    session = Session.create(paths)
    session.record_settings({"temperature": 0.25, "top_k": 9, "gone": 1, "top_p": "bad"})
    flags = Settings().with_layer("flag", {"temperature": 1.0})
    chat = await start(replies("a"), session, flags)
    settings = chat.controller.settings
    assert settings.lookup("temperature") == (1.0, "flag")
    assert settings.lookup("top_k") == (9, "session")
    assert settings.lookup("top_p")[1] == "default"


async def test_a_session_remembers_what_it_began_with_and_no_flag_of_a_later_run(start: Start, paths: Paths) -> None:
    began = Settings().with_layer("config.toml", {"top_k": 9}).with_layer("flag", {"model": "a", "temperature": 0.25})
    chat = await (await start(replies("a"), Session.create(paths), began)).ready()
    await chat.say("/set min_p 0.5", "hi", "/set min_p default", "/set top_p 0.5")
    await chat.controller.close()
    remembered = {"model": "a", "temperature": 0.25, "top_k": 9, "top_p": 0.5}
    saved = Session.open("last", paths)
    assert saved.settings == remembered
    later = Settings().with_layer("environment", {"top_k": 3}).with_layer("flag", {"model": "b", "temperature": 1.5})
    chat = await (await start(replies("a"), saved, later)).ready()
    await chat.say("hi", "/set temperature 0.75")
    assert (chat.loads[-1].model, chat.generated[-1].sampling.temperature) == ("b", 1.5)
    assert chat.controller.session.settings == {**remembered, "temperature": 0.75}
    await chat.say("/set temperature default")
    assert chat.controller.settings.lookup("temperature") == (1.5, "flag")
    assert chat.controller.session.settings == remembered


async def test_a_session_finds_its_folders_again_from_another_folder(
    start: Start, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "models"
    for name in ("mine", "smollm2"):
        (here / name).mkdir(parents=True)
    monkeypatch.chdir(here)
    flags = {"model": "mine", "lora": "x:0.5,y"}
    chat = await (await start(replies("a"), Session.create(paths), Settings().with_layer("flag", flags))).ready()
    await chat.say("hi", "/model ./mine", "/fork")
    assert chat.controller.session.settings == {"model": f"{here}/mine", "lora": f"{here}/x:0.5,{here}/y:1.0"}
    assert [load.model for load in chat.loads] == [f"{here}/mine"]
    await chat.say("/model smollm2")
    assert chat.controller.session.settings["model"] == chat.loads[-1].model == "smollm2"


async def test_a_session_opened_from_another_keeps_its_own(start: Start, paths: Paths) -> None:
    other = Session.create(paths)
    other.record_settings({"model": "a", "temperature": 0.25})
    other.add(Message("u1", None, "user", "other"))
    other.close()
    flags = Settings().with_layer("flag", {"temperature": 1.5, "system": "Be brief."})
    chat = await (await start(replies("a", "b"), Session.create(paths), flags)).ready()
    await chat.say("hi", "/open other", "more")
    assert chat.controller.session.settings == other.settings


async def test_a_read_only_session_gives_the_text_back(start: Start, paths: Paths) -> None:
    first = await (await start(replies("a"), Session.create(paths))).ready()
    await first.say("hi")
    second = await (await start(replies("b"), Session.open("last", paths))).ready()
    await second.say("mine", "/retry", "/rename x", "/delete")
    assert second.last(FillPrompt).text == "mine"
    assert [event.text.split(" (")[0] for event in second.of(Notice)[-4:]] == ["this session is read-only"] * 4
    assert second.texts == ["hi", "a"]
    await second.say("/fork", "mine")
    assert second.texts == ["hi", "a", "mine", "b"]
    assert second.controller.session.id != first.controller.session.id


async def test_a_queued_message_is_given_back_when_its_session_turns_out_read_only(start: Start, paths: Paths) -> None:
    owner = await (await start(replies("a"), Session.create(paths))).ready()
    await owner.say("hi")
    chat = await start(Script(load=(Hold(),), replies=((Say("b"),),)))
    await chat.controller.submit("mine")
    await chat.controller.submit("/open hi")
    assert "read-only" in chat.last(Notice).text
    chat.engine.release()
    await chat.ready()
    assert (chat.last(FillPrompt).text, chat.texts, chat.generated) == ("mine", ["hi", "a"], [])


async def test_a_full_disk_is_told_and_the_chat_goes_on(
    start: Start, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = await (await start(replies("a", "b"), Session.create(paths))).ready()
    with monkeypatch.context() as patch:
        FailingDisk(patch, range(1, 10_000), errno.ENOSPC)
        await chat.say("hi")
    assert chat.texts == ["hi", "a"]
    warnings = [event.text for event in chat.of(Notice) if event.level == "warning"]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert chat.controller.session.fault is not None
    await chat.say("more")
    assert chat.controller.session.fault is None
    assert "saving works again" in [event.text.split(";")[0] for event in chat.of(Notice)]
    await chat.controller.close()
    assert [message.text for message in Session.open("last", paths).path] == ["hi", "a", "more", "b"]


async def test_a_session_that_is_not_saved_is_not_left_for_another(
    start: Start, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Session.create(paths)
    other.add(Message("u1", None, "user", "other"))
    other.close()
    chat = await (await start(replies("a", "b"), Session.create(paths))).ready()
    session = chat.controller.session
    with monkeypatch.context() as patch:
        await chat.say("hi")
        FailingDisk(patch, range(1, 10_000), errno.ENOSPC)
        await chat.say("more", "/new")
        assert chat.last(Notice).text.startswith("the last messages are not saved")
        assert chat.controller.session is session
    await chat.say("/open other")
    assert chat.texts == ["other"]
    assert not chat.controller.session.read_only
    assert session.file is not None
    assert [message.text for message in Session.open(session.file, paths).path] == ["hi", "a", "more", "b"]


async def test_a_session_that_cannot_be_saved_can_be_deleted(
    start: Start, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    chat = await (await start(replies("a", "b"), Session.create(paths))).ready()
    await chat.say("hi")
    monkeypatch.setattr(os, "write", full)
    await chat.say("more", "/delete")
    assert chat.last(Notice).text.startswith("moved to ")
    assert (chat.texts, chat.controller.save()) == ([], None)


async def test_leaving_keeps_the_messages_that_wait(start: Start, paths: Paths) -> None:
    session = Session.create(paths)
    session.add(Message("u1", None, "user", "zero"))
    chat = await start(Script(load=(Hold(),)), session)
    for line in ("one", "/retry", " /two"):
        await chat.controller.submit(line)
    assert chat.controller.queued == ("one", "/retry", " /two")
    await chat.controller.close()
    assert [message.text for message in Session.open("last", paths).path] == ["zero", "one", "/two"]


async def test_leaving_in_the_middle_keeps_the_text(paths: Paths) -> None:
    session = Session.create(paths)
    engine = ScriptedEngine(HELD)
    controller = Controller(engine, Settings(), paths, session)
    streamed = asyncio.Event()
    controller.subscribe(lambda event: streamed.set() if isinstance(event, ReplyText) else None)
    await controller.start()
    await controller.submit("hi")
    await streamed.wait()
    await controller.submit("more")
    await controller.close()
    _, reply, queued = Session.open("last", paths).path
    assert (queued.text, queued.parent) == ("more", reply.id)
    assert reply.stop == "stopped"
    assert reply.text.startswith("one")
