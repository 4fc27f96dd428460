"""`exl2chat run` against a scripted engine: what reaches which stream, and the exit status."""

import asyncio
import io
import json
import os
import pty
import resource
import signal
import subprocess
import sys
from functools import partial

import msgspec
import pytest

from exl2chat import cli
from exl2chat.chat.controller import Controller
from exl2chat.chat.events import Message
from exl2chat.chat.session import Session
from exl2chat.errors import ChatError
from exl2chat.link.protocol import Form
from exl2chat.link.scripted import Die, Fail, Finish, Hold, Read, Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.run import answer
from exl2chat.settings import Settings

RUN = [sys.executable, "-m", "exl2chat", "run"]


@pytest.fixture
def script(tmp_path):
    """Write a script of one reply; the flags that make the engine play it."""

    def write(*reply, load=(), note=""):
        path = tmp_path / "script.json"
        path.write_bytes(msgspec.json.encode(Script(load=load, replies=(reply,), note=note)))
        return ["--home", str(tmp_path), "--engine", f"scripted:{path}"]

    return write


def run(*argv, stdin="", **kwargs):
    return subprocess.run([*RUN, *argv], input=stdin, capture_output=True, text=True, timeout=60, **kwargs)


def test_the_answer_is_all_that_reaches_the_standard_output(script):
    done = run(*script(Read(3), Say("Paris is\nthe capital.")), "-p", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris is\nthe capital.\n", "")


def test_a_reply_that_ends_its_line_gets_no_second_newline(script):
    assert run(*script(Say("done\n")), "-p", "hi").stdout == "done\n"


def test_json_is_one_object_with_text_counts_times_and_stop_reason(script):
    done = run(*script(Read(7, cached=2), Say("a b c"), Finish("stop_string")), "-p", "hi", "--json", "--seed", "9")
    result = json.loads(done.stdout)
    assert (result["text"], result["stop"], result["seed"]) == ("a b c", "stop_string", 9)
    assert (result["prompt_tokens"], result["cached_tokens"], result["reply_tokens"]) == (7, 2, 3)
    assert {"model", "first_token_s", "decode_s", "tokens_per_second"} <= result.keys()
    assert done.stderr == ""


def test_what_is_to_be_known_of_a_load_goes_to_the_standard_error(script):
    done = run(*script(Say("a"), note="the context is 1024 tokens"), "-p", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "exl2chat: the context is 1024 tokens\n")


def test_max_tokens_reaches_the_engine(script):
    assert run(*script(Say("one two three")), "-p", "hi", "--max-tokens", "2").stdout == "one two\n"


def test_stats_go_to_the_standard_error(script):
    done = run(*script(Read(3), Say("a b")), "-p", "hi", "--stats")
    assert done.stdout == "a b\n"
    assert "3 + 2 tokens" in done.stderr
    assert " tokens/s, first after " in done.stderr


def test_the_speed_of_a_single_token_is_left_out(script):
    done = run(*script(Read(3), Say("a")), "-p", "hi", "--stats")
    assert "3 + 1 tokens, first after " in done.stderr


@pytest.mark.parametrize(
    ("argv", "stdin", "sent"),
    [
        (["-p", "ask"], "", "ask"),
        (["-p", "ask"], "text\n", "ask\n\ntext\n"),
        (["-p", "-"], "text\n", "text\n"),
        ([], "text", "text"),
        (["-p", "/help"], "", "/help"),
        (["-p", "//help"], "", "//help"),
        (["-p", "/etc/passwd"], "", "/etc/passwd"),
        (["-p", " indented"], "", " indented"),
    ],
)
def test_prompt_and_standard_input_reach_the_model_as_they_are(monkeypatch, tmp_path, argv, stdin, sent):
    engine = ScriptedEngine(Script(replies=((Say("ok"),),)))
    monkeypatch.setattr("exl2chat.run.choose_engine", lambda *_: engine)
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert cli.main(["run", "--home", str(tmp_path), *argv]) == 0
    asked = next(request for request in engine.requests if hasattr(request, "turns"))
    assert [turn.text for turn in asked.turns] == [sent]


def test_without_a_prompt_there_is_a_usage_error(script):
    done = run(*script(Say("never")))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no prompt" in done.stderr


@pytest.mark.parametrize(
    ("load", "reply", "status", "complaint"),
    [
        ((Fail("config.json: no such file", "check the path", 3),), (), 3, "config.json"),
        ((), (Fail("the prompt has 9 tokens too many", "", 4),), 4, "too many"),
        ((), (Say("half "), Fail("out of memory", "use --ctx", 1)), 1, "out of memory"),
        ((), (Say("half "), Die("the engine was killed by SIGKILL")), 1, "SIGKILL"),
        ((Die("the engine was killed by SIGSEGV"),), (), 1, "SIGSEGV"),
    ],
)
def test_failures_give_one_complaint_and_their_status(script, load, reply, status, complaint):
    done = run(*script(*reply, load=load), "-p", "hi")
    assert done.returncode == status
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ("half \n" if len(reply) == 2 else "")


async def test_a_defect_on_the_way_is_one_complaint_and_not_a_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(Controller, "_draft_soon", lambda _: 1 / 0)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    controller = Controller(ScriptedEngine(), Settings(), Paths.default(tmp_path), Session.in_memory())
    async with asyncio.timeout(10):
        with pytest.raises(ChatError, match="ZeroDivisionError") as caught:
            await answer("hi", controller)
    assert caught.value.status == 1


def test_an_interrupt_keeps_the_partial_answer_and_exits_130(script):
    argv = [*RUN, *script(Say("half"), Hold()), "-p", "hi"]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(4) == b"half"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"\n", b"")
    assert process.returncode == 130


async def interrupted(tmp_path, script, moment, as_json):
    """The status of a run that gets SIGINT when `moment(controller)` holds."""
    controller = Controller(ScriptedEngine(script), Settings(), Paths.default(tmp_path), Session.in_memory())
    task = asyncio.create_task(answer("hi", controller, as_json))
    while not moment(controller):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(10):
        return await task


async def test_an_interrupt_keeps_the_partial_answer_as_json(tmp_path, capsys):
    script = Script(replies=((Say("half"), Hold()),))
    assert await interrupted(tmp_path, script, lambda controller: (controller.reply or ("", ""))[1], True) == 130
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["stop"]) == ("half", "stopped")


@pytest.mark.parametrize("script", [Script(load=(Hold(),)), Script(replies=((Hold(),),))])
async def test_an_interrupt_before_the_first_word_exits_130_and_prints_nothing(tmp_path, capsys, script):
    loads = bool(script.load)
    moment = (lambda controller: controller.phase == "loading") if loads else (lambda controller: controller.busy)
    assert await interrupted(tmp_path, script, moment, False) == 130
    assert capsys.readouterr().out == ""


def test_a_reader_that_goes_away_is_no_error(script):
    flags = [*script(Say("word " * 50_000)), "-p", "hi"]
    process = subprocess.Popen([*RUN, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_full_disk_is_one_complaint_with_an_advice(script):
    with open("/dev/full", "w") as full:
        argv = [*RUN, *script(Say("word")), "-p", "hi"]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    complaint, advice = done.stderr.splitlines()
    assert complaint == "exl2chat: the standard output cannot be written: No space left on device"
    assert "make room" in advice


def test_any_locale_gives_utf8(script):
    env = {"LC_ALL": "C", "LANG": "C", "PATH": os.environ["PATH"], "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*RUN, *script(Say("grün 🦆")), "-p", "ä"], capture_output=True, env=env, timeout=60, input=b""
    )
    assert (done.returncode, done.stdout.decode()) == (0, "grün 🦆\n")


@pytest.mark.parametrize(
    ("closed", "status", "complaint"),
    [
        ("<&- 2>&-", 0, ""),
        (">&-", 1, "exl2chat: the standard output is closed"),
        ("--json >&-", 1, "exl2chat: the standard output is closed"),
        ("<&- >&- 2>&-", 1, ""),
    ],
)
def test_only_a_lost_answer_makes_a_closed_stream_an_error(script, closed, status, complaint):
    line = " ".join(map(str, [*RUN, *script(Say("x")), "-p", "hi", closed]))
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition("\n  ")[0]) == (status, complaint)


def in_terminal(argv):
    """Everything a command writes to a terminal that is its standard output and error."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower)
    os.close(follower)
    seen = b""
    try:
        while piece := os.read(leader, 65536):
            seen += piece
    except OSError:  # Linux reports the end of a terminal as an input/output error
        pass
    os.close(leader)
    return process.wait(timeout=30), seen.decode()


HOSTILE = "\x1b]52;c;aGk=\x07 clipboard \x9b2J \u202e"


def test_a_terminal_sees_safe_text_and_a_pipe_sees_the_raw_reply(script):
    flags = [*script(Say(HOSTILE)), "-p", "hi"]
    assert run(*flags).stdout == HOSTILE + "\n"
    status, seen = in_terminal([*RUN, *flags])
    assert status == 0
    assert "clipboard" in seen
    assert not any(bad in seen for bad in ("\x1b]52", "\x07", "\x9b", "\u202e"))


def test_nothing_of_a_run_is_saved(script, tmp_path):
    run(*script(Say("x")), "-p", "secret")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["script.json"]


def test_the_chat_without_a_terminal_answers_its_standard_input(script):
    argv = [sys.executable, "-m", "exl2chat", *script(Say("ok"))]
    done = subprocess.run(argv, input="hello", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_a_message_that_is_piped_in_goes_on_with_the_chat_that_is_resumed(script, tmp_path):
    paths = Paths.default(tmp_path)
    session = Session.create(paths)
    session.add(Message("a", None, "user", "first"))
    session.close()
    argv = [sys.executable, "-m", "exl2chat", *script(Say("ok")), "--resume"]
    done = subprocess.run(argv, input="second", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    resumed = Session.open("last", paths)
    assert [message.text for message in resumed.path] == ["first", "second", "ok"]
    resumed.close()


def test_a_message_that_is_piped_in_and_cannot_be_saved_is_a_failure(script, tmp_path):
    session = Session.create(Paths.default(tmp_path))
    session.add(Message("a", None, "user", "first"))
    session.close()
    argv = [sys.executable, "-m", "exl2chat", *script(Say("ok")), "--resume"]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))  # no file may grow
    done = subprocess.run(argv, input="second", capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (1, "ok\n")
    assert done.stderr.splitlines()[-1] == "exl2chat: the last messages of 'first' are lost: File too large"


def test_a_message_for_a_chat_that_is_open_elsewhere_is_refused_with_advice_that_a_pipe_can_follow(script, tmp_path):
    session = Session.create(Paths.default(tmp_path))
    session.add(Message("a", None, "user", "first"))
    argv = [sys.executable, "-m", "exl2chat", *script(Say("never")), "--resume"]
    done = subprocess.run(argv, input="second", capture_output=True, text=True, timeout=60)
    session.close()
    assert (done.returncode, done.stdout) == (6, "")
    (line,) = done.stderr.splitlines()
    assert "another exl2chat has it open" in line
    assert "without --resume" in line
    assert "/fork" not in line


@pytest.mark.parametrize(("flags", "complaint"), [(["--resume", "nosuch"], "nosuch"), (["--plain"], "no terminal")])
def test_what_the_chat_cannot_do_with_a_pipe_is_refused(script, flags, complaint):
    argv = [sys.executable, "-m", "exl2chat", *script(Say("never")), *flags]
    done = subprocess.run(argv, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert done.stdout == ""


# What the answer must be


@pytest.mark.parametrize(
    ("argv", "form"),
    [
        (["--json-schema", '{"type": "object"}'], Form("json", '{"type": "object"}')),
        (["--json-schema", "SCHEMA"], Form("json", "true", "SCHEMA")),
        (["--regex", "a|b"], Form("regex", "a|b")),
        (["--grammar", 'start: "x"'], Form("grammar", 'start: "x"')),
        ([], None),
    ],
)
def test_what_the_answer_must_be_reaches_the_engine(monkeypatch, tmp_path, argv, form):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SCHEMA").write_text("true")
    engine = ScriptedEngine(Script(replies=((Say("ok"),),)))
    monkeypatch.setattr("exl2chat.run.choose_engine", lambda *_: engine)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["run", "--home", str(tmp_path), "-p", "hi", *argv]) == 0
    assert next(request for request in engine.requests if hasattr(request, "turns")).form == form


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--json-schema", "nowhere.json"], "nowhere.json: No such file"),
        (["--json-schema", '{"type": }'], "JSON schema: line 1, column 10: Expecting value"),
        (["--grammar", "nowhere.lark"], "nowhere.lark: No such file"),
        (["--grammar", ""], "the grammar is empty"),
        (["--regex", ""], "the regular expression is empty"),
        (["--regex", "a", "--grammar", "b:"], "not allowed with"),
    ],
)
def test_what_cannot_be_read_fails_before_a_model_is_loaded(tmp_path, capsys, argv, complaint):
    assert cli.main(["run", "--home", str(tmp_path), "--engine", "scripted:none", "-p", "hi", *argv]) == 2
    assert complaint in capsys.readouterr().err


def test_an_answer_cut_off_before_it_is_complete_is_a_failure(script):
    done = run(*script(Say('{"a":'), Finish("max_tokens")), "-p", "hi", "--json-schema", "{}")
    assert (done.returncode, done.stdout) == (1, '{"a":\n')
    assert "not complete: it was ended by max_tokens" in done.stderr
