"""Which strings are control tokens, gathered from every file that may say so.

Four files speak of added and special tokens: tokenizer.json (`added_tokens`), added_tokens.json (content to id),
tokenizer_config.json (`added_tokens_decoder`, and bos, eos, ... by name) and special_tokens_map.json (the same names).
Where two disagree about one content, the first in this order holds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from exl2chat.errors import ModelError
from exl2chat.model.controls import is_word
from exl2chat.model.folder import ModelFolder

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_ADDED = 60_000
MAX_ID = 1 << 20
MAX_CONTENT = 256
REMEDY = "the file is damaged; download the model again"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the learned vocabulary. `special` ones are hidden from readers."""

    content: str
    id: int
    special: bool


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """`names` maps bos_token, eos_token, ... to contents; `added` has one entry per content; `special` are contents."""

    names: Mapping[str, str]
    added: tuple[AddedToken, ...]
    special: frozenset[str]


def read_special_tokens(folder: ModelFolder, tokenizer_json: Mapping[str, Any] | None) -> SpecialTokens:
    """The union over the four files; `tokenizer_json` is the parsed file or None. ModelError for a malformed entry."""
    config = folder.read_json("tokenizer_config.json") or {}
    token_map = folder.read_json("special_tokens_map.json") or {}
    found: dict[str, AddedToken] = {}
    for token in _added_tokens(folder, tokenizer_json or {}, config):
        found.setdefault(token.content, token)
    if len(found) > MAX_ADDED:
        raise ModelError(f"{folder.path}: {len(found)} added tokens", f"at most {MAX_ADDED} are supported")
    names: dict[str, str] = {}
    for source, where in ((token_map, "special_tokens_map.json"), (config, "tokenizer_config.json")):
        names |= {n: _content(source[n], folder.where(where), n) for n in NAMES if source.get(n) not in (None, "")}
    special = {token.content for token in found.values() if token.special} | set(names.values())
    for source, where in ((token_map, "special_tokens_map.json"), (config, "tokenizer_config.json")):
        special.update(_additional(source, folder.where(where)))
    return SpecialTokens(names, tuple(sorted(found.values(), key=lambda token: token.id)), frozenset(special))


def _added_tokens(
    folder: ModelFolder, tokenizer_json: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterable[AddedToken]:
    where = folder.where("tokenizer.json")
    for entry in _as(list, tokenizer_json.get("added_tokens") or [], where, "added_tokens"):
        yield _added_token(entry, _as(dict, entry, where, "added_tokens").get("id"), where)
    where = folder.where("added_tokens.json")
    for content, token_id in (folder.read_json("added_tokens.json") or {}).items():
        yield _added_token({"content": content, "special": not is_word(content)}, token_id, where)
    where = folder.where("tokenizer_config.json")
    table = _as(dict, config.get("added_tokens_decoder") or {}, where, "added_tokens_decoder")
    for text, entry in table.items():
        token_id = int(text) if text.isdecimal() and len(text) < 9 else text
        yield _added_token(_as(dict, entry, where, "added_tokens_decoder"), token_id, where)


def _added_token(entry: Mapping[str, Any], token_id: object, where: str) -> AddedToken:
    content = _content(entry, where, "an added token")
    if type(token_id) is not int or not 0 <= token_id < MAX_ID:
        raise ModelError(f"{where}: the id of added token {content!r} is {token_id!r:.40}", REMEDY)
    return AddedToken(content, token_id, entry.get("special") is True)


def _additional(source: Mapping[str, Any], where: str) -> Iterable[str]:
    """The contents of `additional_special_tokens`, or `extra_special_tokens` as newer files call it (list or table)."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = source.get(key) or []
        entries = list(value.values()) if isinstance(value, dict) else _as(list, value, where, key)
        yield from (_content(entry, where, key) for entry in entries)


def _content(entry: object, where: str, name: str) -> str:
    """A token is written as a string or as a table with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(content, str) or not 0 < len(content) <= MAX_CONTENT:
        raise ModelError(f"{where}: {name} has content {content!r:.40}", REMEDY)
    return content


def _as(kind: type[T], value: object, where: str, key: str) -> T:
    if not isinstance(value, kind):
        raise ModelError(f"{where}: {key} is not a {'list' if kind is list else 'table'}", REMEDY)
    return value
