"""The scripted engine keeps the protocol, so that what is tested against it holds for a real one."""

import pytest

from exl2chat.errors import UsageError
from exl2chat.link import protocol as wire
from exl2chat.link.scripted import Die, Fail, Finish, Hold, Progress, Read, Say, Script, ScriptedEngine, read_script

PROMPT = (wire.Turn("user", "hello"),)


async def until(engine, *kinds):
    """Everything the engine says up to and including the first event of one of `kinds`."""
    seen = []
    async for event in engine.events():
        seen.append(event)
        if isinstance(event, kinds):
            break
    return seen


async def ask(engine, id="a", **fields):
    await engine.send(wire.Generate(id, PROMPT, **fields))
    return await until(engine, wire.Finished, wire.Failed, wire.Died)


async def loaded(*reply, load=()):
    engine = ScriptedEngine(Script(load=load, replies=(reply,)))
    await engine.send(wire.Load("any"))
    await until(engine, wire.Ready)
    return engine


async def test_a_load_reports_progress_and_ends_ready():
    engine = ScriptedEngine(Script(load=(Progress("weights", 1, 2, "tensors"),)))
    await engine.send(wire.Load("any", context=512))
    progress, ready = await until(engine, wire.Ready)
    assert progress == wire.Loading("weights", 1, 2, "tensors")
    assert ready.model.context == 512


async def test_chunks_concatenate_to_what_is_said():
    engine = await loaded(Read(9, cached=4), Say("  two words\n\nand more "))
    prefill, *chunks, finished = await ask(engine, sampling=wire.Sampling(seed=7))
    assert prefill == wire.Prefill("a", 9, 9, 4)
    assert "".join(chunk.text for chunk in chunks) == "  two words\n\nand more "
    assert [chunk.tokens for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert finished.reason == "eos"
    assert (finished.stats.reply_tokens, finished.stats.cached_tokens, finished.stats.seed) == (len(chunks), 4, 7)


async def test_max_tokens_cuts_the_reply():
    engine = await loaded(Say("one two three four"))
    *chunks, finished = await ask(engine, max_tokens=2)
    assert len(chunks) == 2
    assert finished.reason == "max_tokens"


async def test_a_stop_ends_a_held_reply_and_keeps_its_count():
    engine = await loaded(Say("one two"), Hold(), Say("never"))
    await engine.send(wire.Generate("a", PROMPT))
    await until(engine, wire.Chunk)
    await engine.send(wire.Stop("a"))
    *_, finished = await until(engine, wire.Finished)
    assert finished.reason == "stopped"
    assert finished.stats.reply_tokens <= 2


async def test_release_lets_a_hold_go_on_whichever_comes_first():
    engine = await loaded(Hold(), Say("on"))
    engine.release()
    assert isinstance((await ask(engine))[-1], wire.Finished)


async def test_an_engine_that_died_wants_a_load_before_it_answers():
    engine = await loaded(Say("half"), Die("killed"))
    assert (await ask(engine))[-1] == wire.Died("killed")
    assert (await ask(engine))[-1].status == 3
    await engine.send(wire.Load("any"))
    assert isinstance((await until(engine, wire.Ready, wire.Failed))[-1], wire.Ready)


async def test_failures_and_reasons_follow_the_script():
    engine = ScriptedEngine(Script(replies=((Fail("out of memory", "use --ctx", 1),), (Finish("context"),))))
    await engine.send(wire.Load("any"))
    await until(engine, wire.Ready)
    assert (await ask(engine))[-1] == wire.Failed("a", "out of memory", "use --ctx", 1)
    assert (await ask(engine, "b"))[-1].reason == "context"


async def test_close_ends_the_events():
    engine = await loaded(Hold())
    await engine.send(wire.Generate("a", PROMPT))
    await engine.close()
    assert [event async for event in engine.events()] == []


def test_a_script_file_is_checked(tmp_path):
    path = tmp_path / "script.json"
    path.write_text('{"replies": [[{"type": "Say", "text": "hi"}]]}')
    assert read_script(path) == Script(replies=((Say("hi"),),))
    path.write_text('{"replies": [[{"type": "Say"}]]}')
    with pytest.raises(UsageError, match=r"script\.json.*text"):
        read_script(path)
