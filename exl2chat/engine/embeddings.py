"""Input embeddings: rows that stand in a text where tokens would, as another network made them of a picture, say.

Their ids lie beyond every vocabulary and come from a hash of the rows: equal rows have equal ids, and no others do. So
whatever compares or hashes ids, as the prefix that a stream keeps and the pages of the prompt cache, tells one picture
from another, and knows one again, without being told that there are any.
"""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from operator import index

import numpy as np
import torch
from torch import Tensor

from exl2chat.errors import UsageError
from exl2chat.model.tokenizer import Tokenizer

FIRST_ID = 1 << 32  # ids below it are those of tokens
IDS = 1 << 62  # two of 10,000 embeddings of 1000 rows share an id with probability 2e-8


@dataclass(frozen=True, slots=True, eq=False)
class InputEmbeddings:
    """rows: float32 [N, hidden] on the host, of which row n stands where a text has `ids[n]`."""

    rows: Tensor
    ids: range

    @classmethod
    def of(cls, rows: Tensor) -> "InputEmbeddings":
        """rows: [N, hidden] or [1, N, hidden] of any float dtype, as the model adds to them: an embedding's scale is
        not applied. UsageError where they are not."""
        if rows.dim() == 3 and rows.shape[0] == 1:
            rows = rows[0]
        if rows.dim() != 2 or not rows.shape[0]:
            raise UsageError(f"input embeddings have shape {list(rows.shape)}", "it is [N, hidden], N at least 1")
        if not rows.is_floating_point():
            kind = str(rows.dtype).removeprefix("torch.")
            raise UsageError(f"input embeddings are of {kind}", "give floating-point numbers")
        rows = rows.detach().to("cpu", torch.float32, copy=True).contiguous()
        if not rows.isfinite().all():
            raise UsageError("input embeddings hold values that are not finite", "give numbers")
        digest = blake2b(rows.numpy().tobytes(), digest_size=8, person=str(rows.shape[1]).encode()).digest()
        first = FIRST_ID + int.from_bytes(digest, "little") % IDS
        return cls(rows, range(first, first + rows.shape[0]))


def check_width(embeddings: Iterable[InputEmbeddings], hidden: int) -> None:
    """UsageError where rows are not of a model's `hidden` size."""
    for width in (each.rows.shape[1] for each in embeddings):
        if width != hidden:
            raise UsageError(f"input embeddings are {width} wide", f"those of this model are {hidden}")


def check_prompt(ids: Sequence[int], size: int, hidden: int, embeddings: Sequence[InputEmbeddings]) -> None:
    """UsageError for no ids, for ids that are neither tokens (0 to size - 1) nor of `embeddings`, and for another width
    of these than `hidden`."""
    check_width(embeddings, hidden)
    known = [range(size), *(each.ids for each in embeddings)]
    try:
        if not len(ids):
            raise UsageError("the prompt has no tokens", "give at least one")
        with suppress(OverflowError):  # not even 32 bits, or below 0
            if np.frombuffer(array("I", ids), np.uint32).max() < size:  # 28 us of 4096 ids, min and max 103
                return
        unknown = next((token for token in map(index, ids) if not any(token in one for one in known)), None)
    except TypeError:
        raise UsageError("the prompt is no list of token ids", "give what the tokenizer's encode returns") from None
    if unknown is not None:
        more = ", and those of the embeddings that are given" if unknown >= FIRST_ID else ""
        raise UsageError(f"the prompt has token ids that are no tokens: {unknown}", f"ids are 0 to {size - 1}{more}")


def fill(x: Tensor, ids: Tensor, embeddings: Iterable[InputEmbeddings]) -> None:
    """Put rows of `embeddings` into x [T, hidden] where `ids` (int64 [T] on the host) are theirs."""
    for each in embeddings:
        at = ((ids >= each.ids.start) & (ids < each.ids.stop)).nonzero()[:, 0]
        if len(at):
            x[at.to(x.device)] = each.rows[ids[at] - each.ids.start].to(x.device)


def encode_marked(
    tokenizer: Tokenizer, text: str, marks: Mapping[str, InputEmbeddings], special: bool = False, add_bos: bool = False
) -> list[int]:
    """The ids of `text`, with those of an embedding wherever its mark stands. What lies between marks is encoded by
    itself, as `Tokenizer.encode` does."""
    if not marks:
        return tokenizer.encode(text, special, add_bos)
    longest_first = sorted(marks, key=len, reverse=True)
    first, *others = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    ids = tokenizer.encode(first, special, add_bos)
    for mark, following in zip(others[::2], others[1::2], strict=True):
        ids += [*marks[mark].ids, *tokenizer.encode(following, special)]
    return ids
