"""The command line as a person meets it: help, mistakes, exit statuses, and how little is imported for each."""

import subprocess
import sys

import pytest

from exl2chat import cli
from exl2chat.settings import OPTIONS


@pytest.fixture
def command(tmp_path, capsys):
    """Run a command line in this process; (status, stdout, stderr)."""

    def run(*argv):
        try:
            status = cli.main([*argv, "--home", str(tmp_path)])
        except SystemExit as left:
            status = left.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", ["", *(entry.name for entry in cli.COMMANDS)])
def test_every_command_takes_the_common_flags_and_lists_those_that_mean_something_to_it(command, name):
    status, out, err = command(*filter(None, [name]), "--help")
    assert (status, err) == (0, "")
    groups = {"": {"model", "chat", "sampling", "screen"}, "run": {"model", "chat", "sampling"}, "bench": {"model"}}
    words = " ".join([*out.split(), ""])
    for option in OPTIONS:
        assert (f" {option.flag} " in words) == (option.group in groups.get(name, ()))
    cli.parser().parse_args([*filter(None, [name]), "--top-k", "3"])


@pytest.mark.parametrize("argv", [["run", "--lora", "a:0.5", "--lora", "b"], ["--lora", "a:0.5,b", "run"]])
def test_a_flag_that_repeats_keeps_every_value(argv):
    assert cli.parser().parse_args([*argv, "--top-k", "1", "--top-k", "2"]).lora == "a:0.5,b"
    assert cli.parser().parse_args([*argv, "--top-k", "1", "--top-k", "2"]).top_k == 2


def test_a_switch_needs_no_value_and_can_be_turned_off():
    read = [cli.parser().parse_args(["run", flag]) for flag in ("--temperature-last", "--no-temperature-last")]
    assert [args.temperature_last for args in read] == [True, False]


def test_a_variable_that_sets_nothing_is_one_line_on_the_standard_error(command, monkeypatch):
    monkeypatch.setenv("EXL2CHAT_TEMPRATURE", "0.5")
    monkeypatch.setenv("EXL2CHAT_TOP_K", "5")
    status, out, err = command("paths")
    assert (status, err) == (0, "exl2chat: EXL2CHAT_TEMPRATURE sets nothing: did you mean EXL2CHAT_TEMPERATURE?\n")
    assert "EXL2CHAT" not in out


def test_the_help_of_run_says_where_the_rare_flags_are_explained(command):
    _, out, _ = command("run", "--help")
    heading = next(line for line in out.splitlines() if line.startswith("more of how tokens are drawn"))
    assert "README" in heading
    assert "/set" in heading


def test_help_names_examples_exit_codes_and_files(command):
    _, out, _ = command("--help")
    for word in ("examples:", "exit status:", "config.toml", "130", *(entry.name for entry in cli.COMMANDS)):
        assert word in out


def test_version_names_what_a_bug_report_needs(command):
    status, out, _ = command("--version")
    assert status == 0
    assert out.startswith("exl2chat ")
    assert "torch" in out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--modle", "x"], "did you mean --model?"),
        (["--modle=x"], "did you mean --model?"),
        (["rnu"], "did you mean run?"),
        (["run", "--jsn"], "did you mean --json?"),
        (["run", "--temperature", "hot"], "a number from 0 to 10"),
        (["run", "--temperature", "11"], "a number from 0 to 10"),
        (["run", "--device", "tpu"], "auto, cpu, cuda"),
        (["run", "--mod", "x"], "did you mean --model?"),
        (["run", "--engine", "steam", "-p", "hi"], "local, in-process"),
        (["run", "--engine", "scripted:/no/such/file", "-p", "hi"], "/no/such/file"),
    ],
)
def test_a_mistake_is_one_clear_complaint_with_status_2(command, argv, hint):
    status, out, err = command(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("exl2chat: ")
    assert hint in err
    assert err.count("\n") <= 2


def test_a_bad_config_file_is_named(command, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("temprature = 1")
    status, _, err = command("run", "-p", "hi")
    assert status == 2
    assert "config.toml" in err
    assert "did you mean temperature?" in err


def test_a_bad_config_file_can_be_found(command, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("not toml")
    status, out, err = command("paths")
    assert (status, err) == (0, "")
    assert str(tmp_path / "config" / "config.toml") in out
    assert command("sessions")[0] == 0


def test_an_empty_home_is_refused(capsys):
    assert cli.main(["paths", "--home", ""]) == 2
    assert "--home is empty" in capsys.readouterr().err


def test_complaints_hold_nothing_a_terminal_obeys(command):
    _, _, err = command("run", "--device", "\x1b]52;c;x\x07", "-p", "hi")
    assert "\x1b" not in err
    assert "\x07" not in err


@pytest.mark.parametrize("argv", [["--top-k", "3", "run", "--top-k", "5"], ["run", "--top-k", "5"]])
def test_a_flag_counts_before_and_after_the_command_and_the_later_wins(argv):
    args = cli.parser().parse_args(argv)
    assert args.top_k == 5
    assert args.command.name == "run"


def test_a_flag_before_the_command_holds_for_it():
    assert cli.parser().parse_args(["--top-k", "3", "run"]).top_k == 3


def test_paths_follow_home(command, tmp_path):
    status, out, _ = command("paths")
    assert status == 0
    assert all(str(tmp_path) in line for line in out.splitlines())


def test_sessions_of_a_new_home_are_none(command):
    assert command("sessions") == (0, "", "no chat is saved yet\n")


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["paths"]])
def test_cheap_commands_import_neither_torch_nor_textual(argv, tmp_path):
    code = (
        "import sys; from exl2chat.cli import main\n"
        f"try: main({[*argv, '--home', str(tmp_path)]!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'textual', 'numpy', 'transformers', 'rich'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_package_runs_as_a_module(tmp_path):
    argv = [sys.executable, "-m", "exl2chat", "--home", str(tmp_path), "paths"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert str(tmp_path) in done.stdout
