"""Killed at any moment: what was acknowledged is there, and at most a second of the reply is not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from exl2chat.chat.events import Message
from exl2chat.chat.records import Header, dump
from exl2chat.chat.session import Session, list_sessions
from exl2chat.paths import Paths

from . import faults, talker

KILLS = 20


def talking(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, talker.__file__, *arguments], stdout=subprocess.PIPE)


def killed(process: subprocess.Popen[bytes]) -> bytes:
    """Kill the process; what it had printed and nobody had read."""
    process.kill()
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    return output


def test_no_acknowledged_message_is_lost_to_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(dump(Header(1, "s", "", "t")))
    chance = random.Random(20)
    acknowledged: list[str] = []
    for _ in range(KILLS):
        process = talking("messages", str(path))
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 30)):
            acknowledged.append(process.stdout.readline().decode().strip())
        time.sleep(chance.random() / 500)  # so that it dies between acknowledgements too
        acknowledged += killed(process).decode().split()
        session = Session.open(path, Paths.default(tmp_path))
        session.close()
        kept = [message.id for message in session.tree.messages.values() if message.role == "user"]
        assert kept[: len(acknowledged)] == acknowledged
        assert len(kept) <= len(acknowledged) + 1  # the kill may come between writing and acknowledging
        assert not any("damaged" in notice for notice in session.notices)
        acknowledged = kept
    assert len(acknowledged) > KILLS


def test_a_process_that_dies_at_any_system_call_leaves_a_sound_file(tmp_path: Path) -> None:
    """The child dies before its first call on the file, then before its second, and so on until it survives."""
    call, status = 0, -1
    while status != 0:
        call += 1
        paths = Paths.default(tmp_path / str(call))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _talk_until_killed(paths, call, writing)
        os.close(writing)
        with open(reading, "rb") as pipe:
            acknowledged = pipe.read().decode().split()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        saved = list_sessions(paths)
        assert saved or not acknowledged
        if saved:
            session = Session.open(saved[0].path, paths)
            session.close()
            kept = [message.id for message in session.path]
            assert kept[: len(acknowledged)] == acknowledged
            assert len(kept) <= len(acknowledged) + 1
    assert call > 15


def _talk_until_killed(paths: Paths, call: int, acknowledge: int) -> None:
    """In a child process: chat, die before system call number `call`, else leave with status 0."""
    status = 1
    try:
        tell = os.write
        faults.at_call(call, lambda: os.kill(os.getpid(), signal.SIGKILL))
        session = Session.create(paths)
        for number in range(4):
            session.draft(f"m{number}", session.tree.head, "ha")
            session.add(Message(f"m{number}", session.tree.head, "assistant" if number % 2 else "user", "hallo"))
            tell(acknowledge, f"m{number} ".encode())
        status = 0
    finally:
        os._exit(status)


def test_at_most_a_second_of_a_reply_is_lost_to_kill_9(tmp_path: Path) -> None:
    process = talking("stream", str(tmp_path))
    assert process.stdout is not None
    heard = [json.loads(process.stdout.readline())]
    while heard[-1][0] < heard[0][0] + 1.6:
        heard.append(json.loads(process.stdout.readline()))
    end = time.monotonic()
    killed(process)
    session = Session.open("last", Paths.default(tmp_path))
    reply = session.path[-1]
    assert [message.text for message in session.path[:-1]] == ["go on"]
    assert reply.stop == "crash"
    assert session.notices == (f"recovered {len(reply.text)} characters of a reply that a crash interrupted",)
    assert reply.text.startswith("".join(text for at, text in heard if at < end - 1))
