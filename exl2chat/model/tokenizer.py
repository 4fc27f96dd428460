"""Text to token ids and back, for tokenizer.json and sentencepiece models alike."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Protocol

from exl2chat.errors import ModelError, UsageError
from exl2chat.model.controls import ControlTokens, Rendered
from exl2chat.model.detokenizer import Detokenizer, Piece
from exl2chat.model.folder import ModelFolder
from exl2chat.model.huggingface_tokenizer import HuggingFaceBackend, Span
from exl2chat.model.sentencepiece_tokenizer import SentencePieceBackend
from exl2chat.model.special_tokens import SpecialTokens, read_special_tokens

Cluster = tuple[list[int], int, int]  # ids, and the start and the end of their characters


class Backend(Protocol):
    """A tokenizer library with its model loaded. `unknown_id` stands for any text that the vocabulary lacks.

    `spans` are (id, start, end), character offsets in the text. `encode` and `spans` match control tokens; `plain` uses
    the learned vocabulary alone, and `opening` text, the first of all, gets the space that the model expects in front.
    """

    size: int
    unknown_id: int | None

    def token_of(self, token_id: int) -> str | None: ...
    def id_of(self, token: str) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def spans(self, text: str) -> Sequence[Span]: ...
    def plain(self, text: str, opening: bool) -> list[int]: ...
    def piece(self, token_id: int) -> Piece: ...


class Tokenizer:
    """The tokenizer of one model.

    vocab_size counts added tokens. bos_id and pad_id are None where the files name none; eos_ids is what the tokenizer
    files know, config and template may add to it. names maps bos_token, eos_token, ... to their contents. special_ids
    are hidden by `decode`.
    """

    def __init__(self, backend: Backend, tokens: SpecialTokens, names: Mapping[str, str]) -> None:
        self._backend = backend
        self.vocab_size = backend.size
        self.names = names
        contents = {token.content for token in tokens.added} | tokens.special | set(names.values())
        known = {content: backend.id_of(content) for content in contents}
        ids = {content: token_id for content, token_id in known.items() if token_id is not None}
        special = tokens.special | set(names.values())
        self.special_ids = frozenset(ids[content] for content in special & ids.keys())
        self.controls = ControlTokens(ids, special)
        self._guarded = {i: content for content, i in self.controls.ids.items() if i != backend.unknown_id}
        self.bos_id = ids.get(names.get("bos_token", ""))
        self.pad_id = ids.get(names.get("pad_token", ""))
        eos = ids.get(names.get("eos_token", ""))
        self.eos_ids = frozenset() if eos is None else frozenset({eos})

    def id_of(self, token: str) -> int | None:
        """The id of a whole token; None if there is no such token."""
        return self._backend.id_of(token)

    def token_of(self, token_id: int) -> str:
        """A token as the vocabulary writes it; "" for an id beyond the vocabulary (logits may be padded)."""
        return self._backend.token_of(token_id) or ""

    def encode(self, text: str, special: bool = False, add_bos: bool = False) -> list[int]:
        """The ids of `text`. Without `special`, control tokens in it are spelled out as plain text. UsageError for what
        is no text."""
        check_text(text)
        ids = self._backend.encode(text) if special else self.encode_chat(self.controls.neutralise(text))
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def encode_following(self, text: str) -> list[int]:
        """The ids of plain `text` that stands behind other text: no space is put in front, no control token is made."""
        check_text(text)
        return self._spell_out(text, opening=False)

    def encode_chat(self, rendered: Rendered) -> list[int]:
        """The ids of a rendered chat: control tokens only where the template wrote them.

        Without hidden text or a forged token these are the ids that transformers gives. A token is forged if the text
        it came from is not its content: a normaliser made it (full-width <, another case).
        """
        check_text(rendered.text)
        ids: list[int] = []
        clusters = _clusters(self._backend.spans(rendered.text))
        for trusted, run in groupby(clusters, lambda cluster: self._trusted(cluster, rendered)):
            groups, starts, ends = zip(*run, strict=True)
            if trusted:
                ids += chain.from_iterable(groups)
            else:
                ids += self._spell_out(rendered.reveal(rendered.text[starts[0] : ends[-1]]), opening=starts[0] == 0)
        return ids

    def _trusted(self, cluster: Cluster, rendered: Rendered) -> bool:
        group, start, end = cluster
        source = rendered.text[start:end]
        if not rendered.hidden.keys().isdisjoint(source):
            return False
        return all(self._guarded.get(token_id, source.strip()) == source.strip() for token_id in group)

    def _spell_out(self, text: str, opening: bool) -> list[int]:
        """Ids without any control token: where the learned vocabulary still makes one, the text is cut in two there."""
        ids = self._backend.plain(text, opening)
        if self._guarded.keys().isdisjoint(ids):
            return ids
        if len(text) < 2:
            return []
        middle = len(text) // 2
        return self._spell_out(text[:middle], opening) + self._spell_out(text[middle:], opening=False)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `special`."""
        detokenizer = self.detokenizer(special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def detokenizer(self, special: bool = False, continuing: bool = False) -> Detokenizer:
        """A streaming decoder; `continuing` when earlier text precedes, so that a leading space belongs to the text."""
        return Detokenizer(self._backend.piece if special else self.piece, continuing)

    def piece(self, token_id: int) -> Piece | None:
        """The bytes of a token; None for one that is not shown."""
        return None if token_id in self.special_ids else self._backend.piece(token_id)


def open_tokenizer(folder: ModelFolder) -> Tokenizer:
    """The tokenizer of a model folder: tokenizer.json if it is there, else tokenizer.model. ModelError if neither."""
    description = folder.read_json("tokenizer.json")
    tokens = read_special_tokens(folder, description)
    if description is not None:
        return Tokenizer(HuggingFaceBackend(folder, description, tokens), tokens, tokens.names)
    if "tokenizer.model" not in folder.files:
        raise ModelError(f"{folder.path}: there is no tokenizer.json and no tokenizer.model", "download it again")
    backend = SentencePieceBackend(folder, tokens)
    tokens = SpecialTokens(tokens.names, tokens.added, tokens.special | set(backend.markers))
    return Tokenizer(backend, tokens, {**backend.names(), **tokens.names})


def token_texts(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """The bytes of each token below `size` inside a text; b"" for one that is not shown."""
    pieces = map(tokenizer.piece, range(size))
    return [piece.rest if piece else b"" for piece in pieces]


def check_text(text: object) -> None:
    """UsageError for what is no text, or holds half of a surrogate pair, which no encoding has."""
    if not isinstance(text, str):
        raise UsageError(f"what is to be encoded is a {type(text).__name__}", "give a text")
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        what = f"character {fault.start} of the text, {text[fault.start]!r}, is half of a surrogate pair"
        raise UsageError(what, "leave it out, or put \ufffd in its place") from None


def _clusters(spans: Sequence[Span]) -> Iterable[Cluster]:
    """Tokens grouped so that no two groups share a character. A byte token may have an empty span."""
    group: list[int] = []
    first = last = 0
    for token_id, start, end in spans:
        if group and start >= last and last > first:
            yield group, first, last
            group = []
        if not group:
            first = last = start
        group.append(token_id)
        last = max(last, end)
    if group:
        yield group, first, last
