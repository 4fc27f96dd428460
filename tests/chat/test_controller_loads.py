"""The controller and the loads of models: begun, failed, cancelled, outdated."""

import asyncio

import msgspec
import pytest

from exl2chat.chat import controller
from exl2chat.chat.events import (
    ModelDown,
    ModelReady,
    Notice,
    ReplyFinished,
    SettingChanged,
)
from exl2chat.link import scripted
from exl2chat.link.protocol import Died, Event, Failed, Load, Ready, Stop
from exl2chat.link.scripted import Fail, Hold, Say, Script, ScriptedEngine
from exl2chat.settings import Settings

from . import conftest
from .conftest import Start, replies


async def test_a_model_that_cannot_be_loaded(start: Start) -> None:
    chat = await start(Script(load=(Fail("config.json: no such field", "choose another", status=3),)))
    await chat.until(lambda: chat.controller.phase == "down")
    assert chat.last(ModelDown) == ModelDown("config.json: no such field", "choose another", 3)
    await chat.controller.submit("hi")
    await chat.until(lambda: len(chat.of(ModelDown)) == 2)
    assert chat.controller.queued == ("hi",)
    chat.engine.script = replies("a")
    await chat.say("/model other")
    assert (chat.texts, chat.loads[-1].model) == (["hi", "a"], "other")


class KeepingEngine(ScriptedEngine):
    """Fails to load `org/broken`, and keeps the model it has."""

    kept: Ready | None = None

    async def _load(self, request: Load) -> Event:
        event = await super()._load(request)
        if request.model != "org/broken":
            self.kept = msgspec.structs.replace(event, seconds=1.5) if isinstance(event, Ready) else None
            return self.kept or event
        self._emit(Failed("", "no such model", "name another", status=3))
        return msgspec.structs.replace(self.kept, seconds=0.0) if self.kept else Died("nothing is loaded")


async def test_a_load_that_fails_early_leaves_the_model_that_answers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "ScriptedEngine", KeepingEngine)
    chat = await (await start(replies("a"))).ready()
    await chat.say("/set context 512", "/set temperature 0.5")
    held, before = chat.controller.model, chat.controller.settings
    await chat.controller.submit("/model org/broken")
    await chat.controller.submit("hi")
    await chat.until(lambda: bool(chat.of(ReplyFinished)))
    assert (chat.controller.model, chat.texts, chat.controller.phase) == (held, ["hi", "a"], "ready")
    assert chat.controller.settings.layers["/set"] == before.layers["/set"]
    assert [event.name for event in chat.of(SettingChanged)][-2:] == ["model", "model"]
    assert (chat.last(ModelDown).message, chat.last(ModelReady).model) == ("no such model", held)
    assert "scripted still answers" in chat.last(Notice).text
    await chat.say("/set dtype float32")
    assert [(load.model, load.dtype) for load in chat.loads[-2:]] == [("org/broken", "auto"), ("smollm2", "float32")]


async def test_a_load_that_fails_early_does_not_end_the_one_after_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "ScriptedEngine", KeepingEngine)
    chat = await (await start(replies("a"))).ready()
    await chat.controller.submit("/model org/broken")
    await chat.controller.submit("/set context 512")
    await chat.controller.submit("/model org/other")
    await chat.say("hi")
    assert (chat.of(ModelDown), len(chat.of(ModelReady)), chat.texts) == ([], 2, ["hi", "a"])
    assert (chat.controller.settings["model"], chat.controller.settings["context"]) == ("org/other", 512)


async def test_settings_that_concern_the_load_load_anew(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say("/model org/other", "/set context 512", "/set dtype float32", "/set top_k 3", "/set top_k 3")
    assert [(load.model, load.context, load.dtype) for load in chat.loads] == [
        ("smollm2", None, "auto"),
        ("org/other", None, "auto"),
        ("org/other", 512, "auto"),
        ("org/other", 512, "float32"),
    ]
    assert chat.controller.model is not None
    assert chat.controller.model.context == 512


async def test_only_the_last_of_several_loads_counts(start: Start) -> None:
    chat = await start(Script(load=(Hold(),), replies=((Say("a"),),)))
    await chat.controller.submit("/set context 512")
    await chat.controller.submit("hi")
    chat.engine.release()
    chat.engine.release()
    await chat.until(lambda: bool(chat.of(ReplyFinished)))
    assert [event.model.context for event in chat.of(ModelReady)] == [512]


async def test_the_model_s_own_sampling_gives_way_to_what_is_set(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"temperature": 0.6, "top_k": 20, "nonsense": 1}
    monkeypatch.setattr(scripted, "MODEL", msgspec.structs.replace(scripted.MODEL, sampling=own))
    chat = await (await start(replies("a"), settings=Settings().with_layer("flag", {"top_k": 5}))).ready()
    assert chat.controller.settings.lookup("temperature") == (0.6, "model")
    assert chat.controller.settings.lookup("top_k") == (5, "flag")


async def test_a_load_is_cancelled_and_the_next_message_begins_another(start: Start) -> None:
    chat = await start(Script(load=(Hold(),), replies=((Say("a"),),)))
    await chat.controller.stop()
    await chat.until(lambda: bool(chat.of(ModelDown)))
    assert (chat.controller.phase, chat.engine.requests[-1]) == ("down", Stop(""))
    await chat.controller.submit("hi")
    chat.engine.release()
    await chat.ready()
    assert chat.texts == ["hi", "a"]


async def test_a_defect_in_taking_a_model_leaves_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    with monkeypatch.context() as patch:
        patch.setattr(controller, "with_model", lambda *_: 1 / 0)
        chat = await start(replies("a"))
        await chat.until(lambda: bool(chat.of(ModelDown)))
    assert (chat.controller.phase, chat.controller.model) == ("down", None)
    await chat.say("hi")
    assert chat.texts == ["hi", "a"]
