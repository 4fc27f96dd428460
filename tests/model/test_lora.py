"""LoRA folders: what is read from them, and one clear line for each that is damaged or beyond what we apply."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exl2chat.errors import ModelError
from exl2chat.model.config import ModelConfig, read_config
from exl2chat.model.folder import open_folder
from exl2chat.model.lora import REFUSED, open_lora
from exl2chat.model.tensors import read_array
from tests.model.lora_files import RANK, make_lora
from tests.model.model_files import GOLDEN, PLAIN, edit_json, read_header, write_raw
from tests.model.test_model_fuzz import VALUES, check_refusal

CONFIG = read_config(open_folder(GOLDEN / PLAIN))
HIDDEN, INNER = CONFIG.hidden_size, CONFIG.intermediate_size
QUERIES, KEYS = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
Q = "model.layers.0.self_attn.q_proj"
SHAPES = {Q: (QUERIES, HIDDEN), "model.layers.1.mlp.down_proj": (HIDDEN, INNER), "lm_head": (CONFIG.vocab_size, HIDDEN)}
Edit = Callable[[dict[str, np.ndarray]], None]


def lora(folder: Path, shapes: dict[str, tuple[int, int]] = SHAPES, **config: Any) -> Path:
    make_lora(folder, shapes, **config)
    return folder


def edit(folder: Path, change: Edit) -> None:
    """Rewrites the weights after `change` was let loose on them."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, file)


def test_every_projection_finds_its_place(tmp_path: Path) -> None:
    shapes = {
        Q: (QUERIES, HIDDEN), "model.layers.0.self_attn.k_proj": (KEYS, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KEYS, HIDDEN), "model.layers.0.self_attn.o_proj": (HIDDEN, QUERIES),
        "model.layers.1.self_attn.qkv_proj": (QUERIES + 2 * KEYS, HIDDEN),
        "model.layers.0.mlp.gate_proj": (INNER, HIDDEN), "model.layers.0.mlp.up_proj": (INNER, HIDDEN),
        "model.layers.1.mlp.gate_up_proj": (2 * INNER, HIDDEN), "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
        "lm_head": (CONFIG.vocab_size, HIDDEN),
    }  # fmt: skip
    updates = open_lora(lora(tmp_path, shapes), CONFIG).updates
    places = {(update.layer, update.slot.place, update.slot.start) for update in updates}
    assert places == {
        (0, "qkv", 0), (0, "qkv", QUERIES), (0, "qkv", QUERIES + KEYS), (0, "o", 0), (1, "qkv", 0),
        (0, "gate_up", 0), (0, "gate_up", INNER), (1, "gate_up", 0), (0, "down", 0), (None, "head", 0),
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_models_within_others_are_found(prefix: str, tmp_path: Path) -> None:
    shapes = {f"{prefix}layers.1.self_attn.q_proj": SHAPES[Q], "language_model.lm_head": SHAPES["lm_head"]}
    assert {u.layer for u in open_lora(lora(tmp_path, shapes), CONFIG).updates} == {1, None}


def test_other_files_beside_the_weights_are_not_read(tmp_path: Path) -> None:
    lora(tmp_path)
    for name in ("adapter_model.bin", "optimizer.pt", "other.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(b"no such thing")
    assert len(open_lora(tmp_path, CONFIG).updates) == 3


# Beyond what we apply: (fields, what the message says)
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "LOHA"}, "peft_type is 'LOHA', not LORA"),
    "no method": ({"peft_type": ...}, "peft_type is missing"),
    "trained biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "bias of no kind": ({"bias": 1}, "bias is 1, not text"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    "unhashable start": ({"init_lora_weights": [1]}, r"init_lora_weights is \[1\]"),
    "rank 0": ({"r": 0}, "r is 0, not a whole number from 1"),
    "rank of text": ({"r": "8"}, "r is '8'"),
    "alpha of text": ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    "huge alpha": ({"lora_alpha": 1e300}, "lora_alpha is 1e"),
    "rslora of text": ({"use_rslora": "yes"}, "use_rslora is 'yes', not true or false"),
    "patterns of no kind": ({"alpha_pattern": [1]}, "alpha_pattern is .*not a table"),
    "an expression": ({"alpha_pattern": {"(a+)+b": 1}}, r"alpha_pattern: '\(a\+\)\+b' is not the name of a module"),
    "alpha of a pattern": ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern: q_proj is missing"),
    "half a rank": ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern: q_proj is 2.5"),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj is 0"),
    "another rank": ({"r": 7}, r"has shape \[3, "),
    "another rank of a pattern": ({"rank_pattern": {"q_proj": 9}}, r"has shape \[3, "),
}
SET: dict[str, Any] = {"modules_to_save": ["embed_tokens"], "layer_replication": [[0, 2]], "target_parameters": ["x"]}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_wrong_or_says_more_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = CONFIGS[case]
    lora(tmp_path)
    edit_json(tmp_path, changes, "adapter_config.json")
    with pytest.raises(ModelError, match=rf"adapter_.*{message}") as caught:
        open_lora(tmp_path, CONFIG)
    assert caught.value.remedy


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_more_than_a_lora_does_is_named(name: str, tmp_path: Path) -> None:
    for unset in (None, False, []):
        open_lora(lora(tmp_path, **{name: unset}), CONFIG)
    with pytest.raises(ModelError, match=f"adapter_config.json: {name} is .* not supported"):
        open_lora(lora(tmp_path, **{name: SET.get(name, True)}), CONFIG)


@pytest.mark.parametrize("start", [None, True, False, "gaussian", "eva", "orthogonal"])
def test_a_start_that_leaves_the_model_alone_is_fine(start: object, tmp_path: Path) -> None:
    assert open_lora(lora(tmp_path, init_lora_weights=start), CONFIG).updates


def test_defaults_are_those_of_peft(tmp_path: Path) -> None:
    lora(tmp_path, {Q: SHAPES[Q]}, ranks={Q: 8})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert open_lora(tmp_path, CONFIG).updates[0].scale == 1


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


def rename(old: str, new: str) -> Edit:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def module(name: str) -> Edit:
    """The projection Q under another name."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for side in (A, B):
            tensors[side.replace(Q, name)] = tensors.pop(side)

    return change


TENSORS: dict[str, tuple[Edit, str]] = {
    "no B": (lambda t: t.pop(B), "lora_A.weight has no counterpart"),
    "no A": (lambda t: t.pop(A), "lora_B.weight has no counterpart"),
    "nothing": (dict.clear, "holds no tensors"),
    "a full weight": (rename(A, f"base_model.model.{Q}.weight"), "is not of a LoRA of linear layers"),
    "an embedding": (
        rename(A, "base_model.model.model.embed_tokens.lora_embedding_A"), "lora_embedding_A is not of a LoRA of linear"
    ),
    "a magnitude": (rename(A, f"base_model.model.{Q}.lora_magnitude_vector"), "is not of a LoRA of linear layers"),
    "no prefix": (rename(A, f"{Q}.lora_A.weight"), "is not of a LoRA of linear layers"),
    "an expert": (module("model.layers.0.mlp.experts.3.up_proj"), "cannot be changed; only q_proj, .* and lm_head can"),
    "a norm": (module("model.layers.0.input_layernorm"), "cannot be changed"),
    "a layer too many": (module("model.layers.2.self_attn.q_proj"), "the model has only 2 layers"),
    "a layer written otherwise": (module("model.layers.00.self_attn.q_proj"), "cannot be changed"),
    "another hidden size": (lambda t: t.update({A: t[A][:, 1:]}), rf"lora_A.weight has shape \[3, {HIDDEN - 1}\]"),
    "another width": (lambda t: t.update({B: t[B][1:]}), rf"lora_B.weight has shape \[{QUERIES - 1}, 3\]"),
    "swapped sides": (lambda t: t.update({A: t[B], B: t[A]}), r"has shape"),
    "flat": (lambda t: t.update({A: t[A].ravel()}), rf"has shape \[{RANK * HIDDEN}\], not \[3, {HIDDEN}\]"),
    "integers": (lambda t: t.update({A: t[A].astype(np.int32)}), "is I32, not BF16 or F16 or F32"),
    "doubles": (lambda t: t.update({A: t[A].astype(np.float64)}), "is F64, not BF16 or F16 or F32"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_fit_no_projection_are_refused(case: str, tmp_path: Path) -> None:
    change, message = TENSORS[case]
    edit(lora(tmp_path), change)
    with pytest.raises(ModelError, match=rf"adapter_model.safetensors.*{message}") as caught:
        open_lora(tmp_path, CONFIG)
    assert caught.value.remedy


FIELDS: dict[str, Any] = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": 4, "use_rslora": True, "bias": "none", "init_lora_weights": True,
    "rank_pattern": {}, "alpha_pattern": {Q: 2},
}  # fmt: skip


@pytest.mark.parametrize("field", [*FIELDS, *REFUSED])
def test_a_field_of_anything_is_read_or_refused(field: str, tmp_path: Path) -> None:
    lora(tmp_path, **FIELDS)
    assert not is_refused(tmp_path)
    refused = []
    for value in VALUES:
        edit_json(tmp_path, {**FIELDS, field: value}, "adapter_config.json")
        refused.append(is_refused(tmp_path))
    assert any(refused)


def test_flipped_bytes_are_read_within_bounds_or_refused(tmp_path: Path) -> None:
    file = lora(tmp_path) / "adapter_model.safetensors"
    good, chance = file.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for _ in range(150):
        damaged = bytearray(good)
        damaged[chance.randrange(2 * header)] = chance.randrange(256)  # half of them in the values
        file.write_bytes(damaged)
        refused += is_refused(tmp_path)
    assert 50 < refused < 100


def is_refused(folder: Path) -> bool:
    """Whether the LoRA is refused, which must be in one line that names the folder."""
    try:
        for update in open_lora(folder, CONFIG).updates:
            read_array(update.a)
            assert math.isfinite(update.scale)
        return False
    except ModelError as fault:
        return check_refusal(fault, folder)


def test_a_lora_for_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    other: ModelConfig = replace(CONFIG, hidden_size=HIDDEN * 2)
    with pytest.raises(ModelError, match="has shape") as caught:
        open_lora(lora(tmp_path), other)
    assert "the model that it was made for" in caught.value.remedy


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    file = lora(tmp_path) / "adapter_model.safetensors"
    whole = file.read_bytes()
    for data in (b"", whole[:100], whole[:-1], whole + b"\0"):
        file.write_bytes(data)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            open_lora(tmp_path, CONFIG)
    file.write_bytes(whole)
    header, data = read_header(file)
    header[A]["shape"] = [1 << 40, HIDDEN]
    write_raw(file, json.dumps(header).encode(), data)
    with pytest.raises(ModelError, match=r"lora_A\.weight of F32"):
        open_lora(tmp_path, CONFIG)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_a_folder_lacks_is_named(missing: str, tmp_path: Path) -> None:
    (lora(tmp_path) / missing).unlink()
    with pytest.raises(ModelError, match=f"there is no {missing}"):
        open_lora(tmp_path, CONFIG)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (lora(tmp_path) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        open_lora(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("name", "says"), [("nowhere", "No such file"), ("file", "Not a dir"), ("a" * 300, "too long")]
)
def test_a_folder_that_is_none_is_named(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=f"{name}: .*{says}") as fault:
        open_lora(tmp_path / name, CONFIG)
    assert "adapter_config.json" in fault.value.remedy


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = lora(tmp_path / "lora")
    (folder / "adapter_model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelError, match="leads out of the model's folder"):
        open_lora(folder, CONFIG)
