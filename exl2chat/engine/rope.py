"""RoPE: the table of rotations for a context. The formulas of every kind are stated at `model.rope_config.Rope`.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), and transformers' modeling_rope_utils.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from exl2chat.model.rope_config import Rope

AT_ONCE = 4096  # positions: of 131,072 with heads of 128 the float64 numbers would take 500 MB


def make_table(rope: Rope, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of positions (int64 [context]), all that a cache has room for; float32 [context, 1, 2,
    rotary_dim / 2].

    A head x, its rotated dimensions as two halves [2, rotary_dim / 2], turns to x * cos + flip(x) * sin, where flip
    exchanges the halves: `sin` is negative in the first, so that flipping needs no sign. Computed in float64: at
    position 100,000 the angle of a float32 product is off by 0.004 radians.
    """
    shape = (len(positions), 1, 2, rope.rotary_dim // 2)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    signs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    turns, factor = frequencies(rope, len(positions)), attention_factor(rope)
    for start in range(0, len(positions), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        angles = torch.outer(positions[part].double(), turns)[:, None, None]
        cos[part] = angles.cos() * factor
        sin[part] = angles.sin() * factor * signs
    return cos, sin


def table_bytes(rope: Rope, context: int) -> int:
    """Bytes of the table for `context` positions."""
    return 2 * 4 * context * rope.rotary_dim


def frequencies(rope: Rope, context: int) -> Tensor:
    """Radians per position, float64 [rotary_dim / 2], for a cache of `context` tokens.

    Only longrope looks at `context`: it has one set of factors for the original context and one beyond. The set is
    chosen by the size of the cache, not by the tokens in it, so that keys written early stay valid later.
    """
    return _KINDS[rope.kind](rope, context)


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by (so q.k by its square)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(theta: float, dim: int) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _default(rope: Rope, _context: int) -> Tensor:
    return _plain(rope.theta, rope.rotary_dim)


def _linear(rope: Rope, _context: int) -> Tensor:
    return _plain(rope.theta, rope.rotary_dim) / rope.factor


def _ntk(rope: Rope, _context: int) -> Tensor:
    dim = rope.rotary_dim
    return _plain(rope.theta * rope.factor ** (dim / (dim - 2)), dim)


def _llama3(rope: Rope, _context: int) -> Tensor:
    plain = _plain(rope.theta, rope.rotary_dim)
    turns = rope.original_context * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, keep.clamp(0, 1))


def _yarn(rope: Rope, _context: int) -> Tensor:
    dim = rope.rotary_dim

    def dimension(turns: float) -> float:
        """Which dimension turns this often within the original context."""
        return dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    plain = _plain(rope.theta, dim)
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def _longrope(rope: Rope, context: int) -> Tensor:
    factors = rope.factors[context > rope.original_context]
    return _plain(rope.theta, rope.rotary_dim) / torch.tensor(factors, dtype=torch.float64)


_KINDS: Mapping[str, Callable[[Rope, int], Tensor]] = {
    "default": _default, "linear": _linear, "ntk": _ntk, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip
