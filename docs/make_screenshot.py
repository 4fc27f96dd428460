"""Draw docs/screenshot.svg: a short chat with the scripted engine, or with a real model.

python docs/make_screenshot.py [--model smollm2 --ask "..." --seed 1] [--theme exl2-dark] [--out docs/screenshot.svg]
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from exl2chat.chat.controller import Controller
from exl2chat.chat.session import Session
from exl2chat.link.choose import choose_engine
from exl2chat.link.protocol import Engine
from exl2chat.link.scripted import Read, Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings
from exl2chat.ui.app import ChatApp

SIZE = (104, 36)
QUESTION = "How do I read a file line by line in Python, and count the words?"
ANSWER = '''\
Open the file with `with`, so that it is **closed** again whatever happens, and go through it line by line. Only one
line is in memory at a time, however large the file is:

```python
from collections import Counter
from pathlib import Path

def count_words(path: Path) -> Counter[str]:
    """How often each word occurs in the file."""
    words: Counter[str] = Counter()
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            words.update(line.lower().split())
    return words  # a dict of word to count
```

| call | gives |
|:--|--:|
| `words.total()` | all words |
| `len(words)` | different words |
| `words.most_common(10)` | the *ten* most frequent |

1. `split()` without arguments takes any white space.
2. Punctuation stays on the words; `re.findall(r"\\w+", line)` leaves it out.
'''


async def draw(engine: Engine, settings: Settings, paths: Paths, question: str, out: Path) -> None:
    """Ask `question`, wait for the reply and write the screen to `out`."""
    app = ChatApp(Controller(engine, settings, paths, Session.in_memory()), paths)
    async with app.run_test(size=SIZE) as pilot:
        await until(lambda: app.controller.phase == "ready")
        await app.controller.submit(question)
        await until(lambda: len(app.controller.path) == 2)
        app.action_page(-1)
        app.action_home()
        await pilot.pause()
        out.write_text(app.export_screenshot(title="exl2chat", simplify=True), "utf-8")


async def until(done: Callable[[], bool]) -> None:
    """Return when `done` says so."""
    while not done():
        await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a real model; without it a script answers")
    parser.add_argument("--ask", default=QUESTION)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--theme", default="exl2-dark")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "screenshot.svg")
    args = parser.parse_args()
    flags = {"theme": args.theme, "seed": args.seed} | ({"model": args.model} if args.model else {})
    settings = Settings().with_layer("flag", flags)
    paths = Paths.default(None if args.model else Path(tempfile.mkdtemp()))
    script = Script(replies=((Read(total=64), Say(ANSWER)),))
    engine = choose_engine("local", paths) if args.model else ScriptedEngine(script)
    asyncio.run(draw(engine, settings, paths, args.ask, args.out))
    print(args.out)


if __name__ == "__main__":
    main()
