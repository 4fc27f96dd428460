"""CUDA C++ kernels and their loader: compiled for the GPU at hand by NVRTC, launched on torch's current stream. On
sm_90 and newer a kernel begins while the one before it ends (programmatic dependent launch).

CuPy keeps what was compiled in CUPY_CACHE_DIR (`exl2chat.paths.Paths.kernels`), under a hash of the source with its
headers, the options, the architecture and the versions of NVRTC and CuPy: whatever changes, the old file is not found.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl2chat.errors import GPU_PACKAGES, ModelError
from exl2chat.progress import Progress

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


@dataclass(slots=True, eq=False)
class Kernel:
    """One function of a file that is compiled one way on one device, when it is first launched. `load` makes them."""

    file: str
    function: str
    device: int
    defines: tuple[tuple[str, int], ...]
    _compiled: "_Compiled | None" = field(default=None, init=False)

    def launch(self, grid: tuple[int, ...], threads: int, shared: int, *arguments: Argument) -> None:
        """Queue it on torch's current stream: `grid` blocks of `threads`, `shared` bytes of dynamic shared memory.

        MemoryError where the GPU has no room for it. In a rehearsal it is only noted.
        """
        noted = _NOTED.get()
        if noted is not None:
            noted.add(self)
            return
        from cuda.bindings import driver

        compiled = self.compile()
        cells = [_cell(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(cells))(*(address for address, _ in cells))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = driver.CUstream(torch._C._cuda_getCurrentRawStream(self.device))
        if compiled.overlaps:
            config.attrs, config.numAttrs = [_overlap()], 1
        status = driver.cuLaunchKernelEx(config, driver.CUfunction(compiled.handle), ctypes.addressof(addresses), 0)[0]
        if status in (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES):
            raise MemoryError(f"kernel {self.function}: {status.name}")
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"kernel {self.function} could not be launched: {status.name}")

    def compile(self) -> "_Compiled":
        """Have it ready, with all of a multiprocessor's shared memory open to it. ModelError names the kernel where it
        does not compile."""
        if self._compiled is None:
            raw = _module(self.file, self.device, self.defines).get_function(self.function)
            properties = torch.cuda.get_device_properties(self.device)
            most: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
            raw.max_dynamic_shared_size_bytes = most - raw.shared_size_bytes
            self._compiled = _Compiled(int(raw.kernel.ptr), properties.major >= 9)
        return self._compiled


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A CUfunction, and whether it may begin before the kernel ahead of it has ended."""

    handle: int
    overlaps: bool


# The kernels that a rehearsal would have launched; None outside of one.
_NOTED: ContextVar[set[Kernel] | None] = ContextVar("noted", default=None)


def load(name: str, function: str, device: torch.device, **defines: int) -> Kernel:
    """`function` of the file `name`, to be compiled with `defines` for `device`; the same object each time."""
    return _kernel(name, function, device.index or 0, tuple(defines.items()))


@lru_cache(maxsize=1024)
def _kernel(name: str, function: str, device: int, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(name, function, device, defines)


def compile_for(work: Callable[[], object], progress: Progress) -> None:
    """Compile every kernel that `work` launches, several at a time, by rehearsing it: the kernels do not run, so what
    they were to write is left as it was. ModelError where one does not compile."""
    with rehearsal() as kernels:
        work()
    files = {(kernel.file, kernel.device, kernel.defines) for kernel in kernels}
    if not files:
        return
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        progress("compiling kernels", 0, len(files))
        for done, module in enumerate(as_completed([pool.submit(_module, *file) for file in files])):
            module.result()
            progress("compiling kernels", done + 1, len(files))
    finally:
        pool.shutdown(cancel_futures=True)
    for kernel in kernels:
        kernel.compile()


@contextmanager
def rehearsal() -> Iterator[set[Kernel]]:
    """Within it kernels are not launched: the set is filled with those that would have been."""
    kernels: set[Kernel] = set()
    token = _NOTED.set(kernels)
    try:
        yield kernels
    finally:
        _NOTED.reset(token)


@lru_cache(maxsize=256)
def _module(name: str, device: int, defines: tuple[tuple[str, int], ...]) -> Any:
    """A file compiled, or found compiled in the cache, and loaded: a cupy.RawModule."""
    try:
        import cupy
    except ImportError as fault:
        raise ModelError(f"the kernels need CuPy: {fault}", GPU_PACKAGES) from None
    try:
        with cupy.cuda.Device(device):
            flags = options(dict(defines)) + (
                HOPPER_OPTIONS if torch.cuda.get_device_capability(device)[0] == 9 else ()
            )
            module = cupy.RawModule(code=source(name), options=flags, backend="nvrtc")
            module.compile()
            return module
    except cupy.cuda.compiler.CompileException as fault:
        errors = [line for line in str(fault).splitlines() if "error" in line]
        variant = " ".join([name, *(f"{key}={value}" for key, value in defines)])
        raise ModelError(f"kernel {variant} does not compile: {errors[0] if errors else fault}", GPU_PACKAGES) from None


def _cell(argument: Argument) -> tuple[int, object]:
    """(address of the argument's bytes, what keeps them alive)."""
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data, argument
    cell = ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, Tensor) else ctypes.c_int(argument)
    return ctypes.addressof(cell), cell


@lru_cache(maxsize=1)
def _overlap() -> Any:
    """The attribute of a dependent launch. Made once: that takes 31 us, all else in Kernel.launch 11 us."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute
