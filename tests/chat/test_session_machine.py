"""Any sequence of talking, crashing, filling the disk and tearing the file: nothing acknowledged is lost."""

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exl2chat.chat.events import Message
from exl2chat.chat.session import Session
from exl2chat.paths import Paths

from .faults import FailingDisk
from .strategies import texts


class SessionMachine(RuleBasedStateMachine):
    """`tree` and `title` are what the session must show; `draft` is the text of a reply on its way."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.session = Session.create(Paths.default(self.folder))
        self.session.add(Message("m0", None, "user", "hello"))
        self.tree = self.session.tree
        self.title = "hello"
        self.draft = ""
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.session.close()
            shutil.rmtree(self.folder)

    def say(self, text: str) -> None:
        self.count += 1
        message = Message(f"m{self.count}", self.tree.head, "assistant" if self.draft else "user", text)
        self.session.add(message)
        self.tree, self.draft = self.tree.add(message), ""

    @rule(text=texts)
    def add(self, text: str) -> None:
        self.say(text)

    @rule(text=texts)
    def rename(self, text: str) -> None:
        self.session.rename(text)
        self.title = text

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        head = data.draw(st.sampled_from([None, *self.tree.messages]))
        self.session.move(head)
        self.tree = self.tree.move(head)

    @rule(text=texts.filter(bool))
    def write_draft(self, text: str) -> None:
        self.session.draft(f"m{self.count + 1}", self.tree.head, text)
        self.draft += text

    @rule(text=texts, first=st.integers(1, 4), code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def add_on_a_bad_disk(self, text: str, first: int, code: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            FailingDisk(patch, range(first, first + 3), code)
            self.say(text)
        self.rename("saved again")
        assert self.session.fault is None

    @precondition(lambda self: self.session.fault is None)
    @rule(torn=st.sampled_from([b"", b'{"k":"msg","id":"', b"\0" * 512, b"\xff\n{}\n"]))
    def crash(self, torn: bytes) -> None:
        """The process dies (its lock with it), perhaps in the middle of a write."""
        assert self.session.file is not None
        path = self.session.file
        self.session.close()
        with path.open("ab") as file:
            file.write(torn)
        self.session = Session.open(path, Paths.default(self.folder))
        if self.draft:
            self.count += 1
            reply = self.session.tree.messages[f"m{self.count}"]
            assert (reply.text, reply.stop) == (self.draft, "crash")
            self.tree, self.draft = self.tree.add(reply), ""

    @invariant()
    def shows_what_it_must(self) -> None:
        if hasattr(self, "tree"):
            assert self.session.tree == self.tree
            assert self.session.title == self.title
            assert self.session.path == self.tree.path


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=60, stateful_step_count=25)
