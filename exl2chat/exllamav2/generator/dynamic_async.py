"""The dynamic generator for asyncio."""

from typing import Any

from exl2chat.engine.generators.asynchronous import AsyncDynamicGenerator
from exl2chat.exllamav2.generator.dynamic import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl2chat.exllamav2.generator.results import Record, record_of


class ExLlamaV2DynamicGeneratorAsync:
    """Takes what `ExLlamaV2DynamicGenerator` takes. The model runs in a thread of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*args, **kwargs)
        self.runner = AsyncDynamicGenerator(self.generator.engine)

    def enqueue(self, job: "ExLlamaV2DynamicJobAsync") -> None:
        """Begin a job. Its constructor has done so already: nothing happens to one of this generator."""
        job.begin(self)

    async def cancel(self, job: "ExLlamaV2DynamicJobAsync") -> None:
        """End a job: whoever waits for its results is told."""
        await job.cancel()

    async def close(self) -> None:
        """End all jobs and the thread."""
        await self.runner.close()


class ExLlamaV2DynamicJobAsync:
    """Takes a generator and what `ExLlamaV2DynamicJob` takes; `async for result in job` gives its dictionaries,
    whose `job` is the `ExLlamaV2DynamicJob` within.

    It is enqueued at once. What is wrong with it, and an error of the model, is raised where results are awaited; so is
    an error of this job alone, while others go on.
    """

    def __init__(self, generator: ExLlamaV2DynamicGeneratorAsync, *args: Any, **kwargs: Any) -> None:
        self.job = ExLlamaV2DynamicJob(*args, **kwargs)
        self.identifier = self.job.identifier
        self._tokenizer = generator.generator.tokenizer
        self._begun: ExLlamaV2DynamicGeneratorAsync | None = None
        self.begin(generator)

    def begin(self, generator: ExLlamaV2DynamicGeneratorAsync) -> None:
        """Enqueue the job, once."""
        if self._begun is None:
            self._stream = generator.runner.enqueue(lambda: generator.generator.checked(self.job))
            self._begun = generator

    @property
    def serial_number(self) -> int | None:
        """None until the generator has taken the job."""
        return self._stream.serial

    def __aiter__(self) -> "ExLlamaV2DynamicJobAsync":
        return self

    async def __anext__(self) -> Record:
        return record_of(await anext(self._stream), self.job, self._tokenizer)

    async def cancel(self) -> None:
        """End the job; `async for` ends at once, wherever it waits."""
        await self._stream.cancel()
