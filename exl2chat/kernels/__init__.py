"""CUDA C++ kernels and their loader: compiled for the GPU at hand by NVRTC, cached on disk by CuPy, launched on torch's
current stream. On sm_90 and newer a kernel begins while the one before it ends (programmatic dependent launch)."""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2chat.errors import ModelError

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17",)
# wgmma is an instruction of this architecture alone, not of those that follow; NVRTC takes the last that it is given.
HOPPER_OPTIONS = ("-arch=sm_90a",)
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)
_ONCE = "#pragma once\n"

# A kernel's arguments by value: a tensor is its address, an int 32 bits, a structured array its bytes.
Argument = Tensor | int | np.ndarray[Any, Any]


def source(name: str) -> str:
    """The text of a kernel file with its headers in it, each once, so that a cache keyed by the text sees them."""
    seen: set[str] = set()

    def expand(text: str) -> str:
        def insert(found: re.Match[str]) -> str:
            header = found[1]
            if header in seen:
                return ""
            seen.add(header)
            return expand((FOLDER / header).read_text("utf-8").replace(_ONCE, ""))

        return _INCLUDE.sub(insert, text)

    return expand((FOLDER / name).read_text("utf-8"))


def options(defines: Mapping[str, int]) -> tuple[str, ...]:
    """The compiler's options, pinned: the same text is the same program."""
    return (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled function on one device."""

    handle: int
    overlaps: bool

    def launch(self, grid: tuple[int, int], threads: int, shared: int, *arguments: Argument) -> None:
        """Queue it on torch's current stream: `grid` blocks of `threads`, `shared` bytes of dynamic shared memory."""
        from cuda.bindings import driver

        cells = [_cell(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(cells))(*(address for address, _ in cells))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if self.overlaps:
            config.attrs, config.numAttrs = [_overlap()], 1
        status = driver.cuLaunchKernelEx(config, driver.CUfunction(self.handle), ctypes.addressof(addresses), 0)[0]
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"a kernel could not be launched: {status.name}")


def load(name: str, function: str, device: torch.device, **defines: int) -> Kernel:
    """`function` of the file `name`, compiled with `defines` for `device`, with all of a multiprocessor's shared memory
    open to it. ModelError names the kernel where it does not compile."""
    return _load(name, function, device.index or 0, tuple(defines.items()))


@lru_cache(maxsize=256)
def _load(name: str, function: str, device: int, defines: tuple[tuple[str, int], ...]) -> Kernel:
    try:
        import cupy
    except ImportError as fault:
        raise ModelError(f"the kernels need CuPy: {fault}", "pip install 'exl2chat[cuda13]', or --device cpu") from None
    try:
        with cupy.cuda.Device(device):
            properties = torch.cuda.get_device_properties(device)
            flags = options(dict(defines)) + (HOPPER_OPTIONS if properties.major == 9 else ())
            module = cupy.RawModule(code=source(name), options=flags, backend="nvrtc")
            raw = module.get_function(function)
            most: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
            raw.max_dynamic_shared_size_bytes = most - raw.shared_size_bytes
            return Kernel(int(raw.kernel.ptr), properties.major >= 9)
    except cupy.cuda.compiler.CompileException as fault:
        raise ModelError(f"kernel {name} {dict(defines)} does not compile: {fault}", "run with --device cpu") from None


def _cell(argument: Argument) -> tuple[int, object]:
    """(address of the argument's bytes, what keeps them alive)."""
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data, argument
    cell = ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else ctypes.c_int(argument)
    return ctypes.addressof(cell), cell


def _overlap() -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute
