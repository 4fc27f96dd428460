"""config.json and generation_config.json to one frozen ModelConfig.

Keys and their meanings follow the configuration classes of transformers; where a key is absent, so is the feature.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exl2chat.errors import ModelError, UsageError
from exl2chat.model.arch import ArchSpec, find_arch
from exl2chat.model.fields import Fields
from exl2chat.model.folder import ModelFolder
from exl2chat.model.quant_config import QuantConfig, read_quant_config
from exl2chat.model.rope_config import Rope, read_rope
from exl2chat.settings import option

MAX_LAYERS = 512
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_HIDDEN = 1 << 16
MAX_INTERMEDIATE = 1 << 20
MAX_VOCAB = 1_000_000
MAX_CONTEXT = 1 << 24
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the engine needs to know of a model, checked. Lengths are in tokens.

    windows: one entry per layer, None where attention is full; a window of w is the token itself and the w - 1 before
    it. attention_scale multiplies q.k. Soft caps are None where absent. eos_ids: union of config.json and
    generation_config.json (the tokenizer and template add theirs later); first_eos_id: the one that config.json names
    first. quant: what is said of GPTQ. sampling: generation_config.json's values under `Sampling` field names.
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
    first_eos_id: int | None = None
    quant: QuantConfig = field(default_factory=QuantConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_config(folder: ModelFolder) -> ModelConfig:
    """The checked configuration of the model in `folder`. ModelError names the file, the field and what is allowed.

    A multimodal model's `text_config` overrides the fields around it.
    """
    raw = folder.read_json("config.json", required=True)
    where = folder.where("config.json")
    inner = Fields(where, raw).table("text_config").values
    config = Fields(where, {**raw, **{name: value for name, value in inner.items() if value is not None}})
    arch = find_arch(config.strings("architectures"), where)
    _check_activation(config, arch)
    vocab = config.integer("vocab_size", 1, MAX_VOCAB)
    layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden = config.integer("hidden_size", 1, MAX_HIDDEN)
    context = config.integer("max_position_embeddings", 1, MAX_CONTEXT)
    heads, kv_heads, head_dim = _read_heads(config, hidden)
    generation = Fields(folder.where("generation_config.json"), folder.read_json("generation_config.json") or {})
    return ModelConfig(
        arch=arch,
        name=folder.name,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-12, 1.0),
        context=context,
        rope=read_rope(config, head_dim, context),
        windows=_read_windows(config, arch, layers),
        attention_scale=config.number("query_pre_attn_scalar", 1e-3, 1e6, float(head_dim)) ** -0.5,
        embedding_scale=math.sqrt(hidden) if arch.scale_embedding else 1.0,
        tie_embeddings=config.flag("tie_word_embeddings", True),
        attention_softcap=config.optional_number("attn_logit_softcapping", 1e-3, 1e6),
        logit_softcap=config.optional_number("final_logit_softcapping", 1e-3, 1e6),
        bos_id=_read_id(config, "bos_token_id", vocab),
        pad_id=_read_id(config, "pad_token_id", vocab),
        first_eos_id=next(iter(config.ids("eos_token_id", vocab)), None),
        eos_ids=frozenset(config.ids("eos_token_id", vocab) + generation.ids("eos_token_id", vocab)),
        quant=read_quant_config(folder, config),
        sampling=_read_sampling(generation),
    )


def _check_activation(config: Fields, arch: ArchSpec) -> None:
    """Gemma's files say `hidden_activation` and carry a `hidden_act` that means nothing."""
    name = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    stated = config.text(name, arch.activation)
    if ACTIVATIONS.get(stated, stated) != arch.activation:
        raise config.wrong(name, f"{arch.activation}, the activation of {arch.names[0]}")


def _read_heads(config: Fields, hidden: int) -> tuple[int, int, int]:
    heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of the {heads} attention heads")
    if "head_dim" not in config and hidden % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size {hidden}, and there is no head_dim")
    head_dim = config.integer("head_dim", 2, MAX_HEAD_DIM, hidden // heads)
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ModelError(
            f"{config.where}: heads of {head_dim} dimensions", f"at most {MAX_HEAD_DIM} and even is possible"
        )
    return heads, kv_heads, head_dim


def _read_windows(config: Fields, arch: ArchSpec, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: by `layer_types` where given, else by the habit of the architecture.

    Qwen's files (those with `max_window_layers`) switch it on with `use_sliding_window`, for the layers from
    `max_window_layers` on.
    """
    window = config.optional_integer("sliding_window", 1, MAX_CONTEXT)
    first = config.integer("max_window_layers", 0, MAX_LAYERS, 0)
    enabled = config.flag("use_sliding_window", "max_window_layers" not in config)
    kinds = config.strings("layer_types") if "layer_types" in config else None
    if kinds is not None and (len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}):
        raise config.wrong("layer_types", f"{layers} times full_attention or sliding_attention")
    if arch.window == "none" or not enabled or window is None:
        return (None,) * layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if arch.window == "alternating":
        return tuple(None if layer % 2 else window for layer in range(layers))
    return tuple(window if layer >= first else None for layer in range(layers))


def _read_id(config: Fields, name: str, vocab_size: int) -> int | None:
    """A token id; None where absent, or -1, as older files say it."""
    value = config.integer(name, -1, vocab_size - 1, -1)
    return None if value < 0 else value


def _read_sampling(generation: Fields) -> Mapping[str, Any]:
    """generation_config.json's sampling values, checked like a user's. `do_sample` false without a temperature means
    greedy; beside a temperature it is taken for an oversight, and the temperature holds."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: generation.values[name] for name in names if name in generation}
    if not generation.flag("do_sample", True):
        values.setdefault("temperature", 0.0)
    try:
        return {name: option(name).check(value, generation.where) for name, value in values.items()}
    except UsageError as fault:
        raise ModelError(fault.message, fault.remedy) from None
