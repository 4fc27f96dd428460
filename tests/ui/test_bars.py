"""The words of the lines around the chat."""

import pytest

from exl2chat.chat.events import LoadProgress
from exl2chat.link.protocol import Stats
from exl2chat.ui.bars import Status, joined, load_words, meter, size, status_words, title_line
from exl2chat.ui.entries import clock, speed


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (LoadProgress("starting", 0, 0, ""), "◐ starting · 4 s"),
        (
            LoadProgress("downloading", 1 << 20, 4 << 20, "B"),
            f"downloading {meter(0.25, 20)}  25% · 1.0 MB of 4.0 MB · 4 s",
        ),
        (LoadProgress("converting", 3, 3, "tensors"), f"converting {'━' * 20} 100% · 3 of 3 tensors · 4 s"),
        (LoadProgress("odd", 9, 3, ""), f"odd {'━' * 20} 100% · 9 of 3 · 4 s"),
    ],
)
def test_load(progress: LoadProgress, words: str) -> None:
    assert load_words(progress, 4.0, 80) == words


def test_a_narrow_line_keeps_the_share_of_a_load() -> None:
    assert load_words(LoadProgress("downloading", 1, 4, ""), 4.0, 40) == f"downloading {meter(0.25, 20)}  25%"
    assert load_words(LoadProgress("downloading weights", 1, 4, ""), 4.0, 20) == "downloading we…  25%"


@pytest.mark.parametrize(
    ("title", "width", "words"),
    [
        ("ducks", 40, "ducks         smollm2 · EXL2 4 bpw · cpu"),
        ("a title of ducks, and long", 40, "a title of ducks, and long       smollm2"),
        ("a title of ducks, and long", 20, "a title of…  smollm2"),
        ("a title of ducks, and long", 12, "a tit…  smo…"),
        ("x", 1, "x …"),
    ],
)
def test_title_and_model_share_their_line(title: str, width: int, words: str) -> None:
    assert title_line(title, ("smollm2", "EXL2 4 bpw", "cpu"), width).plain == words
    assert title_line(title, (), 40).plain.rstrip() == title


def test_status() -> None:
    assert status_words(Status()) == ["no model"]
    assert status_words(Status("streaming", False, 2048, 16384, 50.0, 0.41, 2)) == [
        "writing",
        "2 queued",
        "context ━╌╌╌╌╌╌╌ 2048 of 16.4k",
        "50.0 tok/s",
        "first token 0.41 s",
    ]


def test_a_context_that_is_filled_nobody_knows_how_far_is_not_shown() -> None:
    assert status_words(Status("ready", used=None, context=8192)) == ["ready"]
    assert status_words(Status("ready", used=0, context=8192)) == ["ready", "context ╌╌╌╌╌╌╌╌ 0 of 8192"]


def test_what_is_not_on_disk_is_said_first() -> None:
    assert status_words(Status("ready", unsaved=True, queued=1)) == ["ready", "not saved", "1 queued"]


def test_a_load_can_be_cancelled_once_nothing_is_queued() -> None:
    assert status_words(Status("loading")) == ["loading", "Esc cancels"]
    assert status_words(Status("loading", queued=1)) == ["loading", "1 queued"]


def test_what_replies_must_be_is_in_the_status() -> None:
    assert status_words(Status("ready", form="json")) == ["ready", "json only"]


def test_words_that_do_not_fit_are_left_out() -> None:
    assert joined(("ready", "a very long one", "short"), 15) == "ready  ·  short"
    assert joined(("much too long", "b"), 3) == "much too long"
    assert joined((), 3) == ""


@pytest.mark.parametrize(("share", "bar"), [(0, "╌╌╌╌"), (0.5, "━━╌╌"), (1, "━━━━"), (7, "━━━━"), (-1, "╌╌╌╌")])
def test_meter(share: float, bar: str) -> None:
    assert meter(share, 4) == bar


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 kB"), (5 << 30, "5.0 GB")])
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_notes() -> None:
    assert speed(None) == speed(Stats()) == ""
    assert speed(Stats(reply_tokens=1)) == "1 tok"
    assert speed(Stats(reply_tokens=101, decode_s=2.0)) == "101 tok · 50 tok/s"
    assert clock("not a time") == ""
    assert len(clock("2026-11-21T10:00:00Z")) == 5
