"""The controller's events on the widgets: one method per event."""

from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Literal, Protocol

from exl2chat.chat import events as chat
from exl2chat.chat.controller import Controller
from exl2chat.ui.bars import LoadBar, QueueBar, Status, StatusBar, TitleBar
from exl2chat.ui.entries import entry_of, speaker
from exl2chat.ui.prompt import Prompt
from exl2chat.ui.section import Entry
from exl2chat.ui.transcript import Transcript

Severity = Literal["information", "warning", "error"]


GREETING = """\
Type a message and press **Enter**. While the model loads or answers you can go on typing: what you send waits its turn.

- `/` lists the commands, **F1** explains them
- **Ctrl+J** begins a new line, **Esc** stops a reply and keeps its text
- everything is saved as it is written; **F3** opens an earlier chat
"""


class Stage(Protocol):
    """What a presenter needs of the app beside its widgets."""

    def say(self, text: str, level: Severity) -> None: ...
    def wear(self, theme: str) -> None: ...
    def show_page(self, title: str, markdown: str) -> None: ...
    def choose_session(self, query: str) -> None: ...
    def choose_theme(self) -> None: ...
    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bars:
    """The lines that a presenter keeps up to date."""

    title: TitleBar
    load: LoadBar
    queue: QueueBar
    status: StatusBar


class Presenter:
    """Shows a controller's state and events."""

    def __init__(
        self, controller: Controller, stage: Stage, transcript: Transcript, prompt: Prompt, bars: Bars
    ) -> None:
        self._controller = controller
        self._stage = stage
        self._transcript = transcript
        self._prompt = prompt
        self._bars = bars

    def show(self, event: chat.ChatEvent) -> None:
        """Show one event, and what it changed in the status line."""
        self._show(event)
        self.show_status()

    def show_everything(self) -> None:
        """Show the state of the controller as it is."""
        self._show(chat.PathChanged())
        self._show(chat.SessionChanged())
        self.show_status()

    def show_status(self) -> None:
        """Bring the status line up to date."""
        controller = self._controller
        model, stats = controller.model, controller.last_stats
        self._bars.queue.queued = controller.queued
        self._bars.status.status = Status(
            controller.phase,
            unsaved=controller.session.fault is not None,
            used=controller.context_used,
            context=model.context if model else 0,
            tokens_per_second=round(controller.tokens_per_second, 1),
            first_token_s=stats.first_token_s if stats else 0.0,
            queued=len(controller.queued),
            form=controller.form.kind if controller.form else "",
            editing=self._prompt.replaces is not None,
        )

    @singledispatchmethod
    def _show(self, event: chat.ChatEvent) -> None:
        """Events without a method here change nothing but the status."""

    @_show.register
    def _(self, event: chat.LoadProgress) -> None:
        self._bars.load.progress = event

    @_show.register
    def _(self, _: chat.ModelReady) -> None:
        self._bars.load.progress = None
        self._show(chat.SessionChanged())

    @_show.register
    def _(self, event: chat.ModelDown) -> None:
        self._bars.load.progress = None
        self._show(chat.SessionChanged())
        self._stage.say(f"{event.message} ({event.remedy})" if event.remedy else event.message, "error")

    @_show.register
    def _(self, event: chat.MessageAdded) -> None:
        if len(self._controller.path) == 1:  # it takes the place of the greeting
            self._show(chat.PathChanged())
        else:
            self._transcript.add(entry_of(event.message, self._controller.session.tree), event.message.text)
            self._transcript.follow()

    @_show.register
    def _(self, event: chat.ReplyStarted) -> None:
        self._transcript.begin(self._unfinished(event.id), event.text)

    @_show.register
    def _(self, event: chat.PrefillProgress) -> None:
        self._transcript.update_last(self._unfinished(event.id, f"reading {event.done} of {event.total} tokens"))

    @_show.register
    def _(self, event: chat.ReplyText) -> None:
        if event.tokens <= 1:
            self._transcript.update_last(self._unfinished(event.id))
        self._transcript.append(event.text)

    @_show.register
    def _(self, event: chat.ReplyFinished) -> None:
        self._transcript.finish(entry_of(event.message, self._controller.session.tree))

    @_show.register
    def _(self, _: chat.PathChanged) -> None:
        tree = self._controller.session.tree
        shown = [(entry_of(message, tree), message.text) for message in self._controller.path]
        self._transcript.show(shown or [(Entry("", "system", "exl2chat"), GREETING)])

    @_show.register
    def _(self, _: chat.SessionChanged) -> None:
        session, model = self._controller.session, self._controller.model
        self._bars.title.title = (session.title or "new chat") + (" · read-only" if session.read_only else "")
        self._bars.title.model = (model.name, model.quantization, model.device) if model else ()

    @_show.register
    def _(self, event: chat.SettingChanged) -> None:
        if event.name == "theme":
            self._stage.wear(self._controller.settings["theme"])

    @_show.register
    def _(self, event: chat.Notice) -> None:
        self._stage.say(event.text, event.level)

    @_show.register
    def _(self, event: chat.ShowPage) -> None:
        self._stage.show_page(event.title, event.markdown)

    @_show.register
    def _(self, event: chat.FillPrompt) -> None:
        self._prompt.give(event.text, event.replaces)

    @_show.register
    def _(self, event: chat.ChooseSession) -> None:
        self._stage.choose_session(event.query)

    @_show.register
    def _(self, _: chat.ChooseTheme) -> None:
        self._stage.choose_theme()

    @_show.register
    def _(self, _: chat.QuitRequested) -> None:
        self._stage.leave()

    def _unfinished(self, id: str, remark: str = "") -> Entry:
        model = self._controller.model
        return Entry(id, "assistant", speaker("assistant", model.name if model else ""), remark=remark)
