"""Jobs awaited from an event loop: the loop is never blocked, and nobody waits for what will not come."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from exl2chat.engine.generators.asynchronous import AsyncDynamicGenerator, Stream
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.jobs import Choice, Result, Streamed
from exl2chat.errors import ContextError, UsageError
from tests.engine.dynamic_jobs import SETTINGS, generator, job, prompt, reply, streamed

PATIENCE = 60  # seconds after which a test has failed


class Gate:
    """Holds the model up in the middle of a step until it is opened."""

    def __init__(self, subject: DynamicGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        run = subject._executor.run

        def wait(*step: Any) -> object:
            self.entered.set()
            assert self.opened.wait(PATIENCE)
            return run(*step)

        monkeypatch.setattr(subject._executor, "run", wait)

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, PATIENCE)


@pytest.fixture
async def engine() -> DynamicGenerator:
    return generator()


@pytest.fixture
async def subject(engine: DynamicGenerator) -> AsyncIterator[AsyncDynamicGenerator]:
    subject = AsyncDynamicGenerator(engine)
    yield subject
    await subject.close()


async def results_of(stream: Stream) -> list[Result]:
    async with asyncio.timeout(PATIENCE):
        return [result async for result in stream]


async def test_jobs_awaited_together_write_what_they_would_alone(subject: AsyncDynamicGenerator) -> None:
    wanted = [(prompt(20 + n, n), 10 + n, SETTINGS[n % 4]) for n in range(6)]
    streams = [subject.enqueue(lambda each=each: job(*each)) for each in wanted]  # type: ignore[misc]
    done = await asyncio.gather(*map(results_of, streams))
    for stream, results, each in zip(streams, done, wanted, strict=True):
        assert stream.serial is not None
        assert reply(results, stream.serial) == streamed(*each)
        last = results[-1]
        assert isinstance(last, Streamed)
        assert last.final is not None
    assert await results_of(streams[0]) == []


async def test_the_loop_runs_on_while_the_model_is_at_work(
    engine: DynamicGenerator, subject: AsyncDynamicGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine, monkeypatch)
    reading = asyncio.create_task(results_of(subject.enqueue(lambda: job(prompt(9), 3))))
    await gate.reached()
    for _ in range(100):
        await asyncio.sleep(0)  # the step is still under way
    second = subject.enqueue(lambda: job(prompt(9, 1), 3))
    gate.opened.set()
    await reading
    assert len(await results_of(second)) > 3


async def test_whoever_waits_is_told_of_a_cancellation_at_once(
    engine: DynamicGenerator, subject: AsyncDynamicGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exllamav2 a blocked consumer is never woken (appendix B-9). Here it is, though the model is in a step."""
    gate = Gate(engine, monkeypatch)
    stream = subject.enqueue(lambda: job(prompt(9), 50))
    other = subject.enqueue(lambda: job(prompt(9, 1), 5))
    readers = [asyncio.create_task(results_of(stream)) for _ in range(2)]
    await gate.reached()
    cancelling = asyncio.create_task(stream.cancel())
    assert await asyncio.gather(*readers) == [[], []]
    assert not cancelling.done()
    gate.opened.set()
    await asyncio.wait_for(cancelling, PATIENCE)
    assert stream.serial not in engine._scheduler.running
    assert other.serial is None or len(await results_of(other)) >= 5
    await stream.cancel()
    assert await results_of(stream) == []


async def test_whoever_gives_up_waiting_for_a_cancellation_stops_nobody_else(
    engine: DynamicGenerator, subject: AsyncDynamicGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(engine, monkeypatch)
    first, second = (subject.enqueue(lambda n=n: job(prompt(9, n), 3)) for n in range(2))  # type: ignore[misc]
    await gate.reached()
    cancelling = asyncio.create_task(first.cancel())
    await asyncio.sleep(0)  # until it waits for the thread
    cancelling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelling
    gate.opened.set()
    assert reply(await results_of(second), 1) == streamed(prompt(9, 1), 3)
    assert engine.remaining == 0


async def test_cancelling_a_job_that_has_ended_ends_its_results(subject: AsyncDynamicGenerator) -> None:
    stream = subject.enqueue(lambda: job(prompt(9), 3))
    async with asyncio.timeout(PATIENCE):
        while not stream.ended:
            await asyncio.sleep(0)
    await stream.cancel()
    assert await results_of(stream) == []


async def test_an_error_of_the_model_reaches_every_job_and_the_next_ones_run(
    engine: DynamicGenerator, subject: AsyncDynamicGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exllamav2 it ends the loop for good (appendix B-9)."""
    gate = Gate(engine, monkeypatch)
    streams = [subject.enqueue(lambda n=n: job(prompt(9, n), 5)) for n in range(3)]  # type: ignore[misc]
    await gate.reached()

    def fail(*step: object) -> None:
        raise MemoryError(step)

    run = engine._executor.run
    monkeypatch.setattr(engine._executor, "run", fail)
    gate.opened.set()
    errors = await asyncio.gather(*map(results_of, streams), return_exceptions=True)
    assert [type(error) for error in errors] == [MemoryError] * 3
    monkeypatch.setattr(engine._executor, "run", run)
    stream = subject.enqueue(lambda: job(prompt(9), 5))
    results = await results_of(stream)
    assert stream.serial is not None
    assert reply(results, stream.serial) == streamed(prompt(9), 5)


async def test_the_error_of_one_job_is_raised_there_alone(subject: AsyncDynamicGenerator) -> None:
    def refuse(choice: Choice) -> None:
        raise ValueError(choice.token)

    wrong = subject.enqueue(lambda: job(prompt(9), 5, hooks=(refuse,)))
    long = subject.enqueue(lambda: job(prompt(9), 10**6))
    right = subject.enqueue(lambda: job(prompt(9), 5))
    with pytest.raises(ContextError):
        await results_of(long)
    with pytest.raises(ValueError):
        await results_of(wrong)
    assert reply(await results_of(right), 1) == streamed(prompt(9), 5)


async def test_the_error_of_a_job_reaches_everybody_who_waits_for_it(subject: AsyncDynamicGenerator) -> None:
    def refuse(choice: Choice) -> None:
        raise ValueError(choice.token)

    stream = subject.enqueue(lambda: job(prompt(9), 5, hooks=(refuse,)))
    errors = await asyncio.gather(*(results_of(stream) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in errors] == [ValueError] * 3
    with pytest.raises(ValueError):
        await results_of(stream)
    await stream.cancel()


async def test_closing_ends_every_job_and_the_thread(engine: DynamicGenerator) -> None:
    subject = AsyncDynamicGenerator(engine)
    streams = [subject.enqueue(lambda n=n: job(prompt(9, n), 900)) for n in range(3)]  # type: ignore[misc]
    readers = [asyncio.create_task(results_of(stream)) for stream in streams]
    await asyncio.wait_for(subject.close(), PATIENCE)
    await asyncio.gather(*readers)
    assert subject._thread is not None
    assert not subject._thread.is_alive()
    assert engine.remaining == 0
    await streams[0].cancel()
    await subject.close()
    with pytest.raises(UsageError, match="closed"):
        subject.enqueue(lambda: job(prompt(9), 5))


async def test_a_generator_that_had_no_job_can_be_closed(engine: DynamicGenerator) -> None:
    await AsyncDynamicGenerator(engine).close()
