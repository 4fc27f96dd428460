"""What a process can have, from files as Linux writes them."""

import resource
from pathlib import Path

import pytest

from exl2chat.engine.free_memory import free_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in {"proc/meminfo": f"MemTotal:  1 kB\nMemAvailable:   {1000 << 10} kB", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


@pytest.fixture(autouse=True)
def address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_without_limits_it_is_what_the_system_has(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "0::/"})
    assert free_memory(tmp_path) == 1000 * MIB


@pytest.mark.parametrize(
    ("inner", "outer", "free"), [("max", "max", 1000), (300 * MIB, "max", 200), (900 * MIB, 400 * MIB, 250)]
)
def test_the_tightest_group_on_the_path_counts(tmp_path: Path, inner: object, outer: object, free: int) -> None:
    group = "sys/fs/cgroup/outer"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner",
            f"{group}/inner/memory.max": inner,
            f"{group}/inner/memory.current": 100 * MIB,
            f"{group}/memory.max": outer,
            f"{group}/memory.current": 170 * MIB,
            f"{group}/memory.stat": f"anon 5\ninactive_file {20 * MIB}",
        },
    )
    assert free_memory(tmp_path) == free * MIB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """Its path in /proc/self/cgroup may be one that is not mounted there."""
    group = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/docker/abc", f"{group}/memory.max": 64 * MIB, f"{group}/memory.current": 80 * MIB}
    write(tmp_path, files)
    assert free_memory(tmp_path) == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/jobs"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/jobs\n0::/",
        f"{group}/memory.limit_in_bytes": 500 * MIB,
        f"{group}/memory.usage_in_bytes": 100 * MIB,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 100 * MIB,
    }
    write(tmp_path, files)
    assert free_memory(tmp_path) == 400 * MIB


def test_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (800 * MIB, resource.RLIM_INFINITY))
    write(tmp_path, {"proc/self/status": f"Name:\tpython\nVmSize:\t  {300 << 10} kB\n"})
    assert free_memory(tmp_path) == 500 * MIB
