"""A cache of token ids where a real one has keys and values, and the rules that every step must keep.

What is cached depends on a job's salt too: the ids of a salted job are stored with `SALTED` added.
"""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from exl2chat.engine.pages import Page, PageCopy, PagedSequence, PageTable
from exl2chat.engine.scheduler import Row, Scheduler, StepPlan

EMPTY = -1
SALTED = 1000


class TokenCache:
    """What each page holds. A row of a plan writes its tokens and must find its own text before them."""

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.slots = [[EMPTY] * size for _ in range(pages)]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            assert copy.source != copy.target
            assert 0 < copy.tokens <= self.size
            self.slots[copy.target][: copy.tokens] = self.slots[copy.source][: copy.tokens]

    def read(self, pages: Sequence[int], count: int) -> list[int]:
        return [self.slots[pages[n // self.size]][n % self.size] for n in range(count)]

    def write(self, pages: Sequence[int], start: int, tokens: Sequence[int]) -> None:
        for n, token in enumerate(tokens, start):
            self.slots[pages[n // self.size]][n % self.size] = token

    def places(self, row: Row) -> list[tuple[int, int]]:
        """Every place a row may write, drafts included."""
        end = row.start + len(row.tokens) + row.drafts
        return [(row.pages[n // self.size], n % self.size) for n in range(row.start, end)]


def run(plan: StepPlan, cache: TokenCache, texts: dict[tuple[int, int], list[int]], salts: dict[int, int]) -> None:
    """Carry out a plan as an executor would. texts: each sequence's text, by job and branch; salts: 0 or SALTED."""
    cache.copy(plan.copies)
    rows = [*plan.prefill, *plan.decode]
    places = Counter(place for row in rows for place in cache.places(row))
    assert not places or max(places.values()) == 1, "two rows write to one place"
    for row in rows:
        text = texts[row.job, row.branch]
        assert list(row.tokens) == text[row.start : row.start + len(row.tokens)]
        own = [token + salts[row.job] for token in text]
        assert cache.read(row.pages, row.start) == own[: row.start], "a row does not find its own text"
    written = {page for page, _ in places}
    for row in rows:
        read_only = set(row.pages[: row.start // cache.size])
        assert not read_only & written, "a page is written that another row reads"
        cache.write(row.pages, row.start, [token + salts[row.job] for token in row.tokens])


def check(table: PageTable, scheduler: Scheduler, cache: TokenCache) -> None:
    """Every page is in one place, counted right, found by what it holds, and holds what the table says."""
    jobs = [*scheduler._running, *scheduler._waiting]
    sequences = [sequence for job in jobs for sequence in job.sequences]
    check_table(table, sequences)
    for page in table._slots:
        held = cache.slots[page.index][: len(page.tokens)]
        assert [token % SALTED for token in held] == page.tokens
    for job in scheduler._waiting:
        assert not any(sequence.pages for sequence in job.sequences)


def check_table(table: PageTable, sequences: Sequence[PagedSequence]) -> None:
    size = table.size
    assert [page.index for page in table._slots] == list(range(table.total))
    held = Counter(page for sequence in sequences for page in sequence.pages)
    assert {page: page.holders for page in table._slots if page.holders} == dict(held)
    assert set(table._unheld) == {page for page in table._slots if not page.holders}
    full = {page.digest: page for page in table._slots if page.digest is not None}
    assert full == table._full
    assert set(full.values()) == {page for page in table._slots if len(page.tokens) == size}
    for digest, page in full.items():
        assert digest == child_digest(page.before, page.tokens)
    following = {page for pages in table._following.values() for page in pages}
    assert following == {page for page in table._slots if page.tokens}
    assert all(page.before == before for before, pages in table._following.items() for page in pages)
    assert all(table._following.values())
    empty = [not page.tokens for page in table._unheld]
    assert empty == sorted(empty, reverse=True), "a page with contents would be taken before an empty one"
    for sequence in sequences:
        check_sequence(sequence, held, size)


def check_sequence(sequence: PagedSequence, held: Counter[Page], size: int) -> None:
    assert len(set(sequence.pages)) == len(sequence.pages)
    assert sequence.length <= len(sequence.pages) * size
    for at, page in enumerate(sequence.pages):
        own = sequence.tokens[at * size : min(sequence.length, (at + 1) * size)]
        assert page.tokens[: len(own)] == own
        if own:
            assert page.before == sequence.digest(at, size)
        assert held[page] == 1 or page.digest is not None, "a page that is shared can be written"


def child_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    data = b"".join(token.to_bytes(8, "little") for token in tokens)
    return blake2b(before + data, digest_size=16).digest()
