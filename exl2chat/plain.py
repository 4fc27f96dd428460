"""The chat line by line: for terminals that only print, and for screen readers. Not one escape sequence is written."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.cells import cell_len, set_cell_size

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import (
    ChatEvent,
    ChooseSession,
    ChooseTheme,
    FillPrompt,
    LoadProgress,
    ModelDown,
    ModelReady,
    Notice,
    PathChanged,
    QuitRequested,
    ReplyFinished,
    ReplyStarted,
    ReplyText,
    ShowPage,
)
from exl2chat.chat.outbox import taken_back_words
from exl2chat.chat.session import loss_words, session_files
from exl2chat.safetext import Scrubber, scrub, scrub_line


async def chat(controller: Controller) -> int:
    """Obey the lines typed at the standard input, a terminal, until it ends or the user quits; the exit status."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    screen = _Screen(controller, quit=lines.feed_eof)

    def take_input() -> None:  # a terminal is readable when it has a whole line, so this does not wait
        if data := os.read(sys.stdin.fileno(), 65536):
            lines.feed_data(data)
        elif not screen.warn_of_loss():
            loop.remove_reader(sys.stdin.fileno())
            lines.feed_eof()

    loop.add_reader(sys.stdin.fileno(), take_input)
    loop.add_signal_handler(signal.SIGINT, screen.interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lines.feed_eof)
    controller.subscribe(screen.show)
    try:
        await controller.start()
        while not lines.at_eof() and (line := await lines.readline()):
            await controller.submit(line.decode("utf-8", "replace").rstrip("\n"))
    finally:
        loop.remove_reader(sys.stdin.fileno())
        await controller.close()
    return 0


class _Screen:
    """What the controller says, as lines of text."""

    def __init__(self, controller: Controller, quit: Callable[[], None]) -> None:
        self._controller = controller
        self._quit = quit
        self._scrubber = Scrubber()
        self._stage = ""
        self._stopping: asyncio.Task[None] | None = None
        self._asked = False  # whether to leave what is unfinished
        self._warned = False  # that leaving loses what cannot be saved

    def interrupt(self) -> None:
        """Stop the reply; with none on its way, leave."""
        if self._controller.busy:
            self._stopping = asyncio.create_task(self._stop())
        elif not self.warn_of_loss():
            self._quit()

    async def _stop(self) -> None:
        """Stop the reply; where that took a message back instead, say so."""
        queued = len(self._controller.queued)
        await self._controller.stop()
        if queued:
            print(f"({taken_back_words('Ctrl+C', queued - 1, replying=True)})", flush=True)

    def warn_of_loss(self) -> bool:
        """Whether leaving loses what cannot be saved, and the user is told so only now."""
        unsaved = self._controller.save()
        warned, self._warned = self._warned, unsaved is not None
        if unsaved and not warned:
            print(f"({scrub_line(loss_words(unsaved))})", flush=True)
        return self._warned and not warned

    def show(self, event: ChatEvent) -> None:
        """Print what a listener should know of `event`."""
        match event:
            case LoadProgress(stage) if stage != self._stage:
                self._stage = stage
                print(f"({scrub_line(stage)})", flush=True)
            case ModelReady(model):
                print(f"({scrub_line(model.name)} is ready; /help lists the commands)", flush=True)
            case ModelDown(message, remedy):
                print(f"(error: {scrub_line(message)}; {scrub_line(remedy)})", flush=True)
            case Notice(text, level):
                print(f"({level}: {scrub_line(text)})", flush=True)
            case ReplyStarted(_, text):
                self._scrubber = Scrubber()
                self._asked = False
                print("Assistant: " + self._scrubber.feed(text), end="", flush=True)
            case ReplyText(_, text):
                print(self._scrubber.feed(text), end="", flush=True)
            case ReplyFinished(message):
                print(f" ({message.stop})" if message.stop not in ("eos", "stop_string") else "", flush=True)
            case ShowPage(title, markdown):
                print(f"{scrub_line(title)}\n{without_tables(scrub(markdown))}", flush=True)
            case QuitRequested():
                self._leave()
            case _:
                self._show_choice(event)

    def _leave(self) -> None:
        """Leave, if need be when asked a second time."""
        unfinished = self._controller.busy or self._controller.queued
        if unfinished and not self._asked:
            self._asked = True
            print("(a reply is on its way or a message waits: /quit again leaves, and saves what there is)", flush=True)
        elif not self.warn_of_loss():
            self._quit()

    def _show_choice(self, event: ChatEvent) -> None:
        match event:
            case FillPrompt(text):
                print(f"(to send again: {scrub(text)})", flush=True)
            case PathChanged():
                for message in self._controller.path[-2:]:
                    print(f"({message.role}: {scrub_line(message.text)[:200]})", flush=True)
            case ChooseSession(query):
                for path, found in session_files(self._controller.paths):
                    if isinstance(found, str):
                        line = f"{path.name} cannot be read: {found}"
                    else:
                        line = f"/open {found.id}  {found.title}"
                    if query.casefold() in line.casefold():
                        print(f"({scrub_line(line)})", flush=True)
            case ChooseTheme():
                print("(a plain chat has no colours)", flush=True)


def without_tables(page: str) -> str:
    """A page of commands with its tables as plain lines, their columns aligned."""
    lines: list[str] = []
    for is_table, part in groupby(page.split("\n"), lambda line: line.startswith("|")):
        block = list(part)
        lines += _aligned(block) if is_table else block
    return "\n".join(lines)


def _cells(row: str) -> list[str]:
    """The cells of `| a | b |` as they were before they were written as Markdown."""
    cells = (re.sub(r"\\([\\|])", r"\1", cell) for cell in row[2:-2].split(" | "))
    return [re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in cells]


def _aligned(table: Sequence[str]) -> Iterator[str]:
    rows = [_cells(line) for line in table if set(line) - set("|- ")]  # without the delimiter of the head
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(set_cell_size, row, widths)).rstrip()
