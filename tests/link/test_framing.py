"""Frames survive any chunking of the stream, and damage is told from its end."""

import asyncio
import io
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.errors import ContextError
from exl2chat.link import protocol as wire
from exl2chat.link.framing import MAX_FRAME, FrameError, pack, read_frame, read_frame_blocking

RECORDS = (
    wire.Load("org/name:4.0bpw", context=4096),
    wire.Generate("id", (wire.Turn("user", "zwölf 🦆\x1b[2J"),), stop=("\n\n",)),
    wire.Stop("id"),
    wire.Shutdown(),
)


def test_every_record_comes_back_as_it_was():
    stream = io.BytesIO(b"".join(map(pack, RECORDS)))
    decoder = msgspec.msgpack.Decoder(wire.Request)
    assert tuple(decoder.decode(read_frame_blocking(stream)) for _ in RECORDS) == RECORDS
    assert read_frame_blocking(stream) is None


@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_the_chunking_of_the_stream_does_not_matter(cuts):
    whole = b"".join(map(pack, RECORDS))
    edges = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]

    async def read():
        stream = asyncio.StreamReader()
        for start, end in pairwise(edges):
            stream.feed_data(whole[start:end])
        stream.feed_eof()
        return [await read_frame(stream) for _ in range(len(RECORDS) + 1)]

    *frames, end = asyncio.run(read())
    assert tuple(msgspec.msgpack.decode(frame, type=wire.Request) for frame in frames) == RECORDS
    assert end is None


def test_a_stream_that_ends_within_a_frame_has_no_more_frames():
    whole = pack(RECORDS[0])
    for length in range(len(whole)):
        assert read_frame_blocking(io.BytesIO(whole[:length])) is None


def test_an_absurd_length_is_an_error_not_an_allocation():
    with pytest.raises(FrameError):
        read_frame_blocking(io.BytesIO((MAX_FRAME + 1).to_bytes(4, "little") + b"x"))


def test_a_record_that_fits_no_frame_is_a_conversation_too_long():
    with pytest.raises(ContextError, match="over the limit"):
        pack(wire.Generate("a", (wire.Turn("user", "x" * MAX_FRAME),)))
