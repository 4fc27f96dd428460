"""Blocks as rows: what is written is what is shown, in the width there is."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from exl2chat.paths import Paths, theme_files
from exl2chat.ui.blocks import Block, split
from exl2chat.ui.layout import Layout
from exl2chat.ui.render import MARGIN, Renderer, Row, fit
from exl2chat.ui.section import Entry
from exl2chat.ui.themes import load_theme


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    paths = Paths.default(tmp_path_factory.mktemp("home"))
    return Renderer(load_theme("exl2-dark", theme_files(paths)).look)


def rows(renderer: Renderer, text: str, width: int = 40) -> list[Row]:
    """A reply as the transcript would draw it, without label and remark."""
    layout = Layout(renderer, width)
    layout.show([(Entry("a", "assistant", "A"), text)])
    return layout.rows(10_000)[1:-1]


def drawn(renderer: Renderer, text: str, width: int = 40) -> str:
    return "\n".join(row.strip.text[MARGIN:].rstrip() for row in rows(renderer, text, width))


DOCUMENT = """\
# Plan
Some **bold**, *thin* and `code` text that is long enough to wrap.
- first [link](http://a.b)
- [x] done
  1. nested item that is long enough to wrap too

| name | n |
|:--|--:|
| `a` | 1 |
| bb | 22 |

```py
def f():
    return 1
```
> quoted
> text

---
<b>not html</b> ![cat](c.png)
"""

SHOWN = """\
Plan

Some bold, thin and code text that is
long enough to wrap.
 • first link (http://a.b)
 • ☑ done
   1. nested item that is long enough to
      wrap too

name   n
────  ──
a      1
bb    22

py
def f():
    return 1

▌ quoted text

────────────────────────────────────────

<b>not html</b> [image: cat] (c.png)"""


def test_a_document(renderer: Renderer) -> None:
    assert drawn(renderer, DOCUMENT) == SHOWN


def test_a_narrow_document_keeps_its_words(renderer: Renderer) -> None:
    assert "".join(drawn(renderer, DOCUMENT, 14).split()).replace("─", "") == "".join(SHOWN.split()).replace("─", "")


def test_styles(renderer: Renderer) -> None:
    row = rows(renderer, "a **b** *i* ~~s~~ `c`")[0]
    styles = {segment.text: segment.style for segment in row.strip if segment.text.strip() and segment.style}
    assert styles["b"].bold
    assert styles["i"].italic
    assert styles["s"].strike
    assert styles["c"].color == renderer.look.code.color
    assert all(style.link is None for style in styles.values())


def test_a_long_paragraph_is_wrapped_as_if_it_were_one_block(renderer: Renderer) -> None:
    rng = random.Random(3)
    text = " ".join(rng.choice(["word", "**bold**", "`code`", "longerword", "a"]) for _ in range(1000))
    assert len(split(text)) > 5
    whole = renderer.render(Block("paragraph", text), 60)
    assert [row.strip for row in rows(renderer, text, 60)] == [row.strip for row in whole.rows]


def test_a_long_table_keeps_its_columns(renderer: Renderer) -> None:
    body = "\n".join(f"| {n} | {'x' * (n % 7)} |" for n in range(50))
    lines = drawn(renderer, f"| n | xs |\n|--|--|\n{body}").splitlines()
    assert len(lines) == 52
    assert lines[0].startswith("n   xs")
    assert {line.index("x") for line in lines[2:] if "x" in line} == {4}


def test_a_table_without_room_for_columns_is_a_list_of_its_rows(renderer: Renderer) -> None:
    body = "| #2 | 52 | 15.9 | **eos** |\n| #4 | 118 | | stopped |"
    table = f"| reply | prompt | tokens/s | ended by |\n|--|--|--|--|\n{body}"
    assert drawn(renderer, table, 32).startswith("reply  prompt  tokens/s  ended")
    rows = ["reply: #2", "prompt: 52", "tokens/s: 15.9", "ended by: eos", ""]
    rows += ["reply: #4", "prompt: 118", "tokens/s:", "ended by: stopped"]
    assert drawn(renderer, table, 24).splitlines() == rows


def test_a_long_table_without_room_for_columns_goes_on_as_a_list(renderer: Renderer) -> None:
    body = "\n".join(f"| {n} | b{n} | c{n} |" for n in range(50))
    lines = drawn(renderer, f"| first | second | third |\n|--|--|--|\n{body}", 14).splitlines()
    assert len(lines) == 4 * 50 - 1
    assert lines[-3:] == ["first: 49", "second: b49", "third: c49"]
    assert lines[3::4] == [""] * 49


def test_long_code_is_folded_not_cut(renderer: Renderer) -> None:
    code = "x" * 100
    assert drawn(renderer, f"```\n{code}\n```", 30).replace("\n", "") == code


def test_copy_knows_margin_and_folds(renderer: Renderer) -> None:
    item = rows(renderer, "- " + "word " * 12, 30)
    assert [(row.margin, row.glue) for row in item] == [(MARGIN + 3, "\n"), (MARGIN + 3, " "), (MARGIN + 3, " ")]
    assert [row.glue for row in rows(renderer, "```\na\nb\n```")] == ["\n", "\n"]


@settings(deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["word", "字幅", "**b**", "`", "*", "- i", "```", "| a | b |", "|-|-|", "> q", "    x", "\n", "\t", "🎉"]
        ),
        max_size=60,
    ).map(lambda parts: " ".join(parts).replace(" \n ", "\n")),
    width=st.integers(4, 60),
)
def test_rows_fit_whatever_comes(renderer: Renderer, text: str, width: int) -> None:
    for row in rows(renderer, text, width):
        assert cell_len(row.strip.text) == row.strip.cell_length == MARGIN + width
        assert "\n" not in row.strip.text


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8), st.integers(4, 100))
def test_columns_fit(columns: list[tuple[int, int]], width: int) -> None:
    wanted, words = [max(pair) for pair in columns], [min(pair) for pair in columns]
    widths = fit(wanted, words, width)
    room = max(len(wanted), width - 2 * (len(wanted) - 1))
    assert sum(widths) <= room or all(w == 1 for w in widths)
    assert all(1 <= got <= max(1, want) for got, want in zip(widths, wanted, strict=True))
    if sum(max(1, word) for word in words) <= room:
        assert all(got >= word for got, word in zip(widths, words, strict=True))


def test_columns_that_fit_are_left_alone() -> None:
    assert fit([3, 5, 8], [1, 1, 1], 80) == (3, 5, 8)


def test_the_widest_column_gives_way() -> None:
    assert fit([3, 50, 5], [1, 1, 1], 32) == (3, 20, 5)


def test_a_long_name_stays_whole_while_a_heading_can_be_wrapped() -> None:
    assert fit([12, 17, 11], [6, 17, 5], 36) == (7, 17, 7)
