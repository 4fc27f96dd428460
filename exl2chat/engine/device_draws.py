"""How each row of a step draws its token on the device: the rows of kernels/sample.cu, kept between steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine import penalties
from exl2chat.engine.device_penalties import DeviceWindow, count_window
from exl2chat.engine.device_steps import sampling_row
from exl2chat.engine.scheduler import Row
from exl2chat.settings import Sampling

UNASKED = Sampling(temperature=0, seed=0)  # of a row whose token nobody wants: the least work


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """That a job's next token is drawn on the device. settings: with a seed, and nothing that kernels/sample.cu does
    not know. text: the tokens so far, which penalties count; the list may grow from step to step. counts: whether there
    are penalties, so that no token can be drawn before the one in front of it is known."""

    settings: Sampling
    text: Sequence[int]
    counts: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", penalties.active(self.settings))


@dataclass(slots=True, eq=False)
class _Counted:
    """The window of a text's penalties once the step that was prepared last has drawn: of `length` tokens."""

    window: DeviceWindow
    length: int


# Of a place: the job's drawing and, where there are penalties, what they have counted. Nothing: nobody asks.
_Use = tuple[Drawing | None, _Counted | None]
_NOBODY: _Use = (None, None)


class DeviceDraws:
    """What each token of a step is drawn by. `positions` int32 [R], `tokens` int64 [R] and `results` int32 [R, RESULTS]
    are the memory of the places after which tokens are drawn."""

    def __init__(self, vocabulary: int, longest: int, positions: Tensor, tokens: Tensor, results: Tensor) -> None:
        """Tokens are drawn from the first `vocabulary`; a text has up to `longest`."""
        self._vocabulary, self._longest, self._device = vocabulary, longest, tokens.device
        self._windows: dict[Drawing, _Counted] = {}
        self._settings: dict[Drawing, NDArray[np.void]] = {}
        self._unasked = sampling_row(UNASKED, vocabulary, {})
        self._sent = False
        self._used = [_NOBODY] * len(positions)
        memory = {"position": positions, "token": tokens, "results": results}
        own = [{name: rows[place] for name, rows in memory.items()} for place in range(len(positions))]
        self.table: NDArray[np.void] = np.concatenate([sampling_row(UNASKED, vocabulary, tensors) for tensors in own])
        self._addresses = {name: self.table[name].copy() for name in memory}

    def prepare(self, rows: Sequence[Row], each: int, draws: Mapping[int, Drawing]) -> bool:
        """Have `table` say how these rows draw, which have `each` places a row: those of jobs in `draws` as these say,
        after every token, or after the last alone where penalties count what is drawn. Whether it must be sent again.

        A step may be several groups of rows, each with the `draws` of all: what these do not name is forgotten.
        """
        wanted = set(draws.values())
        self._windows = {drawing: counted for drawing, counted in self._windows.items() if drawing in wanted}
        self._settings = {drawing: row for drawing, row in self._settings.items() if drawing in wanted}
        used: list[_Use] = []
        for row in rows:
            drawing, own = draws.get(row.job), min(len(row.tokens), each)
            if drawing is None or not drawing.counts:
                used += [(drawing, None)] * own
            else:
                used += [*[_NOBODY] * (own - 1), (drawing, self._count(drawing, row.start + len(row.tokens)))]
            used += [_NOBODY] * (each - own)
        used += [_NOBODY] * (len(self._used) - len(used))
        if used != self._used:
            self._sent, table = False, self.table.copy()
            for place, (before, now) in enumerate(zip(self._used, used, strict=True)):
                if now != before:
                    table[place] = self._row(*now)[0]
            for name, addresses in self._addresses.items():
                table[name] = addresses
            self.table, self._used = table, used  # at once: an interrupt leaves no row that nobody knows of
        return not self._sent

    def sent(self) -> None:
        """The device has `table` as it is now."""
        self._sent = True

    def _count(self, drawing: Drawing, length: int) -> _Counted:
        """A window of the text of `length` tokens, and of the one that this step draws. The one that the last step left
        unless the text is another: some of it was taken back, or another drew a token of it."""
        counted = self._windows.get(drawing)
        if counted is None or counted.length != length:
            settings = drawing.settings
            text = torch.tensor(drawing.text, device=self._device)
            window = count_window(
                text, settings.penalty_range, settings.penalty_decay, self._vocabulary, self._longest + 1
            )
            counted = self._windows[drawing] = _Counted(window, length)
        counted.length += 1
        return counted

    def _row(self, drawing: Drawing | None, counted: _Counted | None) -> NDArray[np.void]:
        """As a place draws [1], but for its addresses."""
        if drawing is None:
            return self._unasked
        if counted is not None:
            return sampling_row(drawing.settings, self._vocabulary, counted.window._asdict())
        if drawing not in self._settings:
            self._settings[drawing] = sampling_row(drawing.settings, self._vocabulary, {})
        return self._settings[drawing]
