"""Nothing a model, a file or an error says can steer the terminal, wherever the screen shows it."""

import itertools
import unicodedata

import pytest

from exl2chat.chat.events import Notice, ShowPage
from exl2chat.link.scripted import Fail, Progress, Read, Say, Script
from exl2chat.ui.panels import Page, Picker

# Sequences by family; each is tried bare and inside the Markdown that a renderer treats differently.
SEQUENCES = [
    "\x1b]52;c;ZXZpbA==\x07", "\x1b]52;c;ZXZpbA==\x1b\\", "\x1b]0;title\x07", "\x1b]2;title\x1b\\",
    "\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\", "\x1b]9;note\x07", "\x1b]777;notify;a;b\x07",
    "\x1b]1337;File=:AA\x07",
    "\x1b[2J", "\x1b[H", "\x1b[6n", "\x1b[c", "\x1b[>c", "\x1b[31m", "\x1b[?1049l", "\x1b[?25h", "\x1b[?1000h",
    "\x1b[1;1H",
    "\x1b[21t", "\x1b[8;1;1t", "\x1b[200~", "\x1b[201~", "\x1bP$q\"p\x1b\\", "\x1bPtmux;\x1b\x1b]52;c;eA==\x07\x1b\\",
    "\x1b_Gf=100;AAAA\x1b\\", "\x1b^pm\x1b\\", "\x1bX sos\x1b\\", "\x1bc", "\x1b7", "\x1b8", "\x1bD", "\x1bM",
    "\x1b(0", "\x1b%G",
    "\x9b2J", "\x9b6n", "\x9d52;c;eA==\x9c", "\x90q\x9c", "\x98s\x9c", "\x9e\x9c", "\x9f\x9c", "\x84", "\x85", "\x8d",
    "\x00", "\x05", "\x07", "\x08" * 5, "\x0b", "\x0c", "\rover", "\x0e", "\x0f", "\x11", "\x13", "\x1a", "\x7f",
    "\u202eevil\u202c", "\u2066x\u2069", "\u200e", "\u200f", "\u061c", "\u200b", "\u2060", "\ufeff", "\u2028", "\u2029",
    "\U000e0041\U000e007f", "\U000e0100", "\ufff9a\ufffab\ufffb", "\x1b", "\x1b[", "\x1b]", "a" + "\u0301" * 40,
]  # fmt: skip
WRAPPINGS = ["{}", "`{}`", "**a{}b**", "[t{}](http://x{}y)", "- {}\n- b"]
PAYLOADS = [wrap.replace("{}", s) for s, wrap in itertools.product(SEQUENCES, WRAPPINGS)]
BLOCKS = ["```\n{}\n```", "```{}\nx\n```", "# {}", "> {}", "| {} | b |\n|--|--|\n| {} | 2 |", "![{}]({})", "<{}>"]


def unsafe(text: str) -> set[str]:
    """Characters that a terminal obeys or hides."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\u200c\u200d"}


def check(screen) -> None:
    assert not unsafe(screen.text())
    for strip in screen.strips():
        for segment in strip:
            assert not segment.control
            assert segment.style is None or segment.style.link is None


async def scroll_through(screen) -> None:
    """Look at every row of the transcript."""
    screen.app.action_home()
    for _ in range(1000):
        await screen.pilot.pause()
        check(screen)
        if screen.app.transcript.following:
            return
        screen.app.action_page(1)
    pytest.fail("the end of the transcript was never reached")


def test_the_corpus_is_large() -> None:
    assert len(PAYLOADS) + len(SEQUENCES) * len(BLOCKS) >= 300


async def test_replies_and_what_the_user_says(start) -> None:
    text = "\n\n".join(PAYLOADS + [b.replace("{}", s) for s, b in itertools.product(SEQUENCES, BLOCKS)])
    async with start(Script(replies=((Read(total=1), Say(text)),)), size=(120, 60)) as screen:
        await screen.ready()
        await screen.chat.submit("\n".join(SEQUENCES))
        await screen.replied()
        await scroll_through(screen)


async def test_a_sequence_split_over_chunks(start) -> None:
    steps = tuple(Say(piece) for piece in ("\x1b", "]52;c;", "eA==", "\x07", " \x9b", "31m red\r", "\nend"))
    async with start(Script(replies=((Read(total=1), *steps),))) as screen:
        await screen.ready()
        await screen.say("go")
        await screen.replied()
        await screen.until(lambda: screen.shown("␛]52;c;eA==␇ \ufffd31m red"))
        check(screen)


@pytest.mark.parametrize("start_at", range(0, len(SEQUENCES), 12))
async def test_titles_notices_pages_progress_and_lists(start, start_at: int) -> None:
    nasty = "".join(SEQUENCES[start_at : start_at + 12])
    script = Script(load=(Progress(nasty, 1, 2, nasty), Fail(nasty, nasty)), replies=((Fail(nasty, nasty),),))
    async with start(script) as screen:
        await screen.until(lambda: screen.chat.phase == "down")
        check(screen)
        await screen.chat.run("rename a " + nasty.replace("\n", ""))
        screen.chat.emit(Notice(nasty, "error"))
        await screen.pilot.pause()
        check(screen)
        screen.chat.emit(ShowPage(nasty, nasty))
        await screen.until(lambda: isinstance(screen.app.screen, Page))
        check(screen)
        await screen.press("escape")
        screen.app.choose_session("")
        await screen.until(lambda: isinstance(screen.app.screen, Picker))
        check(screen)


async def test_a_saved_title_is_shown_scrubbed_in_the_list(start) -> None:
    async with start(Script(replies=((Read(total=1), Say("ok")),))) as screen:
        await screen.ready()
        await screen.chat.submit("cats \x1b]0;evil\x07 \u202eback")
        await screen.replied()
        await screen.press("f3")
        await screen.until(lambda: isinstance(screen.app.screen, Picker) and screen.shown("cats ␛]0;evil␇"))
        check(screen)


async def test_the_line_filter_alone_would_be_enough(start) -> None:
    """The choke point: text that reached a widget unscrubbed still does not reach the terminal."""
    async with start() as screen:
        mark = screen.app.query_one("#prompt-mark")
        for sequence in SEQUENCES:
            mark.update(sequence.replace("[", "\\["))
            await screen.pilot.pause()
            check(screen)
