"""The page table of a paged KV cache: which page holds the keys and values of which tokens. Pure Python.

A page holds up to `size` tokens of one text. Its keys and values depend on the tokens in front of it too, so a page is
known by what it holds and by the digest of everything before it: blake2b over the parent's digest and a page's tokens,
chained from the start of the text. Pages that nobody holds keep their contents until they are needed, and that is the
prompt cache: a new sequence takes over every page that its text begins with.

Full pages are shared by all sequences whose text has them; a page that is written is held by one sequence alone. A
sequence that shares only a part of a page gets a copy of that part, and so does one cut back into a shared page.

Nothing here touches a tensor: calls return the page copies that make the table's view true, to be carried out in their
order and before anything else is written.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

DIGEST_BYTES = 16  # two of 2^32 pages share a digest with probability 2^-65


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `tokens` tokens of page `source` to page `target`."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True, eq=False)
class Page:
    """A page of the cache. `holders` sequences use it; `digest` is that of all tokens to its end, once it is full."""

    index: int
    holders: int = 0
    before: bytes = b""
    tokens: list[int] = field(default_factory=list)
    digest: bytes | None = None


class PagedSequence:
    """A text and its pages. The first `length` of `tokens` are in the cache; pages beyond may be reserved.

    Equal texts with different `salt` share nothing: it names whatever else keys and values depend on, as LoRAs.
    """

    def __init__(self, tokens: Iterable[int], salt: bytes = b"") -> None:
        self.tokens = list(tokens)
        self.length = 0
        self.pages: list[Page] = []
        self._digests = [blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest()]

    @property
    def missing(self) -> int:
        """How many tokens are not in the cache."""
        return len(self.tokens) - self.length

    def digest(self, pages: int, size: int) -> bytes:
        """The digest of the first `pages` pages of `size` tokens, all of which the text has."""
        while (known := len(self._digests)) <= pages:
            tokens = struct.pack(f"{size}q", *self.tokens[(known - 1) * size : known * size])
            self._digests.append(blake2b(self._digests[-1] + tokens, digest_size=DIGEST_BYTES).digest())
        return self._digests[pages]

    def cut(self, count: int, size: int) -> None:
        """Forget the tokens from `count` on."""
        del self.tokens[count:]
        del self._digests[count // size + 1 :]


class PageTable:
    """`pages` pages of `size` tokens."""

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self._slots = [Page(index) for index in range(pages)]
        self.clear()

    def clear(self) -> None:
        """Forget everything that is cached. No sequence may hold a page."""
        for page in self._slots:
            page.holders, page.tokens, page.digest = 0, [], None
        self._unheld = OrderedDict.fromkeys(self._slots)  # in the order in which they will be taken
        self._full: dict[bytes, Page] = {}
        self._following: dict[bytes, dict[Page, None]] = {}  # pages with tokens, by the digest of what is before them

    @property
    def total(self) -> int:
        """Number of pages."""
        return len(self._slots)

    @property
    def available(self) -> int:
        """Number of pages that nobody holds, with or without contents."""
        return len(self._unheld)

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` tokens take."""
        return -(-tokens // self.size)

    def missing(self, sequence: PagedSequence) -> list[bytes]:
        """The digests of the full pages that are still to be computed before the sequence's last token."""
        ends = range(sequence.length // self.size + 1, (len(sequence.tokens) - 1) // self.size + 1)
        return [sequence.digest(end, self.size) for end in ends]

    def cached(self, sequence: PagedSequence) -> tuple[int, int]:
        """How many full pages `attach` would find, and how many of them nobody holds."""
        found = list(self._next_pages(sequence))
        return len(found), sum(page.holders == 0 for page in found)

    def _next_pages(self, sequence: PagedSequence) -> Iterator[Page]:
        """The cached full pages that the sequence continues with."""
        for digest in self.missing(sequence):
            if digest not in self._full:
                return
            yield self._full[digest]

    def attach(self, sequence: PagedSequence) -> list[PageCopy]:
        """Add the cached pages that the sequence continues with, and a part of one. Its last token is never cached.

        Only at the end of a page is there anything to find: the rest of a page begun is the sequence's own to compute.
        """
        if len(sequence.pages) * self.size != sequence.length:
            return []
        for page in self._next_pages(sequence):
            self._hold(page)
            sequence.pages.append(page)
            sequence.length += self.size
        return self._attach_part(sequence)

    def _attach_part(self, sequence: PagedSequence) -> list[PageCopy]:
        """Begin the next page with the longest part of it that is cached."""
        before = sequence.digest(len(sequence.pages), self.size)
        start = sequence.length
        wanted = sequence.tokens[start : min(start + self.size, len(sequence.tokens) - 1)]
        found = [(_common(page.tokens, wanted), page) for page in self._following.get(before, ())]
        count, source = max(found, key=lambda part: part[0], default=(0, None))
        if source is None or count == 0:
            return []
        others = len(self._unheld) - (source.holders == 0)
        if source.holders and not others:
            return []  # no page to copy to
        copies = []
        if not others or (not source.holders and len(source.tokens) == count):
            page = source
            self._hold(page)
        else:
            page = self._take(sequence, spared=source)
            self._write(page, before, wanted[:count])
            copies.append(PageCopy(source.index, page.index, count))
        sequence.pages.append(page)
        sequence.length += count
        return copies

    def reserve(self, sequence: PagedSequence, count: int) -> list[PageCopy] | None:
        """Pages to write `count` tokens behind `length`. None, and nothing is changed, where too few are available."""
        at = sequence.length // self.size
        current = sequence.pages[at] if at < len(sequence.pages) else None
        shared = current is not None and current.holders > 1
        lacking = self.pages_for(sequence.length + count) - len(sequence.pages)
        if max(lacking, 0) + shared > len(self._unheld):
            return None
        copies = []
        kept = sequence.length % self.size
        if current is not None and shared:
            copies.append(self._copy_on_write(sequence, at, kept))
        elif current is not None:
            self._shorten(current, kept)
        for _ in range(lacking):
            sequence.pages.append(self._take(sequence))
        return copies

    def _copy_on_write(self, sequence: PagedSequence, at: int, kept: int) -> PageCopy:
        """Replace page `at`, which others hold too, by one that begins with the same `kept` tokens."""
        shared = sequence.pages[at]
        own = self._take(sequence)
        self._write(own, shared.before, shared.tokens[:kept])
        sequence.pages[at] = own
        self._drop(shared)
        return PageCopy(shared.index, own.index, kept)

    def commit(self, sequence: PagedSequence, count: int) -> None:
        """The next `count` tokens are computed. Pages that became full and equal another one are exchanged for it."""
        end = sequence.length + count
        while sequence.length < end:
            at, offset = divmod(sequence.length, self.size)
            stop = min(end, sequence.length - offset + self.size)
            page = sequence.pages[at]
            self._write(page, sequence.digest(at, self.size), sequence.tokens[sequence.length : stop])
            sequence.length = stop
            if len(page.tokens) == self.size:
                self._seal(sequence, at)

    def _seal(self, sequence: PagedSequence, at: int) -> None:
        page, digest = sequence.pages[at], sequence.digest(at + 1, self.size)
        twin = self._full.setdefault(digest, page)
        if twin is page:
            page.digest = digest
            return
        self._hold(twin)
        sequence.pages[at] = twin
        self._drop(page)

    def rewind(self, sequence: PagedSequence, count: int) -> None:
        """Cut the text to its first `count` tokens, the last of which is to be computed again."""
        sequence.cut(count, self.size)
        sequence.length = min(sequence.length, count - 1)
        while len(sequence.pages) > self.pages_for(sequence.length):
            self._drop(sequence.pages.pop())

    def release(self, sequence: PagedSequence) -> None:
        """Let go of every page. Their contents stay as long as no one needs the room; the end of a text goes first."""
        while sequence.pages:
            self._drop(sequence.pages.pop())
        sequence.length = 0

    def defragment(self) -> list[PageCopy]:
        """Move pages so that texts lie in one piece, where more than one page in ten begins a new piece."""
        order = self._layout()
        pieces = sum(first.index + 1 != second.index for first, second in pairwise(order))
        if pieces * 10 <= len(order) or not self._unheld:
            return []
        spare = next(iter(self._unheld))
        if spare.tokens:
            order.remove(spare)
            self._forget(spare)
        copies = []
        for slot, page in enumerate(order):
            if page.index == slot:
                continue
            if self._slots[slot].tokens:
                copies.append(self._move(self._slots[slot], spare))
            copies.append(self._move(page, self._slots[slot]))
        blank = sorted((page for page in self._unheld if not page.tokens), key=lambda page: page.index)
        for page in reversed(blank):
            self._unheld.move_to_end(page, last=False)
        return copies

    def _layout(self) -> list[Page]:
        """Every page with tokens: each text's first page, then all that follows it."""
        order = []
        pending = [page for page in reversed(self._slots) if page.tokens and page.before not in self._full]
        while pending:
            page = pending.pop()
            order.append(page)
            following = self._following.get(page.digest, {}) if page.digest is not None else {}
            pending += sorted(following, key=lambda child: child.index, reverse=True)
        return order

    def _move(self, page: Page, empty: Page) -> PageCopy:
        """Exchange the places of a page and one without tokens."""
        copy = PageCopy(page.index, empty.index, len(page.tokens))
        page.index, empty.index = empty.index, page.index
        self._slots[page.index], self._slots[empty.index] = page, empty
        return copy

    def _hold(self, page: Page) -> None:
        page.holders += 1
        self._unheld.pop(page, None)

    def _drop(self, page: Page) -> None:
        page.holders -= 1
        if page.holders:
            return
        self._unheld[page] = None
        others = [other for other in self._following.get(page.before, ()) if other is not page] if page.tokens else []
        for other in others:
            if not other.holders and _begins(other.tokens, page.tokens):
                self._forget(other)
        if not page.tokens or any(_begins(page.tokens, other.tokens) for other in others):
            self._forget(page)

    def _take(self, sequence: PagedSequence, spared: Page | None = None) -> Page:
        """An empty page, behind the sequence's last one if that is free; else the one unused for longest is emptied.

        The caller has made sure that a page other than `spared` is available.
        """
        behind = sequence.pages[-1].index + 1 if sequence.pages else self.total
        if behind < self.total and not (page := self._slots[behind]).holders and not page.tokens:
            self._hold(page)
            return page
        oldest = next(page for page in self._unheld if page is not spared)
        self._forget(oldest)
        self._hold(oldest)
        return oldest

    def _write(self, page: Page, before: bytes, tokens: list[int]) -> None:
        if not page.tokens:
            page.before = before
            self._following.setdefault(before, {})[page] = None
        page.tokens += tokens

    def _shorten(self, page: Page, count: int) -> None:
        """Keep the first `count` tokens of a page that is about to be written behind them."""
        if len(page.tokens) > count:
            del page.tokens[count:]
            self._unseal(page)

    def _forget(self, page: Page) -> None:
        """Empty a page. One that nobody holds is the next to be taken."""
        if page.tokens:
            siblings = self._following[page.before]
            del siblings[page]
            if not siblings:
                del self._following[page.before]
        page.tokens = []
        self._unseal(page)
        if not page.holders:
            self._unheld.move_to_end(page, last=False)

    def _unseal(self, page: Page) -> None:
        if page.digest is not None:
            del self._full[page.digest]
            page.digest = None


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(first), len(second))
    return next((n for n in range(shorter) if first[n] != second[n]), shorter)


def _begins(start: list[int], tokens: list[int]) -> bool:
    """Whether `tokens` begins with all of `start`."""
    return tokens[: len(start)] == start
