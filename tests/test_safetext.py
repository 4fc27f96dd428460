"""The terminal-safety filter: per character, over any chunking, idempotent."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.safetext import MAX_MARKS, Scrubber, scrub, scrub_line

NASTY = st.text(
    alphabet=st.sampled_from(
        "a b\n\t\r\x00\x07\x1b\x7f\x85\x9b\u0301\u200b\u200d\u202e\u2028\ufeff\U000e0041é字🎉[]52;c"
    )
)
TEXTS = st.text() | NASTY


def test_every_character_a_terminal_obeys_is_replaced() -> None:
    """Against Unicode's own categories: controls, format characters, surrogates, line and paragraph separators."""
    kept = {
        c
        for c in map(chr, range(0x110000))
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in BIDI
        if scrub(c) == c
    }
    assert kept == {"\n", "\t"}


BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@pytest.mark.parametrize(
    "code", [0x61C, 0x200B, 0x200E, 0x200F, 0x2060, 0x2064, 0x206A, 0x206F, 0xFEFF, 0xFFF9, 0xE0001, 0xE007F, 0xE0100]
)
def test_invisible_characters_become_visible(code: int) -> None:
    assert scrub(chr(code)) == "\ufffd"


def test_controls_show_what_they_were() -> None:
    assert scrub("\x1b[2J\x07\x00\x7f") == "␛[2J␇␀␡"


@pytest.mark.parametrize(
    "text", ["plain", "tab\tnew\nline", "naïve café", "日本語", "👩‍👩‍👧", "می‌خواهم", "é" * 3, "ñ" * 50]
)
def test_honest_text_is_left_alone(text: str) -> None:
    assert scrub(text) == text


@given(TEXTS)
def test_idempotent(text: str) -> None:
    assert scrub(scrub(text)) == scrub(text)


@given(TEXTS, st.data())
def test_chunks_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    scrubber = Scrubber()
    pieces = [scrubber.feed(text[start:end]) for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(pieces) + scrubber.flush() == scrub(text)


@given(TEXTS)
def test_nothing_obeyed_is_left_and_it_can_be_encoded(text: str) -> None:
    safe = scrub(text)
    assert not [c for c in safe if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    safe.encode("utf-8")


@given(TEXTS)
def test_a_line_is_one_line(text: str) -> None:
    assert len(scrub_line(text).splitlines()) <= 1
    assert "\t" not in scrub_line(text)


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_line_ends(end: str) -> None:
    assert scrub(f"a{end}b{end}") == "a\nb\n"
    assert scrub("\r\r\n\n\r") == "\n\n\n\n"


def test_a_carriage_return_waits_for_what_follows() -> None:
    scrubber = Scrubber()
    assert [scrubber.feed("a\r"), scrubber.feed("\nb\r"), scrubber.flush(), scrubber.flush()] == ["a", "\nb", "\n", ""]


def test_marks_pile_up_only_so_high() -> None:
    assert scrub("a" + "\u0301" * 50 + "b") == "a" + "\u0301" * MAX_MARKS + "b"
    assert scrub("a" + "\u0301\u200d" * 50).count("\u0301") == MAX_MARKS
