"""Decoding steps of many sequences at once on a GPU, as graphs: each sequence has a page table of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine.cache import PAGE
from exl2chat.engine.decode_graphs import Recorded
from exl2chat.engine.device_draws import DeviceDraws, Drawing
from exl2chat.engine.device_steps import RESULTS, DrawnTokens
from exl2chat.engine.scheduler import Row
from exl2chat.ops import compile_for
from exl2chat.ops.sample import TokenSampler
from exl2chat.progress import silent

# Sequences of a graph.
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Tokens of a graph: up to 16 gemv.cu multiplies, up to ALIKE to the same bits; then gemm.cu, in tiles of 32 and of 64.
MOST = BUCKETS[-1]
ALIKE = 8
# Tokens of each of several sequences: a token and its drafts, filled up behind the last one, which changes nothing of
# the others and is written to the room that the sequence has. attention.cu takes them.
LENGTHS = (1, 2, 4, 8)
DRAWN = LENGTHS[-1]  # up to so many tokens of a sequence all have logits and are drawn from
# Tokens of one sequence alone: up to DRAWN nothing fills them up. What fills the others up prefill_attention.cu takes
# for zeros and rope_cache.cu does not write; of these the last one alone is drawn from.
ALONE = (*range(1, DRAWN + 1), 32, 64)
# Pages of a sequence, at most, or as many as there are. Attention has a block for each (of 16 or so) in every sequence
# and group, whether there is anything in it or not.
WIDTHS = (1, 4)

# The logits of tokens int64 [B * T] of B sequences, whose first ones stand at positions int32 [B], in pages int32
# [B, most]. With the position int32 [1] of the last token of one sequence, its logits alone.
Step = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Stepped(NamedTuple):
    """What a step gave for a row: the logits [T, V] of its tokens, until the next step, and what was drawn after each,
    which means something for jobs in `draws`: -1 where logits are not numbers. Beyond DRAWN tokens of the last alone.
    """

    logits: Tensor
    drawn: Sequence[int]

    def first(self, count: int) -> "Stepped":
        """For the first tokens alone."""
        return self if count >= len(self.drawn) else Stepped(self.logits[:count], self.drawn[:count])


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
        self._numbers = Mirrored((3, MOST), torch.int64, device)  # tokens; firsts and positions, which are int32
        widths = (*(width for width in WIDTHS if width < pages), pages)
        self.tables = {width: PageTables(width, device) for width in widths}
        self.tokens = self._numbers.device[0]
        self.firsts, self.positions = self._numbers.device[1:3].view(torch.int32)[:, :MOST].unbind(0)
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

    def place(self, rows: Sequence[Row], each: int) -> NDArray[np.int32]:
        """Send the tokens of `rows`, each filled up to `each`, and the tables. The positions of what is drawn from,
        int32 [rows, each], or of the last token [1, 1]."""
        count = len(rows)
        full = [row.tokens if len(row.tokens) == each else _padded(row.tokens, each) for row in rows]
        tokens = list(chain.from_iterable(full))
        firsts = np.array([row.start for row in rows], np.int32)
        offsets = range(each) if each <= DRAWN else [len(rows[0].tokens) - 1]
        positions: NDArray[np.int32] = firsts[:, None] + np.array(offsets, np.int32)
        self._numbers.host[0, : len(tokens)] = tokens
        numbers = self._numbers.host[1:3].view(np.int32)
        numbers[0, :count], numbers[1, : positions.size] = firsts, positions.ravel()
        self._numbers.send()
        self.tables[self.width(rows)].place(rows)
        return positions


def _padded(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (*tokens, *tokens[-1:] * (count - len(tokens)))


def group(rows: Sequence[Row], capacity: int) -> list[list[int]]:
    """The places of rows that are a step together: all with a token and drafts, if so many fit; else those of one
    token, and those of several. The end of a prompt is alone, so that it changes no bit of the others. A row that has
    no room to be filled up, in its pages and below `capacity`, is not."""
    if max((len(row.tokens) for row in rows), default=0) <= 1:
        return [list(range(len(rows)))[first : first + MOST] for first in range(0, len(rows), MOST)]
    alone = [[place] for place, row in enumerate(rows) if len(row.tokens) > 1 + min(row.drafts, DRAWN - 1)]
    short = [place for place in range(len(rows)) if [place] not in alone]
    if not short or len(short) * _fill(rows, short, LENGTHS) <= MOST:
        return [*_filled(rows, short, capacity), *alone]
    single = [place for place in short if len(rows[place].tokens) == 1]
    several = [place for place in short if len(rows[place].tokens) > 1]
    return [*_filled(rows, single, capacity), *_filled(rows, several, capacity), *alone]


def alike_drafts(sequences: int) -> int:
    """With how many drafts each of so many sequences has the bits that it has without."""
    bucket = next((size for size in BUCKETS if size >= sequences), ALIKE)
    return max(0, ALIKE // bucket - 1)


def _filled(rows: Sequence[Row], places: list[int], capacity: int) -> Iterator[list[int]]:
    """Groups of up to MOST tokens, the longest first."""
    while places:
        longest = max(places, key=lambda place: len(rows[place].tokens))
        each = _fill(rows, [longest], LENGTHS)
        fitting = [place for place in places if _room(rows[place], capacity) >= each]
        some = fitting if longest in fitting else [longest]
        yield from (some[first : first + MOST // each] for first in range(0, len(some), MOST // each))
        places = [place for place in places if place not in some]


def _fill(rows: Sequence[Row], places: Sequence[int], lengths: Sequence[int]) -> int:
    """To how many tokens the longest is filled up."""
    longest = max(len(rows[place].tokens) for place in places)
    return next(length for length in lengths if length >= longest)


def _room(row: Row, capacity: int) -> int:
    """How many tokens of the row may be written."""
    return min(len(row.pages) * PAGE, capacity) - row.start


class PagedSteps:
    """The decoding steps of one model over the pages of one cache, queued on torch's current stream.

    To draw MOST tokens at a time takes 16 bytes of the device for each and for every token of the vocabulary: 131 MB of
    128,256, beside the graphs' own memory. `placement.GPU_RESERVE` has room for it.
    """

    def __init__(self, step: Step, vocabulary: int, pages: int, longest: int, device: torch.device) -> None:
        """Tokens are drawn from the first `vocabulary`. A text has up to `longest` of them, in up to `pages` pages."""
        self._memory = StepMemory(pages, device)
        results = torch.empty(MOST, RESULTS, dtype=torch.int32, pin_memory=True)
        self._drawn = DrawnTokens(results, [torch.cuda.Event()])  # type: ignore[no-untyped-call]
        self._draws = DeviceDraws(vocabulary, longest, self._memory.positions, self._memory.tokens, results)
        self._sampler = TokenSampler(device, vocabulary, MOST)
        self._sampler.set_rows(self._draws.table)
        self._work = partial(_decode, step, self._sampler, self._memory)  # not self: a cycle
        self._graphs: dict[tuple[int, int, int], Recorded] = {}

    def run(self, rows: Sequence[Row], draws: Mapping[int, Drawing], meanwhile: Callable[[], None]) -> list[Stepped]:
        """The rows of a `group`, one row of up to MOST tokens among them. While the device works, `meanwhile` is
        called."""
        count = len(rows)
        bucket = next(size for size in BUCKETS if size >= count)
        each = _fill(rows, range(count), ALONE if count == 1 else LENGTHS)
        positions = self._memory.place([*rows, *[rows[-1]] * (bucket - count)], each)  # the same again writes the same
        if self._draws.prepare(rows, positions.shape[1], draws):
            self._sampler.set_rows(self._draws.table)
            self._draws.sent()
        logits = self._graph(bucket, each, self._memory.width(rows))()
        self._drawn.record(0)
        try:
            meanwhile()
        finally:  # an interrupt, too: what was sent must not change before the copies have ended
            self._drawn.wait(0)
        places = np.arange(positions.size).reshape(positions.shape)
        drawn = self._drawn.tokens[places, (positions + 1) % RESULTS].tolist()
        stepped = map(Stepped, logits.split_with_sizes([positions.shape[1]] * len(positions)), drawn)
        return [one.first(len(row.tokens)) for one, row in zip(stepped, rows, strict=False)]

    @property
    def recordings(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile every kernel that these steps need. ModelError where one does not compile."""
        sizes = [*((1, each) for each in ALONE), *((size, each) for size in BUCKETS[1:] for each in LENGTHS)]
        fitting = [(size, each) for size, each in sizes if size * each <= MOST]
        compile_for(lambda: [self._work(*size, width) for size in fitting for width in self._memory.tables], silent)

    def _graph(self, sequences: int, each: int, width: int) -> Recorded:
        """Steps of so many sequences with so many tokens each, and tables of that width."""
        key = sequences, each, width
        if key not in self._graphs:
            pool = next((graph.pool for graph in self._graphs.values()), None)
            self._graphs[key] = Recorded(partial(self._work, *key), pool)
        return self._graphs[key]


def _decode(step: Step, sampler: TokenSampler, memory: StepMemory, sequences: int, each: int, width: int) -> Tensor:
    tables = memory.tables[width].device[:sequences]
    last = memory.positions[:1] if each > DRAWN else None
    logits = step(memory.tokens[: sequences * each], memory.firsts[:sequences], tables, last)
    sampler.queue(logits)
    return memory.keep(logits)
