"""Themes: TOML files, checked, as a Textual theme and a Look.

`exl2chat.paths.theme_files` finds them. `extends` takes everything a file does not say from another theme.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.errors import StyleSyntaxError
from rich.style import Style
from textual.theme import Theme

from exl2chat.errors import UsageError
from exl2chat.ui.look import SYNTAX, Look

Colour = Annotated[str, msgspec.Meta(pattern=r"^#[0-9a-fA-F]{6}$")]
Ink = Annotated[str, msgspec.Meta(pattern=r"^(#[0-9a-fA-F]{6}|bold|italic|underline)( (bold|italic|underline))*$")]


class Colors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[colors]: the screen around the transcript, in the terms of `textual.theme.Theme`."""

    primary: Colour
    secondary: Colour
    accent: Colour
    foreground: Colour
    background: Colour
    surface: Colour
    panel: Colour
    success: Colour
    warning: Colour
    error: Colour


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """[chat]: the transcript."""

    user: Ink
    assistant: Ink
    muted: Ink
    heading: Ink
    code: Ink
    link: Ink
    quote: Ink
    marker: Ink
    code_background: Colour


class ThemeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file. `syntax` maps the words of `look.SYNTAX` to inks."""

    dark: bool
    colors: Colors
    chat: Chat
    syntax: dict[str, Ink] = {}


@dataclass(frozen=True, slots=True)
class ChatTheme:
    """A theme ready for use."""

    name: str
    textual: Theme
    look: Look


def load_theme(name: str, files: Mapping[str, Path]) -> ChatTheme:
    """The theme called `name`. UsageError names the file and the field that is wrong."""
    file = files.get(name)
    if file is None:
        raise UsageError(f"there is no theme '{name}'", "`/theme` lists them")
    table = _read(name, files, ())
    try:
        return build(name, msgspec.convert(table, ThemeFile))
    except (msgspec.ValidationError, StyleSyntaxError) as fault:
        remedy = 'a colour is written "#rrggbb"; after `extends = "exl2-dark"` a theme says only what differs'
        raise UsageError(f"{file}: {fault}", remedy) from None


def _read(name: str, files: Mapping[str, Path], seen: tuple[str, ...]) -> dict[str, Any]:
    """The table of a file laid over that of the theme it extends."""
    file = files.get(name)
    if file is None or name in seen:
        raise UsageError(f"{files[seen[-1]]}: extends '{name}', which is not a theme before it", "`/theme` lists them")
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise UsageError(f"{file}: {fault}", "mend the line or take the file away") from None
    if (parent := table.pop("extends", None)) is None:
        return table
    base = _read(str(parent), files, (*seen, name))
    return {
        key: {**base[key], **value} if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in {**base, **table}.items()
    }


def build(name: str, file: ThemeFile) -> ChatTheme:
    """The file's colours as Textual and the transcript want them."""
    colors, chat = file.colors, file.chat
    if unknown := set(file.syntax) - set(SYNTAX):
        raise msgspec.ValidationError(f"[syntax] knows no '{min(unknown)}'")
    theme = Theme(
        name=name,
        dark=file.dark,
        variables={
            "footer-background": colors.background,
            "input-selection-background": colors.primary + " 40%",
            "chat-muted": chat.muted.split()[0],
            "chat-user": chat.user.split()[0],
        },
        **msgspec.structs.asdict(colors),
    )
    inks = {
        field: Style.parse(value) for field, value in msgspec.structs.asdict(chat).items() if "background" not in field
    }
    look = Look(
        text=Style(color=colors.foreground, bgcolor=colors.background),
        code_block=Style(color=colors.foreground, bgcolor=chat.code_background),
        warning=Style(color=colors.warning),
        error=Style(color=colors.error),
        syntax={SYNTAX[word]: Style.parse(ink) for word, ink in file.syntax.items()},
        **inks,
    )
    return ChatTheme(name, theme, look)
