"""The one exception tree: what went wrong, what to do about it, and the exit status of the command.

Exit statuses (documented in the README and in `exl2chat --help`):
0 success, 1 runtime failure, 2 wrong usage, 3 the model or the engine cannot be loaded, 4 the prompt does not fit the
context, 6 a session file is locked, damaged or not there, 129 and 143 `run` was ended by SIGHUP or SIGTERM, 130
interrupted, 141 the reader of the output went away.
"""

from typing import ClassVar

GPU_PACKAGES = "pip install 'exl2chat[cuda13]' (or cuda12, after the version of your driver), or use --device cpu"


class ChatError(Exception):
    """A failure a user can read. `message` names the file and the field; `remedy` says what to do next."""

    status: ClassVar[int] = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class UsageError(ChatError):
    """A flag, a command or a setting that cannot be understood."""

    status = 2


class ModelError(ChatError):
    """A model folder, a hub reference or an engine that cannot be loaded."""

    status = 3


class ContextError(ChatError):
    """A prompt that does not fit the context."""

    status = 4


class SessionError(ChatError):
    """A session file that is not there, locked, unreadable or damaged beyond recovery."""

    status = 6


OUT_OF_MEMORY = ("allocate memory", "out of memory", "OUT_OF_MEMORY", "OUT_OF_RESOURCES", "ALLOC_FAILED")


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether `fault` is Python, torch or CUDA saying that there is no memory left: most say so only in words."""
    return isinstance(fault, MemoryError) or any(words in str(fault) for words in OUT_OF_MEMORY)


def error_for(status: int, message: str, remedy: str = "") -> ChatError:
    """The error that carries `status`: how a failure crosses a process boundary and keeps its exit code."""
    kinds: tuple[type[ChatError], ...] = (UsageError, ModelError, ContextError, SessionError)
    kind = next((k for k in kinds if k.status == status), ChatError)
    return kind(message, remedy)
