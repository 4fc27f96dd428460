"""Every kernel compiled for every GPU that is supported, which needs no GPU.

sm_75 and sm_90a have code of their own and get machine code of every variant; those between and sm_120 share it, and
get PTX of the largest variants: machine code of all for all six takes four minutes.
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
from exl2chat.ops import cuda, cuda_prefill
from exl2chat.ops.plan import LONG, ROWS

ARCHITECTURES = ("sm_75", "compute_80", "compute_86", "compute_89", "sm_90a", "compute_120")
HEAD_DIMS = (64, 80, 96, 128, 256)
Job = tuple[str, dict[str, int]]


def jobs(every: bool) -> Iterator[Job]:
    """(file, defines). The two shapes of gemv.cu differ in a few constants: the larger stands for both."""
    for rows, gptq in product(ROWS if every else ROWS[-1:], (0, 1)):
        sizes = {"WARPS": LONG.warps, "BLOCKS": LONG.blocks, "CHUNKS": LONG.chunks}
        yield "gemv.cu", {**sizes, "ROWS": rows, "GPTQ": gptq}
    for gptq in (0, 1):
        yield "reconstruct.cu", {"GPTQ": gptq}
    for name in ("arrange.cu", "read.cu", "gate.cu"):
        yield name, {}
    for units in (1, 2, 4):
        yield "norm.cu", {"UNITS": units}
    for size in HEAD_DIMS if every else HEAD_DIMS[-2:]:
        yield "rope_cache.cu", {"HEAD_DIM": size}
        (warps, stages), tiles = cuda.SHAPES[0], 2 if size <= cuda.MAX_TILED_DIM else 1
        yield "attention.cu", {"HEAD_DIM": size, "WARPS": warps, "STAGES": stages, "QTILES": tiles}


def prompt_jobs(every: bool, hopper: bool) -> Iterator[Job]:
    """The kernels of prompts: over a cache of float16, and of heads of 128 over a quantised one and its copy."""
    for size in HEAD_DIMS if every else HEAD_DIMS[-1:]:
        shapes = cuda_prefill.SHAPES[min(largest for largest in cuda_prefill.SHAPES if largest >= size)]
        shape = cuda_prefill.WGMMA_SHAPE if hopper and size in cuda_prefill.WGMMA_DIMS else shapes[-1]
        for bits, turned in ((16, False), (6, True), (16, True)) if size == 128 else ((16, False),):
            yield "prefill_attention.cu", shape.defines(size, bits, turned)
    for bits in (4, 6, 8):
        yield "expand_cache.cu", {"HEAD_DIM": 128, "CACHE_BITS": bits}


def compile_for(architecture: str, job: Job) -> str:
    """The compiler's log, empty where there is nothing to say."""
    name, defines = job
    include = next(Path(str(f.locate())).parent for f in files("nvidia-cuda-runtime") or () if f.name == "cuda_fp16.h")
    _, program = nvrtc.nvrtcCreateProgram(source(name).encode(), name.encode(), 0, [], [])
    flags = [flag.encode() for flag in (*options(defines), f"-arch={architecture}", f"-I{include}")]
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
        every = architecture.startswith("sm_")
        wanted = [*jobs(every), *prompt_jobs(every, architecture == "sm_90a")]
        logs = pool.map(lambda job: compile_for(architecture, job), wanted)
        assert not "\n".join(log for log in logs if log)


def test_no_kernel_file_is_forgotten() -> None:
    assert {name for name, _ in (*jobs(every=True), *prompt_jobs(every=True, hopper=True))} == {
        path.name for path in FOLDER.glob("*.cu")
    }


def test_sources_hold_their_headers_once() -> None:
    text = source("gemv.cu")
    assert '#include "' not in text
    assert text.count("void meet()") == 1
