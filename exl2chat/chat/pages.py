"""The pages of Markdown that commands show: settings, model, statistics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from exl2chat.chat.events import Message
from exl2chat.chat.forms import MEANING
from exl2chat.link.protocol import Form
from exl2chat.settings import OPTIONS, Settings, Value

if TYPE_CHECKING:
    from exl2chat.chat.controller import Controller


LONGEST_CODE = 4000  # characters


def shown(value: Value) -> str:
    """A setting's value as the user would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value in (None, "") else str(value)


def settings_page(settings: Settings) -> str:
    """Every setting with its value and where that came from."""
    rows = []
    for row in OPTIONS:
        value, origin = settings.lookup(row.name)
        rows.append((f"`{row.name}`", _cell(shown(value)), origin, row.help))
    return _table(("setting", "value", "from", "meaning"), rows)


def system_page(settings: Settings) -> str:
    """The system prompt and where it came from."""
    value, origin = settings.lookup("system")
    if value is None:
        return "Unset: the model's template decides."
    return f"From {origin}:\n\n{_quoted(str(value))}" if value else f"Off ({origin})."


def form_page(form: Form | None) -> str:
    """What the next replies must be."""
    if form is None:
        return "Anything. `/json`, `/regex` and `/grammar` say what replies must be."
    source = f" From {_cell(form.source)}." if form.source else ""
    return f"Replies are {MEANING[form.kind]}, until `/{form.kind} off`.{source}\n\n{_code(form.text)}"


def model_page(controller: "Controller") -> str:
    """What is loaded, or what is about to be."""
    info = controller.model
    if info is None:
        return f"`{controller.settings['model']}` is {'loading' if controller.phase == 'loading' else 'not loaded'}."
    rows = [
        ("name", info.name),
        ("path", info.path),
        ("architecture", info.architecture),
        ("weights", f"{info.quantization}, {info.weight_bytes / 2**20:,.0f} MiB"),
        ("context", f"{info.context:,} tokens, {info.cache_bytes / 2**20:,.0f} MiB as {info.cache}"),
        ("vocabulary", f"{info.vocab_size:,} tokens"),
        ("runs on", f"{info.device}, {info.dtype}"),
        *((f"its own {name}", str(value)) for name, value in info.sampling.items()),
    ]
    return _table(("model", _cell(controller.settings["model"])), [(name, _cell(value)) for name, value in rows])


def stats_page(path: Sequence[Message]) -> str:
    """Counts and speeds of the replies of the path. A model that wrote all of them is named once, above."""
    replies = [(number, message, message.stats) for number, message in enumerate(path, 1) if message.stats]
    if not replies:
        return "No reply yet."
    head = ["reply", "prompt", "of it cached", "tokens", "first after", "tokens/s", "ended by", "seed"]
    drafts = any(s.drafted for _, _, s in replies)
    if drafts:
        head.append("drafts accepted")
    rows = []
    for number, message, s in replies:
        counts = (f"{s.prompt_tokens:,}", f"{s.cached_tokens:,}", f"{s.reply_tokens:,}")
        speeds = (f"{s.first_token_s:.2f} s", f"{s.tokens_per_second:.1f}" if s.tokens_per_second else "")
        rows.append([f"#{number}", *counts, *speeds, message.stop or "", str(s.seed)])
        if drafts:
            rows[-1].append(f"{s.accepted:,} of {s.drafted:,}, {s.speed_up:.2f}x" if s.drafted else "")
    models = [_cell(message.model) for _, message, _ in replies]
    if len(set(models)) == 1:
        return f"Model: {models[0] or 'unknown'}\n\n{_table(head, rows)}"
    return _table([*head, "model"], [[*row, model] for row, model in zip(rows, models, strict=True)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    """`text` on one line, with nothing in it that ends the cell."""
    line = " ".join(text.split())
    return (line if len(line) <= 80 else line[:79] + "…").replace("\\", "\\\\").replace("|", "\\|")


def _code(text: str) -> str:
    """`text` as it is, whatever it means in Markdown; of a long one the beginning, as a file may have megabytes."""
    beginning = text if len(text) <= LONGEST_CODE else text[:LONGEST_CODE] + "…"
    return "\n".join("    " + line for line in beginning.split("\n"))


def _quoted(text: str) -> str:
    return "\n".join("> " + line for line in text.split("\n"))
