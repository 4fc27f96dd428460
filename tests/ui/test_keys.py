"""The table of keys is what the app and its prompt are bound to, and what help says."""

from exl2chat.ui.app import ChatApp
from exl2chat.ui.keys import HINTS, KEYS, bindings, keys_page
from exl2chat.ui.prompt import Prompt


def test_every_key_is_bound_once_and_explained() -> None:
    keys = [key.keys for key in KEYS if key.keys]
    assert len(keys) == len(set(keys)) == len(bindings())
    assert all(key.label in keys_page() and key.does in keys_page() for key in KEYS)
    assert HINTS[0] == "Enter send"
    assert "| Esc | take back what was queued last; else stop the reply" in keys_page()


def test_every_action_exists() -> None:
    for key in KEYS:
        name = key.action.partition("(")[0]
        assert not name or hasattr(ChatApp, f"action_{name}")
    for binding in Prompt.BINDINGS:
        owner, _, action = binding.action.rpartition(".")
        assert hasattr(ChatApp if owner == "app" else Prompt, "action_" + action.partition("(")[0])


def test_keys_that_help_names_for_the_prompt_are_bound_there() -> None:
    bound = {key for binding in Prompt.BINDINGS for key in binding.key.split(",")}
    assert {"pageup", "pagedown", "ctrl+home", "ctrl+end", "end", "ctrl+d"} <= bound


async def test_every_key_does_its_action_while_the_prompt_has_the_focus(start) -> None:
    async with start() as screen:
        assert screen.app.focused is screen.app.prompt
        active = screen.app.screen.active_bindings
        assert {k.keys: k.action for k in KEYS if k.action} == {
            k.keys: active[k.keys].binding.action.removeprefix("app.") for k in KEYS if k.action
        }


async def test_f6_shows_the_statistics(start) -> None:
    async with start() as screen:
        await screen.press("f6")
        await screen.until(lambda: screen.shown("Statistics"))
