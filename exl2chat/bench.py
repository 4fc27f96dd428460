"""`exl2chat bench`: how fast a model answers on this machine, with the threads that a chat would use."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from exl2chat.gpu_report import write_report
from exl2chat.link.threads import worker_environment
from exl2chat.model import hub
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.paths import Paths
from exl2chat.progress import Progress as Tell
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings, complete_environment

PROMPT = 512
CONTEXTS = (128, 1024)
LONGEST = 2048

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `exl2chat bench`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--report", type=Path, help="test and time the GPU kernels, and write it to a file", metavar="FILE"
    )


def main(args: argparse.Namespace, settings: Settings, paths: Paths) -> int:
    """Measure, with a bar on stderr, and print the report on stdout. ModelError where the model cannot be had."""
    if args.report:
        write_report(args.report)
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def show(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            bars.update(task, description=scrub_line(f"{stage} {unit}"), completed=done, total=total or None)

        folder = hub.resolve(settings["model"], paths, show)
        report = measure(folder, settings, show)
    if args.json:
        print(json.dumps(report))
    else:
        threads = "thread" if report["threads"] == 1 else "threads"
        where = f"{report['threads']} {threads}" if report["device"] == "cpu" else report["device"]
        print(scrub_line(f"{report['model']}: {report['quantization']}, {report['dtype']}, {where}"))
        Console().print(as_table(report))
        print(f"load {report['weight_bytes'] / 1e6:.0f} MB in {report['load_seconds']:.1f} s")
    return 0


def measure(folder: Path, settings: Settings, progress: Tell) -> Report:
    """Load the model in `folder` and time it within the context of the settings.

    Speeds are tokens per second, sizes bytes. UsageError for a context that the model was not made for.
    """
    complete_environment(worker_environment())
    import torch

    from exl2chat.engine import placement
    from exl2chat.engine.benchmark import TURN, measure_decoding, measure_prefill
    from exl2chat.engine.loader import choose_context
    from exl2chat.engine.transformer import Transformer

    checkpoint = open_checkpoint(folder)
    place = placement.choose_device(settings["device"])
    kind = placement.choose_dtype(settings["dtype"], place)
    longest = choose_context(checkpoint, settings["context"] or min(checkpoint.config.context, LONGEST))
    placement.check_memory(checkpoint, place, kind, longest)
    start = time.perf_counter()
    model = Transformer.load(checkpoint, place, kind, progress)
    loaded = time.perf_counter()
    prefill = measure_prefill(model, min(PROMPT, longest), progress)
    decoding = [measure_decoding(model, context, progress) for context in CONTEXTS if context + TURN <= longest]
    return {
        "model": checkpoint.config.name,
        "quantization": checkpoint.quantization,
        "device": place.type,
        "dtype": str(kind).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "weight_bytes": model.weight_bytes,
        "load_seconds": loaded - start,
        "prefill_tokens": min(PROMPT, longest),
        "prefill_per_second": prefill,
        "decode": [
            {
                "context": row.context,
                "per_second": row.tokens_per_second,
                "matrices_per_second": row.matrices_per_second,
                "ratio": row.ratio,
                "read_bytes_per_second": row.tokens_per_second * model.weights.read_bytes,
            }
            for row in decoding
        ],
    }


def as_table(report: Report) -> Table:
    """The speeds for a person."""
    table = Table()
    for name in ("", "tokens/s", "matrices alone", "ratio", "GB/s"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(f"prompt of {report['prefill_tokens']}", f"{report['prefill_per_second']:.0f}")
    for row in report["decode"]:
        table.add_row(
            f"reply at {row['context']}",
            f"{row['per_second']:.1f}",
            f"{row['matrices_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['read_bytes_per_second'] / 1e9:.1f}",
        )
    return table
