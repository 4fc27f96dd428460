"""One job as a stream, for what our streaming generator does not do: guidance by a second prompt."""

from collections.abc import Collection, Sequence

from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import REASONS, Abort, Extras, StreamResult
from exl2chat.engine.lora import Scaled
from exl2chat.engine.paced_drafts import Speculated
from exl2chat.engine.replies.jobs import EndReason, Failed, Job, Streamed
from exl2chat.engine.stopping import StopConditions, StopReason
from exl2chat.errors import ChatError
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import unsupported
from exl2chat.settings import Sampling


class JobStream:
    """Runs one job at a time, as far as its next token. `tokens`: its first prompt and what it has said."""

    speculated = Speculated()

    def __init__(self, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
        self._engine = DynamicGenerator(model.transformer, cache.kv, tokenizer.native, speculate="off")
        self._abort: Abort = lambda: False
        self._count = 0
        self._reason: StopReason | None = None
        self.tokens: list[int] = []

    def begin_stream_ex(
        self,
        prompts: tuple[tuple[int, ...], ...],
        settings: Sampling,
        guidance: float,
        conditions: StopConditions,
        *,
        max_new_tokens: int,
        abort: Abort,
        extras: Extras,
        adapters: Sequence[Scaled],
        decode_special_tokens: bool,
        embeddings: tuple[InputEmbeddings, ...],
    ) -> None:
        """Take a reply of at most `max_new_tokens`, which fill the cache, in place of the last one. The prompts are
        read with the first token. `abort` is asked before every step of that, too."""
        self._engine.clear()
        self._abort, self._count, self._reason = abort, 0, None
        self._engine.set_adapters(adapters)
        job = Job(
            prompts, max_new_tokens, settings, conditions, guidance=guidance, heal=extras.token_healing,
            banned=extras.banned_strings, constraint=extras.constraint, prefer_end=extras.prefer_end,
            special=decode_special_tokens, top_tokens=extras.return_top_tokens,
            probabilities=extras.return_probabilities, logits=extras.return_logits, hooks=extras.hooks,
            continuing=False, embeddings=embeddings,
        )  # fmt: skip
        self.tokens = self._engine.prompt(self._engine.enqueue(job))

    def stream_ex(self, banned: Collection[int] = ()) -> StreamResult:
        """What the next token brings. ChatError where there is no reply: none was begun, or it failed."""
        if banned:
            raise unsupported("ExLlamaV2StreamingGenerator.stream_ex: ban_tokens with cfg_scale")
        while self._engine.remaining:
            if self._abort():
                self._engine.clear()
                self._reason = "stopped"
                break
            for result in self._engine.iterate():
                if isinstance(result, Failed):
                    raise result.error
                if isinstance(result, Streamed):
                    return self._told(result)
        if self._reason is None:
            raise ChatError("no reply was begun", "call begin_stream_ex first")
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
