"""Pages of commands in a plain chat: Markdown that nobody renders is no table."""

from exl2chat.chat.commands import COMMANDS, help_page
from exl2chat.chat.pages import settings_page
from exl2chat.plain import without_tables
from exl2chat.settings import Settings


def test_a_table_is_lines_with_aligned_columns() -> None:
    page = "Model: one\n\n| model | 何 |\n| --- | --- |\n| name |  |\n|  | a |\n| `何何何` | x |\n\nBelow."
    assert without_tables(page).split("\n") == [
        "Model: one",
        "",
        "model   何",
        "name",
        "        a",
        "何何何  x",
        "",
        "Below.",
    ]


def test_a_cell_is_what_it_was_before_markdown() -> None:
    value = "a|b \\ | `c` \\|"
    page = without_tables(settings_page(Settings().with_layer("flag", {"system": value, "model": "--- | -"})))
    assert f"  {value}  " in page
    assert "  --- | -  " in page


def test_the_help_page_has_every_command_and_no_table() -> None:
    lines = without_tables(help_page()).split("\n")
    assert not [line for line in lines if line.startswith("|")]
    starts = {line.index(row.summary) for row in COMMANDS for line in lines if line.endswith("  " + row.summary)}
    assert len(starts) == 1
