"""The block splitter: blocks do not depend on how the text arrived, stay small, and lose nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.ui.blocks import (
    LONGEST_PIECE,
    MOST_CODE_LINES,
    PIECE,
    TABLE_ROWS,
    Block,
    Splitter,
    is_closed,
    split,
    split_plain,
)

LINES = st.sampled_from(
    [
        "", "a word", "**bold *mixed", "`code", "- item", "  - nested", "    deep", "1. one", "2) two", "# Title",
        "####### no",
        "```python", "```", "~~~~", "   ```", "| a | b |", "|---|:-:|", "| 1 | 2 |", "a | b", "> quote", "> > twice",
        ">", "---", "***", "- - -", "===", "<div>", "[a]: http://x.y", "text  ", "\ttabbed", "\u2028odd\x0bodd", "#",
        "- ",
        "word " * 150, "x" * 700, "字" * 600, "| " + "cell " * 120 + "|",
    ]
)  # fmt: skip
TEXTS = st.one_of(st.lists(LINES, max_size=40).map("\n".join), st.text(alphabet="ab *_`#>-|\n1.~[]()\\", max_size=300))


@given(TEXTS, st.data())
def test_chunks_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    splitter, blocks = Splitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        blocks += splitter.feed(text[start:end])
    assert blocks + splitter.finish() == split(text)


@given(TEXTS)
def test_final_blocks_and_tail_are_what_finishing_now_would_give(text: str) -> None:
    splitter, blocks = Splitter(), []
    for char in text:
        blocks += splitter.feed(char)
    tail = splitter.tail
    assert splitter.tail == tail, "looking at the tail changes nothing"
    if not any(block.kind == "table" for block in tail):
        assert blocks + tail == split(text)


@given(TEXTS)
def test_no_block_grows_without_bound(text: str) -> None:
    for block in split(text):
        assert len(block.text) <= 2 * LONGEST_PIECE
        if block.kind == "code":
            assert block.text.count("\n") < MOST_CODE_LINES
        if block.kind == "table":
            assert block.text.count("\n") <= TABLE_ROWS + 1


@given(st.lists(st.text(alphabet="ab c*`[", max_size=30) | st.just("- item") | st.just("> said"), max_size=30))
def test_no_letter_is_lost(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert re.findall("[a-z]", "".join(block.text for block in split(text))) == re.findall("[a-z]", text)


def test_a_document() -> None:
    text = "# Title\nHello\nworld\n\n- one\n- two\n  - three\n\n```py\nx = 1\n\ny = 2\n```\nend\n\n> said\n---\n"
    assert split(text) == [
        Block("heading", "Title", "1"),
        Block("paragraph", "Hello\nworld", gap=True),
        Block("item", "one", "-", gap=True),
        Block("item", "two", "-"),
        Block("item", "three", "-", indent=2),
        Block("code", "x = 1\n\ny = 2", "py", gap=True),
        Block("paragraph", "end", gap=True),
        Block("paragraph", "said", quote=1, gap=True),
        Block("rule", "", gap=True),
    ]


def test_a_table_without_outer_bars_begins_in_a_paragraph() -> None:
    assert [(b.kind, b.text) for b in split("so:\na | b\n--|--\n1 | 2\n\nend")] == [
        ("paragraph", "so:"),
        ("table", "a | b\n--|--\n1 | 2"),
        ("paragraph", "end"),
    ]


def test_a_fence_in_a_list_is_indented_and_its_lines_are_not() -> None:
    blocks = split("1. do\n\n   ```sh\n   ls\n     -l\n   ```\n2. done")
    assert [(b.kind, b.text, b.indent) for b in blocks] == [
        ("item", "do", 0),
        ("code", "ls\n  -l", 3),
        ("item", "done", 0),
    ]


def test_a_fence_is_closed_only_by_its_own_marker() -> None:
    assert [b.text for b in split("````\n```\ncode\n~~~\n````\nafter")] == ["```\ncode\n~~~", "after"]


def test_an_open_fence_shows_its_unfinished_line() -> None:
    splitter = Splitter()
    assert splitter.feed("```py\na = 1\nb =") == []
    assert splitter.tail == [Block("code", "a = 1\nb =", "py")]


def test_long_prose_is_cut_where_nothing_inline_is_open() -> None:
    text = "**" + "word " * 200 + "end** " + "more " * 200
    first, *rest = split(text)
    assert first.text.startswith("**word")
    assert first.text.rstrip().endswith(("**", "more"))
    assert all(block.joined for block in rest)
    assert "".join(block.text for block in (first, *rest)) == text.strip() + " "


def test_text_without_a_break_is_cut_all_the_same() -> None:
    blocks = split("x" * 10_000)
    assert "".join(b.text for b in blocks) == "x" * 10_000
    assert len(blocks) == 3


def test_each_part_of_a_long_table_has_the_header() -> None:
    rows = "\n".join(f"| {n} | x |" for n in range(40))
    blocks = split("| n | x |\n|---|---|\n" + rows)
    assert len(blocks) == 3
    assert all(block.text.startswith("| n | x |\n|---|---|\n") for block in blocks)
    assert [block.joined for block in blocks] == [False, True, True]


@pytest.mark.parametrize(
    "text", ["plain", "2 * 3", "a_b_c", "**b** and *i*", "`a*b`", "[t](u)", "[1]", "\\*", "~~s~~", "``a`b``"]
)
def test_closed(text: str) -> None:
    assert is_closed(text)


@pytest.mark.parametrize("text", ["**b", "a *i", "`code", "[text", "[t](htt", "~~s", "_u"])
def test_open(text: str) -> None:
    assert not is_closed(text)


@given(st.text(alphabet="ab \n", max_size=200) | st.just("x" * 9000) | st.just("y\n" * 500))
def test_plain_text_comes_back(text: str) -> None:
    blocks = split_plain(text)
    if all(len(line) <= LONGEST_PIECE for line in text.split("\n")):
        assert "\n".join(block.text for block in blocks) == text
    assert all(len(block.text) <= 2 * LONGEST_PIECE + PIECE for block in blocks)
