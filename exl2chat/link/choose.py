"""Which engine a command line asked for."""

from pathlib import Path

from exl2chat.errors import UsageError
from exl2chat.link.protocol import Engine
from exl2chat.paths import Paths


def choose_engine(name: str, paths: Paths) -> Engine:
    """`local` (a process of its own), `in-process` (for debugging) or `scripted[:FILE]` (for tests)."""
    kind, _, file = name.partition(":")
    if kind == "scripted":
        from exl2chat.link.scripted import ScriptedEngine, read_script

        return ScriptedEngine(read_script(Path(file)) if file else None)
    if name == "local":
        from exl2chat.link.local import LocalEngine

        return LocalEngine(paths)
    if name == "in-process":
        from exl2chat.link.in_process import InProcessEngine

        return InProcessEngine(paths)
    raise UsageError(f"--engine: there is no engine '{name}'", "it is local, in-process or scripted[:FILE]")
