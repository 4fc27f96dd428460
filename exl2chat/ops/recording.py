"""Work on a GPU recorded as a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def record(
    work: Callable[[], Result], pool: Any = None, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `work`, which ran before, and what the work gave: memory that the graph writes to. It is taken from
    `pool`, that of another graph, or of its own; recorded on `stream` or one of torch's.

    No garbage is collected meanwhile: a graph among it, or an event that is waited for, would end this recording with
    an error (torch 2.9 to 2.13, pytorch/pytorch#161037).
    """
    graph = torch.cuda.CUDAGraph()
    was_on = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
    finally:
        if was_on:
            gc.enable()
    return graph, result
