"""The one table of options, and where each value came from.

A row gives an option its name in TOML and `/set`, its flag, its environment variable, its range and its help. Layers,
later wins: default, the model's own (sampling only), config.toml, the session's recorded settings, environment, flag,
`/set` in the chat. Nothing else reads the environment but `exl2chat.paths`, which says where config.toml is.
"""

import math
import os
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from exl2chat.errors import UsageError
from exl2chat.paths import Paths, theme_files

Origin = Literal["default", "model", "config.toml", "session", "environment", "flag", "/set"]
Value = str | int | float | bool | None
PREFIX = "EXL2CHAT_"  # of the names of our environment variables
MAX_BIAS = 100.0  # a token so much less likely is never drawn
MAX_COUNT = 10**12  # of tokens: more than any context has, and fits 64 bits wherever it is added to
LAYERS: tuple[Origin, ...] = ("default", "model", "config.toml", "session", "environment", "flag", "/set")


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is drawn. Every default is neutral but those of temperature and top_p.

    What an option sets is explained by its row in `OPTIONS`; the engine's `STEPS` say in which order the steps run, but
    those that `step_order` names come first. temperature 0 is greedy; with a max_temperature above 0 the temperature
    is dynamic instead. Penalties look at the last `penalty_range` tokens (-1: all), full strength inside, fading
    linearly over `penalty_decay` more. `seed` None draws one per reply.

    Only here: `mirostat_mu`, where mirostat's limit begins (None: at twice its target); `dry_max_length`, from which on
    DRY's penalty grows no more; `dry_breakers`, the ids no repeated passage contains (None: punctuation, brackets,
    quotes, line feeds and special tokens); `xtc_ignore_tokens`, ids that XTC leaves alone (None: line feeds and special
    tokens); `logit_bias`, pairs of an id and what is added to its logit; `allowed_tokens` (None: all); `banned_tokens`.

    UsageError naming the field and its range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_range: int = -1
    penalty_decay: int = 0
    seed: int | None = None
    top_n_sigma: float = 0.0
    top_a: float = 0.0
    tfs: float = 1.0
    typical_p: float = 1.0
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.1
    mirostat_mu: float | None = None
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    min_temperature: float = 0.0
    max_temperature: float = 0.0
    temperature_exponent: float = 1.0
    temperature_last: bool = False
    skew: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: tuple[int, ...] | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_max_length: int = 20
    dry_breakers: tuple[int, ...] | None = None
    step_order: str = ""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    banned_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for row in OPTIONS:
            if row.group == "sampling":
                row.check(getattr(self, row.name), "sampling")
        if self.dry_max_length < 1:
            raise UsageError(f"sampling: dry_max_length is a whole number of at least 1, not {self.dry_max_length}")
        if self.mirostat_mu is not None and not math.isfinite(self.mirostat_mu):
            raise UsageError(f"sampling: mirostat_mu is a number, not {self.mirostat_mu}")
        for name in ("allowed_tokens", "banned_tokens", "dry_breakers", "xtc_ignore_tokens"):
            if (least := min(getattr(self, name) or (0,))) < 0:
                raise UsageError(f"sampling: {name} holds token ids of at least 0, not {least}")
        for token, bias in self.logit_bias:
            if token < 0 or not abs(bias) <= MAX_BIAS:
                wanted = f"ids of at least 0, each with a number from {-MAX_BIAS} to {MAX_BIAS}"
                raise UsageError(f"sampling: logit_bias holds {wanted}, not {token}: {bias}", "or use banned_tokens")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `low` and `high` are inclusive; `choices` are the words a str may be, `words` those it may list.

    A whole number without a `high` is a count of tokens. `rare` ones are named but not explained by --help. The flag of
    one that `repeats` may be given several times: its values are joined by commas.
    """

    name: str
    kind: type
    default: Value
    help: str
    group: Literal["model", "sampling", "chat", "screen"]
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    flag_name: str = ""
    words: tuple[str, ...] = ()
    rare: bool = False
    repeats: bool = False

    @property
    def flag(self) -> str:
        return self.flag_name or "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    def parse(self, text: str, where: str) -> Value:
        """`text` as this option's type; UsageError naming `where` when it is not."""
        if text.lower() in ("", "none", "default") and self.default is None:
            return None
        try:
            if self.kind is bool:
                return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[text.lower()]
            value: Value = self.kind(text)
        except (ValueError, KeyError):
            raise UsageError(
                f"{where}: {self.name} is {self._expected()}, not {reprlib.repr(text)}", self.help
            ) from None
        return self.check(value, where)

    def check(self, value: object, where: str) -> Value:
        """`value` if type and range are right; UsageError naming `where` if not. None only where it is the default."""
        if value is None and self.default is None:
            return None
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        right_type = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        in_range = not isinstance(value, int | float) or self.low <= value <= self._most
        if not right_type or not in_range or (self.choices and value not in self.choices) or self._is_no_list(value):
            raise UsageError(f"{where}: {self.name} is {self._expected()}, not {_as_toml(value)}", self.help)
        if isinstance(value, str) and not _is_plain(value):
            raise UsageError(f"{where}: {self.name} holds a NUL or is not UTF-8", self.help)
        return cast(Value, value)

    def _is_no_list(self, value: object) -> bool:
        """Whether `value` should list some of the words, each once, and does not."""
        listed = option_words(value) if self.words and isinstance(value, str) else []
        return len(set(listed) & set(self.words)) < len(listed)

    @property
    def _most(self) -> float:
        return MAX_COUNT if self.kind is int and self.high == math.inf else self.high

    def _expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.words:
            return "different words with commas between them, out of " + ", ".join(self.words)
        noun = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[self.kind]
        if self.kind in (bool, str) or self.low == -math.inf:
            return noun
        return f"{noun} from {self.low} to {self._most}"


def option_words(text: str) -> list[str]:
    """The words of an option that lists some, with commas or spaces between them."""
    return text.replace(",", " ").split()


def _as_toml(value: object) -> str:
    """`value` briefly, as the file or the flag that holds it writes it."""
    return str(value).lower() if isinstance(value, bool) else reprlib.repr(value)


def _is_plain(text: str) -> bool:
    """Whether `text` can be written to a file and name one: no NUL, and no byte of the command line that is not UTF-8
    (Python passes those on as surrogates)."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


STEPS = (
    "top_n_sigma", "smoothing", "temperature", "top_k", "top_p", "top_a", "min_p", "tfs", "typical_p", "mirostat",
    "dynamic_temperature", "xtc", "skew",
)  # fmt: skip
SPECULATE = ("auto", "draft", "ngram", "off")
CACHES = ("fp16", "q8", "q6", "q4")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _rare(
    name: str, default: Value, help: str, low: float = 0, high: float = math.inf, words: tuple[str, ...] = ()
) -> Option:
    """The row of a sampling option that few people need."""
    return Option(name, type(default), default, help, "sampling", low, high, words=words, rare=True)


OPTIONS: tuple[Option, ...] = (
    Option("model", str, "smollm2", "a model folder, a hub reference (org/name:4.0bpw) or smollm2", "model"),
    Option("device", str, "auto", "where the model runs", "model", choices=("auto", "cpu", "cuda")),
    Option("dtype", str, "auto", "arithmetic; float32 is exact", "model", choices=DTYPES),
    Option("cache", str, "fp16", "keys and values; fewer bits: more context, slow on a CPU", "model", choices=CACHES),
    Option("context", int, None, "context in tokens; unset: up to 8192", "model", low=256, flag_name="--ctx"),
    Option("draft_model", str, None, "a smaller model with the same tokenizer, to guess tokens ahead", "model"),
    Option("speculate", str, "auto", "what guesses ahead; same replies but for rounding", "model", choices=SPECULATE),
    Option("system", str, None, "the system prompt; unset: what the model's template says", "chat"),
    Option("lora", str, None, "LoRA folders, FOLDER or FOLDER:SCALE, with commas between", "chat", repeats=True),
    Option("max_tokens", int, None, "longest reply in tokens; unset: until the model ends it", "chat", low=1),
    Option("temperature", float, 0.8, "0 is greedy, 1 the model's own distribution", "sampling", low=0, high=10),
    Option("top_k", int, 0, "keep the k likeliest tokens; 0 is off", "sampling", low=0),
    Option("top_p", float, 0.95, "keep the fewest tokens reaching this sum; 1 is off", "sampling", low=0, high=1),
    Option("min_p", float, 0.0, "keep tokens this likely beside the best; 0 is off", "sampling", low=0, high=1),
    Option("repetition_penalty", float, 1.0, "divides logits of tokens seen; 1 is off", "sampling", low=0.1, high=10),
    Option("frequency_penalty", float, 0.0, "subtracted per occurrence so far; 0: off", "sampling", low=-10, high=10),
    Option("presence_penalty", float, 0.0, "subtracted from tokens seen; 0 is off", "sampling", low=-10, high=10),
    Option("penalty_range", int, -1, "how many recent tokens the penalties see; -1 is all", "sampling", low=-1),
    Option("penalty_decay", int, 0, "tokens beyond the range over which penalties fade", "sampling", low=0),
    Option("seed", int, None, "same seed, same reply; unset: a new one per reply", "sampling", low=0, high=2**63 - 1),
    Option("theme", str, "exl2-dark", "name of a theme (`/theme` lists them)", "screen"),
    _rare("top_n_sigma", 0.0, "keep logits this many deviations from the best; 0 is off", high=100),
    _rare("top_a", 0.0, "keep tokens above this times the best's square; 0 is off", high=1),
    _rare("tfs", 1.0, "tail-free: keep tokens until the curve has bent this much; 1 is off", high=1),
    _rare("typical_p", 1.0, "keep the most typical tokens reaching this sum; 1 is off", high=1),
    _rare("mirostat_tau", 0.0, "bits of surprise that mirostat holds replies to; 0 is off", high=100),
    _rare("mirostat_eta", 0.1, "how fast mirostat follows", high=1),
    _rare("smoothing_factor", 0.0, "pull likely tokens together, push others away; 0 is off", high=100),
    _rare("smoothing_curve", 1.0, "from a parabola (1) to a cubic (3)", low=1, high=3),
    _rare("max_temperature", 0.0, "temperature where the model is least certain; 0: not dynamic", high=10),
    _rare("min_temperature", 0.0, "dynamic temperature where the model is most certain", high=10),
    _rare("temperature_exponent", 1.0, "above 1 keeps a dynamic temperature low for longer", low=0.01, high=100),
    _rare("temperature_last", False, "the temperature changes only what the other steps have kept"),
    _rare("skew", 0.0, "above 0 favours unlikely tokens, below 0 likely ones", low=-10, high=10),
    _rare("xtc_probability", 0.0, "how often XTC drops the top choices; 0 is off", high=1),
    _rare("xtc_threshold", 0.1, "a top choice is at least this likely; the last one stays", high=1),
    _rare("dry_multiplier", 0.0, "DRY: penalty of a token that repeats a passage; 0 is off", high=100),
    _rare("dry_base", 1.75, "DRY: times this for every token the passage is longer", low=1, high=10),
    _rare("dry_allowed_length", 2, "DRY: how many tokens a passage has at least", low=1),
    _rare("dry_range", 0, "DRY: how many recent tokens it looks at; 0 is all"),
    _rare("step_order", "", "sampling steps that come first, such as min_p,temperature", words=STEPS),
)  # fmt: skip
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def option(name: str, where: str = "/set") -> Option:
    """The row called `name` (dashes allowed); UsageError with the nearest name when there is none."""
    key = name.strip().replace("-", "_")
    if key in BY_NAME:
        return BY_NAME[key]
    near = get_close_matches(key, BY_NAME, n=1)
    raise UsageError(
        f"{where}: there is no setting '{name}'", f"did you mean {near[0]}?" if near else "`/set` lists them"
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """An immutable stack of layers. `with_layer` returns a new one."""

    layers: Mapping[Origin, Mapping[str, Value]] = field(default_factory=dict)

    def with_layer(self, origin: Origin, values: Mapping[str, Value]) -> "Settings":
        """A copy in which the layer `origin` is `values`, each checked against its row."""
        checked = {option(k, origin).name: option(k, origin).check(v, origin) for k, v in values.items()}
        return Settings({**self.layers, origin: checked})

    def with_value(self, origin: Origin, name: str, value: Value) -> "Settings":
        """A copy with one value changed in one layer."""
        return self.with_layer(origin, {**self.layers.get(origin, {}), option(name, origin).name: value})

    def without(self, origin: Origin, name: str) -> "Settings":
        """A copy in which `origin` says nothing of `name`."""
        kept = {k: v for k, v in self.layers.get(origin, {}).items() if k != option(name, origin).name}
        return Settings({**self.layers, origin: kept})

    def lookup(self, name: str) -> tuple[Value, Origin]:
        """The value that holds, and the layer it came from."""
        row = option(name)
        for origin in reversed(LAYERS):
            if row.name in self.layers.get(origin, {}):
                return self.layers[origin][row.name], origin
        return row.default, "default"

    def __getitem__(self, name: str) -> Any:
        return self.lookup(name)[0]

    def sampling(self) -> Sampling:
        """The sampler record made of the rows in group "sampling"."""
        return Sampling(**{row.name: self[row.name] for row in OPTIONS if row.group == "sampling"})


def load_settings(flags: Mapping[str, Value], paths: Paths, environ: Mapping[str, str] | None = None) -> Settings:
    """config.toml, environment and flags as one stack. UsageError names the file, the field and the remedy."""
    env = os.environ if environ is None else environ
    from_file = read_config(paths.config_file)
    from_env = {row.name: row.parse(env[row.env], row.env) for row in OPTIONS if row.env in env}
    theme = BY_NAME["theme"]
    for values, where in ((from_file, str(paths.config_file)), (from_env, theme.env), (flags, theme.flag)):
        if theme.name in values:
            require_theme(values[theme.name], where, paths)
    return Settings({"config.toml": from_file}).with_layer("environment", from_env).with_layer("flag", flags)


def require_theme(name: Value, where: str, paths: Paths) -> None:
    """UsageError naming `where` when there is no theme called `name`."""
    if name not in (themes := theme_files(paths)):
        raise UsageError(f"{where}: there is no theme '{name}'", f"there are {', '.join(themes)}")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A line about each variable with our prefix that sets nothing, with the nearest that does."""
    meant = {"HOME": "HOME"}  # by what one may write after the prefix, what is right
    for row in OPTIONS:
        right = row.env.removeprefix(PREFIX)
        meant |= {right: right, row.flag.removeprefix("--").replace("-", "_").upper(): right}
    lines = []
    for name in sorted(os.environ if environ is None else environ):
        word = name.removeprefix(PREFIX)
        if word != name and word not in meant.values():
            near = get_close_matches(word.upper(), meant, n=1)
            hint = f"did you mean {PREFIX}{meant[near[0]]}?" if near else "`exl2chat --help` lists the settings"
            lines.append(f"{name} sets nothing: {hint}")
    return lines


def read_config(path: Path) -> dict[str, Value]:
    """config.toml as checked values; {} where there is no such file."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as fault:
        raise UsageError(f"{path}: {fault.strerror}", "check the file and its permissions") from None
    except UnicodeDecodeError as fault:
        line = fault.object.count(b"\n", 0, fault.start) + 1
        raise UsageError(f"{path}: line {line} is not UTF-8 text", "save the file as UTF-8") from None
    except RecursionError:
        raise UsageError(f"{path}: a value is nested too deeply", "mend the line or move the file away") from None
    except ValueError as fault:
        raise UsageError(f"{path}: {fault}", "mend the line or move the file away") from None
    return {
        option(name, str(path)).name: option(name, str(path)).check(value, str(path)) for name, value in table.items()
    }


def child_environment(defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process we start: ours, and `defaults` where it says nothing."""
    return {**defaults, **os.environ}


def complete_environment(defaults: Mapping[str, str]) -> None:
    """Add `defaults` to our own environment where it says nothing, for a library that reads it when imported."""
    os.environ.update(child_environment(defaults))


def terminal_only_prints() -> bool:
    """Whether the terminal says that it obeys no escape sequences, or its user that none are wanted (ACCESSIBLE)."""
    return os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("ACCESSIBLE", "") not in ("", "0")
