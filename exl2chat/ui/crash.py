"""What is left of a defect of the screen: a traceback in a private file, without the values of variables."""

import os
import traceback
from pathlib import Path

from exl2chat.errors import ChatError
from exl2chat.paths import open_private, private_folder


def write_crash(fault: BaseException, file: Path) -> str:
    """Append the traceback of `fault` to `file`; the line to show the user."""
    text = "".join(traceback.format_exception(fault))
    try:
        private_folder(file.parent)
        handle = open_private(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, text.encode("utf-8", "replace"))
        finally:
            os.close(handle)
    except (OSError, ChatError):
        return f"exl2chat: the screen failed: {type(fault).__name__} (and {file} cannot be written)"
    return f"exl2chat: the screen failed: {type(fault).__name__}; the conversation is saved, details are in {file}"
