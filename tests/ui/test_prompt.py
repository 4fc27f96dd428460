"""The prompt: lines, history, pastes, completion. A draft is never lost."""

import pytest
from textual import events

from exl2chat.chat.history import LIMIT, LONGEST, History
from exl2chat.errors import ContextError
from exl2chat.link.protocol import Generate
from exl2chat.link.scripted import Fail, Read, Say, Script

HELLO = Script(replies=((Read(total=8), Say("Hello.")),))


def sent(screen) -> list[str]:
    return [request.turns[-1].text for request in screen.engine.requests if isinstance(request, Generate)]


@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter"])
async def test_a_new_line_does_not_send(start, key: str) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.press("a", key, "b")
        assert screen.app.prompt.text == "a\nb"
        await screen.press("enter")
        await screen.until(lambda: sent(screen) == ["a\nb"])
        assert screen.app.prompt.text == ""


async def test_a_backslash_before_enter_is_a_new_line(start) -> None:
    async with start() as screen:
        await screen.press("a", "backslash", "enter", "b")
        assert screen.app.prompt.text == "a\nb"


async def test_nothing_is_sent_but_text(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.press("enter", "space", "enter")
        await screen.say("text")
        await screen.until(lambda: sent(screen) == [" text"])


async def test_the_prompt_grows_to_ten_rows(start) -> None:
    async with start() as screen:
        assert screen.app.prompt.size.height == 1
        for lines, rows in ((5, 5), (30, 10)):
            screen.app.prompt.put("\n".join("x" * lines))
            await screen.until(lambda rows=rows: screen.app.prompt.size.height == rows)


async def test_history_is_recalled_at_the_first_row_only_and_keeps_the_draft(start, paths) -> None:
    History(paths.history).add("older")
    History(paths.history).add("two\nlines")
    async with start() as screen:
        prompt = screen.app.prompt
        await screen.type("my draft")
        await screen.press("up")
        assert prompt.text == "two\nlines"
        await screen.press("up")
        assert prompt.text == "two\nlines", "the cursor only went up a row"
        await screen.press("up")
        assert prompt.text == "older"
        await screen.press("up")
        assert prompt.text == "older"
        await screen.press("down", "down", "down")
        assert prompt.text == "my draft"


async def test_what_is_sent_is_in_the_history_of_the_next_run(start) -> None:
    async with start() as screen:
        await screen.say("remember me")
    async with start() as screen:
        await screen.press("up")
        assert screen.app.prompt.text == "remember me"


async def test_a_paste_is_inserted_and_not_sent(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        screen.app.prompt.post_message(events.Paste("one\r\ntwo\n"))
        await screen.until(lambda: screen.app.prompt.text == "one\ntwo\n")
        assert sent(screen) == []


async def test_a_huge_paste_is_a_token_until_it_is_sent(start) -> None:
    text = "".join(f"line {n}\n" for n in range(100_000))
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.type("look: ")
        screen.app.prompt.post_message(events.Paste(text))
        await screen.until(lambda: screen.shown("⟦paste 1: 100000 lines"))
        await screen.press("enter")
        await screen.until(lambda: sent(screen) == ["look: " + text])
        await screen.replied()


async def test_a_huge_paste_that_is_refused_comes_back_as_the_token_it_was(start) -> None:
    text = "".join(f"line {n}\n" for n in range(200))
    async with start(Script(replies=((Fail("too long", status=ContextError.status),),))) as screen:
        await screen.ready()
        await screen.type("look: ")
        screen.app.prompt.post_message(events.Paste(text))
        await screen.until(lambda: screen.shown("⟦paste 1: 200 lines"))
        typed = screen.app.prompt.text
        await screen.press("enter")
        await screen.until(lambda: sent(screen) and screen.app.prompt.text)
        assert (screen.app.prompt.text, screen.app.prompt.full_text) == (typed, "look: " + text)
        screen.app.prompt.put("")
        await screen.press("up")
        assert (screen.app.prompt.text, screen.app.prompt.full_text) == (typed, "look: " + text)


async def test_a_paste_into_the_prompt_is_harmless_text(start) -> None:
    async with start() as screen:
        screen.app.prompt.post_message(events.Paste("a\x1b]52;c;eA==\x07b"))
        await screen.until(lambda: screen.app.prompt.text == "a␛]52;c;eA==␇b")


INVISIBLE = "a\u200eb\u200f \u200b\u2060\ufeff\u2028\u2029\u202ec\U000e0041\U000e0100" + "e" + "\u0301" * 12


@pytest.mark.parametrize("lines", [1, 30])
async def test_a_paste_keeps_invisible_characters_and_no_control_character(start, lines: int) -> None:
    pasted, kept = "\n".join([INVISIBLE + "\x07"] * lines), "\n".join([INVISIBLE + "␇"] * lines)
    async with start(HELLO) as screen:
        await screen.ready()
        screen.app.prompt.post_message(events.Paste(pasted))
        await screen.until(lambda: screen.app.prompt.full_text == kept)
        await screen.until(lambda: screen.shown("a�b�" if lines == 1 else "⟦paste 1"))
        assert not set(INVISIBLE) & set(screen.text()) - set("abce \u0301")
        await screen.press("enter")
        await screen.replied()
        assert sent(screen) == [kept] == [screen.chat.path[0].text]
        await screen.chat.run("edit #1")
        assert screen.app.prompt.full_text == kept


async def test_invisible_characters_come_back_with_a_message_that_failed(start) -> None:
    async with start(Script(replies=((Fail("too long", status=ContextError.status),),))) as screen:
        await screen.ready()
        screen.app.prompt.post_message(events.Paste(INVISIBLE))
        await screen.press("enter")
        await screen.until(lambda: sent(screen) and screen.app.prompt.text)
        assert screen.app.prompt.full_text == INVISIBLE
        await screen.press("ctrl+x")
        assert (screen.app.clipboard, screen.app.prompt.text) == (INVISIBLE, "")
        await screen.press("ctrl+v")
        assert screen.app.prompt.full_text == INVISIBLE


async def test_enter_takes_no_completion_of_an_earlier_text(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.type("/branch ")
        await screen.until(lambda: screen.shown("the version after this one"))
        prompt = screen.app.prompt
        prompt.put("/edit #99")
        prompt._handles("enter")  # before the list hears of the text
        assert prompt.text == ""
        await screen.until(lambda: screen.shown("/edit: there is no message yet"))


async def test_completion_is_offered_moved_and_taken(start) -> None:
    async with start() as screen:
        await screen.press("slash", "e")
        await screen.until(lambda: screen.shown("/export [md|json|txt]"))
        await screen.press("down", "tab")
        assert screen.app.prompt.text == "/export "
        await screen.until(lambda: screen.shown("md"))


async def test_completion_closes_on_escape_and_comes_back(start) -> None:
    async with start() as screen:
        await screen.press("slash", "e")
        await screen.until(lambda: screen.shown("/export"))
        await screen.press("escape")
        await screen.until(lambda: not screen.shown("/export [md"))
        assert screen.app.prompt.text == "/e"
        await screen.press("x")
        await screen.until(lambda: screen.shown("/export [md"))


async def test_enter_takes_the_marked_completion_of_half_a_word_and_obeys_a_whole_one(start) -> None:
    async with start() as screen:
        await screen.press(*"/hel")
        await screen.until(lambda: screen.shown("/help [command]"))
        await screen.press("enter")
        assert screen.app.prompt.text == "/help "
        await screen.press("enter")
        await screen.until(lambda: screen.shown("Commands"))


async def test_themes_are_completed(start) -> None:
    async with start() as screen:
        await screen.type("/theme pap")
        await screen.until(lambda: screen.shown("paper"))
        await screen.press("tab")
        assert screen.app.prompt.text == "/theme paper"


async def test_a_queued_message_comes_back_without_losing_the_draft(start) -> None:
    async with start(Script(replies=((Read(total=1), Say("x " * 50, delay=0.05)),))) as screen:
        await screen.ready()
        await screen.say("first")
        await screen.until(lambda: screen.chat.busy)
        await screen.say("second")
        await screen.until(lambda: screen.shown("1 queued"))
        await screen.type("a draft\u200b")
        await screen.press("escape")
        await screen.until(lambda: screen.app.prompt.full_text == "second\na draft\u200b")
        assert screen.app.prompt.cursor_location == screen.app.prompt.document.end
        await screen.press("ctrl+z")
        await screen.until(lambda: screen.app.prompt.full_text == "a draft\u200b")


def test_history_survives_damage_and_stays_private(paths) -> None:
    history = History(paths.history)
    for text in ("one", "two\nlines", "two\nlines", " secret", "", "x" * (LONGEST + 1), "surrogate \ud800"):
        history.add(text)
    with paths.history.open("ab") as file:
        file.write(b'\x00\x00\n{"no": 1}\n"torn')
    assert History(paths.history).entries == ["one", "two\nlines", "surrogate ?"]
    assert paths.history.stat().st_mode & 0o777 == 0o600


def test_history_is_bounded(paths) -> None:
    history = History(paths.history)
    for number in range(LIMIT + 5):
        history.add(str(number))
    assert len(history.entries) == len(History(paths.history).entries) == LIMIT
    assert history.entries[-1] == str(LIMIT + 4)


def test_history_without_a_place_to_write_still_recalls(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "history.jsonl")
    history.add("kept in memory")
    assert history.entries == ["kept in memory"]
