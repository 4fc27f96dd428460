"""A service with a real tiny model, and what it says to requests."""

from pathlib import Path

from exl2chat.link import protocol as wire
from exl2chat.link.service import Service
from exl2chat.paths import Paths
from exl2chat.settings import Sampling

MODEL = str(Path(__file__).parent.parent / "data" / "golden" / "llama-6.0bpw-exl2")
LOAD = wire.Load(MODEL, dtype="float32", context=512)
LAST = (wire.Ready, wire.Failed, wire.Finished)


def ask(id="a", text="hello there", **fields):
    return wire.Generate(
        id, (wire.Turn("user", text),), **{"sampling": Sampling(temperature=0), "max_tokens": 8, **fields}
    )


def nothing(_event):
    return None


def serve(tmp_path, *requests, react=nothing, spare=0):
    """Everything a service says to `requests`; where `react` turns an event into a request, that is submitted too.

    It ends with the answer to the last of them; `spare` answers come beside those.
    """
    events, open_requests = [], len(requests) + spare

    def emit(event):
        nonlocal open_requests
        events.append(event)
        open_requests -= isinstance(event, LAST)
        if further := react(event):
            service.submit(further)
        if not open_requests:
            service.submit(wire.Shutdown())

    service = Service(Paths.default(tmp_path), emit)
    for request in requests:
        service.submit(request)
    service.run()
    return events


def text_of(events, id="a"):
    return "".join(event.text for event in events if isinstance(event, wire.Chunk) and event.id == id)


def last(events, id="a"):
    return next(event for event in events if isinstance(event, wire.Finished | wire.Failed) and event.id == id)
