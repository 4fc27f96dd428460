"""One job as a stream, for what our streaming generator does not do: guidance by a second prompt."""

from collections.abc import Callable, Collection, Sequence

from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.jobs import EndReason, Failed, Job, Streamed
from exl2chat.engine.generators.streaming import REASONS, StreamResult
from exl2chat.engine.lora import Scaled
from exl2chat.engine.speculation import Speculated
from exl2chat.engine.stopping import StopReason
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import unsupported


class JobStream:
    """Runs one job at a time, as far as its next token. `tokens`: its first prompt and what it has said."""

    speculated = Speculated()

    def __init__(self, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
        self._engine = DynamicGenerator(model.transformer, cache.kv, tokenizer.native)
        self.tokens: list[int] = []

    def begin(self, job: Job, adapters: Sequence[Scaled], abort: Callable[[], bool]) -> None:
        """Take a job, which fills the cache if nothing ends it before, in place of the last one."""
        self._engine.clear()
        self._engine.set_adapters(adapters)
        self.tokens = self._engine.prompt(self._engine.enqueue(job))
        self._abort, self._count = abort, 0
        self._reason: StopReason | None = None

    def stream_ex(self, banned: Collection[int] = ()) -> StreamResult:
        """What the next token brings."""
        if banned:
            raise unsupported("ExLlamaV2StreamingGenerator.stream_ex: ban_tokens with cfg_scale")
        if self._reason is None and self._abort():
            self._engine.clear()
            self._reason = "stopped"
        while self._reason is None:
            for result in self._engine.iterate():
                if isinstance(result, Failed):
                    raise result.error
                if isinstance(result, Streamed):
                    return self._told(result)
        return StreamResult("", (), self._count, self._reason)

    def _told(self, result: Streamed) -> StreamResult:
        ids = tuple(token.id for token in result.tokens)
        self.tokens += ids
        self._count += len(ids)
        self._reason = _reason(result.final.reason) if result.final else None
        suppressed = "".join(token.text for token in result.suppressed)
        return StreamResult(result.text, ids, self._count, self._reason, suppressed, result.tokens)


def _reason(reason: EndReason) -> StopReason:
    """Why the stream ended: such a job has as many tokens as the cache has room for."""
    return "context" if reason == "max_new_tokens" else REASONS[reason]
