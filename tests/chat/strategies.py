"""Conversations drawn at random."""

from hypothesis import strategies as st

from exl2chat.chat.events import Message
from exl2chat.chat.records import Draft, Set, Title
from exl2chat.chat.tree import Head
from exl2chat.link.protocol import Form, Stats

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["", "line\nline", "\u2028 \x85 \x1c", '{"k":"msg"', "\0\0", "naïve 🐈"]
)


@st.composite
def steps(draw: st.DrawFn, most: int = 12) -> list[Message | Head]:
    """Messages under any earlier message, and moves of the head among them."""
    made: list[Message | Head] = []
    ids: list[str] = []
    for number in range(draw(st.integers(1, most))):
        if ids and draw(st.integers(0, 3)) == 0:
            made.append(Head(draw(st.sampled_from([None, *ids]))))
            continue
        message = Message(
            id=f"m{number}",
            parent=draw(st.sampled_from([None, *ids])),
            role=draw(st.sampled_from(["user", "assistant"])),
            text=draw(texts),
            stop=draw(st.sampled_from([None, "eos", "stopped"])),
            stats=draw(st.none() | st.builds(Stats, reply_tokens=st.integers(0, 9), decode_s=st.floats(0, 9))),
        )
        ids.append(message.id)
        made.append(message)
    return made


forms = st.none() | st.builds(Form, st.just("regex"), texts, texts)
others = (
    st.builds(Title, texts)
    | st.builds(Set, st.dictionaries(st.sampled_from(["model", "top_k"]), st.integers(0, 9) | texts, max_size=2), forms)
    | st.builds(Draft, st.sampled_from(["x", "y"]), st.none(), texts)
)


@st.composite
def records(draw: st.DrawFn) -> list[Message | Head | Title | Set | Draft]:
    """Steps with other records between them."""
    mixed: list[Message | Head | Title | Set | Draft] = []
    for step in draw(steps()):
        mixed += [step, *draw(st.lists(others, max_size=1))]
    return mixed
