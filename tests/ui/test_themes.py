"""Every shipped theme is complete and readable; a broken one gives one clear line."""

from pathlib import Path

import pytest
from rich.style import Style
from textual.color import Color

from exl2chat.errors import UsageError
from exl2chat.paths import Paths, theme_files
from exl2chat.ui.look import SYNTAX
from exl2chat.ui.themes import ChatTheme, load_theme

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "themes").glob("*.toml"))
WCAG_AA = 4.5
INKS = ("user", "assistant", "muted", "heading", "code", "link", "quote", "marker", "warning", "error")


def luminance(color: Color) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(front: str | None, back: str | None) -> float:
    assert front is not None
    assert back is not None
    light, dark = sorted((luminance(Color.parse(front)), luminance(Color.parse(back))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def ink(style: Style) -> str:
    assert style.color is not None
    return style.color.get_truecolor().hex


def paper(style: Style) -> str:
    assert style.bgcolor is not None
    return style.bgcolor.get_truecolor().hex


@pytest.fixture(params=SHIPPED)
def theme(request: pytest.FixtureRequest, paths: Paths) -> ChatTheme:
    return load_theme(request.param, theme_files(paths))


def test_there_are_dark_and_light_ones(paths: Paths) -> None:
    themes = [load_theme(name, theme_files(paths)) for name in SHIPPED]
    assert len(themes) >= 8
    assert {theme.textual.dark for theme in themes} == {True, False}


def test_contrast_is_known_for_black_on_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_text_is_readable(theme: ChatTheme) -> None:
    look, base = theme.look, theme.textual
    page, code = paper(look.text), paper(look.code_block)
    pairs = {
        **{f"[chat] {name}": (ink(getattr(look, name)), page) for name in INKS},
        **{f"[syntax] {name}": (ink(look.syntax[kind]), code) for name, kind in SYNTAX.items() if kind in look.syntax},
        "text": (ink(look.text), page),
        "code": (ink(look.code_block), code),
        "language of a fence": (ink(look.muted), code),
        "status": (ink(look.muted), base.surface),
        "title": (base.foreground, base.surface),
        "panel": (base.foreground, base.panel),
        "load": (base.accent, base.background),
        "prompt mark": (base.primary, base.surface),
        **{f"notice {name}": (color, base.surface)
           for name, color in (("warning", base.warning), ("error", base.error), ("success", base.success))},
    }  # fmt: skip
    poor = {name: round(contrast(*pair), 2) for name, pair in pairs.items() if contrast(*pair) < WCAG_AA}
    assert not poor


def test_a_user_theme_extends_another(paths: Paths) -> None:
    paths.themes.mkdir(parents=True)
    (paths.themes / "mine.toml").write_text('extends = "nord"\n[chat]\nuser = "#ffffff bold"\n')
    files = theme_files(paths)
    mine, nord = load_theme("mine", files), load_theme("nord", files)
    assert mine.look.user == Style.parse("#ffffff bold")
    assert mine.look.assistant == nord.look.assistant
    assert mine.textual.name == "mine"


def test_a_user_theme_replaces_a_shipped_one(paths: Paths) -> None:
    paths.themes.mkdir(parents=True)
    shipped = theme_files(paths)["nord"].read_text()
    (paths.themes / "nord.toml").write_text(shipped.replace("dark = true", "dark = false"))
    assert load_theme("nord", theme_files(paths)).textual.dark is False


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("dark = true", "dark = 'yes'"), "dark"),
        (('muted = "', 'muted = "x'), "chat.muted"),
        (('primary = "#', 'primary = "'), "colors.primary"),
        (("[chat]", "[chat]\nprimery = 1"), "primery"),
        (('keyword = "', 'keywort = "'), "keywort"),
        (("dark = true", "dark = "), "line 1"),
        (("dark = true", ""), "dark"),
        (("dark = true", 'extends = "bad"'), "bad"),
        (("dark = true", 'extends = "nothing"'), "nothing"),
    ],
)
def test_a_broken_theme_names_file_and_field(paths: Paths, change: tuple[str, str], named: str) -> None:
    paths.themes.mkdir(parents=True)
    good = theme_files(paths)["exl2-dark"].read_text()
    (paths.themes / "bad.toml").write_text(good.replace(*change))
    with pytest.raises(UsageError) as caught:
        load_theme("bad", theme_files(paths))
    assert "bad.toml" in caught.value.message
    assert named in caught.value.message
    assert "\n" not in str(caught.value)


def test_an_unknown_theme(paths: Paths) -> None:
    with pytest.raises(UsageError, match="no theme 'nope'"):
        load_theme("nope", theme_files(paths))
