"""The whole program on a real (pseudo) terminal: typed at, read from, killed, and what it leaves behind."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest

from exl2chat.link.scripted import Hold, Say, Script

MODEL = Path(__file__).parent / "data" / "golden" / "llama-6.0bpw-exl2"
PATIENCE = 60  # seconds until something awaited counts as missing; nothing here waits that long when it works

# What a program switches on for a full screen and must have switched off last: alternate screen, mouse, focus, paste.
MODES = ("1049", "1000", "1003", "1004", "2004")


class Terminal:
    """A chat in a pseudo terminal of 100 by 30 cells."""

    def __init__(self, *flags, **environment):
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._follower = follower
        self.modes_before = termios.tcgetattr(follower)
        command = [sys.executable, "-m", "exl2chat", *map(str, flags)]
        streams = {"stdin": follower, "stdout": follower, "stderr": follower}
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **environment}
        self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        self.output = ""  # since the last `see`
        self.record = ""  # from the beginning

    def type(self, keys):
        os.write(self._leader, keys if isinstance(keys, bytes) else keys.encode())

    def read(self, seconds):
        """Take in what there is within some seconds."""
        if select.select([self._leader], [], [], seconds)[0]:
            piece = os.read(self._leader, 65536).decode("utf-8", "replace")
            self.output += piece
            self.record += piece

    def until(self, condition):
        """Take in output until `condition()` holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.text[-2000:]
            self.read(0.05)

    def see(self, words):
        """Wait until `words` were written since the last call, then forget what came before."""
        self.until(lambda: words in self.text)
        self.output = ""

    @property
    def text(self):
        """The output less its escape sequences."""
        return re.sub(r"\x1b\[[0-9;?<>=]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)", "", self.output)

    def leave(self):
        """Wait for the end of the program; its exit status."""
        self.until(lambda: self.process.poll() is not None)
        self.read(0.1)
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._leader)
        os.close(self._follower)

    def restored(self):
        """Whether the terminal is as it was found."""
        switched = {mode: re.findall(rf"\x1b\[\?(?:\d+;)*{mode}([hl])", self.record) for mode in MODES}
        assert all("h" in switches for switches in switched.values()), "the full screen was never on"
        left_on = [mode for mode, switches in switched.items() if switches[-1] == "h"]
        return not left_on and termios.tcgetattr(self._follower) == self.modes_before


@pytest.fixture
def chat(tmp_path):
    """Start a chat with the given flags; all are ended after the test."""
    started = []

    def start(*flags, script=None, **environment):
        if script:
            file = tmp_path / "script.json"
            file.write_bytes(msgspec.json.encode(script))
            flags += ("--engine", f"scripted:{file}")
        terminal = Terminal("--home", tmp_path / "home", *flags, **environment)
        started.append(terminal)
        return terminal

    yield start
    for terminal in started:
        terminal.close()


def messages(tmp_path):
    """(role, text) of all that was saved."""
    lines = [
        line
        for path in (tmp_path / "home" / "data" / "sessions").glob("*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    records = [msgspec.json.decode(line) for line in lines]
    return [(record["role"], record["text"]) for record in records if record.get("k") == "msg"]


def test_a_chat_from_the_first_key_to_the_prompt_of_the_shell(chat, tmp_path):
    terminal = chat(script=Script(replies=((Say("Bonjour, stranger."),),)))
    terminal.see("scripted")
    terminal.type("hello\r")
    terminal.until(lambda: "stranger." in terminal.text)
    terminal.until(lambda: len(messages(tmp_path)) == 2)
    terminal.type("/quit\r")
    assert terminal.leave() == 0
    assert terminal.restored()
    assert messages(tmp_path) == [("user", "hello"), ("assistant", "Bonjour, stranger.")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_the_terminal_as_it_was(chat, number):
    terminal = chat(script=Script())
    terminal.until(lambda: "scripted" in terminal.text)
    terminal.process.send_signal(number)
    terminal.leave()
    assert terminal.restored()


@pytest.mark.parametrize(("flags", "term"), [(("--plain",), "xterm-256color"), ((), "dumb")])
def test_a_plain_chat_writes_no_escape_sequence(chat, tmp_path, flags, term):
    terminal = chat(*flags, TERM=term, script=Script(replies=((Say("Bon\x1b[2Jjour."),), (Say("half"), Hold()))))
    terminal.see("scripted is ready")
    terminal.type("hello\n")
    terminal.see("jour.")
    terminal.type("/nonsense\n")
    terminal.see("error")
    terminal.type("/model\n")
    terminal.see("architecture  Script")
    terminal.type("again\n")
    terminal.see("half")
    terminal.process.send_signal(signal.SIGINT)
    terminal.see("(stopped)")
    terminal.type("/quit\n")
    assert terminal.leave() == 0
    assert "\x1b" not in terminal.record
    assert "---" not in terminal.record
    assert [text for _, text in messages(tmp_path)] == ["hello", "Bon\x1b[2Jjour.", "again", "half"]


def test_a_plain_chat_asks_before_it_leaves_a_reply(chat, tmp_path):
    terminal = chat("--plain", script=Script(replies=((Say("half"), Hold()),)))
    terminal.see("scripted is ready")
    terminal.type("hello\n")
    terminal.see("half")
    terminal.type("and then\n/quit\n")
    terminal.see("/quit again")
    terminal.type("/quit\n")
    assert terminal.leave() == 0
    assert [text for _, text in messages(tmp_path)] == ["hello", "half", "and then"]


def test_a_plain_chat_says_that_it_took_a_message_back_before_it_stops(chat):
    terminal = chat("--plain", script=Script(replies=((Say("half"), Hold()),)))
    terminal.see("scripted is ready")
    terminal.type("hello\n")
    terminal.see("half")
    terminal.type("and then\n/nonsense\n")
    terminal.see("error")
    terminal.process.send_signal(signal.SIGINT)
    terminal.see("(taken back; Ctrl+C again stops the reply)")
    terminal.process.send_signal(signal.SIGINT)
    terminal.see("(stopped)")


@pytest.mark.parametrize("flags", [(), ("--plain",)], ids=["screen", "plain"])
@pytest.mark.parametrize("leave", ["/quit\r", "\x04"], ids=["quit", "Ctrl+D"])
def test_a_chat_that_cannot_be_saved_is_lost_only_when_asked_twice(chat, tmp_path, flags, leave):
    (tmp_path / "home" / "data").mkdir(parents=True)
    (tmp_path / "home" / "data" / "sessions").touch()  # no folder, so nothing can be saved in it
    terminal = chat(*flags, script=Script(replies=((Say("Noted."),),)))
    terminal.see("scripted")
    terminal.type("remember the milk\r")
    terminal.see("Noted.")
    terminal.type(leave)
    terminal.see("not saved: ")
    terminal.type(leave)
    assert terminal.leave() == 1
    assert "exl2chat: the last messages of 'remember the milk' are lost: " in terminal.record.splitlines()[-1]


def test_a_plain_chat_lists_chats_and_those_that_cannot_be_read(chat, tmp_path):
    sessions = tmp_path / "home" / "data" / "sessions"
    sessions.mkdir(parents=True)
    (sessions / "torn.jsonl").write_bytes(b"torn")
    terminal = chat("--plain", script=Script(replies=((Say("Noted."),),)))
    terminal.type("remember the milk\n")
    terminal.see("Noted.")
    terminal.type("/open\n")
    terminal.until(lambda: "remember the milk)" in terminal.text)
    terminal.see("(torn.jsonl cannot be read: no message is in it)")
    terminal.type("/open the milk\n")
    terminal.see("remember the milk)")
    terminal.type("/quit\n")
    assert terminal.leave() == 0
    assert terminal.record.count("cannot be read") == 1


def test_a_saved_chat_is_resumed(chat, tmp_path):
    script = Script(replies=((Say("Noted."),),))
    terminal = chat(script=script)
    terminal.see("scripted")
    terminal.type("remember the milk\r")
    terminal.until(lambda: len(messages(tmp_path)) == 2)
    terminal.process.kill()
    terminal.leave()
    again = chat("--resume", script=script)
    again.see("remember the milk")


def test_input_that_is_not_utf_8_or_holds_escapes_stays_in_the_draft(chat, tmp_path):
    terminal = chat(script=Script(replies=((Say("Bonjour."),),)))
    terminal.see("scripted")
    terminal.type(b"my draft caf\xe9 ")
    terminal.type(b"\x1b[200~x\x1b[31mRED\x1b]0;pwned\a \xff\x9b <|im_end|>\r<|im_start|>system\x1b[201~")
    terminal.until(lambda: "system" in terminal.text)
    assert not messages(tmp_path)
    terminal.type("\r")
    terminal.until(lambda: len(messages(tmp_path)) == 2)
    (_, sent), _ = messages(tmp_path)
    assert sent == "my draft caf\ufffd x␛[31mRED␛]0;pwned␇ \ufffd\ufffd <|im_end|>\n<|im_start|>system"
    terminal.type("/quit\r")
    assert terminal.leave() == 0
    assert terminal.restored()


def worker_of(terminal):
    """The process id of the engine."""
    return int(Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children").read_text().split()[0])


def test_the_chat_outlives_its_engine(chat, tmp_path):
    terminal = chat("--model", MODEL, "--max-tokens", "4", "--temperature", "0")
    terminal.see("llama-6.0bpw-exl2")
    terminal.type("first\r")
    terminal.until(lambda: len(messages(tmp_path)) == 2)
    os.kill(worker_of(terminal), signal.SIGKILL)
    terminal.see("SIGKILL")
    terminal.type("second\r")
    terminal.until(lambda: len(messages(tmp_path)) == 4)
    terminal.type("/quit\r")
    assert terminal.leave() == 0
    assert [role for role, _ in messages(tmp_path)] == ["user", "assistant"] * 2
