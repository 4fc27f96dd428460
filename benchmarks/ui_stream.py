"""What the screen costs: CPU milliseconds per frame while a reply streams, and the time to open a long session.

    python benchmarks/ui_stream.py [--messages 10000] [--tokens 4000] [--per-frame 17] [--size 120x40]

A frame is measured from handing the text to the transcript until everything it caused has been painted (into a driver
that throws the bytes away). 17 tokens a frame at 30 frames a second are 510 tokens/s. CPU time, not wall time: other
work on the machine does not change it much.
"""

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from exl2chat.chat import events as chat
from exl2chat.chat.controller import Controller
from exl2chat.chat.events import Message
from exl2chat.chat.session import Session
from exl2chat.link.scripted import ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings
from exl2chat.ui.app import ChatApp
from exl2chat.ui.section import Entry

WORDS = re.findall(
    "[a-z]+",
    "the model reads its cache of keys and values for every token while memory bandwidth sets the pace so a smaller "
    "weight is a faster weight and kernels that fuse their steps leave less to fetch",
)


def paragraph(rng: random.Random, words: int) -> str:
    picked = [rng.choice(WORDS) for _ in range(words)]
    picked[::17] = [f"**{word}**" for word in picked[::17]]
    picked[5::23] = [f"`{word}`" for word in picked[5::23]]
    return " ".join(picked).capitalize() + "."


def code(_: random.Random, lines: int) -> str:
    body = "\n".join(f"    value_{n} = self.table.get('key_{n}', [{n}, x * {n}])  # line {n}" for n in range(lines))
    return f"```python\ndef work(self, x: int) -> None:\n{body}\n```"


def listing(rng: random.Random, items: int) -> str:
    return "\n".join(f"- item {n}: {' '.join(rng.choice(WORDS) for _ in range(9))}" for n in range(items))


def table(rng: random.Random, rows: int) -> str:
    body = "\n".join(f"| row {n} | {n * 3} | {' '.join(rng.choice(WORDS) for _ in range(4))} |" for n in range(rows))
    return f"| name | value | note |\n| --- | ---: | --- |\n{body}"


def mixed(rng: random.Random, sections: int) -> str:
    parts = (
        (f"## Section {n}", paragraph(rng, 120), listing(rng, 6), code(rng, 14), table(rng, 4)) for n in range(sections)
    )
    return "\n\n".join(part for section in parts for part in section)


CORPORA: dict[str, Callable[[random.Random], str]] = {
    "mixed": lambda rng: mixed(rng, 40),
    "one paragraph": lambda rng: paragraph(rng, 9000),
    "one fence": lambda rng: code(rng, 900),
    "one list": lambda rng: listing(rng, 900),
    "one table": lambda rng: table(rng, 900),
}


def tokens(text: str, count: int) -> list[str]:
    """About what a tokenizer makes of it: short words with the space before them."""
    return re.findall(r" ?[A-Za-z]{1,6}| ?\d{1,3}|\n+| +|[^\sA-Za-z0-9]", text)[:count]


def long_session(count: int) -> Session:
    rng = random.Random(1)
    session = Session.in_memory()
    steps = []
    for n in range(count):
        text = paragraph(rng, 25) if n % 2 == 0 else f"{paragraph(rng, 90)}\n\n{listing(rng, 3)}\n\n{code(rng, 4)}"
        steps.append(Message(f"m{n}", f"m{n - 1}" if n else None, "user" if n % 2 == 0 else "assistant", text))
    session.tree = session.tree.replay(steps)
    return session


async def stream(app: ChatApp, pilot: Pilot[int], text: list[str], per_frame: int) -> list[float]:
    """CPU milliseconds of every frame of one reply."""
    app.presenter.show(chat.ReplyStarted("r"))
    await pilot.pause()
    frames = []
    for at in range(0, len(text), per_frame):
        before = time.process_time()
        app.presenter.show(chat.ReplyText("r", "".join(text[at : at + per_frame]), at + 2))
        app.transcript.flush()
        await pilot.pause()
        frames.append(1000 * (time.process_time() - before))
    app.transcript.finish(Entry("r", "assistant", "model"))
    return frames


def line(name: str, frames: list[float]) -> str:
    ranked = sorted(frames)
    tenth = max(1, len(frames) // 10)
    figures = (
        sum(frames) / len(frames),
        ranked[len(ranked) // 2],
        ranked[int(len(ranked) * 0.99)],
        ranked[-1],
        sum(frames[:tenth]) / tenth,
        sum(frames[-tenth:]) / tenth,
    )
    return f"{name:16}" + "".join(f"{figure:9.1f}" for figure in figures)


async def measure(args: argparse.Namespace) -> None:
    session = long_session(args.messages)
    paths = Paths.default(Path(tempfile.mkdtemp()))
    width, height = map(int, args.size.split("x"))
    before, wall = time.process_time(), time.monotonic()
    app = ChatApp(Controller(ScriptedEngine(), Settings(), paths, session), paths)
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause()
        opened = f"{time.process_time() - before:.2f} s CPU, {time.monotonic() - wall:.2f} s"
        print(f"{args.messages} messages open in {opened}\n")
        print("CPU ms per frame    mean      p50      p99      max  first10%  last10%")
        for name, corpus in CORPORA.items():
            text = tokens(corpus(random.Random(7)), args.tokens)
            print(line(name, await stream(app, pilot, text, args.per_frame)))
        frames = []
        for _ in range(60):
            before = time.process_time()
            app.action_page(-1)
            await pilot.pause()
            frames.append(1000 * (time.process_time() - before))
        print(line("page up", frames))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--per-frame", type=int, default=17)
    parser.add_argument("--size", default="120x40")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
