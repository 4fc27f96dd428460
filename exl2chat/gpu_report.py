"""The GPU report: which sources ran on which GPU, what its tests said and how fast the kernels were.

CI has no GPU; a test compares the committed report with the sources (`exl2chat bench --report FILE` writes it).
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exl2chat.errors import ModelError

PACKAGE = Path(__file__).parent
TESTS = PACKAGE.parent / "tests" / "gpu"
# Everything that runs only on a GPU, beside the kernels.
SOURCES = (
    "engine/decode_graphs.py",
    "engine/step_benchmark.py",
    "engine/tiling.py",
    "ops/attention.py",
    "ops/cuda.py",
    "ops/cuda_prefill.py",
    "ops/kernel_benchmark.py",
    "ops/plan.py",
    "ops/tiled.py",
    "ops/tiles.py",
)
SECONDS = 540


def source_hash() -> str:
    """SHA-256 over the names and bytes of the GPU's sources and of its tests."""
    digest = hashlib.sha256()
    kernels = [path for path in (PACKAGE / "kernels").iterdir() if path.suffix in (".py", ".cu", ".cuh")]
    for path in sorted([*kernels, *(PACKAGE / name for name in SOURCES), *TESTS.glob("*.py")]):
        digest.update(f"{path.relative_to(PACKAGE.parent).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def write_report(file: Path) -> None:
    """Run the GPU's tests and benchmarks and write what came out. ModelError where there is no GPU or no checkout."""
    import torch

    if not torch.cuda.is_available() or not TESTS.is_dir() or importlib.util.find_spec("cupy") is None:
        raise ModelError(
            "a GPU report needs an NVIDIA GPU, CuPy and a checkout with tests", "run it in a clone of the project"
        )
    import cupy

    from exl2chat.engine.step_benchmark import measure_steps
    from exl2chat.ops.kernel_benchmark import measure_crossover, measure_products, measure_read

    tests = run_tests()
    device = torch.device("cuda")
    bandwidth = measure_read(device)
    rows = [*measure_products(device, bandwidth), *measure_crossover(device), *measure_steps(device, bandwidth)]
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
        "rows": [
            {key: round(value, 2) if isinstance(value, float) else value for key, value in asdict(row).items()}
            | {"ratio": round(row.ratio, 3)}
            for row in rows
        ],
    }
    file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def run_tests() -> dict[str, Any]:
    """How many GPU tests passed, and the names of those that did not."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", str(TESTS), f"--junitxml={results}"]
        subprocess.run(command, cwd=PACKAGE.parent, timeout=SECONDS, check=False)
        cases = list(ET.parse(results).getroot().iter("testcase"))
    bad = {tag: [c.attrib["name"] for c in cases if c.find(tag) is not None] for tag in ("failure", "error", "skipped")}
    return {"passed": len(cases) - sum(map(len, bad.values())), **bad}
