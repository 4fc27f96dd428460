"""How much of the computer's memory this process can still have: the least of what the system, its control groups and
its address space leave it."""

import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# Of a control group's files in version 2 and 1: what it may use, and what it does.
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes; None where nothing tells. `root` is the folder in which proc and sys lie."""
    limits = (_available(root), *_left_by_groups(root), _left_of_address_space(root))
    return min((max(0, left) for left in limits if left is not None), default=None)


def _available(root: Path) -> int | None:
    return _field(root / "proc/meminfo", "MemAvailable")


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group that the process is in leaves, from its own up to the outermost.

    Their pages of files can be had again and count as free (`inactive_file`), as they do in MemAvailable.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, usage = FILES[1 if controllers else 0]
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(mount):
                break
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None:
                yield most - used + _cached(group)


def _cached(group: Path) -> int:
    fields = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    return int(fields.get("inactive_file", "0"))


def _left_of_address_space(root: Path) -> int | None:
    most, used = resource.getrlimit(resource.RLIMIT_AS)[0], _field(root / "proc/self/status", "VmSize")
    return None if most == resource.RLIM_INFINITY or used is None else most - used


def _field(path: Path, name: str) -> int | None:
    """The bytes of a line "name: 12 kB"."""
    for line in _lines(path):
        key, _, value = line.partition(":")
        if key == name and (words := value.split()) and words[0].isdigit():
            return int(words[0]) << 10
    return None


def _number(path: Path) -> int | None:
    """The number that a file consists of; None where it says "max" or is not there."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
