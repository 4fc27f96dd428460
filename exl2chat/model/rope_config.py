"""Every spelling of RoPE scaling to one record.

Spellings: `rope_scaling` beside `rope_theta` (transformers up to 4), `rope_parameters` with `rope_theta` inside (5),
the latter also nested per layer type; the kind as `rope_type` or `type`. Formulas: modeling_rope_utils.py there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from exl2chat.errors import ModelError
from exl2chat.model.fields import Fields

Kind = Literal["default", "linear", "ntk", "llama3", "yarn", "longrope"]
KINDS: Mapping[str, Kind] = {
    "default": "default", "linear": "linear", "ntk": "ntk", "dynamic": "ntk", "llama3": "llama3", "yarn": "yarn",
    "longrope": "longrope", "su": "longrope",
}  # fmt: skip
MIN_FACTOR = 1e-3
MAX_FACTOR = 1e4
MAX_THETA = 1e15
MAX_POSITION = 1 << 24


@dataclass(frozen=True, slots=True)
class Rope:
    """What the tables are computed from. With d = rotary_dim and f[i] = theta ** (-2i / d) for i in [0, d/2):

    default: f. linear: f / factor. ntk: f for theta * factor ** (d / (d - 2)).
    llama3: with w = 2 pi / f and c = original_context: f where w < c / high_freq_factor, f / factor where
    w > c / low_freq_factor, between them (1 - s) f / factor + s f, s = (c / w - low) / (high - low).
    yarn: f / factor and f blended by a ramp between the dimensions that turn beta_fast and beta_slow times in
    original_context, these rounded outwards if `truncate`; cos and sin times attention_factor, or where that is None
    m(mscale) / m(mscale_all_dim) if both are given and not 0, else m(1); m(x) = 0.1 x ln(factor) + 1, 1 up to factor 1.
    longrope: f / factors[0] up to original_context tokens, f / factors[1] beyond; cos and sin times attention_factor,
    or where that is None sqrt(1 + ln(factor) / ln(original_context)), 1 for factor <= 1.

    The first `rotary_dim` of each head's dimensions rotate. original_context is 0 for the kinds that do not use it.
    """

    kind: Kind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())


def read_rope(config: Fields, head_dim: int, context: int) -> Rope:
    """The record for a model whose heads are `head_dim` wide and whose context is `context` tokens."""
    table = _find_table(config)
    theta = table.number("rope_theta", 1.001, MAX_THETA, config.number("rope_theta", 1.001, MAX_THETA, 10_000.0))
    share = config.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    share = table.number("partial_rotary_factor", 0.0, 1.0, share)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"{config.where}: partial_rotary_factor {share:g} rotates {rotary_dim} of {head_dim} dimensions",
            "an even number of at least 2 is needed",
        )
    kind = _read_kind(table)
    if kind == "default":
        return Rope("default", theta, rotary_dim)
    if kind == "linear":
        return Rope("linear", theta, rotary_dim, table.number("factor", MIN_FACTOR, MAX_FACTOR))
    if kind == "ntk":
        return _read_ntk(table, theta, rotary_dim)
    original = _read_original_context(table, config, context)
    if kind == "llama3":
        return _read_llama3(table, theta, rotary_dim, original)
    stretch = context / original
    if kind == "yarn":
        return _read_yarn(table, theta, rotary_dim, original, stretch)
    return _read_longrope(table, theta, rotary_dim, original, stretch)


def _find_table(config: Fields) -> Fields:
    """The flat table of parameters. One nested per layer type must say the same for every type."""
    name = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    table = config.table(name)
    nested = [key for key, value in table.values.items() if isinstance(value, dict)]
    if not nested:
        return table
    inner = [table.table(key) for key in nested]
    if len(nested) != len(table.values) or any(other.values != inner[0].values for other in inner):
        raise ModelError(f"{table.where} differs between layers ({', '.join(nested)[:80]!r})", "not supported yet")
    return inner[0]


def _read_kind(table: Fields) -> Kind:
    name = "rope_type" if "rope_type" in table else "type"
    stated = table.text(name, "default")
    if stated not in KINDS:
        raise table.wrong(name, "one of " + ", ".join(KINDS))
    return KINDS[stated]


def _read_original_context(table: Fields, config: Fields, context: int) -> int:
    """The length trained on before stretching; beside the table it outweighs the one within (Phi-3 keeps it there)."""
    name = "original_max_position_embeddings"
    within = table.integer(name, 2, MAX_POSITION, max(context, 2))
    return config.integer(name, 2, MAX_POSITION, within)


def _read_ntk(table: Fields, theta: float, rotary_dim: int) -> Rope:
    """NTK scaling by a fixed `alpha`. `dynamic` without one stretches only beyond max_position_embeddings, where our
    context ends: within it is plain RoPE."""
    alpha = table.number("alpha", 1.0, MAX_FACTOR, 1.0)
    if alpha == 1.0 or rotary_dim == 2:
        table.number("factor", MIN_FACTOR, MAX_FACTOR, 1.0)
        return Rope("default", theta, rotary_dim)
    return Rope("ntk", theta, rotary_dim, alpha)


def _read_llama3(table: Fields, theta: float, rotary_dim: int, original: int) -> Rope:
    low = table.number("low_freq_factor", MIN_FACTOR, MAX_FACTOR)
    high = table.number("high_freq_factor", MIN_FACTOR, MAX_FACTOR)
    if low >= high:
        raise table.wrong("low_freq_factor", f"below high_freq_factor {high:g}")
    factor = table.number("factor", MIN_FACTOR, MAX_FACTOR)
    return Rope("llama3", theta, rotary_dim, factor, original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(table: Fields, theta: float, rotary_dim: int, original: int, stretch: float) -> Rope:
    return Rope(
        "yarn",
        theta,
        rotary_dim,
        factor=table.number("factor", MIN_FACTOR, MAX_FACTOR, stretch),
        original_context=original,
        beta_fast=table.number("beta_fast", 0.0, MAX_FACTOR, 0.0) or 32.0,
        beta_slow=table.number("beta_slow", 0.0, MAX_FACTOR, 0.0) or 1.0,
        attention_factor=table.optional_number("attention_factor", MIN_FACTOR, MAX_FACTOR),
        mscale=table.optional_number("mscale", 0.0, MAX_FACTOR),
        mscale_all_dim=table.optional_number("mscale_all_dim", 0.0, MAX_FACTOR),
        truncate=table.flag("truncate", True),
    )


def _read_longrope(table: Fields, theta: float, rotary_dim: int, original: int, stretch: float) -> Rope:
    count = rotary_dim // 2
    short = table.numbers("short_factor", count, MIN_FACTOR, MAX_FACTOR)
    long = table.numbers("long_factor", count, MIN_FACTOR, MAX_FACTOR)
    return Rope(
        "longrope",
        theta,
        rotary_dim,
        factor=table.number("factor", MIN_FACTOR, MAX_FACTOR, stretch),
        original_context=original,
        attention_factor=table.optional_number("attention_factor", MIN_FACTOR, MAX_FACTOR),
        factors=(short, long),
    )
