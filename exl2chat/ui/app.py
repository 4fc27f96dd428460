"""The Textual app: events of the controller to widgets, intents of the user to the controller."""

import asyncio
import gc
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal
from textual.filter import LineFilter
from textual.screen import ModalScreen, Screen
from textual.widgets import Static, TextArea

from exl2chat.chat import events as chat
from exl2chat.chat.commands import COMMANDS
from exl2chat.chat.controller import Controller
from exl2chat.chat.history import History
from exl2chat.chat.session import list_sessions
from exl2chat.errors import ChatError
from exl2chat.paths import Paths
from exl2chat.safetext import scrub, scrub_line
from exl2chat.ui.bars import HintBar, LoadBar, Status, StatusBar, TitleBar
from exl2chat.ui.completion import CompletionList
from exl2chat.ui.crash import write_crash
from exl2chat.ui.entries import day, entry_of, speaker
from exl2chat.ui.panels import Choice, Page, Picker
from exl2chat.ui.prompt import Prompt
from exl2chat.ui.safety import SafeText
from exl2chat.ui.section import Entry
from exl2chat.ui.themes import ChatTheme, load_theme, theme_files
from exl2chat.ui.transcript import Transcript

Severity = Literal["information", "warning", "error"]
AGAIN_SECONDS = 2.0
HINT = "Enter send · Ctrl+J newline · Esc stop · / commands · F1 help · F3 sessions · Ctrl+D quit"


class ChatApp(App[int]):
    """One chat on the screen."""

    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar = [
        Binding("escape", "stop", "stop"),
        Binding("ctrl+c", "interrupt", "stop", priority=True),
        Binding("ctrl+n", "command('new')", "new"),
        Binding("f1", "command('help')", "help"),
        Binding("f3", "command('open')", "sessions"),
        Binding("f4", "command('theme')", "themes"),
        Binding("f6", "command('stats')", "statistics"),
    ]

    def __init__(self, controller: Controller, paths: Paths) -> None:
        super().__init__(watch_css=False)
        self.controller = controller
        self.paths = paths
        self.theme_files = theme_files(paths)
        self._look = self._dress(controller.settings["theme"]).look
        controller.names = replace(controller.names, themes=tuple(self.theme_files))
        self._replaces: str | None = None  # the message that the prompt's text is to replace
        self._pressed = 0.0  # when Ctrl+C was pressed with nothing to do

    def compose(self) -> ComposeResult:
        completions = CompletionList()
        yield TitleBar(id="title")
        yield Transcript(self._look, id="transcript")
        yield LoadBar()
        yield completions
        with Horizontal(id="prompt-row"):
            yield Static("❯ ", id="prompt-mark")
            yield Prompt(History(self.paths.history), completions)
        yield StatusBar()
        yield HintBar()

    async def on_mount(self) -> None:
        self.query_one(HintBar).hint = HINT
        self._prompt.focus()
        self._show_path()
        self._show_session()
        self._unsubscribe = self.controller.subscribe(self.show)
        self.set_interval(0.25, self._show_status)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit, 128 + number)
        self.run_worker(self.controller.start())
        self.call_after_refresh(self._freeze_garbage)

    async def on_unmount(self) -> None:
        self._unsubscribe()
        await self.controller.close()

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [SafeText(), *super().get_line_filters()]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The commands of the chat in the palette: those with arguments go into the prompt."""
        if isinstance(screen, Page | Picker):
            return
        for row in COMMANDS:
            if row.syntax.startswith("<"):
                yield SystemCommand(row.name, row.summary, partial(self._prompt.put, f"/{row.name} "))
            else:
                yield SystemCommand(row.name, row.summary, partial(self.action_command, row.name))

    @staticmethod
    def _freeze_garbage() -> None:
        """What lives as long as the app need not be searched again: it halves the longest pause of a frame."""
        gc.collect()
        gc.freeze()

    # What the controller says

    def show(self, event: chat.ChatEvent) -> None:
        """Show one event."""
        match event:
            case chat.LoadProgress():
                self.query_one(LoadBar).progress = event
            case chat.ModelReady() | chat.ModelDown():
                self.query_one(LoadBar).progress = None
                self._show_session()
                if isinstance(event, chat.ModelDown):
                    self._say(f"{event.message} ({event.remedy})" if event.remedy else event.message, "error")
            case chat.MessageAdded(message):
                self._transcript.add(entry_of(message, self.controller.session.tree), message.text)
                self._transcript.follow()
            case chat.ReplyStarted(id, text):
                self._transcript.begin(self._pending_entry(id), text)
            case chat.PrefillProgress(id, done, total):
                self._transcript.update_last(self._pending_entry(id, f"reading {done} of {total} tokens"))
            case chat.ReplyText(id, text, tokens):
                if tokens <= 1:
                    self._transcript.update_last(self._pending_entry(id))
                self._transcript.append(text)
            case chat.ReplyFinished(message):
                self._transcript.finish(entry_of(message, self.controller.session.tree))
            case chat.PathChanged():
                self._show_path()
            case chat.SessionChanged():
                self._show_session()
            case chat.SettingChanged("theme"):
                self._wear(self.controller.settings["theme"])
            case chat.Notice(text, level):
                self._say(text, level)
            case chat.ShowPage(title, markdown):
                self.push_screen(Page(title, markdown, self._look))
            case chat.FillPrompt(text, replaces):
                self._prompt.put(text)
                self._replaces = replaces
            case chat.ChooseSession(query):
                self._choose_session(query)
            case chat.ChooseTheme():
                self._choose_theme()
            case chat.QuitRequested():
                self.exit(0)
        self._show_status()

    def _pending_entry(self, id: str, remark: str = "") -> Entry:
        model = self.controller.model
        return Entry(id, "assistant", speaker("assistant", model.name if model else ""), remark=remark)

    def _show_path(self) -> None:
        tree = self.controller.session.tree
        self._transcript.show([(entry_of(message, tree), message.text) for message in self.controller.path])

    def _show_session(self) -> None:
        session, model = self.controller.session, self.controller.model
        bar = self.query_one(TitleBar)
        bar.title = (session.title or "new chat") + (" · read-only" if session.read_only else "")
        bar.model = f"{model.name} · {model.quantization} · {model.device}" if model else ""

    def _show_status(self) -> None:
        controller = self.controller
        model, stats = controller.model, controller.last_stats
        self.query_one(StatusBar).status = Status(
            controller.phase,
            used=controller.context_used,
            context=model.context if model else 0,
            tokens_per_second=round(controller.tokens_per_second, 1),
            first_token_s=stats.first_token_s if stats else 0.0,
            queued=len(controller.queued),
        )

    def _say(self, text: str, level: Severity) -> None:
        self.notify(scrub(text), severity=level, markup=False, timeout=8 if level == "error" else 4)

    # What the user does

    @on(Prompt.Submitted)
    async def _on_submitted(self, event: Prompt.Submitted) -> None:
        replaces, self._replaces = self._replaces, None
        await self.controller.submit(event.text, replaces)

    @on(TextArea.Changed)
    def _on_typed(self) -> None:
        prompt = self._prompt
        at_end = prompt.cursor_location == prompt.document.end
        found = self.controller.complete(prompt.text, len(prompt.text)) if at_end else []
        self.query_one(CompletionList).offer(found)

    @on(Prompt.Left)
    def _on_left(self) -> None:
        self.exit(0)

    async def action_command(self, line: str) -> None:
        await self.controller.run(line)

    async def action_stop(self) -> None:
        self.screen.clear_selection()
        await self.controller.stop()

    async def action_interrupt(self) -> None:
        """Ctrl+C: copy what is selected, else stop, else clear the prompt, else leave when pressed again."""
        selected = self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self._say("copied, if the terminal allows it", "information")
        elif isinstance(self.screen, ModalScreen):
            self.screen.dismiss(None)
        elif self.controller.busy:
            await self.controller.stop()
        elif self._prompt.text:
            self._prompt.put("")
            self._replaces = None
        elif time.monotonic() - self._pressed < AGAIN_SECONDS:
            self.exit(0)
        else:
            self._pressed = time.monotonic()
            hint = self.query_one(HintBar)
            hint.hint = "press Ctrl+C again to quit"
            self.set_timer(AGAIN_SECONDS, partial(setattr, hint, "hint", HINT))

    def action_page(self, pages: int) -> None:
        self._transcript.page(pages)

    def action_home(self) -> None:
        self._transcript.home()

    def action_follow(self) -> None:
        self._transcript.follow()

    # Themes and lists

    def _dress(self, name: str) -> ChatTheme:
        """Put on the theme `name`. UsageError when it is broken."""
        theme = load_theme(name, self.theme_files)
        self.register_theme(theme.textual)
        self.theme = theme.name
        return theme

    def _wear(self, name: str) -> None:
        """Put on a theme; one that is broken leaves the old one and a line about it."""
        try:
            self._look = self._dress(name).look
        except ChatError as fault:
            self._say(str(fault), "error")
            return
        self.screen_stack[0].query_one(Transcript).restyle(self._look)

    def _choose_theme(self) -> None:
        before = self.theme

        async def chosen(name: str | None) -> None:
            self._wear(before)
            if name:
                await self.controller.run(f"theme {name}")

        picker = Picker("Themes", [Choice(name, name) for name in self.theme_files], "", before, self._wear)
        picker.add_class("narrow")
        self.push_screen(picker, chosen)

    def _choose_session(self, query: str) -> None:
        async def chosen(id: str | None) -> None:
            if id:
                await self.controller.run(f"open {id}")

        saved = [Choice(s.id, s.title, f"{s.messages} messages · {day(s.updated)}") for s in list_sessions(self.paths)]
        self.push_screen(Picker("Sessions", saved, query, self.controller.session.id), chosen)

    @property
    def _prompt(self) -> Prompt:
        return self.screen_stack[0].query_one(Prompt)

    @property
    def _transcript(self) -> Transcript:
        return self.screen_stack[0].query_one("#transcript", Transcript)

    # When things go wrong

    def _fatal_error(self) -> None:
        """Instead of the framework's dump, which would print prompts and paths: one line, and a private log."""
        fault = self._exception or RuntimeError("unknown")
        self._exit_renderables.append(scrub_line(write_crash(fault, self.paths.state / "screen.log")))
        self._close_messages_no_wait()


def run_app(controller: Controller, paths: Paths) -> int:
    """Show the chat until the user leaves; the exit status."""
    app = ChatApp(controller, paths)
    code = app.run()
    return app.return_code or code or 0
