"""A folder as one description: every layout that real files come in."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exl2chat.model.checkpoint import PREFIXES, open_checkpoint
from exl2chat.model.dequant import dequantize
from exl2chat.model.tensors import read_array
from tests.model.model_files import (
    EXL2,
    GOLDEN,
    GPTQ,
    PLAIN,
    Tensors,
    copy_golden,
    edit_json,
    edit_tensors,
    read_header,
    weights,
    weights_name,
)

LABELS = {
    "gemma2-4.0bpw-exl2": "EXL2 3.95 bpw", "llama-3.0bpw-exl2": "EXL2 2.99 bpw", "llama-6.0bpw-exl2": "EXL2 5.97 bpw",
    "llama-fp16": "FP16", "llama-gptq4-g128-actorder-sym": "GPTQ 4-bit", "llama-gptq4-g128-asym": "GPTQ 4-bit",
    "mistral-4.0bpw-exl2": "EXL2 4.00 bpw", "phi3-4.0bpw-exl2": "EXL2 4.00 bpw", "qwen2-4.0bpw-exl2": "EXL2 3.99 bpw",
}  # fmt: skip
LAYER = "model.layers.0."


def test_every_golden_model_is_listed() -> None:
    assert sorted(LABELS) == sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("name", LABELS)
def test_golden_models_open(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    assert checkpoint.quantization == LABELS[name]
    assert len(checkpoint.layers) == checkpoint.config.num_layers == len(checkpoint.config.windows) == 2
    for layer in checkpoint.layers:
        assert [len(layer.qkv), len(layer.gate_up)] == [3, 2]
        assert ("mlp_post" in layer.norms) == name.startswith("gemma2")
        assert ("bias" in layer.qkv[0].tensors) == name.startswith("qwen2")
    assert checkpoint.head.key == "lm_head"


def test_a_snapshot_of_the_hub_s_cache_made_of_links_loads_by_a_link_to_it_too(tmp_path: Path) -> None:
    snapshot, blobs = (tmp_path / "models--org--small" / part for part in ("snapshots/0123abcd", "blobs"))
    shutil.copytree(GOLDEN / EXL2, blobs)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
        file.rename(blobs / f"{number:040x}")
    (tmp_path / "mine").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "mine"):
        down, same = (open_checkpoint(folder).layers[0].down for folder in (path, GOLDEN / EXL2))
        np.testing.assert_array_equal(dequantize(down), dequantize(same))


@pytest.mark.parametrize("name", [EXL2, PLAIN])
def test_weight_bytes_are_those_of_the_file(name: str) -> None:
    data = read_header(GOLDEN / name / weights_name(name))[1]
    assert open_checkpoint(GOLDEN / name).weight_bytes == len(data)


def fuse(tensors: Tensors) -> None:
    for module, fused, parts in (("self_attn", "qkv_proj", "qkv"), ("mlp", "gate_up_proj", ("gate", "up"))):
        for layer in range(2):
            prefix = f"model.layers.{layer}.{module}."
            parted = [tensors.pop(f"{prefix}{part}_proj.weight") for part in parts]
            tensors[f"{prefix}{fused}.weight"] = np.concatenate(parted)


def test_fused_projections_load_for_any_architecture(tmp_path: Path) -> None:
    folder = copy_golden(PLAIN, tmp_path)
    edit_tensors(folder, fuse)
    parted, fused = open_checkpoint(GOLDEN / PLAIN).layers[0], open_checkpoint(folder).layers[0]
    assert [len(fused.qkv), len(fused.gate_up)] == [1, 1]
    for whole, parts in ((fused.qkv, parted.qkv), (fused.gate_up, parted.gate_up)):
        expected = np.concatenate([dequantize(part) for part in parts], axis=1)
        np.testing.assert_array_equal(dequantize(whole[0]), expected)


@pytest.mark.parametrize("form", ["per head dimension", "per head", "flat"])
def test_head_norms_in_every_form(form: str, tmp_path: Path) -> None:
    shapes = {"per head dimension": [(64,), (64,)], "per head": [(4, 64), (2, 64)], "flat": [(256,), (128,)]}[form]
    folder = copy_golden(EXL2, tmp_path)

    def add(tensors: Tensors) -> None:
        for layer in range(2):
            for name, shape in zip("qk", shapes, strict=True):
                tensors[f"model.layers.{layer}.self_attn.{name}_norm.weight"] = np.ones(shape, np.float16)

    edit_tensors(folder, add)
    norms = open_checkpoint(folder).layers[1].norms
    assert [norms["q"].shape, norms["k"].shape] == shapes


@pytest.mark.parametrize("stated", [True, ...], ids=["stated", "silent"])
def test_a_tied_head_lies_over_the_embedding_and_counts_once(stated: object, tmp_path: Path) -> None:
    folder = copy_golden(PLAIN, tmp_path)
    edit_json(folder, {"tie_word_embeddings": stated})
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.head.tensors == {"weight": checkpoint.embedding}
    assert checkpoint.weight_bytes == len(read_header(weights(folder))[1])


def test_a_head_of_its_own_wins_over_a_tied_one(tmp_path: Path) -> None:
    folder = copy_golden(EXL2, tmp_path)
    edit_json(folder, {"tie_word_embeddings": True})
    assert open_checkpoint(folder).head.kind == "exl2"


def test_an_exl2_head_may_be_wider_than_the_vocabulary(tmp_path: Path) -> None:
    folder = copy_golden(EXL2, tmp_path)
    edit_json(folder, {"vocab_size": 1001})
    embedding = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({embedding: tensors[embedding][:1001]}))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.config.vocab_size, checkpoint.head.out_features) == (1001, 1024)


@pytest.mark.parametrize("prefix", PREFIXES[1:])
def test_the_text_half_of_a_multimodal_checkpoint(prefix: str, tmp_path: Path) -> None:
    folder = copy_golden(EXL2, tmp_path)
    tensors = load_file(weights(folder))
    head = "language_model.lm_head" if prefix.startswith("language_model.") else "lm_head"
    moved = {name.replace("model.", prefix, 1).replace("lm_head", head): value for name, value in tensors.items()}
    save_file(moved, weights(folder))
    assert open_checkpoint(folder).layers[1].down.key == f"{prefix}layers.1.mlp.down_proj"


def test_a_bias_of_zeros_is_left_out_and_any_other_kept(tmp_path: Path) -> None:
    folder = copy_golden(GPTQ, tmp_path)
    some = np.linspace(0, 1, 256).astype(np.float16)
    biases = {f"{LAYER}self_attn.q_proj.bias": some * 0, f"{LAYER}self_attn.o_proj.bias": some}
    edit_tensors(folder, lambda tensors: tensors.update(biases))
    layer = open_checkpoint(folder).layers[0]
    assert "bias" not in layer.qkv[0].tensors
    np.testing.assert_array_equal(read_array(layer.o.tensors["bias"]), some)


def test_formats_mix_within_a_model_and_other_tensors_are_ignored(tmp_path: Path) -> None:
    folder = copy_golden(EXL2, tmp_path)
    plain = load_file(GOLDEN / PLAIN / "model.safetensors")

    def mix(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(f"{LAYER}mlp.down_proj.")]:
            del tensors[name]
        tensors[f"{LAYER}mlp.down_proj.weight"] = plain[f"{LAYER}mlp.down_proj.weight"]
        tensors[f"{LAYER}self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)
        tensors[f"{LAYER}self_attn.q_proj.q_perm"] = np.zeros(256, np.int16)  # derived, and never read

    edit_tensors(folder, mix)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layers[0].down.kind == "plain"
    assert checkpoint.quantization == "EXL2 2.95 bpw + FP16"


def test_sharded_checkpoints_open(tmp_path: Path) -> None:
    folder = copy_golden(EXL2, tmp_path)
    tensors = load_file(weights(folder))
    weights(folder).unlink()
    names = sorted(tensors)
    for shard in range(2):
        part = {name: tensors[name] for name in names[shard::2]}  # one linear's tensors land in both shards
        save_file(part, folder / f"output-{shard + 1:05}-of-00002.safetensors")
    down = open_checkpoint(folder).layers[0].down
    np.testing.assert_array_equal(dequantize(down), dequantize(open_checkpoint(GOLDEN / EXL2).layers[0].down))
