"""The supervisor against a real worker process. Most tests need no model: a worker without one answers with Failed."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from exl2chat.link import protocol as wire
from exl2chat.link.in_process import InProcessEngine
from exl2chat.link.local import LocalEngine
from exl2chat.paths import Paths
from exl2chat.settings import Sampling

MODEL = Path(__file__).parent.parent / "data" / "golden" / "llama-6.0bpw-exl2"
ASK = wire.Generate("a", (wire.Turn("user", "hello"),))


async def first(engine, *kinds):
    """The first event of one of `kinds`."""
    async with asyncio.timeout(60):
        async for event in engine.events():
            if isinstance(event, kinds):
                return event
            assert not isinstance(event, wire.Failed | wire.Died), event
    raise AssertionError("the events ended")


async def answered(engine):
    await engine.send(ASK)
    return await first(engine, wire.Failed)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pid):
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.01)


@pytest.fixture
async def engine(tmp_path):
    engine = LocalEngine(Paths.default(tmp_path))
    yield engine
    await engine.close()


async def test_a_reply_without_a_model_fails_and_the_worker_lives_on(engine):
    failed = await answered(engine)
    assert (failed.id, failed.status) == ("a", 3)
    pid = engine.pid
    await answered(engine)
    assert engine.pid == pid


async def test_a_bad_model_reference_fails_with_status_3(engine):
    await engine.send(wire.Load("/no/such/folder"))
    failed = await first(engine, wire.Failed)
    assert (failed.id, failed.status) == ("", 3)
    assert "/no/such/folder" in failed.message


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_killed_worker_is_reported_and_replaced_by_the_next_request(engine, number):
    await answered(engine)
    killed = engine.pid
    os.kill(killed, number)
    died = await first(engine, wire.Died)
    assert number.name in died.detail
    assert engine.pid is None
    await answered(engine)
    assert engine.pid not in (None, killed)


async def test_a_worker_killed_in_the_middle_of_a_reply_loads_again_and_answers(engine, tmp_path):
    load, endless = wire.Load(str(MODEL)), wire.Generate("a", ASK.turns, Sampling(temperature=0))
    await engine.send(load)
    await first(engine, wire.Ready)
    await engine.send(endless)
    await first(engine, wire.Chunk)
    os.kill(engine.pid, signal.SIGKILL)
    assert "SIGKILL" in (await first(engine, wire.Died)).detail
    await engine.send(load)
    await first(engine, wire.Ready)
    await engine.send(endless)
    await first(engine, wire.Chunk)
    await engine.send(wire.Stop("a"))
    assert (await first(engine, wire.Finished)).reason == "stopped"
    log = Paths.default(tmp_path).log.read_text()
    assert log.count("loaded llama-6.0bpw-exl2") == 2
    assert ASK.turns[0].text not in log, "what is said is never logged"


async def test_a_worker_killed_before_it_speaks_is_reported(engine):
    await engine.send(ASK)
    os.kill(engine.pid, signal.SIGKILL)
    assert "SIGKILL" in (await first(engine, wire.Died)).detail


async def test_a_worker_killed_during_a_load_is_reported_and_the_next_load_works(engine):
    await engine.send(wire.Load(str(MODEL)))
    await first(engine, wire.Loading)
    os.kill(engine.pid, signal.SIGKILL)
    await first(engine, wire.Died)
    await engine.send(wire.Load(str(MODEL)))
    await first(engine, wire.Ready)


@pytest.mark.parametrize("output", [r"\377\377\377\377", r"\003\000\000\000abc", r"\200\000\000\000cut short"])
async def test_a_worker_that_sends_damaged_data_is_ended_and_reported(engine, tmp_path, monkeypatch, output):
    impostor = tmp_path / "python"
    impostor.write_text(f"#!/bin/sh\nprintf '{output}'\nexec sleep {0 if 'cut' in output else 60}\n")
    impostor.chmod(0o700)
    monkeypatch.setattr("exl2chat.link.local.sys.executable", str(impostor))
    await engine.send(ASK)
    pid = engine.pid
    died = await first(engine, wire.Died)
    assert ("left with status 0" if "cut" in output else "damaged") in died.detail
    assert not alive(pid)


async def test_a_worker_that_cannot_be_started_is_reported(engine, monkeypatch):
    monkeypatch.setattr("exl2chat.link.local.sys.executable", "/no/such/python")
    await engine.send(ASK)
    assert "cannot be started" in (await first(engine, wire.Died)).detail


async def test_of_the_log_only_the_dead_workers_own_last_line_is_told_and_safely(engine, tmp_path, monkeypatch):
    impostor = tmp_path / "python"
    lines = r"1 2 $$ ERROR first words\n1 2 $$ ERROR last \033[2J words\n1 2 99999999 ERROR of another\nof nobody\n"
    impostor.write_text(f'#!/bin/sh\nprintf "{lines}" >&2\nexit 7\n')
    impostor.chmod(0o700)
    monkeypatch.setattr("exl2chat.link.local.sys.executable", str(impostor))
    await engine.send(ASK)
    detail = (await first(engine, wire.Died)).detail
    assert detail.startswith("the engine left with status 7; its last words: ERROR last ")
    assert detail.endswith(f" words (more in {Paths.default(tmp_path).log})")
    assert "another" not in detail
    assert "\x1b" not in detail


async def test_close_ends_the_worker_even_one_that_does_not_listen(engine):
    await answered(engine)
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(2):
        await engine.close()
    assert not alive(pid)


async def test_close_ends_the_events(engine):
    await answered(engine)
    await engine.close()
    assert [event async for event in engine.events()] == []


async def test_the_worker_leaves_a_core_to_the_screen_unless_told_otherwise(engine, monkeypatch):
    def setting():
        entries = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
        return int(next(entry for entry in entries if entry.startswith(b"OMP_NUM_THREADS=")).partition(b"=")[2])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    await answered(engine)
    assert 1 <= setting() <= max(1, os.cpu_count() - 1)
    os.kill(engine.pid, signal.SIGKILL)
    await first(engine, wire.Died)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    await answered(engine)
    assert setting() == 3


async def test_a_stop_starts_no_worker(engine):
    await engine.send(wire.Stop("a"))
    assert engine.pid is None


async def test_the_log_is_private_and_bounded(engine, tmp_path):
    log = Paths.default(tmp_path).log
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * (2 << 20))
    await answered(engine)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert log.stat().st_size < 1 << 20
    assert log.with_suffix(".log.1").stat().st_size == 2 << 20


async def test_a_log_that_cannot_be_written_does_not_keep_the_worker_from_starting(tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    engine = LocalEngine(Paths.default(tmp_path))
    assert (await answered(engine)).status == 3
    await engine.close()


PARENT = """
import asyncio, pathlib, sys
from exl2chat.link import protocol as wire
from exl2chat.link.local import LocalEngine
from exl2chat.paths import Paths

async def main():
    engine = LocalEngine(Paths.default(pathlib.Path(sys.argv[1])))
    await engine.send(wire.Generate("a", (wire.Turn("user", "hello"),)))
    async for event in engine.events():
        print(engine.pid, flush=True)

asyncio.run(main())
"""


async def test_no_worker_outlives_a_front_end_that_was_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await gone(worker)


async def test_the_in_process_engine_speaks_the_same_protocol(tmp_path):
    engine = InProcessEngine(Paths.default(tmp_path))
    assert (await answered(engine)).status == 3
    await engine.close()
    assert [event async for event in engine.events()] == []
