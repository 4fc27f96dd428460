"""Every variant of every kernel that the loader can ask for, as machine code for every GPU that is supported. It needs
no GPU.

The compiler is told not to optimise: it reads the same code and assembles the same instructions in a quarter of the
time (2.4 instead of 10.9 s for six variants). What it makes of them optimised is seen on a GPU.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import files
from itertools import product
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from exl2chat.kernels import FOLDER, options, source
from exl2chat.ops import cuda_attention, cuda_prefill
from exl2chat.ops.gemm import HEIGHTS
from exl2chat.ops.plan import CHUNKS, ROWS, WARPS

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
FAST = "--Ofast-compile=max"
SHARED = 227 << 10  # bytes that a block may have on sm_90
HEAD_DIMS = (64, 80, 96, 128, 256)
VARIANTS = ((16, False, False), (6, True, False), (16, True, False), (16, False, True), (6, True, True))
Job = tuple[str, dict[str, int]]


def jobs(hopper: bool) -> Iterator[Job]:
    """(file, defines)."""
    yield from prompt_jobs(hopper)
    for rows, gptq in product(ROWS, (0, 1)):
        yield "gemv.cu", {"WARPS": WARPS, "CHUNKS": CHUNKS, "ROWS": rows, "GPTQ": gptq}
    for rows, gptq in product(HEIGHTS, (0, 1)):
        yield "gemm.cu", {"ROWS": rows, "WARPS": 8, "GPTQ": gptq}
    for gptq in (0, 1):
        yield "reconstruct.cu", {"GPTQ": gptq}
    for name in ("arrange.cu", "read.cu", "gate.cu", "sample.cu"):
        yield name, {}
    for units in (1, 2, 4):
        yield "norm.cu", {"UNITS": units}
    for size, bits in (*product(HEAD_DIMS, (16, 6)), (128, 8), (128, 4)):
        yield "rope_cache.cu", {"HEAD_DIM": size, "CACHE_BITS": bits}
        for tiles in (1, cuda_attention.max_tiles(size)):
            yield "attention.cu", cuda_attention.choose_shape(8 * tiles, size, bits, SHARED, many=tiles == 1).defines


def prompt_jobs(hopper: bool) -> Iterator[Job]:
    """The kernels of prompts: over a cache of float16, and of heads of 128 over a quantised one and its copy."""
    for size in HEAD_DIMS:
        shapes = cuda_prefill.SHAPES[min(largest for largest in cuda_prefill.SHAPES if largest >= size)]
        shape = cuda_prefill.WGMMA_SHAPE if hopper and size in cuda_prefill.WGMMA_DIMS else shapes[-1]
        for bits, turned, repeated in VARIANTS if size == 128 else VARIANTS[:1]:
            yield "prefill_attention.cu", shape.defines(size, bits, turned, repeated)
    for bits in (4, 6, 8):
        yield "expand_cache.cu", {"HEAD_DIM": 128, "CACHE_BITS": bits}


def compile_for(architecture: str, job: Job) -> str:
    """The compiler's log, empty where there is nothing to say."""
    name, defines = job
    include = next(Path(str(f.locate())).parent for f in files("nvidia-cuda-runtime") or () if f.name == "cuda_fp16.h")
    _, program = nvrtc.nvrtcCreateProgram(source(name).encode(), name.encode(), 0, [], [])
    # Without optimising, the assembler warns of wgmma in loops.
    fast = () if architecture == "sm_90a" and name in ("gemm.cu", "prefill_attention.cu") else (FAST,)
    flags = [flag.encode() for flag in (*options(defines), *fast, f"-arch={architecture}", f"-I{include}")]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    as_bytes = bytes(log)
    nvrtc.nvrtcGetProgramLog(program, as_bytes)
    nvrtc.nvrtcDestroyProgram(program)
    text = as_bytes.rstrip(b"\0").decode()
    return f"{job}: {text}" if status != nvrtc.nvrtcResult.NVRTC_SUCCESS or text else ""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = pool.map(lambda job: compile_for(architecture, job), jobs(architecture == "sm_90a"))
        assert not "\n".join(log for log in logs if log)


def test_no_kernel_file_is_forgotten() -> None:
    assert {name for name, _ in jobs(hopper=True)} == {path.name for path in FOLDER.glob("*.cu")}


def test_sources_hold_their_headers_once() -> None:
    text = source("gemv.cu")
    assert '#include "' not in text
    assert text.count("void meet()") == 1
