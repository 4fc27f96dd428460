"""Where a model runs and in what arithmetic, and whether it fits there: decided before anything is loaded."""

from pathlib import Path

import torch

from exl2chat.engine.cache import cache_bytes
from exl2chat.errors import ModelError
from exl2chat.model.checkpoint import Checkpoint
from exl2chat.model.quant import Linear

MEMINFO = Path("/proc/meminfo")


def choose_device(name: str) -> torch.device:
    """The device of `--device`: "auto" is the GPU where there is one. ModelError for "cuda" without one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        built = "torch sees no NVIDIA GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise ModelError(f"--device cuda: {built}", "use --device cpu, or install a CUDA build of torch and its driver")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`. "auto" is float16 on a GPU and bfloat16 on the CPU.

    On the CPU bfloat16 names the fastest way: single tokens in float16 on weights that are exact, prompts in bfloat16
    (twice as fast, for 0.4 % of perplexity at most), 4-bit GPTQ from its codes. float16 reads prompts in float32.
    """
    auto = "bfloat16" if device.type == "cpu" else "float16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        auto if name == "auto" else name
    ]


def check_memory(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, context: int, reusable: int = 0
) -> None:
    """ModelError with the sum where the weights and a cache for `context` tokens exceed the free memory.

    `reusable` bytes are in use now and will be free by then.
    """
    weights = weight_bytes(checkpoint, dtype, device.type == "cuda" and dtype == torch.float16)
    cache = cache_bytes(checkpoint.config, context, device, dtype)
    free = free_bytes(device)
    if free is not None and weights + cache > free + reusable:
        raise ModelError(
            f"{checkpoint.folder.path}: {weights / 2**30:.1f} GiB of weights and {cache / 2**30:.1f} GiB of cache for "
            f"{context} tokens do not fit {(free + reusable) / 2**30:.1f} GiB of free memory",
            "choose a smaller model or a smaller --ctx",
        )


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, stays_packed: bool = False) -> int:
    """Bytes of the weights once loaded, with a work copy in float32 of the largest matrix of a layer.

    Where quantised weights stay packed, in float16 on a CUDA device, their scales take a few hundredths more than on
    disk.
    """

    def size(linear: Linear) -> int:
        if stays_packed and linear.kind != "plain":
            return linear.weight_bytes * 21 // 20
        return linear.in_features * linear.out_features * dtype.itemsize

    layers = [linear for layer in checkpoint.layers for linear in layer.linears]
    work = 4 * max(linear.in_features * linear.out_features for linear in layers)
    return sum(map(size, [*layers, checkpoint.head])) + checkpoint.embedding.nbytes + work


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had on `device`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
