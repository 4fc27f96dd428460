"""Frequencies and attention factors of every kind of RoPE against transformers' own functions."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exl2chat.engine.rope import AT_ONCE, attention_factor, frequencies, make_table, table_bytes
from exl2chat.model.rope_config import Rope

HEAD_DIM, CONTEXT = 64, 4096
FACTORS = (tuple(1 + 0.1 * i for i in range(32)), tuple(1 + 0.7 * i for i in range(32)))
LONG = {"short_factor": list(FACTORS[0]), "long_factor": list(FACTORS[1]), "original_max_position_embeddings": 1024}

# name: (ours, what transformers is told, tokens in the cache)
KINDS: dict[str, tuple[Rope, dict[str, Any], int]] = {
    "linear": (Rope("linear", 1e4, 64, factor=4.0), {"rope_type": "linear", "factor": 4.0}, 100),
    "llama3": (
        Rope("llama3", 5e5, 64, factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        100,
    ),
    "yarn": (
        Rope("yarn", 1e6, 64, factor=4.0, original_context=1024),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        100,
    ),
    "yarn-mscale": (
        Rope("yarn", 1e4, 64, factor=40.0, original_context=1024, mscale=0.7, mscale_all_dim=1.0, beta_fast=20.0),
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 0.7,
         "mscale_all_dim": 1.0, "beta_fast": 20.0},
        100,
    ),
    "yarn-untruncated": (
        Rope("yarn", 1e4, 64, factor=4.0, original_context=1024, attention_factor=1.3, truncate=False),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3,
         "truncate": False},
        100,
    ),
    "longrope-short": (
        Rope("longrope", 1e4, 64, factor=4.0, original_context=1024, factors=FACTORS),
        {"rope_type": "longrope", "factor": 4.0, **LONG},
        1024,
    ),
    "longrope-long": (
        Rope("longrope", 1e4, 64, factor=4.0, original_context=1024, factors=FACTORS),
        {"rope_type": "longrope", "factor": 4.0, **LONG},
        1025,
    ),
}  # fmt: skip


def theirs(rope: Rope, told: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": rope.theta, **told},
    )
    return ROPE_INIT_FUNCTIONS[told["rope_type"]](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("name", KINDS)
def test_matches_transformers(name: str) -> None:
    rope, told, length = KINDS[name]
    expected, factor = theirs(rope, told, length)
    torch.testing.assert_close(frequencies(rope, length).float(), expected, rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-6)


def test_ntk_is_what_transformers_makes_of_a_longer_sequence() -> None:
    """Its dynamic kind at twice the context and factor 2 stretches theta by alpha 3."""
    rope = Rope("ntk", 1e4, 64, factor=3.0)
    expected, factor = theirs(rope, {"rope_type": "dynamic", "factor": 2.0}, 2 * CONTEXT)
    torch.testing.assert_close(frequencies(rope, 100).float(), expected, rtol=2e-6, atol=0)
    assert attention_factor(rope) == factor == 1.0


def test_default_turns_the_first_pair_by_a_radian_per_token() -> None:
    spread = frequencies(Rope("default", 1e4, 8), 10)
    torch.testing.assert_close(spread, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))


def test_a_long_table_is_made_of_parts_that_hold_every_position() -> None:
    rope, positions = Rope("default", 1e4, 8), torch.arange(2 * AT_ONCE + 3).flip(0)
    cos, sin = make_table(rope, positions, torch.device("cpu"))
    angles = torch.outer(positions.double(), frequencies(rope, len(positions)))
    for table, halves in ((cos, (angles.cos(), angles.cos())), (sin, (-angles.sin(), angles.sin()))):
        torch.testing.assert_close(table[:, 0].double(), torch.stack(halves, 1), rtol=0, atol=1e-7)
    assert cos.nbytes + sin.nbytes == table_bytes(rope, len(positions))


def test_the_table_holds_rotations_scaled_by_the_attention_factor() -> None:
    rope = Rope("yarn", 1e4, 8, factor=4.0, original_context=1024)
    cos, sin = (table[999:] for table in make_table(rope, torch.arange(1000), torch.device("cpu")))
    assert cos.shape == sin.shape == (1, 1, 2, 4)
    angles = 999 * frequencies(rope, 1000)
    scale = 0.1 * math.log(4) + 1
    torch.testing.assert_close(cos[0, 0, 1].double(), angles.cos() * scale, rtol=0, atol=1e-7)
    torch.testing.assert_close(
        sin[0, 0].double(), torch.stack((-angles.sin(), angles.sin())) * scale, rtol=0, atol=1e-7
    )
