"""tokenizer.model through the `sentencepiece` library, for models that have no tokenizer.json.

The library matches no control token in text, and puts a space in front of every text it encodes. So text is split at
control tokens here, and a space in front is kept only at the start of the text, as transformers does (with `legacy` in
tokenizer_config.json: after every control token).
"""

import re
from collections.abc import Iterator, Sequence

import sentencepiece

from exl2chat.errors import ModelError
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
        where = folder.where("tokenizer.model")
        with library_faults(where):
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(folder.files["tokenizer.model"]))
        learned = self._model.get_piece_size()
        if not 0 < learned <= MAX_VOCABULARY:
            raise ModelError(f"{where}: has {learned} tokens", f"at most {MAX_VOCABULARY} are supported")
        self._beyond = {token.id: token.content for token in tokens.added if token.id >= learned}
        self._ids = {content: token_id for token_id, content in self._beyond.items()}
        for token in tokens.added:
            if token.id < learned and self._model.id_to_piece(token.id) != token.content:
                raise ModelError(f"{where}: added token {token.content!r} cannot have id {token.id}", REMEDY)
        self.size = max([learned, *(token_id + 1 for token_id in self._beyond)])
        self.unknown_id: int | None = self._model.unk_id()
        self._learned = learned
        self._legacy = (folder.read_json("tokenizer_config.json") or {}).get("legacy") is True
        spaced = next((i for i in range(learned) if self._model.id_to_piece(i).startswith(SPACE)), None)
        self._drops_space = spaced is not None and not self._model.decode([spaced]).startswith(" ")
        self.markers = tuple(self._marker_pieces())
        matched = {*self.markers, *(token.content for token in tokens.added), *tokens.special}
        matched = {content for content in matched if self.id_of(content) is not None}
        by_length = sorted(matched, key=len, reverse=True)
        self._split = re.compile("(" + ("|".join(map(re.escape, by_length)) or "(?!)") + ")")

    def _marker_pieces(self) -> Iterator[str]:
        """Control pieces, and user-defined ones (score 0) that look like markers: <|im_start|>, [INST]."""
        for token_id in range(self._learned):
            piece = self._model.id_to_piece(token_id)
            user_defined = self._model.get_score(token_id) == 0 and MARKER.fullmatch(piece)
            if self._model.is_control(token_id) or (user_defined and not self._model.is_byte(token_id)):
                yield piece

    def token_of(self, token_id: int) -> str | None:
        if 0 <= token_id < self._learned:
            return str(self._model.id_to_piece(token_id))
        return self._beyond.get(token_id)

    def id_of(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        token_id = int(self._model.piece_to_id(token))
        return token_id if self._model.id_to_piece(token_id) == token else None

    def names(self) -> dict[str, str]:
        """bos, eos and unk as the model file itself states them."""
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id(), "unk_token": self._model.unk_id()}
        return {name: self._model.id_to_piece(token_id) for name, token_id in ids.items() if token_id >= 0}

    def spans(self, text: str) -> Sequence[Span]:
        found: list[Span] = []
        position = 0
        for part in self._split.split(text):
            if self._split.fullmatch(part):
                token_id = self.id_of(part)
                found.append((token_id or 0, position, position + len(part)))
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
        mapping = self._model.encode_as_offset_mapping(prefix + text)
        shift = len(prefix)
        spans = [
            (token_id, start - shift, end - shift)
            for token_id, (start, end) in zip(mapping["ids"], mapping["offsets"], strict=True)
            if start >= shift or end > shift
        ]
        if not opening and spans and spans[0] == (self._model.piece_to_id(SPACE), 0, 0):
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
