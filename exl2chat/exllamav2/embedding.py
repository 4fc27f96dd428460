"""Embeddings in a prompt: `ExLlamaV2MMEmbedding`, and tensors at the marker `{{EMBED_HERE}}`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2chat.engine.embeddings import FIRST_ID, InputEmbeddings, check_width, encode_marked
from exl2chat.errors import UsageError
from exl2chat.exllamav2.unsupported import refuse_set
from exl2chat.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from exl2chat.exllamav2.model import ExLlamaV2

EMBEDDING_INDEX = 1_000_000_000  # in a prompt of ids, what stands for the first row of a tensor
MARKER = "{{EMBED_HERE}}"


class ExLlamaV2MMEmbedding:
    """Rows for a prompt, which stand there where a text has `text_alias` or a tensor `get_ids()`.

    The ids are those of the rows' contents, so that rows that are equal are found in the prompt cache again.
    """

    def __init__(
        self,
        model: "ExLlamaV2",
        embeddings: Tensor,
        text_alias: str | None = None,
        thw_grid: object = None,
        pre_tokens: int = 0,
        post_tokens: int = 0,
    ) -> None:
        """embeddings: [N, hidden], of which the first `pre_tokens` and the last `post_tokens` are no part of a picture.
        UsageError where they do not fit the model."""
        refuse_set("ExLlamaV2MMEmbedding", thw_grid=thw_grid)
        self.model, self.embeddings = model, embeddings
        self.native = InputEmbeddings.of(embeddings)
        check_width([self.native], model.config.prepared().hidden_size)
        self.first_index, self.length = self.native.ids.start, len(self.native.ids)
        self.text_alias = text_alias or f"<$EMB_{self.first_index}$>"
        self.pre_tokens, self.post_tokens = pre_tokens, post_tokens
        self.metadata: dict[str, Any] = {}

    def get_ids(self) -> list[int]:
        """An id for each row."""
        return list(self.native.ids)

    def get_ids_tensor(self) -> Tensor:
        """int64 [1, N]."""
        return torch.arange(self.first_index, self.first_index + self.length)[None]

    def get_vision_token_range(self) -> tuple[int, int]:
        """The first id of the picture, and the one behind its last."""
        return self.first_index + self.pre_tokens, self.first_index + self.length - self.post_tokens

    def get_size_in_bytes(self) -> int:
        """Bytes of the rows."""
        return self.embeddings.nbytes


Embeddings = Tensor | Sequence[ExLlamaV2MMEmbedding] | None
Marks = Mapping[str, InputEmbeddings]


def marks_of(embeddings: Sequence[ExLlamaV2MMEmbedding] | None) -> Marks:
    """Each embedding by its text alias. UsageError for what is none, and for two with one alias."""
    marks: dict[str, InputEmbeddings] = {}
    for one in embeddings or ():
        if not isinstance(one, ExLlamaV2MMEmbedding):
            raise UsageError(f"a {type(one).__name__} is among the embeddings", "give ExLlamaV2MMEmbedding objects")
        if marks.setdefault(one.text_alias, one.native).ids != one.native.ids:
            raise UsageError(f"two embeddings have the text alias {one.text_alias}", "give each its own")
    return marks


def marks_of_prompts(embeddings: Embeddings, count: int) -> list[Marks]:
    """What may stand in each of `count` prompts: embeddings by their aliases; or the rows of a tensor [count, N,
    hidden], each at the marker of its own prompt. UsageError for a tensor of another shape."""
    if not isinstance(embeddings, Tensor):
        return [marks_of(embeddings)] * count
    if embeddings.dim() != 3 or len(embeddings) != count:
        raise UsageError(
            f"input_embeddings has shape {list(embeddings.shape)}", f"it is [{count}, N, hidden] for {count} prompts"
        )
    return [{MARKER: InputEmbeddings.of(rows)} for rows in embeddings]


def encode_prompt(tokenizer: Tokenizer, text: str, marks: Marks, special: bool, add_bos: bool) -> tuple[int, ...]:
    """The ids of `text` with embeddings in the place of `marks`. The marker takes the spaces around it with it.
    UsageError where it does not stand there once."""
    if MARKER in marks:
        if (found := text.count(MARKER)) != 1:
            raise UsageError(f"the prompt has {MARKER} {found} times", "put it once, where the embeddings belong")
        before, after = text.split(MARKER)
        text = before.rstrip(" \t") + MARKER + after.lstrip(" \t")
    return tuple(encode_marked(tokenizer, text, marks, special, add_bos))


def spliced(input_ids: Tensor, embeddings: Embeddings) -> tuple[Tensor, tuple[InputEmbeddings, ...]]:
    """A prompt of ids and what is in it. Ids from EMBEDDING_INDEX on are rows of a tensor [1, N, hidden], and become
    those of the rows; UsageError for one beyond them."""
    if not isinstance(embeddings, Tensor):
        return input_ids, tuple(marks_of(embeddings).values())
    embedding = InputEmbeddings.of(embeddings)
    rows = (input_ids >= EMBEDDING_INDEX) & (input_ids < FIRST_ID)
    index = input_ids - EMBEDDING_INDEX
    if (rows & (index >= len(embedding.ids))).any():
        raise UsageError(
            f"input_ids has rows beyond the {len(embedding.ids)} of input_embeddings", "row n is EMBEDDING_INDEX + n"
        )
    return torch.where(rows, index + embedding.ids.start, input_ids), (embedding,)
