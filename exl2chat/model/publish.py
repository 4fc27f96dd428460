"""Folders that appear complete or not at all, made by one process at a time."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from exl2chat.paths import fsync, open_private


@contextmanager
def exclusive(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `lock`; `waiting` is called once if another process has it. The kernel frees it on death."""
    handle = open_private(lock, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A folder beside `target` to fill; at the end it is on disk and renamed to `target`.

    What an interrupted run left is cleared first. The caller holds a lock, and `target` does not exist.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    yield partial
    for file in partial.iterdir():
        fsync(file)
    fsync(partial)
    partial.rename(target)
    fsync(target.parent)
