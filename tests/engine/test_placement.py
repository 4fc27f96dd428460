"""Choices made before loading."""

from pathlib import Path

import pytest
import torch

from exl2chat.engine import placement
from exl2chat.engine.cache import KVCache, cache_bytes
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


def test_a_model_that_does_not_fit_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    small = checkpoint("llama-3.0bpw-exl2")
    placement.check_memory(small, CPU, torch.float16, 2048)
    monkeypatch.setattr(placement, "free_bytes", lambda _: 4 << 20)
    with pytest.raises(ModelError, match=r"0\.0 GiB of weights and 0\.0 GiB of cache for 2048 tokens do not fit"):
        placement.check_memory(small, CPU, torch.float16, 2048)


def test_free_memory_is_read_where_the_system_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemAvailable:       12 kB\n")
    monkeypatch.setattr(placement, "MEMINFO", tmp_path / "meminfo")
    assert placement.free_bytes(CPU) == 12 << 10
    monkeypatch.setattr(placement, "MEMINFO", tmp_path / "none")
    assert placement.free_bytes(CPU) is None


def test_a_cache_is_whole_pages_and_forgets_backwards() -> None:
    cache = KVCache(checkpoint("llama-3.0bpw-exl2").config, 300, CPU, torch.float16)
    assert cache.capacity == 300
    assert cache.storage.shape == (2, 2, 2, 2, 256, 64)
    assert cache.storage.dtype == torch.float32
    cache.length = 10
    for wanted, left in ((20, 10), (4, 4), (-1, 0)):
        cache.truncate(wanted)
        assert cache.length == left
