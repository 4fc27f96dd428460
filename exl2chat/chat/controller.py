"""The chat without a screen: text and commands in, typed events out.

One task reads the engine's events; every state change happens in that task or in a call from the front end, on one
event loop, before the first await of that call. There are no threads and no locks.
"""

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from exl2chat.chat import commands
from exl2chat.chat.completion import Completion, complete
from exl2chat.chat.events import (
    ChatEvent,
    LoadProgress,
    Message,
    MessageAdded,
    ModelDown,
    ModelReady,
    Notice,
    PathChanged,
    Phase,
    PrefillProgress,
    ReplyFinished,
    ReplyStarted,
    ReplyText,
    SessionChanged,
    SettingChanged,
)
from exl2chat.chat.faults import fault_in, log_fault
from exl2chat.chat.loads import Loads, load_request, put_back
from exl2chat.chat.outbox import Outbox
from exl2chat.chat.recall import recorded, with_model, with_session
from exl2chat.chat.reply import Reply, context_filled, request
from exl2chat.chat.session import Session, new_id, storable
from exl2chat.errors import ChatError, ContextError, SessionError, UsageError, error_for
from exl2chat.link import protocol as wire
from exl2chat.paths import Paths
from exl2chat.settings import OPTIONS, Settings

DRAFT_SECONDS = 0.5
Listener = Callable[[ChatEvent], None]


class Controller:
    """One chat: a session, an engine and the settings. The TUI, `run` and the tests are its consumers.

    `form` is what the next replies must be, None: anything; `models` are names of models here, for completion.
    """

    def __init__(self, engine: wire.Engine, settings: Settings, paths: Paths, session: Session) -> None:
        self.paths = paths
        self.session = session
        self.settings = with_session(settings, session)
        self.models: tuple[str, ...] = ()
        self.model: wire.ModelInfo | None = None
        self.phase: Phase = "down"
        self.last_stats: wire.Stats | None = None
        self.form = session.form
        self._engine = engine
        self._listeners: list[Listener] = []
        self._outbox = Outbox(self)
        self._reply: Reply | None = None
        self._loads = Loads()
        self._pump: asyncio.Task[None] | None = None
        self._draft_timer: asyncio.TimerHandle | None = None
        self._fault: str | None = None

    # What a front end may look at

    @property
    def path(self) -> tuple[Message, ...]:
        """The messages on show. While a reply is on its way they end with what it answers."""
        return self.session.tree.path_to(self._reply.parent) if self._reply else self.session.path

    @property
    def reply(self) -> tuple[str, str] | None:
        """Id and text so far of the reply on its way."""
        return (self._reply.id, self._reply.text) if self._reply else None

    @property
    def queued(self) -> tuple[str, ...]:
        """Lines that will be sent when the model is free, the next one first."""
        return self._outbox.lines

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of the reply on its way, else of the last one."""
        if self._reply:
            return self._reply.tokens_per_second
        return self.last_stats.tokens_per_second if self.last_stats else 0.0

    @property
    def context_used(self) -> int | None:
        """Tokens of the context that the last prompt and reply of the path fill; None where that is not known."""
        if self._reply and self._reply.prompt_tokens:
            return self._reply.prompt_tokens + self._reply.tokens
        return context_filled(self.path, self.model)

    # What a front end may do

    async def start(self) -> None:
        """Listen to the engine and load the model; LoadProgress and ModelReady (or ModelDown) follow."""
        self._pump = asyncio.create_task(self._read_events())
        for line in self.session.notices:
            self.emit(Notice(line, "warning"))
        await self.load_model()

    async def close(self) -> None:
        """Keep what there is of a reply and the messages that wait, release the session file and stop the engine."""
        self._end_reply("stopped")
        self._outbox.keep()
        self.session.close()
        await self._engine.close()
        if self._pump:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with every event; call what is returned to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def submit(self, text: str, replaces: str | None = None) -> None:
        """Obey a command or send a message, at once or when the model is free.

        `replaces` (from FillPrompt) is the message that this one becomes an alternative to.
        """
        text = storable(text)
        action = commands.parse(text)
        if not isinstance(action, commands.Text):
            await self.obey(action)
        elif action.text.strip():
            await self.enqueue(text, replaces)

    async def run(self, line: str) -> None:
        """Obey the action `line`: a command with or without its slash. Never reaches the model."""
        word = storable(line if line.startswith("/") else "/" + line)
        action = commands.parse(word)
        await self.obey(commands.Unknown(word[1:]) if isinstance(action, commands.Text) else action)

    async def stop(self) -> None:
        """Take back the newest queued message into the prompt; with none queued, stop the reply and keep its text, or
        cancel the load: ModelDown follows, and ModelReady of the model before if the engine still has it."""
        if self.queued:
            self._outbox.return_newest()
        elif self._reply:
            await self._engine.send(wire.Stop(self._reply.id))
        elif self.phase == "loading":
            await self._engine.send(wire.Stop(""))

    def save(self) -> str | None:
        """Try again to write what could not be written; why it still cannot, None when everything is on disk."""
        if self.session.fault:
            self.session.save()
            self._watch_disk()
        return self.session.fault

    def complete(self, line: str, cursor: int) -> list[Completion]:
        """What the text before `cursor` could become."""
        return complete(line[:cursor], self.models, self.paths)

    # What the actions (`exl2chat.chat.actions`) are made of

    @property
    def busy(self) -> bool:
        """Whether a reply is on its way."""
        return self._reply is not None

    def emit(self, event: ChatEvent) -> None:
        """Tell every listener. One that fails is reported to the event loop and does not stop the others."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as fault:
                log_fault(f"a listener on {type(event).__name__} failed", fault)

    async def obey(self, action: commands.Invocation | commands.Unknown) -> None:
        """Obey a command; what goes wrong is reported."""
        try:
            await commands.obey(action, self)
        except ChatError as fault:
            self.report(fault)

    def report(self, fault: ChatError) -> None:
        """Tell the user what went wrong."""
        self.emit(Notice(str(fault), "error", fault.status))

    def require_writable(self) -> None:
        """SessionError when nothing can be added to the session."""
        if self.session.read_only:
            raise SessionError("this session is read-only", "`/fork` goes on in a copy")

    def add_message(self, message: Message) -> None:
        """Save `message` at the head and show it."""
        beside, title = message.parent != self.session.tree.head, self.session.title
        self.session.add(message)
        self._watch_disk()
        self.emit(PathChanged() if beside else MessageAdded(message))
        if self.session.title != title:
            self.emit(SessionChanged())

    async def reply_to(self, parent: str | None, start: str = "") -> None:
        """Ask for a reply to the message `parent` that begins with `start`. The model must be ready."""
        self.require_writable()
        if start and self.form:
            raise UsageError(
                "/continue: the next replies are of a given form, from their beginning on",
                f"`/{self.form.kind} off` first, or `/retry`",
            )
        sampling = self.settings.sampling()
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(32))
        shown = self.path
        self._reply = Reply(new_id(), parent, start, sampling.seed or 0, self.model.name if self.model else "")
        self.phase = "prefill"
        if self.path != shown:
            self.emit(PathChanged())
        self.emit(ReplyStarted(self._reply.id, start))
        asked = request(self._reply.id, self.path, start, sampling, self.settings, self.form)
        try:
            await self._engine.send(asked)
        except ChatError as fault:  # it is too long for a message to the engine
            self._handle_reply(wire.Failed(asked.id, fault.message, fault.remedy, fault.status), self._reply)

    async def change_settings(self, settings: Settings) -> None:
        """Let `settings` hold and save them; a change of what is loaded loads anew. UsageError if a reply runs then."""
        if self._reply and load_request(settings) != self._loads.wanted:
            raise UsageError("a reply is on its way", "stop it first")
        self.session.record_settings(recorded(settings), self.form)
        await self._use(settings)

    def remember(self) -> None:
        """Record in the session what is set in it; it holds again when that is opened."""
        self.session.record_settings(recorded(self.settings), self.form)

    async def change_session(self, session: Session) -> None:
        """Show another session, with the settings recorded in it.

        SessionError, and `session` closed, while the present one has messages that cannot be saved.
        """
        if self.save():
            session.close()
            raise SessionError("the last messages are not saved", "make room, or `/export` and `/delete` them")
        self.session.close()
        self.session, self.last_stats, self._fault = session, None, None
        self.emit(SessionChanged())
        self.emit(PathChanged())
        for line in session.notices:
            self.emit(Notice(line, "warning"))
        self.form = session.form if session.settings else self.form
        await self._use(with_session(self.settings, session))

    async def enqueue(self, line: str, replaces: str | None = None) -> None:
        """Send `line` when the model is free, which may be now; load the model if it is down."""
        self._outbox.add(line, replaces)
        if self.phase == "down":
            await self.load_model()
        await self._outbox.send()

    def move_head(self, head: str | None) -> None:
        """Show the path that ends in `head`."""
        self.session.move(head)
        self._watch_disk()
        self.emit(PathChanged())

    async def load_model(self) -> None:
        """Load what the settings say, in place of what is loaded."""
        request = self._loads.begin(self.settings)
        self.phase = "loading"
        self.emit(LoadProgress("starting", 0, 0, ""))
        await self._engine.send(request)

    # Inside

    async def _use(self, settings: Settings) -> None:
        self._take_settings(settings)
        if self._pump and load_request(self.settings) != self._loads.wanted:
            await self.load_model()

    def _take_settings(self, settings: Settings) -> None:
        before, self.settings = self.settings, settings
        for row in OPTIONS:
            if settings[row.name] != before[row.name]:
                self.emit(SettingChanged(row.name))

    async def _read_events(self) -> None:
        async for event in self._engine.events():
            what = f"handling {type(event).__name__}"
            if fault := await fault_in(self._handle(event), what):
                await fault_in(self._give_up(event, fault), what)

    async def _give_up(self, event: wire.Event, fault: Exception) -> None:
        """End what `fault` came in the way of, and say so: nobody is to wait for an answer that never comes."""
        error = ChatError(f"a defect ended this: {type(fault).__name__}: {fault!s:.200}", "please report it")
        reply, down = self._reply, self.phase == "loading" or isinstance(event, wire.Ready | wire.Died)
        self.phase = "down" if down else "ready"
        try:
            self._end_reply("error")
        finally:
            if down:
                self._loads.forget()
                self._go_down(error)
            else:
                self.report(error)
        if reply:
            await self._engine.send(wire.Stop(reply.id))

    async def _handle(self, event: wire.Event) -> None:
        match event:
            case wire.Loading(stage, done, total, unit):
                self.emit(LoadProgress(stage, done, total, unit))
            case wire.Ready():
                self._take_ready(event)
            case wire.Died(detail):
                self._end_reply("crash")
                self._go_down(error_for(1, f"the engine died: {detail}", "the next message starts it again"))
                self._loads.forget()
            case wire.Failed(id="", message=message, remedy=remedy, status=status):
                if self._loads.fail():
                    self._go_down(error_for(status, message, remedy))
            case _ if self._reply and event.id == self._reply.id:
                self._handle_reply(event, self._reply)
        await self._outbox.send()

    def _take_ready(self, event: wire.Ready) -> None:
        news = self._loads.take(event)
        if news == "outdated":
            return
        self.model, self.phase = event.model, "ready"
        self.settings = with_model(self.settings, event.model)
        if news == "kept" and self._loads.held:
            self._take_settings(put_back(self.settings, self._loads.held))
            self.remember()
        self.emit(ModelReady(event.model, event.seconds))
        if event.note:
            self.emit(Notice(event.note, "warning"))
        if news == "kept":
            self.emit(Notice(f"that was not loaded: {event.model.name} still answers", "warning"))

    def _handle_reply(self, event: wire.Event, reply: Reply) -> None:
        match event:
            case wire.Prefill(id, done, total, cached):
                reply.begin(event)
                self.emit(PrefillProgress(id, done, total, cached))
            case wire.Chunk(id, text, tokens):
                self.phase = "streaming"
                reply.take(text, tokens)
                self._draft_soon()
                self.emit(ReplyText(id, text, tokens))
            case wire.Finished(_, reason, stats):
                self.phase = "ready"
                self.last_stats = stats
                self._end_reply(reason, stats)
            case wire.Failed(_, message, remedy, status):
                self.phase = "ready"
                self._end_reply("error")
                if status == ContextError.status and reply.adds_nothing:
                    self._outbox.return_question(reply.parent)
                self.report(error_for(status, message, remedy))

    def _go_down(self, fault: ChatError) -> None:
        self.model, self.phase = None, "down"
        self.emit(ModelDown(fault.message, fault.remedy, fault.status))

    def _end_reply(self, stop: wire.StopReason, stats: wire.Stats | None = None) -> None:
        """Save the reply on its way, or forget it when it brought nothing."""
        reply, self._reply = self._reply, None
        if self._draft_timer:
            self._draft_timer.cancel()
            self._draft_timer = None
        if reply is None:
            return
        if reply.adds_nothing and (reply.text or stop in ("stopped", "error", "crash")):
            self.emit(PathChanged())
            return
        message = reply.message(stop, stats)
        self.session.add(message)
        self._watch_disk()
        self.emit(ReplyFinished(message))

    def _draft_soon(self) -> None:
        if not self._draft_timer:
            self._draft_timer = asyncio.get_running_loop().call_later(DRAFT_SECONDS, self._draft)

    def _draft(self) -> None:
        """Write down what came of the reply since the last time."""
        self._draft_timer = None
        if reply := self._reply:
            self.session.draft(reply.id, reply.parent, reply.undrafted(), reply.model)
            self._watch_disk()

    def _watch_disk(self) -> None:
        """Tell when saving begins to fail and when it works again."""
        before, self._fault = self._fault, self.session.fault
        if before != self._fault:
            failing = f"cannot save: {self._fault}; the chat goes on in memory until that works"
            self.emit(Notice(failing, "warning") if self._fault else Notice("saving works again; all is on disk"))
