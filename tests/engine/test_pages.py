"""What the page table shares, copies, keeps and evicts. Pages of four tokens; texts are strings."""

import pytest

from exl2chat.engine.pages import PageCopy, PagedSequence, PageTable
from tests.engine.paged_simulation import check_table

SIZE = 4


def text(letters: str, salt: bytes = b"") -> PagedSequence:
    return PagedSequence(map(ord, letters), salt)


def indices(sequence: PagedSequence) -> list[int]:
    return [page.index for page in sequence.pages]


def compute(table: PageTable, sequence: PagedSequence, count: int | None = None) -> None:
    """Compute `count` tokens, or all of them."""
    count = len(sequence.tokens) - sequence.length if count is None else count
    assert table.reserve(sequence, count) is not None
    table.commit(sequence, count)


def computed(table: PageTable, letters: str) -> PagedSequence:
    sequence = text(letters)
    table.attach(sequence)
    compute(table, sequence)
    return sequence


def cache(table: PageTable, *texts: str) -> None:
    """Leave texts in the cache that nobody holds."""
    for letters in texts:
        table.release(computed(table, letters))


def reused(table: PageTable, letters: str, salt: bytes = b"") -> int:
    """How many tokens of a text are cached."""
    sequence = text(letters, salt)
    table.attach(sequence)
    found = sequence.length
    table.release(sequence)
    return found


@pytest.fixture
def table() -> PageTable:
    return PageTable(8, SIZE)


def test_a_text_begins_with_the_cached_pages_of_another_that_is_still_held(table: PageTable) -> None:
    first = computed(table, "abcdefghij")
    second = text("abcdefghxy")
    assert table.attach(second) == []
    assert indices(second) == indices(first)[:2]
    assert (second.length, table.available) == (8, 5)


def test_the_last_token_is_never_cached_because_its_logits_are_wanted(table: PageTable) -> None:
    cache(table, "abcdefgh")
    assert reused(table, "abcdefgh") == 7
    assert reused(table, "abcd") == 3
    assert reused(table, "a") == 0


def test_equal_tokens_behind_other_tokens_are_another_page(table: PageTable) -> None:
    cache(table, "abcdefgh")
    assert reused(table, "xbcdefgh!") == 0
    assert reused(table, "efgh!") == 0


def test_texts_with_another_salt_share_nothing(table: PageTable) -> None:
    cache(table, "abcdefgh")
    assert reused(table, "abcdefgh!", b"lora") == 0


def test_a_part_of_a_held_page_is_copied(table: PageTable) -> None:
    first = computed(table, "abcdef")
    second = text("abcdexyz")
    copies = table.attach(second)
    assert copies == [PageCopy(indices(first)[1], indices(second)[1], 1)]
    assert second.length == 5
    compute(table, second)
    assert first.pages[1].tokens == [*b"ef"]
    check_table(table, [first, second])


def test_the_longest_cached_part_is_used(table: PageTable) -> None:
    cache(table, "abcx", "abyy", "a123")
    assert reused(table, "abyz!") == 3


def test_a_text_that_continues_an_abandoned_one_takes_over_its_page(table: PageTable) -> None:
    cache(table, "abcdef")
    sequence = text("abcdefgh")
    assert table.attach(sequence) == []
    assert sequence.length == 6
    assert table.available == 6


def test_a_text_that_branches_off_an_abandoned_one_leaves_it_cached(table: PageTable) -> None:
    cache(table, "abcdef")
    branch = text("abcdexy")
    assert len(table.attach(branch)) == 1
    compute(table, branch)
    table.release(branch)
    assert reused(table, "abcdef!") == 6
    assert reused(table, "abcdexy!") == 7


def test_the_only_page_there_is_is_cut_rather_than_copied() -> None:
    table = PageTable(1, SIZE)
    cache(table, "abcd")
    sequence = text("abx")
    assert table.attach(sequence) == []
    compute(table, sequence)
    assert sequence.pages[0].tokens == [*b"abx"]
    check_table(table, [sequence])


def test_a_part_is_not_copied_where_no_page_is_free() -> None:
    table = PageTable(1, SIZE)
    held = computed(table, "abc")
    sequence = text("abx")
    assert table.attach(sequence) == []
    assert sequence.length == 0
    assert held.pages[0].tokens == [*b"abc"]


def test_pages_that_become_equal_are_merged(table: PageTable) -> None:
    first, second = text("abcdefgh"), text("abcdefgh")
    compute(table, first, 6)
    compute(table, second, 6)
    assert table.available == 5
    assert indices(first)[0] == indices(second)[0]
    compute(table, first, 2)
    compute(table, second, 2)
    assert indices(first) == indices(second)
    assert table.available == 6
    check_table(table, [first, second])


def test_equal_and_shorter_leftovers_are_not_kept_beside_a_page(table: PageTable) -> None:
    first, second, third = text("abc"), text("ab"), text("abc")
    for sequence in (first, second, third):
        compute(table, sequence)
    for sequence in (second, first, third):
        table.release(sequence)
    assert [page.tokens for page in table._slots if page.tokens] == [[*b"abc"]]


def test_a_text_cut_back_into_a_shared_page_writes_a_copy(table: PageTable) -> None:
    first, second = computed(table, "abcdefghi"), computed(table, "abcdefghi")
    table.rewind(second, 7)
    assert second.length == 6
    assert table.reserve(second, 2) == [PageCopy(indices(first)[1], indices(second)[1], 2)]
    assert second.pages[1].holders == 1
    assert reused(table, "abcdefghi!") == 9
    check_table(table, [first, second])


def test_a_text_cut_back_into_a_page_of_its_own_writes_there(table: PageTable) -> None:
    sequence = computed(table, "abcdefgh")
    before = indices(sequence)
    table.rewind(sequence, 7)
    assert table.reserve(sequence, 1) == []
    assert indices(sequence) == before
    sequence.tokens += b"xy"
    compute(table, sequence)
    assert reused(table, "abcdefgxy") == 8
    assert reused(table, "abcdefghi") == 7
    check_table(table, [sequence])


def test_pages_unused_for_longest_are_evicted_and_the_end_of_a_text_before_its_start(table: PageTable) -> None:
    cache(table, "abcdefghijkl", "ABCDEFGHIJKL")
    assert reused(table, "abcde") == 4
    held = computed(table, "0123456789!?")
    assert reused(table, "abcdefghijkl!") == 8
    assert reused(table, "ABCDEFGHIJKL!") == 12
    check_table(table, [held])


def test_empty_pages_are_taken_before_cached_ones(table: PageTable) -> None:
    cache(table, "abcd", "efgh")
    held = computed(table, "0123456789012345678901")
    assert table.available == 2
    assert reused(table, "abcd!") == 4
    assert reused(table, "efgh!") == 4
    check_table(table, [held])


def test_reserving_too_much_changes_nothing(table: PageTable) -> None:
    held = computed(table, "abcdefgh")
    cache(table, "0123")
    assert table.reserve(held, 6 * SIZE + 1) is None
    assert table.available == 6
    assert reused(table, "0123!") == 4


def test_a_text_grows_into_the_page_behind_it(table: PageTable) -> None:
    computed(table, "abcd")
    unused = text("?")
    assert table.reserve(unused, 1) == []
    sequence = computed(table, "wxyz")
    table.release(unused)
    sequence.tokens += b"1234"
    compute(table, sequence)
    assert indices(sequence) == [2, 3]


def test_defragmenting_puts_texts_in_one_piece(table: PageTable) -> None:
    first, second = text("abcdefghijkl"), text("ABCDEFGHIJKL")
    for _ in range(3):
        compute(table, first, SIZE)
        compute(table, second, SIZE)
    slots = [[*page.tokens] for page in table._slots]
    for copy in table.defragment():
        slots[copy.target][: copy.tokens] = slots[copy.source][: copy.tokens]
    for sequence in (first, second):
        assert indices(sequence) == list(range(indices(sequence)[0], indices(sequence)[0] + 3))
        assert b"".join(bytes(slots[index]) for index in indices(sequence)) == bytes(sequence.tokens)
    check_table(table, [first, second])
    new = computed(table, "01234567")
    assert indices(new) == [6, 7]


def test_texts_that_branch_are_put_in_order_once(table: PageTable) -> None:
    cache(table, "0123", "abcd", "4567", "abcdABCD", "89!?", "abcdwxyz")
    table.release(computed(table, "abcdABCDEFGH"))
    assert table.defragment()
    assert table.defragment() == []


def test_nothing_is_moved_where_texts_lie_in_one_piece_or_no_page_is_free(table: PageTable) -> None:
    cache(table, "abcdefghijklmnopqrstuvw")
    assert table.defragment() == []
    small = PageTable(4, SIZE)
    first, second = text("abcdefgh"), text("ABCDEFGH")
    for _ in range(2):
        compute(small, first, SIZE)
        compute(small, second, SIZE)
    assert small.defragment() == []
