"""tokenizer.model through the `sentencepiece` library, for models that have no tokenizer.json.

The library matches no control token in text, and puts a space in front of every text it encodes. So text is split at
control tokens here, and a space in front is kept only at the start of the text, as transformers does (with `legacy` in
tokenizer_config.json: after every control token).
"""

import re
from collections.abc import Iterator, Sequence

import sentencepiece

from exl2chat.errors import ModelError
from exl2chat.model.controls import either
from exl2chat.model.detokenizer import BYTE_TOKEN, Piece
from exl2chat.model.folder import ModelFolder
from exl2chat.model.huggingface_tokenizer import MAX_VOCABULARY, Span, library_faults
from exl2chat.model.special_tokens import REMEDY, SpecialTokens

SPACE = "▁"
UNKNOWN = " ⁇ ".encode()
ANCHOR = "\x01"  # a character that no learned token contains
MARKER = re.compile(r"[<\[].+[>\]]")


class SentencePieceBackend:
    """A `Backend` over a sentencepiece model and the added tokens of the JSON files."""

    def __init__(self, folder: ModelFolder, tokens: SpecialTokens) -> None:
        self._where = where = folder.where("tokenizer.model")
        with library_faults(where):
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(folder.files["tokenizer.model"]))
            self._learned = self._model.get_piece_size()
            if not 0 < self._learned <= MAX_VOCABULARY:
                raise ModelError(f"{where}: has {self._learned} tokens", f"at most {MAX_VOCABULARY} are supported")
            self._tokens = dict(enumerate(self._model.id_to_piece(list(range(self._learned)))))
            self._ids = {content: token_id for token_id, content in self._tokens.items()}
            self.unknown_id: int | None = self._model.unk_id()
            self._drops_space = self._finds_space_dropped()
        for token in tokens.added:
            if self._tokens.setdefault(token.id, token.content) != token.content:
                raise ModelError(f"{where}: added token {token.content!r} cannot have id {token.id}", REMEDY)
            self._ids.setdefault(token.content, token.id)
        self.size = max(self._tokens) + 1
        self._legacy = (folder.read_json("tokenizer_config.json") or {}).get("legacy") is True
        self.markers = tuple(self._marker_pieces())
        matched = {*self.markers, *(token.content for token in tokens.added), *tokens.special} & self._ids.keys()
        self._split = re.compile(f"({either(matched).pattern})")

    def _finds_space_dropped(self) -> bool:
        """Whether the library's decode drops the space that starts a text."""
        spaced = next((token_id for token_id, token in self._tokens.items() if token.startswith(SPACE)), None)
        return spaced is not None and not self._model.decode([spaced]).startswith(" ")

    def _marker_pieces(self) -> Iterator[str]:
        """Control pieces, and user-defined ones (score 0) that look like markers: <|im_start|>, [INST]."""
        for token_id in range(self._learned):
            token = self._tokens[token_id]
            user_defined = self._model.get_score(token_id) == 0 and MARKER.fullmatch(token)
            if self._model.is_control(token_id) or (user_defined and not self._model.is_byte(token_id)):
                yield token

    def token_of(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def names(self) -> dict[str, str]:
        """bos, eos and unk as the model file itself states them."""
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id(), "unk_token": self._model.unk_id()}
        return {name: self._tokens[token_id] for name, token_id in ids.items() if token_id >= 0}

    def spans(self, text: str) -> Sequence[Span]:
        found: list[Span] = []
        position = 0
        for part in self._split.split(text):
            if self._split.fullmatch(part):
                found.append((self._ids[part], position, position + len(part)))
            elif part:
                opening = position == 0 or self._legacy
                found += [(i, position + start, position + end) for i, start, end in self._learned_spans(part, opening)]
            position += len(part)
        return found

    def encode(self, text: str) -> list[int]:
        return [token_id for token_id, _, _ in self.spans(text)]

    def plain(self, text: str, opening: bool) -> list[int]:
        return [token_id for token_id, _, _ in self._learned_spans(text, opening)]

    def _learned_spans(self, text: str, opening: bool) -> list[Span]:
        """`text` as the library encodes it; when not `opening`, behind an anchor that is then dropped again."""
        prefix = "" if opening else ANCHOR
        with library_faults(self._where):
            mapping = self._model.encode_as_offset_mapping(prefix + text)
        shift = len(prefix)
        spans = [
            (token_id, start - shift, end - shift)
            for token_id, (start, end) in zip(mapping["ids"], mapping["offsets"], strict=True)
            if start >= shift or end > shift
        ]
        if not opening and spans and spans[0] == (self._ids.get(SPACE), 0, 0):
            del spans[0]  # the normaliser swallowed the anchor, and the space in front moved behind it
        return spans

    def piece(self, token_id: int) -> Piece:
        token = self.token_of(token_id)
        if token is None:
            return Piece(b"", b"")
        if token_id >= self._learned or self._model.is_control(token_id):
            data = token.encode()
        elif self._model.is_unknown(token_id):
            data = UNKNOWN
        elif self._model.is_byte(token_id) and (match := BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        else:
            text = token.replace(SPACE, " ")
            return Piece(text.removeprefix(" " * self._drops_space).encode(), text.encode())
        return Piece(data, data)
