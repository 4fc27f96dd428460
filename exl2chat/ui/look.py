"""The colours of a theme as what the transcript draws with. Made by `themes`, used by `render`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pygments.token import Token, _TokenType
from rich.style import Style

SYNTAX = {
    "keyword": Token.Keyword,
    "constant": Token.Keyword.Constant,
    "type": Token.Keyword.Type,
    "string": Token.Literal.String,
    "number": Token.Literal.Number,
    "comment": Token.Comment,
    "function": Token.Name.Function,
    "class": Token.Name.Class,
    "builtin": Token.Name.Builtin,
    "decorator": Token.Name.Decorator,
    "tag": Token.Name.Tag,
    "attribute": Token.Name.Attribute,
    "variable": Token.Name.Variable,
    "operator": Token.Operator,
    "heading": Token.Generic.Heading,
    "deleted": Token.Generic.Deleted,
    "inserted": Token.Generic.Inserted,
}


@dataclass(frozen=True, slots=True)
class Look:
    """Styles of the transcript. `text` and `code_block` carry a background, the others are laid over one of them."""

    text: Style
    code_block: Style
    user: Style
    assistant: Style
    muted: Style
    heading: Style
    code: Style
    link: Style
    quote: Style
    marker: Style
    warning: Style
    error: Style
    syntax: Mapping[_TokenType, Style] = field(default_factory=dict)

    def token(self, kind: _TokenType) -> Style | None:
        """The style of a piece of code: of its kind or of the nearest wider one."""
        step: _TokenType | None = kind
        while step is not None:
            if step in self.syntax:
                return self.syntax[step]
            step = step.parent
        return None
