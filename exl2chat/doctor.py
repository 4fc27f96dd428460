"""`exl2chat doctor`: whether everything that a chat needs is here and works, and what to do about what does not."""

import argparse
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from exl2chat import __version__
from exl2chat.chat.session import unreadable_sessions
from exl2chat.errors import GPU_PACKAGES, ChatError
from exl2chat.link.threads import worker_environment
from exl2chat.model import hub
from exl2chat.paths import Paths
from exl2chat.progress import silent
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings, complete_environment, load_settings, terminal_only_prints

NVIDIA = Path("/proc/driver/nvidia/version")
ENOUGH_MEMORY = 2 << 30
LITTLE_ROOM = 64 << 20  # bytes on a disk: chats and kernels take less, the smallest model more
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and, where that is a problem, the remedy."""

    name: str
    found: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return not self.remedy


Check = Callable[[], Finding]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `exl2chat doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def main(args: argparse.Namespace, _settings: Settings, paths: Paths) -> int:
    """Print what each check finds as it ends; 0 where all is well, 1 where something needs a remedy."""
    complete_environment(worker_environment(paths))
    findings = []
    for finding in examine(paths):
        findings.append(finding)
        if not args.json:
            show(finding)
    well = all(finding.ok for finding in findings)
    if args.json:
        print(json.dumps({"ok": well, "findings": [asdict(f) | {"ok": f.ok} for f in findings]}))
    return 0 if well else 1


def show(finding: Finding) -> None:
    """A line, and a second one with the remedy."""
    print(f"{'OK' if finding.ok else 'PROBLEM':8}{finding.name:24}{scrub_line(finding.found)}", flush=True)
    if finding.remedy:
        print(f"{'':8}{'':24}{scrub_line(finding.remedy)}", flush=True)


def examine(paths: Paths) -> Iterator[Finding]:
    """Every check, one after another; those of the GPU only where there is one."""
    general: dict[str, Check] = {
        "exl2chat": lambda: Finding("exl2chat", f"{__version__}, Python {platform.python_version()}"),
        "settings": lambda: check_settings(paths),
        "folders": lambda: check_folders(paths),
        "models": lambda: check_models(paths),
        "terminal": check_terminal,
        "torch": check_torch,
        "processor": check_processor,
        "memory": check_memory,
    }
    for name, check in general.items():
        yield attempt(name, check)
    gpu = attempt("GPU", check_gpu)
    yield gpu
    if not (gpu.ok and has_gpu()):
        return
    needed = [attempt("CuPy", check_cupy), attempt("cuda.bindings", check_bindings)]
    yield from needed
    if not all(finding.ok for finding in needed):
        return
    yield attempt("compiler", check_compiler)
    for name in families():
        yield attempt(name, partial(check_family, name))
    yield attempt("read bandwidth", check_bandwidth)
    yield attempt("kernel cache", lambda: check_kernels(paths))


def attempt(name: str, check: Check) -> Finding:
    """What the check finds; what it raises is a finding, too."""
    try:
        return check()
    except ChatError as fault:
        return Finding(name, fault.message, fault.remedy or "see the message")
    except PermissionError as fault:
        remedy = "change its permissions, or use another place: --home, and HF_HOME for models of the hub"
        return Finding(name, f"{fault.filename}: {fault.strerror}", remedy)
    except Exception as fault:  # a broken library may raise anything
        first_line = str(fault).partition("\n")[0][:200]
        return Finding(name, f"{type(fault).__name__}: {first_line}", f"reinstall what fails; on a GPU: {GPU_PACKAGES}")


def check_settings(paths: Paths) -> Finding:
    load_settings({}, paths)
    there = "" if paths.config_file.exists() else " (not there: all defaults)"
    return Finding("settings", f"{paths.config_file}{there}")


def check_folders(paths: Paths) -> Finding:
    """Whether each folder, or the first above it that exists, can be written to and has room, and the chats be read."""
    for folder in (paths.data, paths.cache, paths.state):
        there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
        if not os.access(there, os.W_OK | os.X_OK):
            return Finding("folders", f"{there} cannot be written to", "change its permissions, or use --home")
        if (free := shutil.disk_usage(there).free) < LITTLE_ROOM:
            found = f"the disk of {there} is full or nearly so: {free:,} bytes free"
            return Finding("folders", found, "delete something there, or use a folder of another disk: --home")
    if unreadable := unreadable_sessions(paths):
        names = ", ".join(path.name for path in unreadable)
        remedy = "`exl2chat sessions` says why; put back a copy, or move what cannot be read elsewhere"
        return Finding("folders", f"chats {paths.sessions}, of which cannot be read: {names}", remedy)
    return Finding("folders", f"chats {paths.sessions}, log {paths.log}")


def check_models(paths: Paths) -> Finding:
    return Finding("models", f"{len(list(hub.local_models(paths)))} here; those made here in {paths.models}")


def check_terminal() -> Finding:
    """What a chat can draw. A pipe is no problem: `exl2chat run` answers into it."""
    console = Console()
    if not console.is_terminal:
        return Finding("terminal", "the output is not a terminal, as a chat needs it; `exl2chat run` needs none")
    if terminal_only_prints():
        return Finding("terminal", "it only prints: the chat goes line by line")
    found = f"{console.width} x {console.height}, colours: {console.color_system or 'none'}, {console.encoding}"
    narrow = "make the window at least 40 x 10" if console.width < 40 or console.height < 10 else ""
    plain = "" if console.encoding.startswith("utf") else "choose a UTF-8 locale, such as LANG=C.UTF-8"
    return Finding("terminal", found, narrow or plain)


def check_torch() -> Finding:
    import torch

    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if NVIDIA.exists() and not torch.version.cuda:
        return Finding("torch", f"{torch.__version__}, {cuda}", "there is an NVIDIA driver: install torch with CUDA")
    return Finding("torch", f"{torch.__version__}, {cuda}")


def check_processor() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    cores = len(os.sched_getaffinity(0))
    return Finding("processor", f"{cores} cores ({capability}), of which a chat uses {torch.get_num_threads()}")


def check_memory() -> Finding:
    import torch

    from exl2chat.engine.placement import free_bytes

    free = free_bytes(torch.device("cpu"))
    if free is None:
        return Finding("memory", "the system does not tell how much is free")
    little = "close something: the smallest model takes about 1 GiB" if free < ENOUGH_MEMORY else ""
    return Finding("memory", f"{free / GIB:.1f} GiB free", little)


def has_gpu() -> bool:
    """Whether torch can use an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def driver_version() -> str:
    """As "driver 580.82"; empty where there is none."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", NVIDIA.read_text()) if NVIDIA.exists() else None
    return f"driver {found[0]}" if found else ""


def check_gpu() -> Finding:
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        if driver and torch.version.cuda:
            return Finding("GPU", f"torch cannot use it; {driver}", "update the driver, or install torch for its CUDA")
        return Finding("GPU", "none: the model runs on the processor")
    properties = torch.cuda.get_device_properties(0)
    capability = f"sm_{properties.major}{properties.minor}"
    free, total = torch.cuda.mem_get_info(0)
    found = f"{properties.name} ({capability}), {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    old = "" if (properties.major, properties.minor) >= (7, 5) else "it is too old (sm_75 at least): use --device cpu"
    return Finding("GPU", f"{found}; {driver or 'unknown driver'}", old)


def check_cupy() -> Finding:
    import cupy

    return Finding("CuPy", cupy.__version__)


def check_bindings() -> Finding:
    from cuda.bindings import driver

    newest = driver.cuDriverGetVersion()[1]
    return Finding("cuda.bindings", f"here; the driver supports CUDA {newest // 1000}.{newest // 10 % 100}")


def check_compiler() -> Finding:
    """NVRTC and the headers it includes: every kernel of the checks that follow."""
    import torch
    from cupy.cuda import nvrtc

    from exl2chat.engine.checkup import FAMILIES
    from exl2chat.ops import compile_for

    device, started = torch.device("cuda"), time.perf_counter()
    with torch.inference_mode():
        compile_for(lambda: [family.error(device) for family in FAMILIES.values()], silent)
    seconds = time.perf_counter() - started
    return Finding("compiler", "NVRTC {}.{}, kernels ready in {:.1f} s".format(*nvrtc.getVersion(), seconds))


def families() -> tuple[str, ...]:
    from exl2chat.engine.checkup import FAMILIES

    return tuple(FAMILIES)


def check_family(name: str) -> Finding:
    """One small case against the reference."""
    import torch

    from exl2chat.engine.checkup import FAMILIES, TOLERANCE

    with torch.inference_mode():
        error = FAMILIES[name].error(torch.device("cuda"))
    wrong = "" if error <= TOLERANCE else "please report it, with this output; until then use --device cpu"
    return Finding(name, f"relative error {error:.1e}", wrong)


def check_bandwidth() -> Finding:
    import torch

    from exl2chat.ops.kernel_benchmark import measure_read

    return Finding("read bandwidth", f"{measure_read(torch.device('cuda')) / 1e9:,.0f} GB/s")


def check_kernels(paths: Paths) -> Finding:
    files = [file for file in paths.kernels.glob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return Finding("kernel cache", f"{paths.kernels}: {len(files)} files, {size / 1e6:.1f} MB; it may be deleted")
