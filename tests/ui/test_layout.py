"""The virtual layout against one that draws everything: the same rows, wherever the view went before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2chat.paths import Paths, theme_files
from exl2chat.ui.layout import DRAWN_SECTIONS, Layout
from exl2chat.ui.render import Renderer, Row
from exl2chat.ui.section import Entry
from exl2chat.ui.themes import load_theme

HEIGHT = 9
TEXTS = [
    "one line",
    "",
    "a **longer** text " * 20,
    "# head\n\n- a\n- b\n\n```py\nx = 1\n\n\ny\n```\nend",
    "| a | b |\n|---|---|\n" + "| long cell text here | 2 |\n" * 40,
    "word " * 400,
    "```\n" + "code\n" * 80 + "```",
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    paths = Paths.default(tmp_path_factory.mktemp("home"))
    return Renderer(load_theme("exl2-dark", theme_files(paths)).look)


def build(renderer: Renderer, texts: list[str], width: int = 30) -> Layout:
    layout = Layout(renderer, width)
    layout.show([(Entry(str(n), "assistant" if n % 2 else "user", f"name {n}"), text) for n, text in enumerate(texts)])
    return layout


def plain(rows: list[Row]) -> list[str]:
    return [row.strip.text.rstrip() for row in rows]


def everything(renderer: Renderer, texts: list[str], width: int = 30) -> list[str]:
    return plain(build(renderer, texts, width).rows(100_000))


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8),
    steps=st.lists(st.integers(-40, 40) | st.sampled_from(["end", "start"]), max_size=15),
)
def test_moving_shows_the_rows_that_are_there(renderer: Renderer, texts: list[str], steps: list[int | str]) -> None:
    """From the end, where heights above are only guessed, every step moves the view by exactly that many rows."""
    whole = everything(renderer, texts)
    layout = build(renderer, texts)
    layout.to_end(HEIGHT)
    at = max(0, len(whole) - HEIGHT)
    for step in steps:
        if step == "end":
            layout.to_end(HEIGHT)
            at = max(0, len(whole) - HEIGHT)
        elif step == "start":
            layout.to_start()
            at = 0
        else:
            layout.move(int(step))
            at = min(max(0, at + int(step)), len(whole) - 1)
        assert plain(layout.rows(HEIGHT)) == whole[at : at + HEIGHT]


@pytest.mark.parametrize("text", TEXTS)
def test_a_streamed_message_looks_as_one_that_was_loaded(renderer: Renderer, text: str) -> None:
    layout = build(renderer, ["question"])
    layout.add(Entry("r", "assistant", "A"), "", live=True)
    for at in range(0, len(text), 7):
        layout.append(text[at : at + 7])
        layout.to_end(HEIGHT)
        layout.rows(HEIGHT)
    layout.update(Entry("r", "assistant", "A"), finished=True)
    layout.to_start()
    loaded = build(renderer, ["question"])
    loaded.add(Entry("r", "assistant", "A"), text)
    assert plain(layout.rows(10_000)) == plain(loaded.rows(10_000))
    assert layout.total == len(loaded.rows(10_000))


def test_the_view_stays_when_a_reply_grows_below(renderer: Renderer) -> None:
    layout = build(renderer, TEXTS)
    layout.to_end(HEIGHT)
    layout.move(-30)
    before = plain(layout.rows(HEIGHT))
    layout.add(Entry("r", "assistant", "A"), "", live=True)
    layout.append("text\n\n" * 50)
    assert plain(layout.rows(HEIGHT)) == before


def test_another_width_keeps_the_block_at_the_top(renderer: Renderer) -> None:
    layout = build(renderer, TEXTS)
    layout.seek(20)
    top = layout.top
    layout.resize(50)
    assert layout.top[:2] == top[:2]
    layout.to_start()
    assert plain(layout.rows(10_000)) == everything(renderer, TEXTS, 50)


def test_rows_are_found_by_number_once_they_were_drawn(renderer: Renderer) -> None:
    whole = everything(renderer, TEXTS)
    layout = build(renderer, TEXTS)
    layout.rows(100_000)
    assert layout.total == len(whole)
    for first in range(0, len(whole) - 5, 17):
        assert plain(layout.between(first, first + 4)) == whole[first : first + 5]
        layout.seek(first)
        assert layout.y == first
        assert plain(layout.rows(3)) == whole[first : first + 3]


def test_corrected_guesses_above_the_view_are_accounted_for(renderer: Renderer) -> None:
    """y less drift is a row's number for as long as it is in view: a selection depends on it."""
    layout = build(renderer, TEXTS * 5)
    layout.to_end(HEIGHT)
    number = layout.y - layout.drift
    for _ in range(60):
        layout.move(-1)
        assert layout.y - layout.drift == number - 1
        number -= 1


def test_only_what_is_in_view_is_drawn(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    real = Renderer.render
    monkeypatch.setattr(Renderer, "render", lambda self, block, *rest: drawn.append(block) or real(self, block, *rest))
    layout = build(renderer, ["some text"] * 10_000)
    layout.to_end(HEIGHT)
    layout.rows(HEIGHT)
    assert len(drawn) <= HEIGHT


def test_drawn_rows_of_far_away_messages_are_dropped(renderer: Renderer) -> None:
    layout = build(renderer, ["some text"] * 500)
    layout.rows(10_000)
    assert len(layout._recent) == DRAWN_SECTIONS
    assert plain(layout.rows(10_000)) == everything(renderer, ["some text"] * 500)
