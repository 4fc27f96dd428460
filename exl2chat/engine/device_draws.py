"""How each row of a step draws its token on the device: the rows of kernels/sample.cu, kept between steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    not know. text: the tokens so far, which penalties count; the list may grow from step to step."""

    settings: Sampling
    text: Sequence[int]


@dataclass(slots=True, eq=False)
class _Counted:
    """The window of a text's penalties once the step that was prepared last has drawn: of `length` tokens."""

    window: DeviceWindow
    length: int


class DeviceDraws:
    """What each row of a step draws by. `positions` int32 [R], `tokens` int64 [R] and `results` int32 [R, RESULTS] are
    the memory of the steps' rows."""

    def __init__(self, vocabulary: int, longest: int, positions: Tensor, tokens: Tensor, results: Tensor) -> None:
        """Tokens are drawn from the first `vocabulary`; a text has up to `longest`."""
        self._vocabulary, self._longest = vocabulary, longest
        self._memory = {"position": positions, "token": tokens, "results": results}
        self._windows: dict[Drawing, _Counted] = {}
        self._sent = False
        self._used: list[tuple[Drawing | None, _Counted | None]] = [(None, None)] * len(positions)
        self.table: NDArray[np.void] = np.concatenate([self._row(place, UNASKED, None) for place in range(len(tokens))])

    def prepare(self, rows: Sequence[Row], draws: Mapping[int, Drawing]) -> bool:
        """Have `table` say how these rows draw: those of jobs in `draws` as these say. Whether it must be sent again.

        A step may be several groups of rows, each with the `draws` of all: what these do not name is forgotten.
        """
        wanted = set(draws.values())
        self._windows = {drawing: counted for drawing, counted in self._windows.items() if drawing in wanted}
        for place, used in enumerate(self._used):
            drawing = draws.get(rows[place].job) if place < len(rows) else None
            counted = None
            if drawing is not None and penalties.active(drawing.settings):
                row = rows[place]
                counted = self._count(drawing, row.start + len(row.tokens))
            if used != (drawing, counted):
                self._sent = False
                self.table[place] = self._row(place, UNASKED if drawing is None else drawing.settings, counted)[0]
                self._used[place] = drawing, counted
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
            text = torch.tensor(drawing.text, device=self._memory["token"].device)
            window = count_window(
                text, settings.penalty_range, settings.penalty_decay, self._vocabulary, self._longest + 1
            )
            counted = self._windows[drawing] = _Counted(window, length)
        counted.length += 1
        return counted

    def _row(self, place: int, settings: Sampling, counted: _Counted | None) -> NDArray[np.void]:
        tensors = {name: memory[place] for name, memory in self._memory.items()}
        if counted is not None:
            tensors |= counted.window._asdict()
        return sampling_row(settings, self._vocabulary, tensors)
