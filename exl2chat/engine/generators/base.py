"""Whole replies at once: prompts to the texts that follow them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from exl2chat.engine.cache import KVCache
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.lora import Scaled
from exl2chat.engine.replies.jobs import EndReason, Failed, Job, Result, Streamed
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ContextError, UsageError
from exl2chat.model.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """What follows a prompt. `tokens`: the prompt's, less a healed one, then the reply's; `text` is what the reply
    says. `cut`: so many tokens of the prompt, its first, did not fit. reason None: it was aborted."""

    tokens: list[int]
    cut: int
    text: str = ""
    reason: EndReason | None = None
    reply: list[int] = field(default_factory=list)


class BaseGenerator:
    """Writes the replies of some jobs side by side. Those for which the cache has no room yet wait for the others."""

    def __init__(self, model: Transformer, cache: KVCache, tokenizer: Tokenizer, longest: int | None = None) -> None:
        """No text with its reply is longer than `longest` tokens, by default what the cache holds."""
        self._capacity = longest or cache.capacity
        self._jobs = DynamicGenerator(model, cache, tokenizer)
        self.completions: list[Completion] = []

    def warm_up(self) -> None:
        """Write a few tokens and forget them, so that the first reply is as fast as the others."""
        self._jobs.warm_up()

    def full(self) -> bool:
        """Whether one of the last texts is as long as one may be."""
        return any(len(completion.tokens) >= self._capacity for completion in self.completions)

    def set_adapters(self, adapters: Sequence[Scaled]) -> None:
        """The LoRAs of the replies to come."""
        self._jobs.set_adapters(adapters)

    def generate(self, jobs: Sequence[Job], abort: Callable[[], bool] = lambda: False) -> list[Completion]:
        """Run jobs of one prompt each. `abort` is asked before every step: what is written by then is the result.

        A prompt that leaves no room for max_new_tokens loses its first tokens, and its Completion says how many;
        ContextError where max_new_tokens alone would fill the cache. The error of one reply ends all of them.
        """
        fitting = [self._fit(job) for job in jobs]
        try:
            serials = [self._jobs.enqueue(job) for job in fitting]
            self.completions = [
                Completion(self._jobs.prompt(serial), len(job.prompts[0]) - len(fit.prompts[0]))
                for serial, job, fit in zip(serials, jobs, fitting, strict=True)
            ]
            known = dict(zip(serials, self.completions, strict=True))
            while self._jobs.remaining and not abort():
                for result in self._jobs.iterate():
                    _add(result, known)
        finally:
            self._jobs.clear()
        return self.completions

    def _fit(self, job: Job) -> Job:
        room = self._capacity - job.max_new_tokens
        if room < 1:
            raise ContextError(
                f"{job.max_new_tokens} tokens leave no room for a prompt in a cache of {self._capacity}",
                "ask for fewer, or make the cache larger",
            )
        if len(job.prompts) != 1:
            raise UsageError("guidance needs a dynamic generator", "give one prompt")
        return replace(job, prompts=(job.prompts[0][-room:],))


def _add(result: Result, completions: dict[int, Completion]) -> None:
    if isinstance(result, Failed):
        raise result.error
    if not isinstance(result, Streamed):
        return
    completion, ids = completions[result.serial], [token.id for token in result.tokens]
    completion.tokens += ids
    completion.reply += ids
    completion.text += result.text
    if result.final is not None:
        completion.reason = result.final.reason
