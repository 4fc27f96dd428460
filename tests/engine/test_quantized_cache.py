"""Models over caches of 8, 6 and 4 bits on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2chat.engine import placement
from exl2chat.engine.cache import BITS, cache_bytes
from exl2chat.engine.rope import table_bytes
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ModelError
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.ops import cache_decode, reference
from exl2chat.progress import silent
from exl2chat.settings import CACHES

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parent.parent / "data" / "golden"
QUANTIZED = ("q8", "q6", "q4")


@pytest.fixture(scope="module", params=["llama-6.0bpw-exl2", "gemma2-4.0bpw-exl2"])
def model(request: pytest.FixtureRequest) -> Transformer:
    """gemma2 has windows, a soft cap and heads of another size."""
    return Transformer.load(open_checkpoint(GOLDEN / request.param), CPU, torch.float32, silent)


def logits(model: Transformer, cache: str, chunks: list[int]) -> torch.Tensor:
    ids = torch.randint(model.config.vocab_size, (sum(chunks),), generator=torch.Generator().manual_seed(1))
    model = replace(model, cache_bits=BITS[cache])
    memory = model.new_cache(300)
    memory.storage.view(torch.uint8).fill_(255)  # nothing that is not written may matter
    return torch.cat([model.forward(part, memory) for part in ids.split(chunks)])


def test_every_word_of_the_setting_is_a_width() -> None:
    assert tuple(BITS) == CACHES


def test_fewer_bits_are_a_larger_error(model: Transformer) -> None:
    truth = logits(model, "fp16", [290])
    errors = [(logits(model, cache, [290]) - truth).norm() / truth.norm() for cache in QUANTIZED]
    assert 0 < errors[0] < 0.02
    assert errors[0] < errors[1] < errors[2] < 0.5


@pytest.mark.parametrize("cache", QUANTIZED)
def test_chunks_are_one_prompt(model: Transformer, cache: str) -> None:
    """What one step writes the next ones read as it was: across tiles of 16 tokens and a page of 256."""
    whole = logits(model, cache, [283])
    parts = logits(model, cache, [15, 1, 1, 16, 200, 40, *[1] * 10])
    # a key on the edge between two codes may be rounded otherwise by another order of sums
    assert (parts - whole).norm() / whole.norm() < (1e-3 if cache == "q8" else 2e-2)


def test_no_more_is_decoded_at_once_than_was_planned(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter how many heads at a time."""
    together = logits(model, "q6", [200, 1])
    limit, largest = 200 * model.config.head_dim, 0

    def watched(*args: Any) -> torch.Tensor:
        nonlocal largest
        found = cache_decode.decode(*args)
        largest = max(largest, found.numel())
        return found

    monkeypatch.setattr(reference, "AT_ONCE", limit)
    monkeypatch.setattr(reference, "decode", watched)
    torch.testing.assert_close(logits(model, "q6", [200, 1]), together, rtol=1e-4, atol=1e-4)
    assert largest == 201 * model.config.head_dim


def test_what_is_decoded_is_part_of_the_workspace() -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-6.0bpw-exl2")
    plain, long = (
        placement.copy_bytes(placement.candidate(checkpoint, CPU, torch.float32, bits), CPU, 1 << 20)
        for bits in (16, 4)
    )
    assert (plain, long) == (0, (1 << 20) * checkpoint.config.head_dim * cache_decode.BYTES_PER_NUMBER)


@pytest.mark.parametrize(("cache", "bits"), [("q8", 8.5), ("q6", 6.5), ("q4", 4.5)])
def test_the_bytes_are_those_of_the_format(cache: str, bits: float) -> None:
    config = open_checkpoint(GOLDEN / "llama-6.0bpw-exl2").config
    assert config.head_dim % 32 == 0
    values = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    rotations = table_bytes(config.rope, 1024)
    assert cache_bytes(config, 1024, CPU, torch.float32, BITS[cache]) == values * 1024 * bits / 8 + rotations


def test_a_plan_counts_the_bytes_of_its_cache() -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-6.0bpw-exl2")
    plain, small = (
        placement.plan_memory(placement.candidate(checkpoint, CPU, torch.float32, bits), CPU, torch.float32, 256).cache
        for bits in (16, 4)
    )
    assert small == cache_bytes(checkpoint.config, 256, CPU, torch.float32, 4)
    rotations = table_bytes(checkpoint.config.rope, 256)
    assert small - rotations == (plain - rotations) * 4.5 / 32


def test_heads_that_do_not_fit_the_format_are_named() -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-6.0bpw-exl2")
    odd = replace(checkpoint, config=replace(checkpoint.config, head_dim=100))
    with pytest.raises(ModelError, match="heads of 100 numbers cannot be kept in 4 bits"):
        placement.candidate(odd, CPU, torch.float32, 4)
