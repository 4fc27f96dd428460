"""`exl2chat run`: one prompt, one answer. The answer is all that reaches the standard output."""

import argparse
import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import (
    ChatEvent,
    LoadProgress,
    Message,
    ModelDown,
    Notice,
    PathChanged,
    PrefillProgress,
    ReplyFinished,
    ReplyText,
)
from exl2chat.chat.forms import Kind, form_of
from exl2chat.chat.grammar import literal
from exl2chat.chat.session import Session
from exl2chat.errors import ChatError, UsageError, error_for
from exl2chat.link.choose import choose_engine
from exl2chat.link.protocol import Form, Stats
from exl2chat.paths import Paths
from exl2chat.safetext import Scrubber, scrub_line
from exl2chat.settings import Settings

if TYPE_CHECKING:
    from rich.progress import Progress

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `exl2chat run`."""
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="the prompt; what is piped to the standard input follows it (`-`: only that)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: text, model, counts, seconds, stop")
    parser.add_argument(
        "--stats", action="store_true", help="print speed and counts on the standard error, if piped too"
    )
    form = parser.add_argument_group("what the answer must be").add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="SCHEMA", help="JSON of this schema: a file, or the schema itself")
    form.add_argument("--regex", metavar="EXPRESSION", help="what this regular expression matches as a whole")
    form.add_argument("--grammar", metavar="GRAMMAR", help="a grammar, Lark or GBNF: a file, or the grammar itself")


def main(args: argparse.Namespace, settings: Settings, paths: Paths) -> int:
    """Answer the prompt; the exit status."""
    said: dict[Kind, str | None] = {"json": args.json_schema, "regex": args.regex, "grammar": args.grammar}
    form = next((form_of(kind, text) for kind, text in said.items() if text is not None), None)
    return answer_in(Session.in_memory(), args, settings, paths, form)


def answer_in(
    session: Session, args: argparse.Namespace, settings: Settings, paths: Paths, form: Form | None = None
) -> int:
    """Answer the prompt as the next message of `session`; the exit status."""
    controller = Controller(choose_engine(args.engine, paths), settings, paths, session)
    controller.form = form or session.form
    return asyncio.run(answer(read_prompt(args.prompt), controller, args.json, args.stats))


def read_prompt(prompt: str | None) -> str:
    """`prompt` and, unless it is a terminal, the standard input. UsageError when both are empty."""
    piped = "" if sys.stdin.isatty() and prompt != "-" else sys.stdin.read()
    whole = "\n\n".join(part for part in ("" if prompt == "-" else prompt, piped) if part)
    if not whole.strip():
        raise UsageError("there is no prompt", 'give one: exl2chat run -p "..."')
    return whole


async def answer(prompt: str, controller: Controller, as_json: bool = False, stats: bool = False) -> int:
    """Print the reply to `prompt` as it comes, or as one JSON object; the exit status.

    An interrupt stops the reply, keeps what there is of it and gives 130. ChatError when there is no reply, or only
    a part of one because the engine failed, or one that was cut off before it had the form it must have.
    """
    listener = _Listener(controller, None if as_json else _Printer())
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, listener.interrupt)
    try:
        await controller.start()
        await controller.submit(literal(prompt))
        message = await listener.reply
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        try:
            await controller.close()
        finally:
            listener.close()  # which fails where the reader of the output went away
    if as_json:
        print(json.dumps(_as_object(message), ensure_ascii=sys.stdout.isatty()))
    if stats or sys.stderr.isatty():
        print(_summary(message), file=sys.stderr)
    if controller.form and message.stop != "eos" and not listener.interrupted:
        cut = f"the answer is not complete: it was ended by {message.stop}"
        raise ChatError(cut, "allow for more: --max-tokens, --ctx")
    return INTERRUPTED if listener.interrupted else 0


class _Listener:
    """Follows one reply: shows progress, hands on its text, and resolves `reply` when it has ended."""

    def __init__(self, controller: Controller, printer: "_Printer | None") -> None:
        self.reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.interrupted = False
        self._controller = controller
        self._printer = printer
        self._meter = _Meter()
        self._stopping: asyncio.Task[None] | None = None
        controller.subscribe(self._hear)

    def interrupt(self) -> None:
        """Stop the reply; where none has begun, or on the second call, wait no longer."""
        if self._controller.busy and not self.interrupted:
            self._stopping = asyncio.create_task(self._controller.stop())
        else:
            self.reply.cancel()
        self.interrupted = True

    def close(self) -> None:
        """Leave both streams at the start of a line."""
        self._meter.hide()
        if self._printer:
            self._printer.close()

    def _hear(self, event: ChatEvent) -> None:
        if self.reply.done():
            return
        try:
            self._take(event)
        except Exception as fault:  # such as a reader of the output that went away
            self.reply.set_exception(fault)

    def _take(self, event: ChatEvent) -> None:
        match event:
            case LoadProgress(stage, done, total):
                self._meter.show(stage, done, total)
            case PrefillProgress(_, done, total):
                self._meter.show("reading the prompt", done, total)
            case ReplyText(text=text):
                self._meter.hide()
                if self._printer:
                    self._printer.write(text)
            case ReplyFinished(message) if message.stop not in ("error", "crash"):
                self.reply.set_result(message)
            case ModelDown(message, remedy, status):
                self.reply.set_exception(error_for(status, message, remedy))
            case Notice(text, status=status) if status:
                self.reply.set_exception(error_for(status, text))
            case Notice(text, "warning"):
                self._meter.hide()
                print(f"exl2chat: {scrub_line(text)}", file=sys.stderr)
            case PathChanged() if self.interrupted:  # stopped before it brought any text
                self.reply.cancel()


class _Printer:
    """The reply on the standard output: as it is where a program reads it, safe where a terminal shows it."""

    def __init__(self) -> None:
        self._scrubber = Scrubber() if sys.stdout.isatty() else None
        self._line_is_open = False

    def write(self, text: str) -> None:
        """Print a piece of the reply at once."""
        if self._scrubber:
            text = self._scrubber.feed(text)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._line_is_open = not text.endswith("\n")

    def close(self) -> None:
        """End the last line."""
        if self._line_is_open:
            print(flush=True)


class _Meter:
    """Progress of loading and reading on the standard error, where a person watches it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def show(self, stage: str, done: int, total: int) -> None:
        """Say what is going on and how far it is; `total` 0 means unknown."""
        if self._progress is None:
            if not sys.stderr.isatty():
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
            console = Console(stderr=True)
            self._progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._progress.add_task("")
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0], description=scrub_line(stage), completed=done, total=total or None
        )

    def hide(self) -> None:
        """Take the progress off the terminal."""
        if self._progress:
            self._progress.stop()
            self._progress = None


def _as_object(message: Message) -> dict[str, object]:
    """What `--json` prints."""
    stats = message.stats or Stats()
    return {
        "text": message.text,
        "stop": message.stop,
        "model": message.model,
        "seed": stats.seed,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "reply_tokens": stats.reply_tokens,
        "first_token_s": round(stats.first_token_s, 4),
        "decode_s": round(stats.decode_s, 4),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "speed_up": round(stats.speed_up, 3),
    }


def _summary(message: Message) -> str:
    stats = message.stats or Stats()
    speed = f"{stats.tokens_per_second:.1f} tokens/s, " if stats.tokens_per_second else ""
    speed += f"first after {stats.first_token_s:.2f} s"
    if stats.drafted:
        speed += f", {stats.accepted} of {stats.drafted} drafts accepted ({stats.speed_up:.2f}x)"
    return f"{stats.prompt_tokens} + {stats.reply_tokens} tokens, {speed}, ended by {message.stop}, seed {stats.seed}"
