"""`exl2chat bench`: how fast a model answers on this machine, with the threads and kernels that a chat would use."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from exl2chat.errors import ModelError, UsageError, is_out_of_memory
from exl2chat.gpu_report import write_report
from exl2chat.link.threads import worker_environment
from exl2chat.model import hub
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.paths import Paths
from exl2chat.progress import Progress as Tell
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings, complete_environment

if TYPE_CHECKING:
    import torch

    from exl2chat.engine.placement import Budget
    from exl2chat.engine.transformer import Transformer

SHAPES = ("llama-8b", "llama-1b", "tiny")

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `exl2chat bench`."""
    parser.add_argument("--shape", choices=SHAPES, help="measure random weights of this shape instead of a model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--report",
        type=Path,
        help="run the GPU's tests, measure every shape and kernel, and write a file",
        metavar="FILE",
    )


def main(args: argparse.Namespace, settings: Settings, paths: Paths) -> int:
    """Measure, with a bar on stderr, and print the report on stdout. ModelError where the model cannot be had."""
    if args.shape and settings.lookup("model")[1] == "flag":
        raise UsageError("--shape and --model exclude each other", "leave one of them out")
    complete_environment(worker_environment(paths))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def show(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            bars.update(task, description=scrub_line(f"{stage} {unit}"), completed=done, total=total or None)

        if args.report:
            write_report(args.report, show)
            return 0
        folder = None if args.shape else hub.resolve(settings["model"], paths, show)
        try:
            report = measure(folder, args.shape, settings, show)
        except Exception as fault:
            if not is_out_of_memory(fault):
                raise
            remedy = "close what else fills it; or use a shorter context (--ctx) or a smaller model"
            raise ModelError("out of memory", remedy) from None
    print(json.dumps(report)) if args.json else show_report(report)
    return 0


def measure(folder: Path | None, shape: str | None, settings: Settings, progress: Tell) -> Report:
    """Load the model in `folder`, or make one of `shape`, and time it within the context of the settings.

    UsageError for a context that the model was not made for, ModelError for a model that does not fit the memory.
    """
    import torch

    from exl2chat.engine import placement
    from exl2chat.engine.benchmark import measure as measure_model
    from exl2chat.engine.cache import BITS
    from exl2chat.engine.step_benchmark import as_objects

    device = placement.choose_device(settings["device"])
    dtype = placement.choose_dtype(settings["dtype"], device)
    bits = BITS[settings["cache"]]
    start = time.perf_counter()
    quantization: str | None
    if folder is None:
        model, budget = _make(shape or "", device, dtype, bits, settings["context"], progress)
        quantization = None  # the name says that the weights are random
    else:
        model, budget, quantization = _load(folder, device, dtype, bits, settings["context"], progress)
    loaded = time.perf_counter()
    model.warm_up(model.new_cache(budget.context), progress)
    ready = time.perf_counter()
    bandwidth, rows = measure_model(model, budget.context, progress)
    return {
        "model": model.config.name,
        "quantization": quantization,
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "cache": settings["cache"],
        "threads": torch.get_num_threads(),
        "memory": str(budget),
        "weight_bytes": model.weight_bytes,
        "load_seconds": loaded - start,
        "kernels_seconds": ready - loaded,
        "read_bytes_per_second": bandwidth,
        "rows": as_objects(rows),
    }


def _load(
    folder: Path, device: "torch.device", dtype: "torch.dtype", bits: int, asked: int | None, progress: Tell
) -> "tuple[Transformer, Budget, str]":
    from exl2chat.engine import placement
    from exl2chat.engine.benchmark import workload
    from exl2chat.engine.transformer import Transformer

    checkpoint = open_checkpoint(folder)
    placement.check_context(checkpoint, asked)
    candidate = placement.candidate(checkpoint, device, dtype, bits)
    budget = placement.plan_memory(candidate, device, dtype, asked, usual=workload(device).room)
    progress(f"loading {budget}")
    return Transformer.load(checkpoint, device, dtype, progress, bits), budget, checkpoint.quantization


def _make(
    name: str, device: "torch.device", dtype: "torch.dtype", bits: int, asked: int | None, progress: Tell
) -> "tuple[Transformer, Budget]":
    from exl2chat.engine import placement, shapes
    from exl2chat.engine.benchmark import workload

    shape = shapes.SHAPES[name]
    weights = shape.weight_bytes(device, dtype)
    candidate = placement.Candidate(f"--shape {name}", shape.config(), weights, bits)
    budget = placement.plan_memory(candidate, device, dtype, asked, usual=workload(device).room)
    return replace(shapes.random_model(shape, device, dtype, progress), cache_bits=bits), budget


def show_report(report: Report) -> None:
    """The report for a person, on stdout."""
    threads = "thread" if report["threads"] == 1 else "threads"
    where = report["gpu"] or f"{report['threads']} {threads}"
    parts = filter(None, (report["quantization"], report["dtype"], f"cache {report['cache']}", where))
    print(scrub_line(f"{report['model']}: {', '.join(parts)}"))
    Console().print(as_table(report))
    for ceiling in dict.fromkeys(row["ceiling"] for row in report["rows"]):
        print(f"ceiling of {' and '.join(_kinds(report, ceiling))}: {ceiling}")
    weights = f"{report['weight_bytes'] / (1 << 20):,.0f} MiB"
    print(f"load {weights} in {report['load_seconds']:.1f} s; memory {report['memory']}")
    if report["read_bytes_per_second"]:
        print(f"kernels ready in {report['kernels_seconds']:.1f} s; ", end="")
        print(f"the memory is read at {report['read_bytes_per_second'] / 1e12:.2f} TB/s")


def _kinds(report: Report, ceiling: str) -> list[str]:
    """Which rows are measured against it."""
    names = [row["name"] for row in report["rows"] if row["ceiling"] == ceiling]
    kinds = ("prompts" if name.startswith("prompt") else "drafts" if "drafts" in name else "replies" for name in names)
    return list(dict.fromkeys(kinds))


def as_table(report: Report) -> Table:
    """The speeds, each with the share of its ceiling; several tokens at once also as a multiple of one."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    has_several = any("times_one" in row for row in report["rows"])
    for name in ("", "tokens/s", "ms", "of ceiling", *(["of one"] if has_several else [])):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in report["rows"]:
        speed, milliseconds = row["tokens_per_second"], row["microseconds"] / 1e3
        shown = f"{speed:,.0f}" if speed >= 1000 else f"{speed:.1f}"
        times = [f"{row['times_one']:.2f} x"] if "times_one" in row else []
        table.add_row(row["name"], shown, f"{milliseconds:.2f}", f"{row['ratio']:.0%}", *times)
    return table
