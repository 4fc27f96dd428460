"""The GPU report: which sources ran on which GPU, what its tests said and how fast the kernels were.

CI has no GPU; a test compares the committed report with the sources (`exl2chat bench --report FILE` writes it).
"""

import gc
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl2chat.errors import ModelError
from exl2chat.progress import Progress
from exl2chat.settings import child_environment

if TYPE_CHECKING:
    import torch

PACKAGE = Path(__file__).parent
TESTS = PACKAGE.parent / "tests" / "gpu"
# Everything that runs only on a GPU, beside the kernels.
SOURCES = (
    "engine/checkup.py",
    "engine/decode_graphs.py",
    "engine/device_decoder.py",
    "engine/device_draws.py",
    "engine/device_penalties.py",
    "engine/device_steps.py",
    "engine/jobs_benchmark.py",
    "engine/paged_steps.py",
    "engine/reply_benchmark.py",
    "engine/shapes.py",
    "engine/step_benchmark.py",
    "engine/tiling.py",
    "ops/attention.py",
    "ops/cache_format.py",
    "ops/cuda.py",
    "ops/cuda_attention.py",
    "ops/cuda_prefill.py",
    "ops/gemm.py",
    "ops/kernel_benchmark.py",
    "ops/partial.py",
    "ops/plan.py",
    "ops/recording.py",
    "ops/sample.py",
    "ops/tiled.py",
    "ops/tiles.py",
)
SECONDS = 540
ALONE = ("test_memory.py",)  # it fills the GPU's memory
BAD = ("failure", "error", "skipped")
# The tools of NVIDIA's compute-sanitizer, and what each says at its end.
SANITIZERS = {"memcheck": r"ERROR SUMMARY: (\d+)", "racecheck": r"RACECHECK SUMMARY: (\d+)"}
# Not ours to mend: cuda.bindings asks the driver for functions that it does not have, and in cuDNN's attention for
# Hopper, which torch calls, racecheck reports hazards.
SANITIZER_OPTIONS = ("--report-api-errors", "no", "--kernel-name-exclude", "kernel_substring=cudnn")


def source_hash() -> str:
    """SHA-256 over the names and bytes of the GPU's sources and of its tests."""
    digest = hashlib.sha256()
    kernels = [path for path in (PACKAGE / "kernels").iterdir() if path.suffix in (".py", ".cu", ".cuh")]
    for path in sorted([*kernels, *(PACKAGE / name for name in SOURCES), *TESTS.glob("*.py")]):
        digest.update(f"{path.relative_to(PACKAGE.parent).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def write_report(file: Path, progress: Progress) -> None:
    """Run the GPU's tests and benchmarks and write what came out. ModelError where something for that is missing."""
    import torch

    if not torch.cuda.is_available():
        remedy = "if there is one, `exl2chat doctor` says what is missing; without --report, bench measures the CPU"
        raise ModelError("--report needs an NVIDIA GPU, and torch sees none", remedy)
    if importlib.util.find_spec("cupy") is None:
        raise ModelError("--report needs CuPy", "`exl2chat doctor` says how to install it")
    if not TESTS.is_dir():
        raise ModelError("--report needs the project's tests", "run it in a clone of the project")
    import cupy

    from exl2chat.ops.kernel_benchmark import measure_crossover, measure_products, measure_read

    progress("running the GPU's tests")
    tests, sanitizer = run_checks()
    device = torch.device("cuda")
    bandwidth = measure_read(device)
    progress("timing the kernels")
    kernels = [*measure_products(device, bandwidth), *measure_crossover(device)]
    report = {
        "source_hash": source_hash(),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(device),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cupy": cupy.__version__,
        "read_bytes_per_second": round(bandwidth),
        "tests": tests,
        "sanitizer": sanitizer,
        "rows": [row.as_object() for row in kernels],
        "shapes": measure_shapes(device, bandwidth, progress),
    }
    file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def measure_shapes(device: "torch.device", bandwidth: float, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """The rows of whole models by the name of their shape, as `exl2chat bench --shape` prints them."""
    import torch

    from exl2chat.engine.cache import BITS
    from exl2chat.engine.shapes import SHAPES, random_model
    from exl2chat.engine.step_benchmark import CACHE_WORKLOAD, SHORT_WORKLOAD, WORKLOAD, as_objects, measure_steps

    tables = {}
    for name, work, caches in (("llama-8b", WORKLOAD, ("q8", "q6", "q4")), ("llama-1b", SHORT_WORKLOAD, ())):
        model = random_model(SHAPES[name], device, torch.float16, progress)
        tables[name] = as_objects(measure_steps(model, bandwidth, work, progress))
        for cache in caches:
            gc.collect()  # recorded steps refer to themselves, and keep the cache before
            model = replace(model, cache_bits=BITS[cache])
            tables[f"{name} {cache}"] = as_objects(measure_steps(model, bandwidth, CACHE_WORKLOAD, progress))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return tables


def run_checks() -> tuple[dict[str, Any], dict[str, dict[str, int | str]]]:
    """How many GPU tests passed, and the names of those that did not; what the sanitizer found. Files are processes
    side by side, with the sanitizer's: most of their time goes into compiling. Those of ALONE follow."""
    files = sorted(path.name for path in TESTS.glob("test_*.py"))
    with tempfile.TemporaryDirectory() as folder:
        run = partial(run_file, Path(folder))
        with ThreadPoolExecutor() as pool:
            sanitizer = pool.submit(run_sanitizer)
            found = list(pool.map(run, [name for name in files if name not in ALONE]))
        found += map(run, ALONE)
    outcomes = [outcome for some in found for outcome in some]
    bad = {tag: [name for name, outcome in outcomes if outcome == tag] for tag in BAD}
    return {"passed": len(outcomes) - sum(map(len, bad.values())), **bad}, sanitizer.result()


def run_file(folder: Path, name: str) -> list[tuple[str, str]]:
    """Each test of a file with how it ended; where there are no results, the file with "error"."""
    results = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", str(TESTS / name), f"--junitxml={results}"]
    try:
        subprocess.run(command, cwd=PACKAGE.parent, timeout=SECONDS, check=False)
        cases = list(ET.parse(results).getroot().iter("testcase"))
    except (subprocess.TimeoutExpired, OSError, ET.ParseError):
        cases = []
    if not cases:
        return [(name, "error")]
    return [(case.attrib["name"], next((child.tag for child in case if child.tag in BAD), "")) for case in cases]


def run_sanitizer() -> dict[str, dict[str, int | str]]:
    """What compute-sanitizer finds: by tool and family of kernels (`engine.checkup`) the number of errors or hazards,
    or what it said where it could not finish. Every case is a process; they run side by side."""
    from exl2chat.engine.checkup import FAMILIES

    with ThreadPoolExecutor() as pool:
        found = {tool: {name: pool.submit(sanitize, tool, name) for name in FAMILIES} for tool in SANITIZERS}
        return {tool: {name: case.result() for name, case in cases.items()} for tool, cases in found.items()}


def sanitize(tool: str, family: str) -> int | str:
    """One case under one tool."""
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        *SANITIZER_OPTIONS,
        sys.executable,
        str(TESTS / "sanitize.py"),
        family,
    ]
    # Every tensor is an allocation of its own, so that memcheck sees where it ends.
    environment = child_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    try:
        result = subprocess.run(
            command, cwd=PACKAGE.parent, env=environment, timeout=SECONDS, check=False, capture_output=True, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    summary = re.search(SANITIZERS[tool], result.stdout)
    if result.returncode or not summary:
        return (result.stdout + result.stderr)[-600:]
    return int(summary[1])
