"""What drafts do to the speed of a reply: synthetic ones that are always right, and ones that are always wrong."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from exl2chat.engine.cache import KVCache
from exl2chat.engine.decoders import Decoder
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.replies.language import Language
from exl2chat.engine.replies.task import Task
from exl2chat.engine.reply_benchmark import SAMPLING, OneLetter
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ModelError
from exl2chat.ops.kernel_benchmark import KernelRow

Clock = Callable[[], float]


class Script:
    """Drafts of a known sequence, or of other tokens than those."""

    is_model = False

    def __init__(self, sequence: Sequence[int], right: bool) -> None:
        self._sequence = sequence if right else [abs(token - 1) for token in sequence]

    def begin(self, chooser: object) -> bool:  # noqa: ARG002
        """Nothing depends on it."""
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        return list(self._sequence[len(tokens) : len(tokens) + count])


class ScriptedReply:
    """One reply, written again and again: that of a model to a prompt which its cache holds.

    A GPU computes the same bits in steps of one row and of several: there each reply is what the model says, and has to
    be the same. A CPU does not: there the tokens of the first are taken, whatever is drawn.
    """

    def __init__(self, model: Transformer, cache: KVCache, context: int, count: int) -> None:
        """`count` tokens after a prompt of `context`."""
        self._model, self._cache, self._count = model, cache, count
        self._prompt = (1,) * context
        self._language = Language(OneLetter(), model.config.vocab_size)  # type: ignore[arg-type]
        cache.truncate(0)
        model.forward(model.inputs(self._prompt[:-1]), cache, last_only=True)
        self.sequence = self._write(self.decoder(), ())

    def decoder(self, right: bool | None = None) -> Decoder:
        """One that has right drafts, wrong ones, or none."""
        drafters = () if right is None else (Script(self.sequence, right),)
        return Decoder(self._model, self._cache, self._language.size, drafters)

    def repeat(self, decoder: Decoder) -> None:
        """Write it once more. ModelError where it becomes another."""
        if self._write(decoder, self.sequence if self._model.device.type == "cpu" else ()) != self.sequence:
            raise ModelError("a reply with drafts is another than without", "report this as a defect")

    def _write(self, decoder: Decoder, script: Sequence[int]) -> list[int]:
        self._cache.truncate(len(self._prompt) - 1)
        task = Task(Job((self._prompt,), self._count, SAMPLING), self._language)
        tokens = task.chooser.tokens
        decoder.begin(task.chooser, len(tokens) + self._count)
        for _ in range(self._count):
            token = decoder.next(task.chooser)
            task.push(script[len(tokens)] if script else token)
        return tokens


def measure_drafts(
    model: Transformer, cache: KVCache, context: int, count: int, rounds: int, clock: Clock = time.perf_counter
) -> list[KernelRow]:
    """The median time of a token in a reply of `count` after a prompt of `context`, with drafts that are always right
    and always wrong, against the same without, in turns."""
    reply = ScriptedReply(model, cache, context, count)
    works = [partial(reply.repeat, reply.decoder(right)) for right in (None, True, False)]
    off, *seconds = (1e6 * median(times) / count for times in in_turns(works, rounds, clock))
    return [
        KernelRow(f"reply with drafts always {name}", 1, each, off, "the same reply without drafts")
        for name, each in zip(("right", "wrong"), seconds, strict=True)
    ]


def in_turns(works: Sequence[Callable[[], object]], rounds: int, clock: Clock) -> list[list[float]]:
    """Seconds of each in every round, after one that does not count."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(1 + rounds):
        for work, times in zip(works, seconds, strict=True):
            started = clock()
            work()
            times.append(clock() - started)
    return [times[1:] for times in seconds]
