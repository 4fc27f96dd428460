"""Decoding steps of many sequences at once on a GPU, as graphs: each sequence has a page table of its own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine.decode_graphs import Recorded
from exl2chat.engine.device_draws import DeviceDraws, Drawing
from exl2chat.engine.device_steps import RESULTS, DrawnTokens
from exl2chat.engine.scheduler import Row
from exl2chat.ops import compile_for
from exl2chat.ops.sample import TokenSampler
from exl2chat.progress import silent

# Sequences of a graph. Up to 16 gemv.cu multiplies (up to 8 to the same bits), then gemm.cu, in tiles of 32 and of 64.
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MOST = BUCKETS[-1]
# Tokens of a sequence; of several there is one sequence. Up to 8, which are a token and its drafts, nothing fills them
# up: they take the kernels of 8 sequences of a token, gemv.cu and attention.cu, whose bits are the same. What fills the
# others up prefill_attention.cu takes for zeros, and attention.cu would write it into pages of others.
LENGTHS = (*range(1, 9), 32, 64)
# Pages of a sequence, at most, or as many as there are. Attention has a block for each (of 16 or so) in every sequence
# and group, whether there is anything in it or not.
WIDTHS = (1, 4)

# The logits of tokens int64 [B * T] of B sequences, whose first and last ones stand at positions int32 [B] each, in
# pages int32 [B, most].
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mirrored:
    """Memory of the host, as an array, and its copy on the device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: NDArray[Any] = self._memory.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def send(self, rows: slice = slice(None)) -> None:
        """Queue the copy, of all or of some. The host's memory must not change before it has ended."""
        self.device[rows].copy_(self._memory[rows], non_blocking=True)


class PageTables:
    """The pages of a step's rows, up to `width` each: int32 [MOST, width]."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._tables = Mirrored((MOST, width), torch.int32, device)
        self._placed: list[tuple[int, ...]] = [()] * MOST  # what was sent, () where that is not known
        self.device = self._tables.device

    def place(self, rows: Sequence[Row]) -> None:
        """Send the tables from the first that has changed to the last, if any has."""
        changed = [place for place, row in enumerate(rows) if self._placed[place] != row.pages]
        if not changed:
            return
        for place in changed:
            pages = rows[place].pages
            self._placed[place] = ()
            self._tables.host[place, : len(pages)] = pages
        self._tables.send(slice(changed[0], changed[-1] + 1))
        for place in changed:
            self._placed[place] = rows[place].pages


class StepMemory:
    """What a step reads of its rows, sent in one copy; their page tables; and its logits, in one place for all graphs:
    each would keep its own."""

    def __init__(self, pages: int, device: torch.device) -> None:
        """A text has up to `pages` pages."""
        self._numbers = Mirrored((3, MOST), torch.int64, device)  # tokens; firsts and lasts, which are int32
        widths = (*(width for width in WIDTHS if width < pages), pages)
        self.tables = {width: PageTables(width, device) for width in widths}
        self.tokens = self._numbers.device[0]
        self.firsts, self.lasts = self._numbers.device[1:3].view(torch.int32)[:, :MOST].unbind(0)
        self._logits: Tensor | None = None

    def keep(self, logits: Tensor) -> Tensor:
        """A copy of logits [tokens, V], until the next one."""
        if self._logits is None:
            self._logits = logits.new_empty(MOST, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def width(self, rows: Sequence[Row]) -> int:
        """That of the smallest tables which have room for the pages of all rows."""
        longest = max(len(row.pages) for row in rows)
        return min(width for width in self.tables if width >= longest)

    def place(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        """Send up to MOST tokens, one after another, and the tables. The positions of the rows' last ones."""
        count = len(rows)
        tokens = [token for row in rows for token in row.tokens]
        lasts = np.array([row.start + len(row.tokens) - 1 for row in rows])
        self._numbers.host[0, : len(tokens)] = tokens
        numbers = self._numbers.host[1:3].view(np.int32)
        numbers[0, :count], numbers[1, :count] = [row.start for row in rows], lasts
        self._numbers.send()
        self.tables[self.width(rows)].place(rows)
        return lasts


class PagedSteps:
    """The decoding steps of one model over the pages of one cache, queued on torch's current stream."""

    def __init__(self, step: Step, vocabulary: int, pages: int, longest: int, device: torch.device) -> None:
        """Tokens are drawn from the first `vocabulary`. A text has up to `longest` of them, in up to `pages` pages."""
        self._memory = StepMemory(pages, device)
        results = torch.empty(MOST, RESULTS, dtype=torch.int32, pin_memory=True)
        self._drawn = DrawnTokens(results, [torch.cuda.Event()])  # type: ignore[no-untyped-call]
        self._draws = DeviceDraws(vocabulary, longest, self._memory.lasts, self._memory.tokens, results)
        self._sampler = TokenSampler(device, vocabulary, MOST)
        self._sampler.set_rows(self._draws.table)
        self._work = partial(_decode, step, self._sampler, self._memory)  # not self: a cycle
        self._graphs: dict[tuple[int, int, int], Recorded] = {}

    def run(self, rows: Sequence[Row], draws: Mapping[int, Drawing]) -> tuple[Tensor, list[int]]:
        """Rows of one token, up to MOST, or one row of as many: their logits [tokens, V], until the next step; and what
        was drawn after each row's last token, which means something for jobs in `draws`: -1 where logits are not
        numbers."""
        count, tokens = len(rows), sum(len(row.tokens) for row in rows)
        bucket = next(size for size in BUCKETS if size >= count)
        each = next(size for size in LENGTHS if size * count >= tokens)
        lasts = self._memory.place([*rows, *[rows[-1]] * (bucket - count)])  # the same row again writes the same
        if self._draws.prepare(rows, draws):
            self._sampler.set_rows(self._draws.table)
            self._draws.sent()
        logits = self._graph(bucket, each, self._memory.width(rows))()
        self._drawn.record(0)
        self._drawn.wait(0)
        drawn: list[int] = self._drawn.tokens[np.arange(count), (lasts[:count] + 1) % RESULTS].tolist()
        return logits[:tokens], drawn

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile every kernel that these steps need. ModelError where one does not compile."""
        sizes = [*((size, 1) for size in BUCKETS), *((1, each) for each in LENGTHS[1:])]
        compile_for(lambda: [self._work(*size, width) for size in sizes for width in self._memory.tables], silent)

    def _graph(self, sequences: int, each: int, width: int) -> Recorded:
        """Steps of so many sequences with so many tokens each, and tables of that width."""
        key = sequences, each, width
        if key not in self._graphs:
            pool = next((graph.pool for graph in self._graphs.values()), None)
            self._graphs[key] = Recorded(partial(self._work, *key), pool)
        return self._graphs[key]


def _decode(step: Step, sampler: TokenSampler, memory: StepMemory, sequences: int, each: int, width: int) -> Tensor:
    firsts, lasts = memory.firsts[:sequences], memory.lasts[:sequences]
    tables = memory.tables[width].device[:sequences]
    logits = step(memory.tokens[: sequences * each], firsts, lasts, tables)
    if each == 1:
        sampler.queue(logits)
    else:  # in a rehearsal the positions may be any
        sampler.queue(logits.index_select(0, (lasts - firsts).clamp(0, each - 1)))
    return memory.keep(logits)
