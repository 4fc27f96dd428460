"""The engine's results as the reference's dictionaries."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exl2chat.engine.cache import PAGE
from exl2chat.engine.replies.jobs import Failed, Final, Prefilled, Result, Started, Streamed, Token
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer

Record = dict[str, Any]


def record_of(result: Result, job: Any, tokenizer: ExLlamaV2Tokenizer) -> Record:
    """One result of `job`. Of a job that failed: eos, eos_reason "error", the exception as `error`."""
    record: Record = {"job": job, "stage": "streaming", "eos": False, "serial": result.serial}
    if job.identifier is not None:
        record["identifier"] = job.identifier
    if isinstance(result, Started):
        record["stage"] = "started"
    elif isinstance(result, Prefilled):
        record.update(stage="prefill", curr_progress=result.done, max_progress=result.total)
    elif isinstance(result, Failed):
        record.update(eos=True, eos_reason="error", error=result.error, full_completion=result.text)
    else:
        record.update(_streamed(result))
        if result.final is not None:
            record.update(_final(result.final, tokenizer))
    return record


def _streamed(result: Streamed) -> Record:
    record = _tokens(result.text, result.tokens)
    if result.suppressed:
        record["suppressed_text"] = "".join(token.text for token in result.suppressed)
        record["suppressed_tokens"] = _ids(result.suppressed)
    return record


def _tokens(text: str, tokens: Sequence[Token]) -> Record:
    """text, token_ids [1, n] and what the job asked of each token; what is empty is left out."""
    record: Record = {"text": text} if text else {}
    if not tokens:
        return record
    record["token_ids"] = _ids(tokens)
    if tokens[0].probability is not None:
        record["token_probs"] = torch.tensor([[token.probability for token in tokens]])
    if width := max(len(token.top) for token in tokens):
        tops = [[*token.top, *[(-1, 0.0)] * (width - len(token.top))] for token in tokens]
        record["top_k_tokens"] = torch.tensor([[[token for token, _ in top] for top in tops]])
        record["top_k_probs"] = torch.tensor([[[probability for _, probability in top] for top in tops]])
    if tokens[0].logits is not None:
        record["logits"] = torch.stack([torch.from_numpy(token.logits) for token in tokens])[None]
    return record


def _final(final: Final, tokenizer: ExLlamaV2Tokenizer) -> Record:
    record: Record = {
        "eos": True,
        "eos_reason": final.reason,
        "full_completion": final.text,
        "new_tokens": final.new_tokens,
        "prompt_tokens": final.prompt_tokens,
        "time_enqueued": final.waited,
        "time_prefill": final.read,
        "time_generate": final.wrote,
        "cached_pages": final.cached_tokens // PAGE,
        "cached_tokens": final.cached_tokens,
        "seed": final.seed,
    }
    if final.token is not None:
        record["eos_triggering_token_id"] = final.token
        record["eos_triggering_token_str"] = tokenizer.native.token_of(final.token)
    if final.string is not None:
        record["eos_triggering_string"] = final.string
    if final.drafted:
        record["accepted_draft_tokens"] = final.accepted
        record["rejected_draft_tokens"] = final.drafted - final.accepted
    if final.withheld:
        record["held"] = _tokens(final.withheld_text, final.withheld)
    return record


def _ids(tokens: Sequence[Token]) -> Tensor:
    return torch.tensor([[token.id for token in tokens]], dtype=torch.int64)
