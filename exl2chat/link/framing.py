"""Records as frames on a byte stream: a 4-byte little-endian length and that many bytes of msgpack."""

import asyncio
from typing import BinaryIO

import msgspec

from exl2chat.errors import ChatError, ContextError
from exl2chat.link.protocol import Record

MAX_FRAME = 64 << 20  # bytes; the longest conversation that fits any context is far below it
_HEADER = 4


class FrameError(ChatError):
    """Bytes that are no frame: the other side is damaged or something else writes to the pipe."""


def pack(record: Record) -> bytes:
    """`record` as one frame. ContextError when it is longer than MAX_FRAME."""
    body = msgspec.msgpack.encode(record)
    if len(body) > MAX_FRAME:
        size = f"{len(body)} bytes, over the limit of {MAX_FRAME}"
        raise ContextError(f"the conversation takes {size}", "shorten it, or start anew")
    return len(body).to_bytes(_HEADER, "little") + body


async def read_frame(stream: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame; None at the end of the stream, also in the middle of a frame."""
    try:
        size = _checked_size(await stream.readexactly(_HEADER))
        return await stream.readexactly(size)
    except asyncio.IncompleteReadError:
        return None


def read_frame_blocking(stream: BinaryIO) -> bytes | None:
    """`read_frame` for a thread that may wait."""
    header = stream.read(_HEADER)
    if len(header) < _HEADER:
        return None
    size = _checked_size(header)
    body = stream.read(size)
    return body if len(body) == size else None


def _checked_size(header: bytes) -> int:
    size = int.from_bytes(header, "little")
    if size > MAX_FRAME:
        raise FrameError(f"a frame claims {size} bytes, over the limit of {MAX_FRAME}")
    return size
