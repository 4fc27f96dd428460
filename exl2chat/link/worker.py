"""The engine process: `python -m exl2chat.link.worker CONFIG DATA CACHE STATE`, the four folders of `Paths`.

Frames come in on the standard input and go out on the original standard output. File descriptors 1 and 2 both lead to
the log, so that nothing a native library prints reaches the terminal or the frames. When the standard input ends, the
front end is gone and the process leaves at once: nothing here needs saving.
"""

import logging
import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from exl2chat.errors import ChatError
from exl2chat.link import protocol as wire
from exl2chat.link.framing import pack, read_frame_blocking
from exl2chat.link.service import Service
from exl2chat.paths import Paths


def main() -> None:
    """Serve until Shutdown or the end of the standard input."""
    requests, events = _take_standard_streams()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")

    def emit(event: wire.Event) -> None:
        try:
            events.write(pack(event))
            events.flush()
        except BrokenPipeError:
            os._exit(0)

    service = Service(Paths(*map(Path, sys.argv[1:5])), emit)
    threading.Thread(target=_read_requests, args=(requests, service), daemon=True).start()
    service.run()


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """The pipes of the front end, moved out of the way of anything that reads 0 or writes 1."""
    requests, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, events


def _read_requests(stream: BinaryIO, service: Service) -> None:
    """Hand every request to the service while it works, so that a Stop acts at once; leave when the stream ends."""
    decoder = msgspec.msgpack.Decoder(wire.Request)
    try:
        while (frame := read_frame_blocking(stream)) is not None:
            service.submit(decoder.decode(frame))
    except (ChatError, msgspec.MsgspecError):
        logging.exception("the front end sent what is no request")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
