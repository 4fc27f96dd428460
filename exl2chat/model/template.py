"""Conversations to prompt text, by the chat template of the model.

Where a template is looked for: chat_template.jinja, chat_template.json, then tokenizer_config.json, whose
`chat_template` is a string or a list of named ones ("default" is taken). A model without one, a base model, gets
`FALLBACK`: "User:" and "Assistant:" in turn, the system text in front.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from exl2chat.errors import ModelError
from exl2chat.model.controls import Disguise, Rendered
from exl2chat.model.folder import ModelFolder
from exl2chat.model.sandbox import MAX_SOURCE, REMEDY, Refusal, Sandbox
from exl2chat.model.tokenizer import Tokenizer

Turn = tuple[str, str]
FALLBACK = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}

{% elif message.role == 'user' %}User: {{ message.content }}
{% else %}Assistant: {{ message.content }}{{ eos_token }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
FALLBACK_STOP = "\nUser:"
MAX_STOP_STRING = 100  # its beginning says as much; what is held back while it forms takes memory by the square


class ChatTemplate:
    """A template and the tokenizer it writes for. `source` is its text."""

    def __init__(self, sandbox: Sandbox, tokenizer: Tokenizer) -> None:
        self._sandbox = sandbox
        self._tokenizer = tokenizer
        self.source = sandbox.source

    def render(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = True, continue_final: bool = False
    ) -> Rendered:
        """The prompt for `turns`, (role, text) pairs; roles are "system", "user" and "assistant".

        With `continue_final` the prompt ends with the last turn's text, for the model to go on (as transformers'
        continue_final_message). Where the template refuses or ignores a system turn, its text goes in front of the
        first user turn, a blank line between. Control tokens in texts are neutralised (`model.controls`). ModelError
        if the template fails or refuses the order of turns.
        """
        turns = list(turns) if self._takes_system else _fold_system(turns)
        disguise = Disguise(self._tokenizer.controls, "".join(text for _, text in turns))
        masked = [(role, disguise.neutralise(role, text)) for role, text in turns]
        opaque = [(role, disguise.opaque(role, text)) for role, text in turns]
        cut = disguise.hide("") if continue_final else ""
        generate = add_generation_prompt and not continue_final
        text = self._render(masked, generate, cut)
        checked = self._render(opaque, generate, cut)
        forged = self._tokenizer.controls.found_in(text) != self._tokenizer.controls.found_in(checked)
        return Rendered(checked if forged else text, disguise.hidden, disguise.neutralised + forged)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The control token the template writes after an assistant turn: the model ends its turn with it."""
        found = (self._tokenizer.controls.first_in(after) for after in self._after_reply)
        return frozenset(token_id for token_id in found if token_id is not None)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """Where no control token ends an assistant turn: what the template writes before the next user text.

        A base model, which the fallback is for, was trained on no turns: it goes on to write the user's next one.
        """
        if self.source == FALLBACK:
            return (FALLBACK_STOP,)
        between = self._after_reply[0].rstrip()[:MAX_STOP_STRING]
        return (between,) if between and not self.stop_ids else ()

    @cached_property
    def _after_reply(self) -> tuple[str, ...]:
        """What stands after an assistant turn: before the next user text, and at the end."""
        disguise = Disguise(self._tokenizer.controls, "")
        ask, reply, again = (disguise.hide(name) for name in ("question", "reply", "next"))
        turns = [("user", ask), ("assistant", reply), ("user", again)]
        try:
            whole = self._render(turns, generate=False)
            short = self._render(turns[:2], generate=False)
        except ModelError:
            return ("",)
        return whole.partition(reply)[2].partition(again)[0], short.partition(reply)[2]

    @cached_property
    def _takes_system(self) -> bool:
        disguise = Disguise(self._tokenizer.controls, "")
        system, user = disguise.hide("system"), disguise.hide("user")
        try:
            return system in self._render([("system", system), ("user", user)], generate=True)
        except ModelError:
            return False

    def _render(self, turns: Sequence[Turn], generate: bool, cut: str = "") -> str:
        """The template's text for `turns`; with `cut`, a character that marks the end of the last turn, up to there."""
        messages = [{"role": role, "content": text} for role, text in turns]
        if cut:
            messages[-1]["content"] += cut + " "
        names = self._tokenizer.names
        variables: dict[str, Any] = {**names, "add_generation_prompt": generate, "tools": None, "documents": None}
        try:
            text = self._sandbox.render(messages, variables)
        except Refusal as fault:
            message = f"{self._sandbox.where}: the chat template refuses this conversation: {fault!s:.300}"
            raise ModelError(message, "start with a user message and alternate") from None
        return _up_to(cut, text, self._sandbox.where) if cut else text


def open_template(folder: ModelFolder, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a model folder, compiled. ModelError if it is malformed."""
    source, where = find_template(folder)
    return ChatTemplate(Sandbox(source, where), tokenizer)


def find_template(folder: ModelFolder) -> tuple[str, str]:
    """The source of the template and how messages name it."""
    source = folder.read_text("chat_template.jinja", MAX_SOURCE)
    if source is not None:
        return source, folder.where("chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = (folder.read_json(name) or {}).get("chat_template")
        if value is not None:
            return _named(value, folder.where(name)), folder.where(name)
    return FALLBACK, f"{folder.path} (no chat template)"


def _named(value: object, where: str) -> str:
    """A template string, or "default" (else the first) of a list of {name, template} or a table of them."""
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {str(entry.get("name")): entry.get("template") for entry in value}
    if isinstance(value, Mapping) and value:
        value = value.get("default", next(iter(value.values())))
    if not isinstance(value, str):
        raise ModelError(f"{where}: chat_template is neither a text nor a list of named texts", REMEDY)
    return value


def _fold_system(turns: Sequence[Turn]) -> list[Turn]:
    """The system turns' text in front of the first user turn's."""
    system = "\n\n".join(text for role, text in turns if role == "system")
    rest = [turn for turn in turns if turn[0] != "system"]
    if not system:
        return rest
    if rest and rest[0][0] == "user":
        return [("user", f"{system}\n\n{rest[0][1]}"), *rest[1:]]
    return [("user", system), *rest]


def _up_to(mark: str, text: str, where: str) -> str:
    """`text` up to the last `mark`; a template that trims texts has trimmed the end of this one too."""
    head, found, tail = text.rpartition(mark)
    if not found:
        raise ModelError(f"{where}: the chat template drops the end of the last message", "it cannot be continued")
    return head if tail.startswith(" ") else head.rstrip()
