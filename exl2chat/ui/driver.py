"""What the terminal sends, made fit for Textual's parser: bytes of any kind, pastes that hold escape sequences."""

import os
import select
from codecs import getincrementaldecoder

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"
POLL_SECONDS = 0.1
READ_BYTES = 4096


class ChatDriver(LinuxDriver):
    """Reads on where Textual's driver would end the app, at a byte that is not UTF-8, keeps every paste whole, and does
    not wait for a terminal that is gone."""

    def run_input_thread(self) -> None:
        """Turn input into messages until the driver is told to stop or the terminal is gone."""
        decode = getincrementaldecoder("utf-8")("replace").decode
        parser, guard = XTermParser(self._debug), PasteGuard()
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], POLL_SECONDS)[0]:
                data = os.read(self.fileno, READ_BYTES)
                if not data:
                    return
                if text := guard.feed(decode(data)):  # to the parser, no text is the end of the input
                    for message in parser.feed(text):
                        self.process_message(message)
            for message in parser.tick():
                self.process_message(message)

    def write(self, data: str) -> None:
        """Show `data`, unless the thread that writes has died with the terminal: its queue would fill up and block."""
        if self._writer_thread is not None and self._writer_thread.is_alive():
            super().write(data)


class PasteGuard:
    """A filter over the input that shows each ESC within a bracketed paste as a glyph.

    A parser that meets one there begins an escape sequence and takes what follows for keys, Enter among them. All other
    text passes unchanged and at once, because the parser tells Esc from a sequence by the time that passes.
    """

    def __init__(self) -> None:
        self._inside = False
        self._before = ""  # inside: not passed on yet, the beginning of an end mark; outside: the last text passed on

    def feed(self, text: str) -> str:
        """What of the input so far may be parsed now."""
        passed = ""
        while text:
            piece, text = self._in_paste(text) if self._inside else self._outside(text)
            passed += piece
        return passed

    def _outside(self, text: str) -> tuple[str, str]:
        """`text` up to the end of the mark that begins a paste, and the rest."""
        seen = self._before + text
        if PASTE_BEGINS not in seen:
            self._before = seen[1 - len(PASTE_BEGINS) :]
            return text, ""
        end = seen.index(PASTE_BEGINS) + len(PASTE_BEGINS) - len(self._before)
        self._inside, self._before = True, ""
        return text[:end], text[end:]

    def _in_paste(self, text: str) -> tuple[str, str]:
        """The pasted text as far as it is certain, with the mark that ends it, and the rest."""
        pasted, mark, rest = (self._before + text).partition(PASTE_ENDS)
        self._inside, self._before = not mark, ""
        if not mark:
            ends = (PASTE_ENDS[:length] for length in range(len(PASTE_ENDS), -1, -1))
            self._before = next(end for end in ends if pasted.endswith(end))
            pasted = pasted.removesuffix(self._before)
        return pasted.replace("\x1b", "␛") + mark, rest
