"""Which settings a session remembers, and how they come back when it is opened."""

import os
from collections.abc import Mapping

from exl2chat.chat.reply import whole_paths
from exl2chat.chat.session import Session
from exl2chat.errors import UsageError
from exl2chat.link.protocol import ModelInfo
from exl2chat.settings import BY_NAME, OPTIONS, Settings, Value

RECORDED = frozenset(row.name for row in OPTIONS if row.group in ("chat", "sampling") or row.name == "model")


def whole_path(model: str) -> str:
    """The whole path of a model that is a folder; any other name, and that of the default model, as it is."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.isdir(path) and model != BY_NAME["model"].default else model


FOLDERS = {"model": whole_path, "lora": whole_paths}  # a session is opened from other folders than it was begun in


def begun(settings: Settings) -> Settings:
    """`settings` when a session begins: the model, and what else of those that are recorded somebody chose, wherever,
    is its own from here on. Defaults stay free to change."""
    outside = settings.with_layer("/set", {})
    found = {name: outside.lookup(name) for name in RECORDED}
    own = {n: value for n, (value, origin) in found.items() if n == "model" or origin not in ("default", "model")}
    return settings.with_layer("session", own)


def recorded(settings: Settings) -> dict[str, Value]:
    """What a session remembers: its own values and what was set in it. A flag that is given when it is opened again is
    neither."""
    chosen = {**settings.layers.get("session", {}), **settings.layers.get("/set", {})}
    kept = {"model": settings["model"], **{name: value for name, value in chosen.items() if name in RECORDED}}
    return {name: FOLDERS[name](str(value)) if value and name in FOLDERS else value for name, value in kept.items()}


def with_session(settings: Settings, session: Session) -> Settings:
    """`settings` with what `session` remembers. `/set` of an earlier session no longer holds where it is recorded."""
    if not session.settings:
        return settings
    kept = {k: v for k, v in settings.layers.get("/set", {}).items() if k not in RECORDED}
    return settings.with_layer("session", _usable(session.settings, "session")).with_layer("/set", kept)


def with_model(settings: Settings, model: ModelInfo) -> Settings:
    """`settings` over the sampling that the model's own files recommend, as far as there are such options."""
    return settings.with_layer("model", _usable(model.sampling, "model"))


def _usable(values: Mapping[str, object], where: str) -> dict[str, Value]:
    """The values that are valid: files outlive the options of the version that wrote them."""
    usable = {}
    for name in RECORDED & values.keys():
        try:
            usable[name] = BY_NAME[name].check(values[name], where)
        except UsageError:
            continue
    return usable
