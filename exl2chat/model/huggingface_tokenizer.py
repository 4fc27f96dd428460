"""tokenizer.json through the `tokenizers` library.

The file is a program for that library, written by a stranger: its components are checked against a list first, and
every panic of the library (PanicException is no Exception) becomes a ModelError. What cannot be caught, an allocation
that aborts or a regular expression that never ends, is met by `exl2chat.model.vet`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken as LibraryToken
from tokenizers import Encoding
from tokenizers import Tokenizer as Library

from exl2chat.errors import ModelError
from exl2chat.model.detokenizer import Piece, piece_rule
from exl2chat.model.folder import MAX_TOKENIZER_JSON, ModelFolder
from exl2chat.model.special_tokens import REMEDY, SpecialTokens

MAX_VOCABULARY = 1 << 20
MAX_REPLACEMENT = 64
MAX_PATTERN = 4096
KNOWN = {
    "normalizer": "Sequence NFC NFD NFKC NFKD Nmt Prepend Replace Strip StripAccents Lowercase Precompiled ByteLevel",
    "pre_tokenizer": "Sequence ByteLevel Split Metaspace Digits Punctuation Whitespace WhitespaceSplit UnicodeScripts",
    "decoder": "Sequence ByteLevel Metaspace Replace ByteFallback Fuse Strip",
    "model": "BPE Unigram",
}
Span = tuple[int, int, int]


class HuggingFaceBackend:
    """A `Backend` over the `tokenizers` library. `size` counts added tokens."""

    def __init__(self, folder: ModelFolder, description: Mapping[str, Any], tokens: SpecialTokens) -> None:
        self._where = where = folder.where("tokenizer.json")
        check_description(description, where)
        with library_faults(where):
            self._full = Library.from_str(folder.read_text("tokenizer.json", MAX_TOKENIZER_JSON) or "")
            self._full.post_processor = None  # ids of chats carry no extra tokens, and this one would trim the spans
            self._full.no_truncation()
            self._full.no_padding()
            _add_missing(self._full, tokens, where)
            self._plain = _without_added(self._full, description, prefix=True)
            self._plain_inside = _without_added(self._full, description, prefix=False)
        added = self._full.get_added_tokens_decoder()
        self.size = max([self._full.get_vocab_size(), *(token_id + 1 for token_id in added)])
        model = description["model"]
        self.unknown_id = model.get("unk_id")
        if isinstance(model.get("unk_token"), str):
            self.unknown_id = self._full.token_to_id(model["unk_token"])
        self._piece_rule = piece_rule(description.get("decoder"), where)
        byte_level = (description.get("decoder") or {}).get("type") == "ByteLevel"  # added tokens are not spelled in it
        self._literal = frozenset(added if byte_level else ())

    def token_of(self, token_id: int) -> str | None:
        return self._full.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        return self._full.token_to_id(token)

    def spans(self, text: str) -> Sequence[Span]:
        encoding = self._encoded(self._full, text)
        return [(token_id, start, end) for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    def encode(self, text: str) -> list[int]:
        return self._encoded(self._full, text).ids

    def plain(self, text: str, opening: bool) -> list[int]:
        return self._encoded(self._plain if opening else self._plain_inside, text).ids

    def _encoded(self, library: Library, text: str) -> Encoding:
        """ModelError where the file's regular expressions give up on `text`."""
        with library_faults(self._where):
            return library.encode(text, add_special_tokens=False)

    def piece(self, token_id: int) -> Piece:
        token = self._full.id_to_token(token_id)
        if token is None or token_id in self._literal:
            data = (token or "").encode()
            return Piece(data, data)
        return self._piece_rule(token)


@contextmanager
def library_faults(where: str) -> Iterator[None]:
    """Exceptions and panics of a tokenizer library as one ModelError naming `where`."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as fault:
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":
            raise
        reason = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise ModelError(f"{where}: {reason:.200}", REMEDY) from None


def check_description(description: Mapping[str, Any], where: str) -> None:
    """Check component types, vocabulary size, and lengths of patterns and replacements; ModelError if not known."""
    for section, known in KNOWN.items():
        for component in _components(description.get(section), where, section):
            kind = component.get("type")
            if kind not in known.split():
                raise ModelError(
                    f"{where}: {section} {kind!r:.40} is not supported", "use another version of the model"
                )
            _check_patterns(component, where)
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not 0 < len(vocabulary) <= MAX_VOCABULARY:
        raise ModelError(f"{where}: model.vocab is missing, empty or over {MAX_VOCABULARY} tokens", REMEDY)


def _components(value: object, where: str, section: str) -> Iterator[dict[str, Any]]:
    """`value` and all it is made of: a Sequence nests under its section's plural."""
    if value is None and section != "model":
        return
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {section} is not a table", REMEDY)
    yield value
    children = value.get("normalizers") or value.get("pretokenizers") or value.get("decoders") or []
    if not isinstance(children, list):
        raise ModelError(f"{where}: {section} has a Sequence that is no list", REMEDY)
    for child in children:
        if child is None:
            raise ModelError(f"{where}: {section} has an empty step", REMEDY)
        yield from _components(child, where, section)


def _check_patterns(component: Mapping[str, Any], where: str) -> None:
    pattern = component.get("pattern")
    texts = pattern.values() if isinstance(pattern, dict) else [pattern or ""]
    long_pattern = any(not isinstance(text, str) or len(text) > MAX_PATTERN for text in texts)
    content = component.get("content", component.get("prepend", ""))
    if long_pattern or not isinstance(content, str) or len(content) > MAX_REPLACEMENT:
        raise ModelError(f"{where}: {component.get('type')} has a pattern or replacement too long to be real", REMEDY)


def _add_missing(library: Library, tokens: SpecialTokens, where: str) -> None:
    """Tokens that other files name and tokenizer.json does not list as added."""
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for token in tokens.added:
        if token.content not in known:
            library.add_tokens([_library_token(token.content, special=token.content in tokens.special)])
            if library.token_to_id(token.content) != token.id:
                raise ModelError(f"{where}: added token {token.content!r} cannot have id {token.id}", REMEDY)
    learned = [content for content in tokens.special - known if library.token_to_id(content) is not None]
    library.add_special_tokens([_library_token(content, special=True) for content in sorted(learned)])


def _library_token(content: str, special: bool) -> LibraryToken:
    return LibraryToken(content, special=special, normalized=False)


def _without_added(full: Library, description: Mapping[str, Any], prefix: bool) -> Library:
    """A tokenizer over the same (shared) vocabulary that knows no added token; without `prefix` no space in front."""
    plain = Library(full.model)
    if prefix:
        plain.normalizer, plain.pre_tokenizer = full.normalizer, full.pre_tokenizer
        return plain
    shell = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "normalizer": _no_prefix(description.get("normalizer")),
        "pre_tokenizer": _no_prefix(description.get("pre_tokenizer")),
    }
    parts = Library.from_str(json.dumps(shell))
    plain.normalizer, plain.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    return plain


def _no_prefix(component: Any) -> Any:
    """`component` with everything switched off that puts a space in front of the text."""
    if isinstance(component, list):
        return [_no_prefix(child) for child in component if child.get("type") != "Prepend"]
    if not isinstance(component, dict) or component.get("type") == "Prepend":
        return None
    changed = {key: _no_prefix(value) if isinstance(value, list) else value for key, value in component.items()}
    if component["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
        changed.pop("add_prefix_space", None)
    elif component["type"] == "ByteLevel" and "add_prefix_space" in component:
        changed["add_prefix_space"] = False
    return changed
