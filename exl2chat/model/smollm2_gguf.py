"""SmolLM2 from GGUF: the same tensors, names and JSON files as its Hugging Face checkpoint has."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from exl2chat.errors import ModelError
from exl2chat.model.exl2_writer import Float32, Source, to_json
from exl2chat.model.gguf_reader import Gguf, GgufTensor, read_gguf, to_float32

CONTROL = 3  # tokenizer.ggml.token_type of a special token

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_source(data: bytes) -> Source:
    """The GGUF file `data` as a Source. ModelError where it is damaged or not a Llama model."""
    gguf = read_gguf(data)
    try:
        if gguf.metadata["general.architecture"] != "llama":
            raise ModelError("the GGUF file is not of the Llama architecture", "only SmolLM2 is converted")
        files = {
            "generation_config.json": to_json(_token_ids(gguf.metadata)),
            "tokenizer.json": to_json(_tokenizer(gguf.metadata)),
            "tokenizer_config.json": to_json(_tokenizer_config(gguf.metadata)),
        }
        tensors = dict(_rename(name, tensor, gguf) for name, tensor in gguf.tensors.items())
        return Source(_config(gguf), files, tensors)
    except KeyError as missing:
        raise ModelError(f"the GGUF file has no {missing}", "it is damaged or not SmolLM2") from None


def _rename(name: str, tensor: GgufTensor, gguf: Gguf) -> tuple[str, Callable[[], Float32]]:
    """The Hugging Face name of a tensor, and a function that reads it."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{TOP_NAMES[parts[0]]}.weight", partial(to_float32, tensor)
    hugging_face = f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    if parts[2] in heads:
        return hugging_face, partial(_half_split, tensor, gguf.metadata[heads[parts[2]]])
    return hugging_face, partial(to_float32, tensor)


def _half_split(tensor: GgufTensor, heads: int) -> Float32:
    """A query or key weight [N, K] with its rows ordered for half-split RoPE.

    GGUF orders the rows of a head for interleaved RoPE: the two halves of each pair side by side.
    """
    weight = to_float32(tensor)
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{name}_token_id"] for key, name in ids.items()}


def _config(gguf: Gguf) -> dict[str, Any]:
    values = gguf.metadata
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": values["llama.context_length"],
        # Stored as float32: the shortest decimal that rounds to it is the number meant.
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": values["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_token_ids(values),
    }


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE; the pre-tokeniser `smollm` splits digits one by one before the usual regex."""
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ModelError(
            f"the GGUF file has the pre-tokeniser {metadata['tokenizer.ggml.pre']}", "only smollm is known"
        )
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        **{key: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
        "chat_template": metadata["tokenizer.chat_template"],
    }
