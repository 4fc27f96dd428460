"""The environment of the engine process: its threads, how they wait for each other, and where compiled kernels stay."""

import os
from pathlib import Path

from exl2chat.paths import Paths

MAX_THREADS = 8  # reading the weights from memory is the limit well before


def worker_environment(paths: Paths) -> dict[str, str]:
    """Variables for libgomp and CuPy, which read them as they are loaded. They hold where the user set none.

    One core stays free for the screen. With as many threads as cores, every repaint holds up all threads at the next
    barrier. Measured in the chat with a 135M model on two cores that also ran other work: 28 to 35 tokens/s with one
    thread, 7 with two, 11 with two that never spin (GOMP_SPINCOUNT=0).
    """
    threads = min(MAX_THREADS, max(1, _cores() - 1))
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000", "CUPY_CACHE_DIR": str(paths.kernels)}


def _cores() -> int:
    """Physical cores that this process may use; two hardware threads of one core count once."""
    usable = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in usable]
    try:
        return len({file.read_text() for file in siblings})
    except OSError:
        return len(usable)
