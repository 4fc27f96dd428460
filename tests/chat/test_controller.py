"""The controller over a scripted engine: what it says, what it asks for, what it keeps."""

import asyncio

import msgspec
import pytest

from exl2chat.chat import controller
from exl2chat.chat.completion import Names
from exl2chat.chat.controller import Controller
from exl2chat.chat.events import (
    ChatEvent,
    FillPrompt,
    LoadProgress,
    MessageAdded,
    ModelDown,
    ModelReady,
    Notice,
    PathChanged,
    PrefillProgress,
    ReplyFinished,
    ReplyStarted,
    ReplyText,
    SessionChanged,
    SettingChanged,
)
from exl2chat.chat.reply import Reply
from exl2chat.chat.session import Session
from exl2chat.link import framing, scripted
from exl2chat.link.protocol import Died, Event, Failed, Load, Ready, Request, Stop, Turn
from exl2chat.link.scripted import Die, Fail, Finish, Hold, Progress, Read, Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings

from . import conftest
from .conftest import HELD, Start, replies


async def test_a_message_gets_a_reply(start: Start) -> None:
    chat = await (await start(replies("Hello there."))).ready()
    await chat.say("hi")
    assert chat.texts == ["hi", "Hello there."]
    kinds = [type(event) for event in chat.events if not isinstance(event, LoadProgress | ReplyText)]
    assert kinds == [ModelReady, MessageAdded, SessionChanged, ReplyStarted, PrefillProgress, ReplyFinished]
    assert "".join(event.text for event in chat.of(ReplyText)) == "Hello there."
    message = chat.last(ReplyFinished).message
    assert (message.stop, message.model) == ("eos", "scripted")
    assert message.stats is not None
    assert message.stats.seed == chat.generated[0].sampling.seed
    assert chat.controller.context_used == 9
    assert chat.controller.tokens_per_second == message.stats.tokens_per_second > 0


async def test_each_reply_has_its_own_seed_unless_one_is_set(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say("1", "/retry", "/seed 7", "/retry", "/retry", "/seed random", "/retry")
    seeds = [request.sampling.seed for request in chat.generated]
    assert len(set(seeds)) == 4
    assert seeds[2:4] == [7, 7]
    assert None not in seeds


async def test_what_the_model_reads(start: Start) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("/system Be brief.", "one", "//two", " /three")
    assert chat.generated[-1].turns == (
        Turn("system", "Be brief."),
        Turn("user", "one"),
        Turn("assistant", "a"),
        Turn("user", "/two"),
        Turn("assistant", "b"),
        Turn("user", "/three"),
    )
    await chat.say("/system off", "/set max_tokens 5", "/set temperature 0", "x")
    request = chat.generated[-1]
    assert request.turns[0].role == "user"
    assert (request.max_tokens, request.sampling.temperature) == (5, 0.0)


async def test_messages_typed_while_the_model_loads_are_sent_in_order(start: Start) -> None:
    script = Script(load=(Progress("reading", 1, 2), Hold()), replies=((Say("a"),), (Say("b"),)))
    chat = await start(script)
    await chat.controller.submit("first")
    await chat.controller.submit("second")
    assert (chat.controller.queued, chat.controller.phase, chat.texts) == (("first", "second"), "loading", [])
    chat.engine.release()
    await chat.until(lambda: len(chat.of(ReplyFinished)) == 2)
    assert chat.texts == ["first", "a", "second", "b"]
    assert LoadProgress("reading", 1, 2, "") in chat.events


async def test_what_is_to_be_known_of_a_load_is_a_notice(start) -> None:
    chat = await start(Script(replies=((Say("a"),),), note="the context is 1024 tokens"))
    await chat.ready()
    assert [(notice.text, notice.level) for notice in chat.of(Notice)] == [("the context is 1024 tokens", "warning")]


async def test_messages_typed_while_a_reply_streams_wait_their_turn(start: Start) -> None:
    chat = await (await start(HELD)).ready()
    await chat.controller.submit("first")
    await chat.controller.submit("second")
    await chat.until(lambda: chat.controller.reply == (chat.last(ReplyStarted).id, "one two"))
    assert (chat.controller.queued, chat.texts, chat.controller.phase) == (("second",), ["first"], "streaming")
    assert chat.controller.context_used == 9
    assert chat.controller.tokens_per_second > 0
    chat.engine.release()
    await chat.until(lambda: len(chat.of(ReplyFinished)) == 2)
    assert chat.texts == ["first", "one two three", "second", "next"]


async def test_stop_takes_back_what_is_queued_and_then_stops_keeping_the_text(start: Start) -> None:
    chat = await (await start(HELD)).ready()
    for line in ("first", "second", "third"):
        await chat.controller.submit(line)
    await chat.until(lambda: (chat.controller.reply or ("", ""))[1] == "one two")
    await chat.controller.stop()
    await chat.controller.stop()
    assert [event.text for event in chat.of(FillPrompt)] == ["third", "second"]
    await chat.controller.run("stop")
    await chat.ready()
    assert chat.texts == ["first", "one two"]
    assert chat.last(ReplyFinished).message.stop == "stopped"
    await chat.controller.stop()
    assert len([request for request in chat.engine.requests if isinstance(request, Stop)]) == 1


async def test_a_reply_stopped_before_its_first_word_leaves_no_message(start: Start) -> None:
    chat = await (await start(Script(replies=((Read(total=5), Hold()), (Say("yes"),))))).ready()
    await chat.controller.submit("hi")
    await chat.until(lambda: bool(chat.of(PrefillProgress)))
    assert chat.controller.phase == "prefill"
    await chat.controller.stop()
    await chat.ready()
    assert (chat.texts, chat.of(ReplyFinished)) == (["hi"], [])
    assert isinstance(chat.events[-1], PathChanged)
    await chat.say("again")
    assert chat.generated[-1].turns == (Turn("user", "hi\n\nagain"),)


async def test_retry_makes_a_sibling_and_branch_goes_between_them(start: Start) -> None:
    chat = await (await start(replies("a", "b", "c"))).ready()
    await chat.say("hi", "/retry")
    assert chat.texts == ["hi", "b"]
    await chat.say("more", "/branch prev #2")
    assert chat.texts == ["hi", "a"]
    await chat.say("/branch")
    assert chat.texts == ["hi", "b", "more", "c"]
    await chat.say("/branch 1 #2", "/branch 7 #2")
    assert chat.texts == ["hi", "a"]
    assert "1 to 2" in chat.last(Notice).text
    assert len(chat.controller.session.tree.messages) == 5


async def test_retry_of_an_earlier_message(start: Start) -> None:
    chat = await (await start(replies("a", "b", "c"))).ready()
    await chat.say("1", "2", "/retry #2")
    assert chat.texts == ["1", "c"]
    assert chat.generated[-1].turns == (Turn("user", "1"),)


async def test_the_path_on_show_ends_with_what_is_being_answered(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), (Say("b"), Hold()))))).ready()
    await chat.say("hi")
    await chat.controller.submit("/retry")
    await chat.until(lambda: (chat.controller.reply or ("", ""))[1] == "b")
    assert chat.texts == ["hi"]
    refused = chat.controller.session.tree
    for line in ("/undo", "/retry", "/new", "/edit", "/continue", "/set context 512", "/model other"):
        await chat.controller.submit(line)
        assert "stop" in chat.last(Notice).text
    assert (chat.controller.session.tree, len(chat.loads)) == (refused, 1)


async def test_edit_branches_and_loses_nothing(start: Start) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("/unknown", "  wrong", "/edit")
    prompt = chat.last(FillPrompt)
    assert prompt.text == "  wrong"
    await chat.controller.submit("right", replaces=prompt.replaces)
    await chat.ready()
    assert chat.texts == ["right", "b"]
    await chat.say("/branch prev")
    assert chat.texts == ["  wrong", "a"]


async def test_an_edited_reply_is_saved_and_not_answered(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say("hi", "/edit #2")
    await chat.controller.submit("A better one.", replaces=chat.last(FillPrompt).replaces)
    assert chat.texts == ["hi", "A better one."]
    assert len(chat.generated) == 1
    await chat.say("/continue")
    assert chat.generated[-1].turns[-1] == Turn("assistant", "A better one.")
    assert chat.texts == ["hi", "A better one.a"]


async def test_what_looks_like_a_command_is_edited_as_text(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say(" /help", "/edit")
    await chat.controller.submit(chat.last(FillPrompt).text, replaces=chat.last(FillPrompt).replaces)
    await chat.ready()
    assert chat.texts == ["/help", "a"]


async def test_undo_and_redo_move_the_head(start: Start) -> None:
    chat = await (await start(replies("a", "b", "c"))).ready()
    await chat.say("1", "2", "3", "/undo 2")
    assert chat.texts == ["1", "a"]
    await chat.say("/redo")
    assert chat.texts == ["1", "a", "2", "b"]
    await chat.say("/undo 9", "/undo")
    assert chat.texts == []
    assert chat.last(Notice).text == "/undo: everything is undone: `/redo` steps forward again"
    await chat.say("/redo 9")
    assert chat.texts == ["1", "a", "2", "b", "3", "c"]
    await chat.say("/redo")
    assert "nothing was undone" in chat.last(Notice).text


async def test_continue_adds_to_the_reply(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("Once"), Finish("max_tokens")), (Say(" upon"),), ())))).ready()
    await chat.say("tell", "/continue")
    assert chat.texts == ["tell", "Once upon"]
    assert chat.generated[-1].turns == (Turn("user", "tell"), Turn("assistant", "Once"))
    assert chat.last(ReplyStarted).text == "Once"
    await chat.say("/continue")
    assert chat.texts == ["tell", "Once upon"]
    assert len(chat.controller.session.tree.messages) == 3


@pytest.mark.parametrize("said", [(), (Say("par tial"),)])
async def test_an_engine_that_dies_costs_nothing_and_comes_back(
    start: Start, paths: Paths, said: tuple[Say, ...]
) -> None:
    script = Script(replies=((*said, Die("killed by SIGKILL")), (Say("back"),)))
    chat = await (await start(script, Session.create(paths))).ready()
    await chat.controller.submit("hi")
    await chat.until(lambda: chat.controller.phase == "down")
    down = chat.last(ModelDown)
    assert "SIGKILL" in down.message
    assert chat.texts == ["hi", *(["par tial"] if said else [])]
    assert [event.message.stop for event in chat.of(ReplyFinished)] == ["crash"] * len(said)
    await chat.say("/retry")
    assert chat.texts == ["hi", "back"]
    assert len(chat.loads) == 2
    saved = Session.open(chat.controller.session.id, paths)
    assert saved.tree == chat.controller.session.tree


async def test_a_message_after_a_death_starts_the_engine_again(start: Start) -> None:
    chat = await (await start(Script(replies=((Die(),), (Say("back"),))))).ready()
    await chat.controller.submit("hi")
    await chat.until(lambda: chat.controller.phase == "down")
    await chat.say("there")
    assert chat.texts == ["hi", "there", "back"]


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


@pytest.mark.parametrize("said", [(), (Say("half"),)])
async def test_a_reply_that_fails(start: Start, said: tuple[Say, ...]) -> None:
    chat = await (await start(Script(replies=((*said, Fail("a defect", "see the log")), (Say("fine"),))))).ready()
    await chat.say("hi")
    notice = chat.last(Notice)
    assert (notice.text, notice.level, notice.status) == ("a defect (see the log)", "error", 1)
    assert chat.texts == ["hi", *(["half"] if said else [])]
    await chat.say("/retry")
    assert chat.texts == ["hi", "fine"]


TOO_LONG = (Fail("9 tokens too many", "shorten it", status=4),)


async def test_a_message_that_does_not_fit_comes_back_into_the_prompt(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), TOO_LONG, TOO_LONG, (Say("b"),))))).ready()
    await chat.say("hi", " /long message")
    assert (chat.last(FillPrompt), chat.texts) == (FillPrompt(" /long message"), ["hi", "a"])
    assert chat.last(Notice).status == 4
    await chat.say("still too long")
    assert (chat.last(FillPrompt), chat.texts) == (FillPrompt("still too long"), ["hi", "a"])
    await chat.say("short")
    assert chat.texts == ["hi", "a", "short", "b"]
    assert [turn.text for turn in chat.generated[-1].turns] == ["hi", "a", "short"]


async def test_an_edit_that_does_not_fit_leaves_what_it_was_to_replace(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), TOO_LONG, (Say("b"),))))).ready()
    await chat.say("hi", "/edit")
    edited = chat.last(FillPrompt).replaces
    await chat.controller.submit("far too long", edited)
    await chat.ready()
    assert (chat.last(FillPrompt), chat.texts) == (FillPrompt("far too long", edited), ["hi", "a"])


async def test_a_retry_that_does_not_fit_leaves_the_message_and_its_reply(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), TOO_LONG)))).ready()
    await chat.say("hi", "/retry")
    assert (chat.of(FillPrompt), chat.texts) == ([], ["hi", "a"])


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


async def test_a_listener_that_fails_stops_nothing(start: Start) -> None:
    chat = await start(replies("a"))
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    failures: list[dict[str, object]] = []

    def fail(_: ChatEvent) -> None:
        raise ZeroDivisionError

    unsubscribe = chat.controller.subscribe(fail)
    await chat.ready()
    await chat.say("hi")
    assert chat.texts == ["hi", "a"]
    assert failures
    unsubscribe()
    failures.clear()
    await chat.say("hi")
    assert failures == []


@pytest.mark.parametrize(
    ("defect", "kept"),
    [((Reply, "begin"), []), ((Reply, "message"), []), ((Controller, "_draft_soon"), ["hi", "one"])],
)
async def test_a_defect_in_handling_an_event_ends_the_reply_with_an_error_and_not_the_chat(
    start: Start, monkeypatch: pytest.MonkeyPatch, defect: tuple[type, str], kept: list[str]
) -> None:
    chat = await (await start(replies("one two", "b"))).ready()
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    with monkeypatch.context() as patch:
        patch.setattr(*defect, lambda *_: 1 / 0)
        await chat.controller.submit("hi")
        await chat.until(lambda: bool(chat.of(Notice)))
        await chat.ready()
    assert isinstance(failures[0]["exception"], ZeroDivisionError)
    notice = chat.last(Notice)
    assert (notice.level, notice.status) == ("error", 1)
    assert "ZeroDivisionError" in notice.text
    assert chat.texts == (kept or ["hi"])
    await chat.say("more")
    assert chat.texts == [*(kept or ["hi"]), "more", "b"]


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


@pytest.mark.parametrize("queued", [True, False])
async def test_a_conversation_too_long_for_the_engine_returns_to_the_prompt(
    start: Start, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    monkeypatch.setattr(conftest, "ScriptedEngine", FramingEngine)
    monkeypatch.setattr(framing, "MAX_FRAME", 10_000)
    chat = await start(replies("a"))
    if not queued:
        await chat.ready()
    await chat.controller.submit("x" * 10_001)
    await chat.until(lambda: bool(chat.of(Notice)))
    await chat.ready()
    assert (chat.last(Notice).status, chat.last(FillPrompt).text) == (4, "x" * 10_001)
    await chat.say("hi")
    assert chat.texts == ["hi", "a"]


class FramingEngine(ScriptedEngine):
    """Refuses what fits no frame, as the one behind a pipe does."""

    async def send(self, request: Request) -> None:
        framing.pack(request)
        await super().send(request)


async def test_completion_knows_what_the_front_end_knows(start: Start) -> None:
    chat = await start()
    chat.controller.names = Names(themes=("nord",))
    assert [found.text for found in chat.controller.complete("/theme no later", len("/theme no"))] == ["/theme nord"]
