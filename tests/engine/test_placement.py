"""Choices made before loading."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl2chat.engine import placement
from exl2chat.engine.cache import KVCache, cache_bytes
from exl2chat.engine.shapes import SHAPES
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ModelError
from exl2chat.model.checkpoint import Checkpoint, open_checkpoint
from exl2chat.progress import silent

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CPU = torch.device("cpu")


def checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(GOLDEN / name)


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert placement.choose_device("auto").type == device
        assert placement.choose_device("cpu").type == "cpu"


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError) as caught:
        placement.choose_device("cuda")
    assert "--device cpu" in caught.value.remedy


def test_auto_is_the_fastest_dtype_that_is_accurate_enough() -> None:
    assert placement.choose_dtype("auto", CPU) == torch.bfloat16
    assert placement.choose_dtype("auto", torch.device("cuda")) == torch.float16
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert placement.choose_dtype(str(dtype).removeprefix("torch."), CPU) == dtype


@pytest.mark.parametrize("name", ["llama-3.0bpw-exl2", "gemma2-4.0bpw-exl2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_estimate_covers_what_is_then_used(name: str, dtype: torch.dtype) -> None:
    model = Transformer.load(checkpoint(name), CPU, dtype, silent)
    largest = 2 * 512 * 256 * 4
    assert model.weight_bytes <= placement.weight_bytes(checkpoint(name), dtype) <= model.weight_bytes + largest
    assert cache_bytes(model.config, 1000, CPU, dtype) == model.new_cache(1000).nbytes


MIB = 1 << 20
TOKEN = 2048 + 512  # bytes in the cache of the smallest golden checkpoint: keys and values, and its rotations


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., placement.Budget]:
    """The budget of the smallest golden checkpoint where `beside` bytes are free beside weights and workspace."""
    small = checkpoint("llama-3.0bpw-exl2")
    model = placement.candidate(small, CPU, torch.float16)
    fixed = model.weights + placement.workspace_bytes(small.config, CPU)

    def make(beside: int, asked: int | None = None, reusable: int = 0) -> placement.Budget:
        monkeypatch.setattr(placement, "free_bytes", lambda _: fixed + beside)
        return placement.plan_memory(model, CPU, torch.float16, asked, reusable)

    return make


def test_the_default_context_is_what_the_model_was_made_for_if_that_fits(plan: Callable[..., placement.Budget]) -> None:
    budget = plan(2048 * TOKEN)
    assert (budget.context, budget.cache, budget.note, budget.fits) == (2048, 2048 * TOKEN, "", True)
    assert str(budget) == "16 of 16 MiB (4 weights, 5 cache, 7 workspace)"
    large = replace(budget, weights=5 << 30, cache=1 << 30, free=1 << 40)
    assert str(large) == "6.0 of 1,024.0 GiB (5.0 weights, 1.0 cache, 0.0 workspace)"


def test_a_context_nobody_asked_for_shrinks_to_whole_pages_that_fit_and_says_so(
    plan: Callable[..., placement.Budget],
) -> None:
    budget = plan(1536 * TOKEN + 1000)
    assert (budget.context, budget.cache, budget.fits) == (1536, 1536 * TOKEN, True)
    assert "1536 tokens: with 2048" in budget.note
    assert plan(1536 * TOKEN, reusable=512 * TOKEN).context == 2048


def test_what_does_not_fit_is_refused_with_the_sum_and_with_what_would(plan: Callable[..., placement.Budget]) -> None:
    parts = r"0\.0 GiB of weights, 0\.0 GiB of cache for 2048 tokens and 0\.0 GiB of workspace do not fit 0\.0 GiB"
    with pytest.raises(ModelError, match=parts) as caught:
        plan(1536 * TOKEN, asked=2048)
    assert "--ctx 1536 would fit, or more with --cache q4;" in caught.value.remedy
    with pytest.raises(ModelError, match=parts) as caught:
        plan(-1)
    assert "--ctx" not in caught.value.remedy
    with pytest.raises(ModelError):  # a page or two would fit, but nobody can chat in them
        plan(512 * TOKEN)
    assert plan(512 * TOKEN, asked=512).context == 512


def test_the_copy_of_a_quantised_cache_is_part_of_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, config = torch.device("cuda"), SHAPES["llama-8b"].config()
    monkeypatch.setattr(placement, "free_bytes", lambda _: 1 << 40)

    def workspace(bits: int, context: int) -> int:
        return placement.plan_memory(placement.Candidate("", config, 0, bits), cuda, torch.float16, context).workspace

    plain = workspace(16, 8192)
    assert workspace(16, 131072) == plain
    assert workspace(4, 8192) == plain + 2 * 8 * 128 * 8192 * 2  # keys and values, 8 groups of 128, float16
    assert workspace(4, 131072) == plain + (256 << 20)


def test_fewer_bits_are_advised_only_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    small = checkpoint("llama-3.0bpw-exl2")
    for bits, advised in ((16, True), (8, True), (4, False)):
        model = placement.candidate(small, CPU, torch.float16, bits)
        page = model.cache_bytes(256, CPU, torch.float16)
        workspace = placement.workspace_bytes(model.config, CPU) + placement.copy_bytes(model, CPU, 256)
        monkeypatch.setattr(placement, "free_bytes", lambda _, free=model.weights + workspace + page: free)
        with pytest.raises(ModelError) as caught:
            placement.plan_memory(model, CPU, torch.float16, 2048)
        assert "--ctx 256" in caught.value.remedy
        assert ("--cache q4" in caught.value.remedy) == advised


def test_a_cache_that_is_packed_already_is_not_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model = placement.candidate(checkpoint("llama-3.0bpw-exl2"), CPU, torch.float16, 4)
    monkeypatch.setattr(placement, "free_bytes", lambda _: 64 * MIB)
    with pytest.raises(ModelError) as caught:
        placement.plan_memory(model, CPU, torch.float16, 1 << 20)
    assert "would fit; or choose" in caught.value.remedy


def test_a_system_that_does_not_tell_its_free_memory_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda _: None)
    model = placement.candidate(checkpoint("llama-3.0bpw-exl2"), CPU, torch.float16)
    budget = placement.plan_memory(model, CPU, torch.float16, None)
    assert (budget.fits, budget.context) == (True, 2048)
    assert str(budget) == "16 MiB (4 weights, 5 cache, 7 workspace)"


def test_the_cpus_memory_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda: 12 << 10)
    assert placement.free_bytes(CPU) == 12 << 10


def test_a_cache_is_whole_pages_and_forgets_backwards() -> None:
    cache = KVCache(checkpoint("llama-3.0bpw-exl2").config, 300, CPU, torch.float16)
    assert cache.capacity == 300
    assert cache.storage.shape == (2, 2, 2, 2, 256, 64)
    assert cache.storage.dtype == torch.float32
    cache.length = 10
    for wanted, left in ((20, 10), (4, 4), (-1, 0)):
        cache.truncate(wanted)
        assert cache.length == left
