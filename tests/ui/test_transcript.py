"""The transcript on the screen: following, scrolling, selecting, painting no more than needed."""

from textual.geometry import Offset
from textual.selection import Selection

from exl2chat.link.scripted import Hold, Read, Say, Script
from exl2chat.ui.transcript import Transcript

PARAGRAPHS = "".join(f"paragraph {n}\n\n" for n in range(60))
MORE = Script(replies=((Read(total=1), Say(PARAGRAPHS), Hold(), Say("more\n\nand more\n\nlast")),))


async def begun(screen) -> Transcript:
    """A long reply on its way, its view at the end."""
    await screen.ready()
    await screen.say("question")
    await screen.until(lambda: screen.shown("paragraph 59"))
    return screen.app.transcript


async def test_the_view_follows_until_the_user_scrolls_up(start) -> None:
    async with start(MORE) as screen:
        transcript = await begun(screen)
        assert transcript.following
        await screen.press("pageup")
        await screen.until(lambda: not screen.shown("paragraph 59"))
        before = screen.text()
        screen.engine.release()
        await screen.replied()
        await screen.until(lambda: screen.shown("new lines · End"))
        assert [row[:-1] for row in screen.text().split("\n")[:20]] == [row[:-1] for row in before.split("\n")[:20]]
        await screen.press("end")
        await screen.until(lambda: screen.shown("last"))
        assert transcript.following
        assert not screen.shown("new lines · End")


async def test_scrolling_down_to_the_end_follows_again(start) -> None:
    async with start(MORE) as screen:
        transcript = await begun(screen)
        await screen.press("pageup", "pagedown")
        assert transcript.following


async def test_sending_goes_to_the_end(start) -> None:
    async with start(Script(replies=((Read(total=1), Say(PARAGRAPHS)),))) as screen:
        transcript = await begun(screen)
        await screen.replied()
        await screen.press("ctrl+home")
        await screen.until(lambda: screen.shown("paragraph 0"))
        assert not transcript.following
        await screen.say("next question")
        await screen.replied(2)
        await screen.until(lambda: screen.shown("paragraph 59"))
        assert transcript.following


async def test_home_end_and_pages_while_typing(start) -> None:
    async with start(MORE) as screen:
        await begun(screen)
        await screen.type("a draft")
        await screen.press("ctrl+home")
        await screen.until(lambda: screen.shown("question") and screen.shown("paragraph 0"))
        await screen.press("pagedown", "pagedown", "pageup")
        await screen.press("ctrl+end")
        await screen.until(lambda: screen.shown("paragraph 59"))
        assert screen.app.prompt.text == "a draft"


async def test_the_scroll_bar_knows_where_the_view_is(start) -> None:
    async with start(MORE) as screen:
        transcript = await begun(screen)
        bar = transcript.vertical_scrollbar
        assert bar.position == transcript.document.y == bar.window_virtual_size - bar.window_size
        transcript.scroll_to(y=0)
        await screen.until(lambda: screen.shown("paragraph 0"))
        assert bar.position == 0


async def test_the_mouse_selects_text_and_ctrl_c_copies_it(start) -> None:
    reply = (
        "some **bold** words that go on until the line is so long that it has to be folded somewhere in here\n\n- item"
    )
    async with start(Script(replies=((Read(total=1), Say(reply)),)), size=(60, 24)) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        lines = screen.text().split("\n")
        first = next(y for y, line in enumerate(lines) if "some bold" in line)
        last = next(y for y, line in enumerate(lines) if "• item" in line)
        await screen.pilot.mouse_down(offset=(7, first))
        await screen.pilot.hover(offset=(9, last))
        await screen.pilot.mouse_up(offset=(9, last))
        await screen.press("ctrl+c")
        assert (
            screen.app.clipboard == reply[5:].replace("**", "").replace("- item", "item")[: len(screen.app.clipboard)]
        )
        assert screen.app.clipboard.endswith("\n\nitem")
        assert screen.app.screen.get_selected_text() is None


async def test_everything_can_be_selected(start) -> None:
    async with start(Script(replies=((Read(total=1), Say("first\n\nlast")),))) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        text, _ = screen.app.transcript.get_selection(Selection(None, None))
        assert [line for line in text.splitlines() if line][-2:] == ["first", "last"]
        assert screen.app.transcript.get_selection(Selection(Offset(2, 1), Offset(6, 1)))[0] == "ques"


async def test_a_frame_repaints_only_what_changed(start, monkeypatch) -> None:
    async with start(MORE) as screen:
        await screen.ready()
        painted = []
        real = Transcript.refresh

        def refresh(self, *regions, **options):
            painted.extend(region.height for region in regions)
            return real(self, *regions, **options)

        await begun(screen)
        await screen.press("pageup")
        monkeypatch.setattr(Transcript, "refresh", refresh)
        screen.engine.release()
        await screen.replied()
        assert painted
        assert max(painted) == 1, "only the row that says how much is new"


async def test_a_new_chat_shows_nothing_of_the_one_before(start) -> None:
    async with start(MORE) as screen:
        await begun(screen)
        screen.engine.release()
        await screen.replied()
        await screen.press("ctrl+n")
        await screen.until(lambda: screen.shown("Type a message"))
        assert not screen.shown("paragraph")
        await screen.press("ctrl+home")
        assert not screen.shown("paragraph")
