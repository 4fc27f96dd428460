"""Where things live, and how a private file is made."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from errno import EFBIG, EINVAL
from pathlib import Path

import platformdirs

from exl2chat.errors import ChatError, UsageError

TRASH = ".trash"


@dataclass(frozen=True, slots=True)
class Paths:
    """The folders of one installation. `home` (flag `--home`, EXL2CHAT_HOME) puts all of them under one folder."""

    config: Path
    data: Path
    cache: Path
    state: Path

    @classmethod
    def default(cls, home: Path | None = None) -> "Paths":
        if home is None and os.environ.get("EXL2CHAT_HOME"):
            home = Path(os.environ["EXL2CHAT_HOME"])
        if home is not None:
            home = home.expanduser().absolute()
            return cls(home / "config", home / "data", home / "cache", home / "state")
        dirs = platformdirs.PlatformDirs("exl2chat", appauthor=False)
        return cls(dirs.user_config_path, dirs.user_data_path, dirs.user_cache_path, dirs.user_state_path)

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def sessions(self) -> Path:
        return self.data / "sessions"

    @property
    def trash(self) -> Path:
        return self.sessions / TRASH

    @property
    def history(self) -> Path:
        return self.data / "history.jsonl"

    @property
    def themes(self) -> Path:
        return self.config / "themes"

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def kernels(self) -> Path:
        return self.cache / "kernels"

    @property
    def log(self) -> Path:
        return self.state / "engine.log"


def theme_files(paths: Paths) -> Mapping[str, Path]:
    """Every theme there is, by name, which is the file's stem: those of the package or, in a checkout, of its folder
    `themes`; one of the user's takes the place of another of its name."""
    package = Path(__file__).parent
    bundled = package / "_themes"
    folders = (bundled if bundled.is_dir() else package.parent / "themes", paths.themes)
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.toml"))}


def home_folder(text: str) -> Path:
    """The folder that `--home` names. UsageError when it is empty, as an unset shell variable leaves it."""
    if not text:
        raise UsageError("--home is empty", "name a folder, or leave it out")
    return Path(text)


def private_folder(path: Path) -> Path:
    """`path`, made if needed, readable by its owner only (0700). ChatError when it cannot be made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
    except OSError as fault:
        raise ChatError(f"{path}: {fault.strerror}", "choose another place with --home") from None
    return path


def open_private(path: Path, flags: int) -> int:
    """A file descriptor of a 0600 file whatever the umask; a file found looser is repaired."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    keep_private(handle)
    return handle


def keep_private(handle: int) -> None:
    """Let only its owner read and write an open file."""
    if os.fstat(handle).st_mode & 0o077:
        os.fchmod(handle, 0o600)


def read_file(path: Path, limit: int) -> bytes:
    """What is in the regular file `path`. OSError where it is larger than `limit` bytes, or something else: a pipe or
    a device may never end. None is waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        check_file(file.fileno(), limit)
        return file.read()


def check_file(handle: int, limit: int) -> None:
    """OSError unless what is open is a regular file of at most `limit` bytes."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(EINVAL, "is not a regular file")
    if found.st_size > limit:
        raise OSError(EFBIG, f"is larger than {limit >> 20} MiB")


def fsync(path: Path) -> None:
    """Make what is in a file survive a power loss; of a folder its new and renamed entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
