"""`ExLlamaV2Tokenizer`: text to tensors of ids and back."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from exl2chat.engine.embeddings import FIRST_ID, encode_marked
from exl2chat.engine.samplers.vocabulary import Vocabulary
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ModelError
from exl2chat.exllamav2.config import ExLlamaV2Config
from exl2chat.exllamav2.embedding import ExLlamaV2MMEmbedding, marks_of
from exl2chat.exllamav2.unsupported import refuse_set
from exl2chat.model.folder import open_folder
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer

MASKED = -65504.0  # the lowest float16


class TokenizerModel:
    """The vocabulary as it is written in the files, for packages that make grammars of it."""

    def __init__(self, native: Tokenizer) -> None:
        self.vocab = [native.token_of(token_id) for token_id in range(native.vocab_size)]

    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self.vocab)

    def id_to_piece(self, token_id: int) -> str:
        """A token as the vocabulary writes it."""
        return self.vocab[token_id]


class ExLlamaV2Tokenizer:
    """The tokenizer of the model in `config.model_dir`. Ids that the files do not name are None (pad: -1)."""

    def __init__(
        self,
        config: ExLlamaV2Config,
        lazy_init: bool = True,  # noqa: ARG002
        force_json: bool = False,
        force_spm: bool = False,
    ) -> None:
        """ModelError for files that are missing or damaged. Tables are made when first used, whatever lazy_init is."""
        refuse_set("ExLlamaV2Tokenizer", force_spm=force_spm)
        model = config.prepared()
        folder = open_folder(Path(config.model_dir or ""))
        if force_json and "tokenizer.json" not in folder.files:
            raise ModelError(f"{folder.path}: there is no tokenizer.json", "leave force_json at its default")
        self.config = config
        self.native: Tokenizer = open_tokenizer(folder)
        self.eos_ids = self.native.eos_ids | model.eos_ids
        self.bos_token_id = model.bos_id if model.bos_id is not None else self.native.bos_id
        self.eos_token_id = min(self.native.eos_ids or model.eos_ids, default=None)
        self.unk_token_id = self.single_id(self.native.names.get("unk_token", "<unk>"))
        self.pad_token_id = self._pad_id(model.pad_id)
        self.bos_token, self.eos_token, self.pad_token = map(
            self._token, (self.bos_token_id, self.eos_token_id, self.pad_token_id)
        )

    def _pad_id(self, configured: int | None) -> int:
        """From config.json, the tokenizer's files, "<pad>", or EOS where that is not BOS; else -1."""
        known = (configured, self.native.pad_id, self.single_id("<pad>"))
        found = next((token_id for token_id in known if token_id is not None), None)
        if found is None and self.eos_token_id != self.bos_token_id:
            found = self.eos_token_id
        return -1 if found is None else found

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None or token_id < 0 else self.native.token_of(token_id)

    @cached_property
    def tokenizer_model(self) -> TokenizerModel:
        """The vocabulary. `tokenizer` is the same, as older scripts have it."""
        return TokenizerModel(self.native)

    @property
    def tokenizer(self) -> TokenizerModel:
        return self.tokenizer_model

    @property
    def actual_vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.native.vocab_size

    @cached_property
    def extended_id_to_piece(self) -> dict[int, str]:
        """The special tokens."""
        return {token_id: self.native.token_of(token_id) for token_id in sorted(self.native.special_ids)}

    @property
    def extended_piece_to_id(self) -> dict[str, int]:
        """The ids of the special tokens."""
        return {piece: token_id for token_id, piece in self.extended_id_to_piece.items()}

    @cached_property
    def newline_token_id(self) -> int | None:
        """The last token of a line feed."""
        return next(reversed(self.native.encode("\n")), None)

    @cached_property
    def space_token_id(self) -> int | None:
        """The last token of a space."""
        return next(reversed(self.native.encode(" ")), None)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the sampler asks about tokens."""
        return Vocabulary(self.native)

    def get_vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.native.vocab_size

    def single_id(self, token: str) -> int | None:
        """The id of a whole token; None if there is no such token."""
        return self.native.id_of(token)

    def single_token(self, token_id: int) -> Tensor:
        """int64 [1, 1]."""
        return torch.tensor([[token_id]])

    def num_tokens(self, text: str) -> int:
        """Length of `text` in tokens."""
        return len(self.native.encode(text))

    def encode(
        self,
        text: str | list[str],
        add_bos: bool = False,
        add_eos: bool = False,
        encode_special_tokens: bool = False,
        return_offsets: bool = False,
        embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """int64 [B, n], padded on the left; with `return_offsets` also int32 [B], minus the padding of each row. The
        aliases of `embeddings` become their ids."""
        texts = text if isinstance(text, list | tuple) else [text]
        end = [self.eos_token_id] if add_eos and self.eos_token_id is not None else []
        marks = marks_of(embeddings)
        rows = [encode_marked(self.native, line, marks, encode_special_tokens, add_bos) + end for line in texts]
        longest = max(map(len, rows), default=0)
        ids = torch.tensor([[self.pad_token_id] * (longest - len(row)) + row for row in rows], dtype=torch.int64)
        if not return_offsets:
            return ids
        return ids, torch.tensor([len(row) - longest for row in rows], dtype=torch.int32)

    @overload
    def decode(self, ids: list[Tensor], decode_special_tokens: bool = False) -> list[str]: ...
    @overload
    def decode(self, ids: Tensor, decode_special_tokens: bool = False) -> str | list[str]: ...
    def decode(self, ids: Tensor | list[Tensor], decode_special_tokens: bool = False) -> str | list[str]:
        """The text of ids [n]; a list for [B, n] or a list. Special tokens and padding are shown on request only, and
        embeddings never."""
        if isinstance(ids, list) or ids.dim() > 1:
            return [self._decode(row, decode_special_tokens) for row in ids]
        return self._decode(ids, decode_special_tokens)

    def _decode(self, ids: Tensor, special: bool) -> str:
        shown = ids.flatten().tolist()
        if not special:
            shown = [token_id for token_id in shown if token_id not in (self.pad_token_id, self.eos_token_id)]
        return self.native.decode([token_id for token_id in shown if 0 <= token_id < FIRST_ID], special)

    def padding_mask(self, ids: Tensor) -> Tensor:
        """float16 of the shape of `ids`: the lowest number at padding, 0 elsewhere."""
        return torch.where(ids == self.pad_token_id, MASKED, 0.0).to(torch.float16)

    def get_id_to_piece_list(self, include_special_tokens: bool = False) -> list[str]:
        """The text of every id as it stands inside a text; "" for special ones unless asked for."""
        return self._pieces_with_special if include_special_tokens else self._pieces

    def get_piece_to_id_dict(self) -> dict[str, int]:
        """The id of every piece."""
        return {piece: token_id for token_id, piece in enumerate(self._pieces)}

    @cached_property
    def token_table(self) -> TokenTable:
        """The bytes of every token, for filters and grammars. Takes about 10 us a token."""
        return TokenTable(self.native, self.native.vocab_size, self.eos_ids)

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._piece(token_id, special=False) for token_id in range(self.native.vocab_size)]

    @cached_property
    def _pieces_with_special(self) -> list[str]:
        return [self._piece(token_id, special=True) for token_id in range(self.native.vocab_size)]

    def _piece(self, token_id: int, special: bool) -> str:
        detokenizer = self.native.detokenizer(special, continuing=True)
        return detokenizer.push(token_id) + detokenizer.flush()
