"""config.json and generation_config.json to one frozen ModelConfig."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from exl2chat.model.arch import ArchSpec


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE, normalised from every spelling. `factors` are longrope's divisors per frequency, short and long."""

    kind: Literal["default", "linear", "ntk", "llama3", "yarn", "longrope"]
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
    factors: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the engine needs to know of a model, checked. Lengths are in tokens.

    windows: one entry per layer, None where attention is full. attention_scale multiplies q.k. Soft caps are None where
    absent. eos_ids: union of config.json and generation_config.json (the tokenizer and template add theirs later).
    sampling: generation_config.json's values under `Sampling` field names. gptq_v2: zero points stored without the -1.
    """

    arch: ArchSpec
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    rope: Rope
    windows: tuple[int | None, ...]
    attention_scale: float
    embedding_scale: float
    tie_embeddings: bool
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    torch_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    gptq_v2: bool = False
    quantization: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
