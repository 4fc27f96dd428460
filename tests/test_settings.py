"""Options from every source: which layer holds, and values that are refused in one line."""

from pathlib import Path

import msgspec
import pytest

from exl2chat.errors import UsageError
from exl2chat.paths import Paths
from exl2chat.settings import LAYERS, Sampling, Settings, load_settings, option, read_config, unknown_variables


def configured(home: Path, text: str) -> Paths:
    """The folders of an installation whose config.toml is `text`."""
    paths = Paths.default(home)
    paths.config.mkdir()
    paths.config_file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return paths


def test_the_later_layer_holds_and_says_so() -> None:
    settings = Settings()
    for number, origin in enumerate(LAYERS):
        settings = settings.with_value(origin, "top-k", number)
        assert settings.lookup("top_k") == (number, origin)
    assert settings.without("/set", "top_k").lookup("top_k") == (len(LAYERS) - 2, "flag")


def test_what_nobody_set_is_what_the_sampler_takes_by_itself() -> None:
    assert Settings().sampling() == Sampling()


def test_file_environment_and_flags_stack(tmp_path: Path) -> None:
    paths = configured(tmp_path, "top_k = 1\nmin_p = 1\nseed = 1\n")
    environ = {"EXL2CHAT_MIN_P": "0.5", "EXL2CHAT_SEED": "2", "EXL2CHAT_UNKNOWN": "x"}
    settings = load_settings({"seed": 3}, paths, environ)
    assert (settings["top_k"], settings["min_p"], settings["seed"]) == (1, 0.5, 3)
    assert isinstance(settings.sampling().min_p, float)


@pytest.mark.parametrize(
    ("flags", "environ", "config", "where"),
    [
        ({"theme": "nosuch"}, {"EXL2CHAT_THEME": "nord"}, "", "--theme"),
        ({"theme": "nord"}, {"EXL2CHAT_THEME": "nosuch"}, "", "EXL2CHAT_THEME"),
        ({"theme": "nord"}, {}, "theme = 'nosuch'", "{file}"),
    ],
)
def test_a_theme_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, flags: dict[str, str], environ: dict[str, str], config: str, where: str
) -> None:
    paths = configured(tmp_path, config)
    with pytest.raises(UsageError) as caught:
        load_settings(flags, paths, environ)
    assert caught.value.message == f"{where.format(file=paths.config_file)}: there is no theme 'nosuch'"
    assert {"exl2-dark", "exl2-light", "nord"} <= set(caught.value.remedy.replace(",", "").split())


def test_a_theme_of_the_user_s_is_one(tmp_path: Path) -> None:
    paths = configured(tmp_path, "theme = 'mine'")
    paths.themes.mkdir()
    (paths.themes / "mine.toml").touch()
    assert load_settings({}, paths, {})["theme"] == "mine"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EXL2CHAT_TEMPRATURE", "EXL2CHAT_TEMPERATURE"),
        ("EXL2CHAT_CTX", "EXL2CHAT_CONTEXT"),
        ("EXL2CHAT_HOEM", "EXL2CHAT_HOME"),
        ("EXL2CHAT_topk", "EXL2CHAT_TOP_K"),
        ("EXL2CHAT_", "--help"),
    ],
)
def test_a_variable_that_sets_nothing_is_named_with_the_nearest_that_does(name: str, meant: str) -> None:
    (line,) = unknown_variables({name: "1", "HOME": "x", "EXL2CHAT_HOME": "x", "EXL2CHAT_TOP_K": "1"})
    assert line.startswith(f"{name} sets nothing: ")
    assert meant in line


@pytest.mark.parametrize(
    "text",
    [
        "top_k = ",
        "top_k = true",
        "top_k = 1.5",
        "temperature = nan",
        "temperature = 1e999",
        "system = 5",
        'system = "a\\u0000b"',
        "topk = 1",
        "top_k = " + "1" * 5000,
        "top_k = " + "[" * 5000,
        "top_k = '\ud800'",
    ],
)
def test_a_bad_config_file_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    paths = configured(tmp_path, text)
    with pytest.raises(UsageError, match=r"config\.toml") as caught:
        load_settings({}, paths, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"temperature_last = 'on'", "temperature_last is true or false, not 'on'"),
        (b"top_k = true", "top_k is a whole number from 0 to 1000000000000, not true"),
        (b'top_k = "many"', "top_k is a whole number from 0 to 1000000000000, not 'many'"),
        (
            b"dry_range = 18446744073709551616",
            "dry_range is a whole number from 0 to 1000000000000, not 18446744073709551616",
        ),
        (b"top_k = 1\nsystem = '\xff'\n", "line 2 is not UTF-8 text"),
        (b"top_k = " + b"[" * 5000, "a value is nested too deeply"),
    ],
)
def test_a_bad_config_file_is_told_in_the_words_of_the_file(tmp_path: Path, data: bytes, message: str) -> None:
    config = tmp_path / "config.toml"
    config.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_config(config)
    assert caught.value.message == f"{config}: {message}"


def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        read_config(tmp_path)


def test_an_optional_value_can_be_unset() -> None:
    assert [option("seed").parse(text, "/set") for text in ("", "none", "Default")] == [None] * 3


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "9" * 5000, str(2**63)])
def test_a_seed_is_a_whole_number_of_63_bits(text: str) -> None:
    with pytest.raises(UsageError, match="EXL2CHAT_SEED: seed is a whole number") as caught:
        option("seed").parse(text, "EXL2CHAT_SEED")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_text_that_no_record_can_hold_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="EXL2CHAT_MODEL: model holds a NUL or is not UTF-8"):
        option("model").parse(text, "EXL2CHAT_MODEL")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_a": 2}, "sampling: top_a is a number from 0 to 1, not 2.0"),
        ({"temperature_last": 1}, "sampling: temperature_last is true or false, not 1"),
        ({"smoothing_curve": 0.5}, "sampling: smoothing_curve is a number from 1 to 3, not 0.5"),
        ({"dry_max_length": 0}, "sampling: dry_max_length is a whole number of at least 1, not 0"),
        ({"mirostat_mu": float("nan")}, "sampling: mirostat_mu is a number, not nan"),
        ({"banned_tokens": (3, -1)}, "sampling: banned_tokens holds token ids of at least 0, not -1"),
        ({"allowed_tokens": (-1,)}, "sampling: allowed_tokens holds token ids of at least 0, not -1"),
        (
            {"logit_bias": ((5, 1.0), (6, 200.0))},
            "sampling: logit_bias holds ids of at least 0, each with a number from -100.0 to 100.0, not 6: 200.0",
        ),
    ],
)
def test_a_sampling_value_out_of_range_is_named_with_the_range(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**values)
    assert caught.value.message == message


def test_sampling_crosses_the_wire_as_it_is() -> None:
    sampling = Sampling(
        xtc_ignore_tokens=(), dry_breakers=(1, 2), allowed_tokens=(3,), banned_tokens=(4, 5), mirostat_mu=2.5,
        logit_bias=((7, -1.5), (8, 2.0)), step_order="min_p", temperature_last=True,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling


@pytest.mark.parametrize("text", ["min_p, top_k", "temperature", "", "xtc skew"])
def test_an_order_lists_steps(text: str) -> None:
    assert option("step_order").parse(text, "/set") == text
    assert Sampling(step_order=text).step_order == text


@pytest.mark.parametrize("text", ["min-p", "min_p,min_p", "top_q", "min_p;top_k"])
def test_an_order_of_something_else_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"step_order is different words with commas between them, out of top_n_sigma, .*skew, not"
    ):
        option("step_order").parse(text, "--step-order")
