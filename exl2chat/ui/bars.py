"""The lines around the chat: title, progress of a load, status, keys. Each shows a record and knows nothing else."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text
from textual.reactive import reactive
from textual.widget import Widget

from exl2chat.chat.events import LoadProgress, Phase
from exl2chat.safetext import scrub_line

SEPARATOR = "  ·  "
BAR_CELLS = 20
LONGEST_QUEUED = 200  # characters; what is further right is out of sight
UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB"))
PHASES = {
    "loading": "loading",
    "ready": "ready",
    "prefill": "reading",
    "streaming": "writing",
    "down": "no model",
}


@dataclass(frozen=True, slots=True)
class Status:
    """What the status line says. Tokens; seconds; 0 where unknown, `used` then None. `unsaved`: something said is not
    on disk. `form`: what replies must be, in a word. `editing`: what is typed is to replace a message."""

    phase: Phase = "down"
    unsaved: bool = False
    used: int | None = 0
    context: int = 0
    tokens_per_second: float = 0.0
    first_token_s: float = 0.0
    queued: int = 0
    form: str = ""
    editing: bool = False


class Line(Widget):
    """One row of text."""

    DEFAULT_CSS = "Line { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }"


class TitleBar(Line):
    """The session's title, and the model at the right, of which the more important words come first."""

    title = reactive("")
    model: reactive[tuple[str, ...]] = reactive(())

    def render(self) -> Text:
        return title_line(scrub_line(self.title), [scrub_line(word) for word in self.model], self.size.width)


class StatusBar(Line):
    """The state of the chat in as many words as fit."""

    status = reactive(Status())

    def render(self) -> Text:
        return Text(joined(status_words(self.status), self.size.width))


class HintBar(Line):
    """What keys do, the more important ones first."""

    hints: reactive[tuple[str, ...]] = reactive(())

    def render(self) -> Text:
        return Text(joined(self.hints, self.size.width))


class QueueBar(Line):
    """What was sent and waits its turn; hidden when nothing does."""

    queued: reactive[tuple[str, ...]] = reactive(())

    def on_mount(self) -> None:
        self.display = False

    def watch_queued(self, queued: tuple[str, ...]) -> None:
        self.display = bool(queued)

    def render(self) -> Text:
        waiting = " │ ".join(scrub_line(text[:LONGEST_QUEUED]) for text in self.queued)
        return Text(f"queued: {waiting}")


class LoadBar(Line):
    """How far the model is on its way; hidden when there is none to wait for."""

    progress: reactive[LoadProgress | None] = reactive(None)

    def on_mount(self) -> None:
        self.display = False
        self._since = time.monotonic()
        self._timer = self.set_interval(0.25, self.refresh, pause=True)

    def watch_progress(self, before: LoadProgress | None, now: LoadProgress | None) -> None:
        if before is None:
            self._since = time.monotonic()
        self.display = now is not None
        if now is None:
            self._timer.pause()
        else:
            self._timer.resume()

    def render(self) -> Text:
        if self.progress is None:
            return Text()
        return Text(load_words(self.progress, time.monotonic() - self._since, self.size.width))


def title_line(title: str, model: Sequence[str], width: int) -> Text:
    """The title and, at the other end of the line, as many words of the model as fit beside it or in half of the line;
    then the title gives way."""
    room = width - 2 - min(cell_len(title), width // 2)
    shown = [" · ".join(model[:count]) for count in range(1, len(model) + 1)]
    right = Text(next((words for words in reversed(shown) if cell_len(words) <= room), shown[0] if shown else ""))
    right.truncate(max(1, room), overflow="ellipsis")
    left = Text(title, "bold")
    left.truncate(max(1, width - right.cell_len - 2), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right)


def joined(words: Sequence[str], width: int) -> str:
    """The first of the words, and of the others those that still fit in `width` cells."""
    line = words[0] if words else ""
    for word in words[1:]:
        if cell_len(line + SEPARATOR + word) <= width:
            line += SEPARATOR + word
    return line


def status_words(status: Status) -> list[str]:
    """The parts of the status line, the more important ones first."""
    words = [PHASES[status.phase]]
    if status.unsaved:
        words.append("not saved")
    if status.phase == "loading" and not status.queued:
        words.append("Esc cancels")
    if status.queued:
        words.append(f"{status.queued} queued")
    if status.editing:
        words.append("editing")
    if status.form:
        words.append(f"{status.form} only")
    if status.context and status.used is not None:
        share = status.used / status.context
        words.append(f"context {meter(share, 8)} {amount(status.used)} of {amount(status.context)}")
    if status.tokens_per_second:
        words.append(f"{status.tokens_per_second:.1f} tok/s")
    if status.first_token_s:
        words.append(f"first token {status.first_token_s:.2f} s")
    return words


def load_words(progress: LoadProgress, seconds: float, width: int) -> str:
    """Stage, bar, share and seconds of a load; in a narrow line fewer of them."""
    waited = f"{seconds:.0f} s"
    stage = scrub_line(progress.stage)
    if not progress.total:
        return f"{'◐◓◑◒'[int(seconds * 4) % 4]} {stage} · {waited}"
    share = min(1.0, progress.done / progress.total)
    if progress.unit == "B":
        counts = f"{size(progress.done)} of {size(progress.total)}"
    else:
        counts = f"{progress.done} of {progress.total} {scrub_line(progress.unit)}".rstrip()
    words = f"{stage} {meter(share, BAR_CELLS)} {share:4.0%}"
    more = f"{words} · {counts} · {waited}"
    if cell_len(words) <= width:
        return more if cell_len(more) <= width else words
    beginning = Text(stage)
    beginning.truncate(max(1, width - len(" 100%")), overflow="ellipsis")
    return f"{beginning.plain} {share:4.0%}"


def meter(share: float, cells: int) -> str:
    """A bar of `cells` cells, filled to `share`."""
    filled = round(min(max(share, 0.0), 1.0) * cells)
    return "━" * filled + "╌" * (cells - filled)


def amount(tokens: int) -> str:
    """A count in at most five characters or so."""
    return str(tokens) if tokens < 10_000 else f"{tokens / 1000:.1f}k"


def size(number: int) -> str:
    """Bytes in the largest unit that fits."""
    for factor, unit in UNITS:
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"
