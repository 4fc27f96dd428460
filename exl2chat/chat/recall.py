"""Which settings a session remembers, and how they come back when it is opened."""

from collections.abc import Mapping

from exl2chat.chat.session import Session
from exl2chat.errors import UsageError
from exl2chat.link.protocol import ModelInfo
from exl2chat.settings import BY_NAME, OPTIONS, Settings, Value

RECORDED = frozenset(row.name for row in OPTIONS if row.group in ("chat", "sampling") or row.name == "model")


def chosen_values(settings: Settings) -> dict[str, Value]:
    """The model, and what else of the recorded settings somebody chose: defaults stay free to change."""
    found = {name: settings.lookup(name) for name in BY_NAME if name in RECORDED}
    return {
        name: value for name, (value, origin) in found.items() if name == "model" or origin not in ("default", "model")
    }


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
