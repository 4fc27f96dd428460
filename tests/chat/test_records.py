"""Session files as bytes: whole, cut anywhere, and damaged."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.chat.events import Message
from exl2chat.chat.records import Draft, Header, Record, Set, Title, dump, load
from exl2chat.chat.tree import Head, Tree
from exl2chat.errors import SessionError

from .strategies import records

HEADER = Header(1, "7f3a", "2026-11-21T14:02:11Z", "cats")
TALK = [
    HEADER,
    Set({"model": "smollm2", "temperature": 0.8, "seed": None}),
    Message("u1", None, "user", "Explain 🐈\nbriefly"),
    Draft("a1", "u1", "A sys"),
    Draft("a1", "u1", "tem \u2028"),
    Message("a1", "u1", "assistant", "A system", stop="eos"),
    Title("quantum cats"),
    Message("u2", "a1", "user", "and?"),
    Head("a1"),
    Draft("a2", "u2", "because "),
]


def lines(*drawn: Record | Header) -> bytes:
    return b"".join(map(dump, drawn))


def tree_of(drawn: list[Record]) -> Tree:
    return Tree().replay(record for record in drawn if isinstance(record, Message | Head))


@given(records())
def test_what_is_written_is_read(drawn: list[Record]) -> None:
    log = load(lines(HEADER, *drawn))
    assert log.header == HEADER
    assert log.tree == tree_of(drawn)
    assert log.title == next((r.title for r in reversed(drawn) if isinstance(r, Title)), HEADER.title)
    last_set = next((r for r in reversed(drawn) if isinstance(r, Set)), Set({}))
    assert (log.settings, log.form) == (last_set.values, last_set.form)
    drafted: dict[str, str] = {}
    for record in drawn:
        if isinstance(record, Draft):
            drafted[record.id] = drafted.get(record.id, "") + record.text
    assert {draft.id: draft.text for draft in log.drafts} == drafted
    assert (log.damaged, log.torn, log.complete) == (0, b"", True)


def test_a_file_cut_at_any_byte_keeps_every_whole_record() -> None:
    data = lines(*TALK)
    ends = [len(lines(*TALK[:n])) for n in range(len(TALK) + 1)]
    for cut in range(len(data) + 1):
        log = load(data[:cut])
        # A record whose line feed alone is missing is whole.
        whole = sum(end <= cut + 1 for end in ends) - 1
        steps = [record for record in TALK[:whole] if isinstance(record, Message | Head)]
        assert log.tree == Tree().replay(steps), cut
        assert log.damaged == 0
        assert log.size + len(log.torn) == cut
        assert data[log.size : cut] == log.torn
        assert log.complete == (cut in ends or bool(log.torn))


@given(st.data(), st.sampled_from([b"\0", b"\xff", b"\n"]))
def test_a_block_of_rubbish_costs_only_the_lines_it_touches(data: st.DataObject, filler: bytes) -> None:
    talk = [HEADER, *(Message(f"m{n}", f"m{n - 1}" if n else None, "user", f"text {n} " * 9) for n in range(30))]
    good = lines(*talk)
    start = data.draw(st.integers(0, len(good) - 512))
    log = load(good[:start] + filler * 512 + good[start + 512 :])
    at = 0
    for record in talk:
        end = at + len(dump(record))
        # A line right behind the block has lost its beginning, unless NULs (which are skipped) or an LF came before.
        touched = (at < start + 512 and end > start) or (at == start + 512 and filler == b"\xff")
        if isinstance(record, Message) and not touched:
            assert log.tree.messages[record.id].text == record.text
        at = end
    assert log.damaged > 0 or log.torn or filler == b"\n"  # empty lines in place of whole ones leave no trace


def test_what_follows_a_lost_message_stays_on_the_path() -> None:
    talk = [
        Message("u1", None, "user", "1"),
        Message("a1", "u1", "assistant", "2"),
        Message("u2", "lost", "user", "3"),
        Message("a2", "u2", "assistant", "4"),
        Message("v2", "lost", "user", "3 otherwise"),
    ]
    log = load(lines(HEADER, *talk))
    assert [message.text for message in log.tree.path] == ["1", "2", "3 otherwise"]
    assert [message.id for message in log.tree.siblings("v2")] == ["u2", "v2"]


def test_a_second_message_of_one_id_is_not_believed() -> None:
    log = load(lines(HEADER, Message("u1", None, "user", "first"), Message("u1", None, "user", "second")))
    assert log.tree.messages["u1"].text == "first"
    assert log.damaged == 1


def test_unknown_kinds_and_fields_are_left_alone() -> None:
    later = b'{"k":"probability","id":"u1","p":[1,2]}\n{"k":"title","title":"t","by":"a later version"}\n'
    log = load(lines(HEADER) + later)
    assert (log.damaged, log.title) == (0, "t")


@pytest.mark.parametrize(
    "line",
    [
        b'{"k":"msg","id":7}',
        b'{"k":"head","id":"nobody"}',
        b"[1]",
        b'"text"',
        b"\xff\xfe",
        b'{"k":"later","deep":' + b"[" * 100_000,
        b'{"exl2chat":1,"deep":' + b"[" * 100_000,
    ],
)
def test_a_line_that_makes_no_sense_is_counted(line: bytes) -> None:
    assert load(lines(HEADER) + line + b"\n").damaged == 1


@pytest.mark.parametrize(
    ("line", "damaged"),
    [
        (b'{"k":"title","title":"t"}', 0),
        (b'{"k":"set","set":{"temperature":"hot"}}', 1),
        (b'{"k":"msg","id":"u9","parent":null,"role":"user","text":5}', 1),
        (b'{"k":5}', 1),
        (b"[1]", 1),
    ],
)
def test_a_whole_last_line_without_a_line_feed_is_a_line_like_any_other(line: bytes, damaged: int) -> None:
    for end in (b"\n", b""):
        log = load(lines(HEADER) + line + end)
        assert (log.damaged, log.torn, log.complete) == (damaged, b"", bool(end))
    half = load(lines(HEADER) + line[:-1])
    assert (half.damaged, half.torn) == (0, line[:-1])


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(SessionError, match="format 2"):
        load(lines(msgspec.structs.replace(HEADER, version=2)))


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_fail(data: bytes) -> None:
    log = load(lines(HEADER) + data)
    assert log.header == HEADER


def test_drafts_of_a_reply_that_never_finished_concatenate() -> None:
    log = load(lines(*TALK, Draft("a2", "u2", "it is so")))
    assert log.drafts == (Draft("a2", "u2", "because it is so"),)
