"""The Textual app: what is on the screen and what keys do. Intents go to the controller, events to the presenter."""

import asyncio
import gc
import signal
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

from textual import events, on
from textual._keyboard_protocol import MODIFIER_FUNCTIONAL_KEYS
from textual.app import App, ComposeResult, SystemCommand
from textual.containers import Horizontal
from textual.filter import LineFilter
from textual.notifications import Notify
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from exl2chat.chat.commands import COMMANDS, help_page
from exl2chat.chat.controller import Controller
from exl2chat.chat.history import History
from exl2chat.chat.outbox import taken_back_words
from exl2chat.chat.session import loss_words, session_files
from exl2chat.errors import ChatError
from exl2chat.paths import Paths, theme_files
from exl2chat.safetext import scrub
from exl2chat.ui.bars import HintBar, LoadBar, QueueBar, StatusBar, TitleBar
from exl2chat.ui.completion import CompletionList
from exl2chat.ui.crash import write_crash
from exl2chat.ui.driver import ChatDriver
from exl2chat.ui.entries import choice_of
from exl2chat.ui.keys import HINTS, bindings, keys_page
from exl2chat.ui.panels import Choice, Page, Picker
from exl2chat.ui.presenter import Bars, Presenter, Severity
from exl2chat.ui.prompt import Prompt
from exl2chat.ui.safety import SafeText, release
from exl2chat.ui.themes import ChatTheme, load_theme
from exl2chat.ui.transcript import Transcript

YOUNG_OBJECTS = 5000  # the default of 700 made 500 collections in a long reply, some of them 15 ms long
AGAIN_SECONDS = 2.0
MOST_NOTICES = 3
STATUS_SECONDS = 0.25
NOTICE_SECONDS = {"information": 4, "warning": 6, "error": 10}


class ChatApp(App[int]):
    """One chat on the screen. UsageError when the theme of the settings is missing or broken."""

    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar = bindings()

    def __init__(self, controller: Controller, paths: Paths) -> None:
        super().__init__(driver_class=ChatDriver, watch_css=False)
        self.controller = controller
        self.paths = paths
        self._look = self._dress(controller.settings["theme"]).look
        self.transcript = Transcript(self._look, id="transcript")
        self._completions = CompletionList()
        self.prompt = Prompt(
            History(paths.history), self._completions, lambda line: controller.complete(line, len(line))
        )
        self._hints = HintBar()
        self._bars = Bars(TitleBar(), LoadBar(), QueueBar(), StatusBar())
        self.presenter = Presenter(controller, self, self.transcript, self.prompt, self._bars)
        self._safe = SafeText()  # one for good: drawn lines are cached by their filter
        self._armed = False  # Ctrl+C was pressed with nothing to do: once more leaves
        self._asked = float("-inf")  # when the user was told what leaving would cut short
        self._warned = False  # that leaving loses what cannot be saved

    def compose(self) -> ComposeResult:
        yield self._bars.title
        yield self.transcript
        yield self._bars.load
        yield self._bars.queue
        yield self._completions
        with Horizontal(id="prompt-row"):
            yield Static("❯ ", id="prompt-mark")
            yield self.prompt
        yield self._bars.status
        yield self._hints

    def on_mount(self) -> None:
        self._hints.hints = HINTS
        self.prompt.focus()
        self.presenter.show_everything()
        self._unsubscribe = self.controller.subscribe(self.presenter.show)
        self.set_interval(STATUS_SECONDS, self.presenter.show_status)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        self.run_worker(self.controller.start())
        self.call_after_refresh(freeze_garbage)

    async def on_unmount(self) -> None:
        self._unsubscribe()
        await self.controller.close()

    async def on_event(self, event: events.Event) -> None:
        """Any key between two presses of Ctrl+C takes the first back. Some terminals report Ctrl as a key."""
        if isinstance(event, events.Key) and event.key not in {"ctrl+c", *MODIFIER_FUNCTIONAL_KEYS}:
            self._arm(False)
        await super().on_event(event)

    @on(Notify)
    def _make_room(self, event: Notify) -> None:
        """Show few notices, and each text once: they lie over the chat."""
        shown = list(self._notifications)
        same = [notice for notice in shown if notice.message == event.notification.message]
        for notice in (*same, *shown[: 1 - MOST_NOTICES]):
            self._unnotify(notice, refresh=False)

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [self._safe, *super().get_line_filters()]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The chat's commands in the palette; one that cannot do without an argument goes into the prompt."""
        if isinstance(screen, ModalScreen):
            return
        for row in COMMANDS:
            run = partial(self.action_command, row.name)
            ask = partial(self.prompt.put, f"/{row.name} ")
            yield SystemCommand(row.name, row.summary, ask if row.syntax.startswith("<") else run)

    # What the presenter asks for

    def say(self, text: str, level: Severity) -> None:
        """Show a line for a while."""
        self.notify(scrub(text), severity=level, markup=False, timeout=NOTICE_SECONDS[level])

    def wear(self, theme: str) -> None:
        """Put on a theme; one that is broken leaves the old one and a line about it."""
        try:
            self._look = self._dress(theme).look
        except ChatError as fault:
            self.say(str(fault), "error")
            return
        self.transcript.restyle(self._look)

    def show_page(self, title: str, markdown: str) -> None:
        """Show something to read over the chat."""
        self.push_screen(Page(title, markdown, self._look))

    def choose_session(self, query: str) -> None:
        """Let the user pick a saved session; by its path, as a file that was copied has the id of the other."""
        saved = [choice_of(path, found) for path, found in session_files(self.paths)]
        here = str(self.controller.session.file)
        self.push_screen(Picker("Sessions", saved, query, here), partial(self._run_with, "open"))

    def choose_theme(self) -> None:
        """Let the user pick a theme; the one that is marked is worn meanwhile."""
        before = self.theme

        async def chosen(name: str | None) -> None:
            self.wear(before)
            await self._run_with("theme", name)

        picker = Picker("Themes", [Choice(name, name) for name in theme_files(self.paths)], "", before, self.wear)
        picker.add_class("corner")
        self.push_screen(picker, chosen)

    def leave(self) -> None:
        """End the app; `on_unmount` saves what is on its way. Asked for once more while that cuts something short, and
        once in a session that cannot be saved."""
        unfinished = unfinished_words(self.controller.busy, len(self.controller.queued))
        unsaved = self.controller.save()
        warned, self._warned = self._warned, unsaved is not None
        if unsaved and not warned:
            self._asked = time.monotonic()
            self.say("; ".join(filter(None, (unfinished, loss_words(unsaved)))), "warning")
        elif unfinished and time.monotonic() - self._asked > NOTICE_SECONDS["warning"]:
            self._asked = time.monotonic()
            self.say(f"{unfinished}: once more to quit", "warning")
        else:
            self.exit(0)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy `text`, which may be from the prompt."""
        super().copy_to_clipboard(release(text))

    # What the user does

    @on(Prompt.Submitted)
    async def _on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        await self.controller.submit(event.text, event.replaces)

    @on(Prompt.EditEnded)
    def _on_edit_ended(self) -> None:
        self.say("no longer editing: what you send is a new message", "information")

    @on(Prompt.Left)
    def _on_prompt_left(self) -> None:
        self.leave()

    async def action_command(self, line: str) -> None:
        await self.controller.run(line)

    def action_help(self) -> None:
        self.show_page("Help", f"{keys_page()}\n\n{help_page()}")

    async def action_stop(self) -> None:
        self.screen.clear_selection()
        await self._stop("Esc")

    async def action_interrupt(self) -> None:
        """Copy the selection, else close a panel, else stop, else clear the prompt, else leave when pressed twice."""
        if selected := self.screen.get_selected_text():
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self.say(f"{len(selected)} characters sent to the clipboard (OSC 52)", "information")
        elif isinstance(self.screen, ModalScreen):
            self.screen.dismiss(None)
        elif self.controller.busy or self.controller.queued:
            await self._stop("Ctrl+C")
        elif self.prompt.text:
            self.prompt.put("")
        elif self._armed:
            self.leave()
        else:
            self._arm(True)
            self.set_timer(AGAIN_SECONDS, partial(self._arm, False))

    def action_page(self, pages: int) -> None:
        self.transcript.page(pages)

    def action_home(self) -> None:
        self.transcript.home()

    def action_follow(self) -> None:
        self.transcript.follow()

    # Inside

    async def _stop(self, key: str) -> None:
        """Stop because `key` was pressed; where that took a message back instead, say so."""
        queued = len(self.controller.queued)
        await self.controller.stop()
        if queued:
            self.say(taken_back_words(key, queued - 1, self.controller.busy), "information")

    def _arm(self, armed: bool) -> None:
        """Whether the next Ctrl+C leaves; the hints say so."""
        self._armed = armed
        self._hints.hints = ("press Ctrl+C again to quit",) if armed else HINTS

    async def _run_with(self, command: str, argument: str | None) -> None:
        if argument:
            await self.controller.run(f"{command} {argument}")

    def _dress(self, name: str) -> ChatTheme:
        """Put on the theme `name`. UsageError when it is missing or broken."""
        theme = load_theme(name, theme_files(self.paths))
        self.register_theme(theme.textual)
        self.theme = theme.name
        return theme

    def _fatal_error(self) -> None:
        """Instead of the framework's dump, which prints the values of variables: one line, and a private log."""
        fault = self._exception or RuntimeError("unknown")
        self._exit_renderables.append(scrub(write_crash(fault, self.paths.state / "screen.log")))
        self._close_messages_no_wait()


def unfinished_words(replying: bool, queued: int) -> str:
    """What is not finished yet, as a sentence; empty when all is."""
    waiting = f"{queued} message{'s' * (queued > 1)} {'are' if queued > 1 else 'is'} queued" if queued else ""
    return " and ".join(filter(None, ("a reply is running" if replying else "", waiting)))


def freeze_garbage() -> None:
    """What lives as long as the app is not searched for garbage again: it halves the longest pause between frames."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def run_app(controller: Controller, paths: Paths) -> int:
    """Show the chat until the user leaves; the exit status."""
    app = ChatApp(controller, paths)
    app.run()
    return app.return_code or 0
