"""Every RoPE spelling: the tables that the record's formulas give are those of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exl2chat.errors import ModelError
from exl2chat.model.config import read_config
from exl2chat.model.folder import open_folder
from exl2chat.model.rope_config import Rope
from tests.model.test_model_config import BASE, MIXED, arch

LONG = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


def frequencies(rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """(inverse frequencies [rotary_dim / 2], factor on cos and sin), as the docstring of Rope says."""
    exponent = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    plain = rope.theta**-exponent
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        waves = rope.original_context * plain / (2 * math.pi)  # turns within the original context
        share = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = np.clip(share, 0, 1)
        return (1 - share) * plain / rope.factor + share * plain, 1.0
    if rope.kind == "yarn":
        return yarn(rope, plain)
    if rope.kind == "longrope":
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context)) if rope.factor > 1 else 1.0
        return plain / rope.factors[length > rope.original_context], rope.attention_factor or scale
    return plain, 1.0


def yarn(rope: Rope, plain: np.ndarray) -> tuple[np.ndarray, float]:
    def dimension(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / max(high - low, 0.001), 0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        magnified = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        magnified = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    else:
        magnified = magnitude(1)
    return plain / rope.factor * ramp + plain * (1 - ramp), magnified


def read(folder: Path, changes: dict[str, Any]) -> Rope:
    table = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(table))
    return read_config(open_folder(folder)).rope


def new_form(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0} | parameters}


SPELLINGS = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear, both words": {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
    "linear, new form": new_form({"rope_type": "linear", "factor": 2.5}),
    "linear, half the head": {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3"} | LLAMA3},
    "llama3, new form": new_form({"rope_type": "llama3"} | LLAMA3),
    "yarn": {"rope_scaling": {"type": "yarn"} | YARN},
    "yarn, new form": new_form({"rope_type": "yarn"} | YARN),
    "yarn, no original": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "yarn, untruncated": {"rope_scaling": {"rope_type": "yarn", "truncate": False} | YARN},
    "yarn, betas": {"rope_scaling": {"rope_type": "yarn", "beta_fast": 16, "beta_slow": 2.0} | YARN},
    "yarn, attention factor": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.5} | YARN},
    "yarn, mscale": {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3} | YARN},
    "yarn, factor from lengths": {"rope_scaling": {"rope_type": "yarn"} | YARN | {"factor": None}},
    "longrope": arch("Phi3")
    | {"pad_token_id": 0, "original_max_position_embeddings": 512, "rope_scaling": {"type": "longrope"} | LONG},
    "longrope, new form": arch("Phi3")
    | {"pad_token_id": 0, "original_max_position_embeddings": 512} | new_form({"rope_type": "longrope"} | LONG),
    "longrope, factors given": {
        "rope_scaling": {
            "rope_type": "longrope", "factor": 32.0, "attention_factor": 1.2, "original_max_position_embeddings": 128,
        } | LONG,
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("length", [16, 4096])
def test_frequencies_agree_with_transformers(changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    rope = read(tmp_path, changes)
    reference = AutoConfig.from_pretrained(tmp_path)
    function = ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]]
    expected, magnified = function(reference, "cpu", seq_len=length)
    ours, factor = frequencies(rope, length)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(magnified)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        new_form({"rope_type": "default"}),
        {"rope_parameters": {key: {"rope_theta": 5000.0} for key in MIXED["layer_types"]}},
        {"rope_scaling": {"type": "dynamic", "factor": 8.0}},  # stretches beyond the context only
    ],
)  # fmt: skip
def test_default(changes: dict[str, Any], tmp_path: Path) -> None:
    rope = read(tmp_path, changes)
    theta = 5000.0 if changes.get("rope_parameters") else 10000.0
    assert (rope.kind, rope.theta, rope.rotary_dim, rope.factor) == ("default", theta, 16, 1.0)


@pytest.mark.parametrize("kind", ["ntk", "dynamic"])
def test_ntk_alpha(kind: str, tmp_path: Path) -> None:
    rope = read(tmp_path, {"rope_scaling": {"type": kind, "alpha": 2.5}})
    assert (rope.kind, rope.factor) == ("ntk", 2.5)


def test_su_is_longrope_s_first_name(tmp_path: Path) -> None:
    assert read(tmp_path, {"rope_scaling": {"type": "su"} | LONG}).kind == "longrope"


def test_partial_rotation_by_either_place(tmp_path: Path) -> None:
    assert read(tmp_path, {"partial_rotary_factor": 0.25}).rotary_dim == 4
    assert read(tmp_path, new_form({"partial_rotary_factor": 0.5})).rotary_dim == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 0.0}, "rotates 0 of 16"),
        ({"partial_rotary_factor": 0.2}, "rotates 3 of 16"),
        ({"rope_scaling": [4.0]}, "rope_scaling"),
        ({"rope_scaling": {"type": "mrope"}}, "type is 'mrope'"),
        ({"rope_scaling": {"type": ["linear"]}}, "type is"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
        ({"rope_scaling": {"type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": 0.5}}, "original_max"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"truncate": 1}}, "truncate is 1"),
        ({"rope_scaling": {"type": "yarn"} | YARN | {"beta_fast": "32"}}, "beta_fast"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing"),
        ({"rope_scaling": {"type": "longrope"} | LONG | {"long_factor": [1.0] * 7}}, "long_factor"),
        ({"rope_scaling": {"type": "longrope"} | LONG | {"short_factor": [0.0] * 8}}, "short_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}, "sliding_attention": {"rope_theta": 2}}}, "differs"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}, "sliding_attention": None}}, "differs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: .*{says}"):
        read(tmp_path, changes)
