"""config.json in all its spellings, against the configuration classes of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from exl2chat.errors import ModelError
from exl2chat.model.config import ModelConfig, read_config
from exl2chat.model.folder import open_folder
from exl2chat.model.quant_config import QuantConfig

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 96,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2,
}  # fmt: skip

MIXED = {"head_dim": 16, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}


def arch(name: str) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}


def read(folder: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """BASE with `changes`, a value of `...` removing a field, as config.json and read."""
    table = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(table))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(open_folder(folder))


FAMILIES = {
    "llama": {},
    "llama without kv heads": {"num_key_value_heads": ...},
    "llama with head_dim": {"head_dim": 32},
    "mistral": arch("Mistral") | {"sliding_window": 1024},
    "mistral without window": arch("Mistral") | {"sliding_window": None},
    "qwen2": arch("Qwen2") | {"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 2},
    "qwen2 with window": arch("Qwen2") | {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2 silent": arch("Qwen2") | {"sliding_window": 512, "max_window_layers": 2},
    "qwen3 layer types": arch("Qwen3") | MIXED | {"use_sliding_window": True},
    "gemma2": arch("Gemma2")
    | {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 144, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2 layer types": arch("Gemma2") | MIXED | {"query_pre_attn_scalar": 24},
    "phi3": arch("Phi3") | {"sliding_window": 2047, "original_max_position_embeddings": 4096, "pad_token_id": 0},
    "many eos": {"eos_token_id": [2, 3, 5], "bos_token_id": 1, "pad_token_id": 0},
}  # fmt: skip


def windows_of(reference: Any) -> tuple[int | None, ...]:
    kinds = getattr(reference, "layer_types", None) or ["sliding_attention"] * reference.num_hidden_layers
    window = None if reference.model_type == "llama" else getattr(reference, "sliding_window", None)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_numbers_agree_with_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, changes)
    reference = AutoConfig.from_pretrained(tmp_path)
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == getattr(reference, "head_dim", reference.hidden_size // reference.num_attention_heads)
    assert config.context == reference.max_position_embeddings
    assert config.norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.windows == windows_of(reference)
    assert config.attention_scale == getattr(reference, "query_pre_attn_scalar", config.head_dim) ** -0.5
    eos = reference.eos_token_id
    assert config.eos_ids == set(eos if isinstance(eos, list) else [eos])
    for field, ours in (("bos_token_id", config.bos_id), ("pad_token_id", config.pad_id)):
        if field in changes:
            assert ours == getattr(reference, field)


def test_gemma_scales_and_caps(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30, "hidden_act": "silu"}
    config = read(tmp_path, arch("Gemma2") | caps | {"hidden_activation": "gelu_pytorch_tanh"})
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.embedding_scale == 96**0.5
    plain = read(tmp_path, {})
    assert (plain.attention_softcap, plain.logit_softcap, plain.embedding_scale) == (None, None, 1.0)


def test_eos_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": 2}, {"eos_token_id": [7, 9]}).eos_ids == {2, 7, 9}
    assert read(tmp_path, {"eos_token_id": [5, 2]}, {"eos_token_id": 1}).first_eos_id == 5
    assert read(tmp_path, {"eos_token_id": ...}, {"eos_token_id": 4}).eos_ids == {4}
    assert read(tmp_path, {"eos_token_id": None}, {}).eos_ids == frozenset()


def test_text_config_overrides_the_fields_around_it(tmp_path: Path) -> None:
    inner = {"hidden_size": 192, "vocab_size": 500, "eos_token_id": None} | arch("Mistral")
    config = read(tmp_path, {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner})
    assert (config.hidden_size, config.vocab_size, config.head_dim) == (192, 500, 32)
    assert config.arch.names == ("MistralForCausalLM",)
    assert config.eos_ids == {2}


def test_ids_of_minus_one_mean_none(tmp_path: Path) -> None:
    config = read(tmp_path, {"pad_token_id": -1, "bos_token_id": None})
    assert (config.pad_id, config.bos_id) == (None, None)


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        (None, {}),
        ({"transformers_version": "5", "max_length": 20}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": None},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
        ),
        ({"repetition_penalty": 1, "typical_p": 0.5}, {"repetition_penalty": 1.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
    ],
)  # fmt: skip
def test_sampling_defaults(generation: dict[str, Any] | None, sampling: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, {}, generation).sampling == sampling


@pytest.mark.parametrize("generation", [{"temperature": -1}, {"top_p": 2}, {"top_k": "40"}, {"min_p": True}])
def test_sampling_defaults_out_of_range_name_the_file(generation: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {next(iter(generation))}"):
        read(tmp_path, {}, generation)


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json"])
def test_gptq_figures_from_either_file(file: str, tmp_path: Path) -> None:
    table = {"quant_method": "gptq", "bits": 3, "group_size": 64, "checkpoint_format": "gptq_v2", "desc_act": False}
    if file == "quantize_config.json":
        (tmp_path / file).write_text(json.dumps(table))
    config = read(tmp_path, {"quantization_config": table} if file == "config.json" else {})
    assert config.quant == QuantConfig(3, 64, v2=True)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"quant_method": "exl2", "bits": 4.25}, QuantConfig()),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, QuantConfig(4, 0)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}}, QuantConfig()),
    ],
)
def test_quantization_config(table: dict[str, Any], expected: QuantConfig, tmp_path: Path) -> None:
    assert read(tmp_path, {"quantization_config": table}).quant == expected
