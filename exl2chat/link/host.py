"""One loaded model in the engine process, and its answers as events. Imports torch."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exl2chat.engine.cache import BITS
from exl2chat.engine.compile_grammar import compile_grammar, compile_json_schema, compile_regex
from exl2chat.engine.drafting import Speculate, takes_draft_model
from exl2chat.engine.generators.streaming import PLAIN, Extras, StreamingGenerator
from exl2chat.engine.loader import LoadedModel, plan_draft, plan_load
from exl2chat.engine.lora import Adapter, Scaled, load_adapter
from exl2chat.errors import ContextError, UsageError
from exl2chat.link import protocol as wire
from exl2chat.paths import Paths
from exl2chat.progress import Progress

UNUSED = (
    "the draft model is left out: in half precision on a CPU it costs more than it brings, and replies would differ; "
    "--dtype float32 or --speculate draft uses it"
)
COMPILERS = {"json": compile_json_schema, "regex": compile_regex, "grammar": compile_grammar}


class Host:
    """A model, its cache and the generator over both, which lives as long as they do to reuse earlier turns."""

    def __init__(
        self, model: LoadedModel, name: str, draft: LoadedModel | None, speculate: Speculate, note: str
    ) -> None:
        """`note`: what the user should know of how they were loaded, beside the model's own."""
        self.info = wire.ModelInfo(
            name=name,
            path=str(model.checkpoint.folder.path),
            architecture=model.checkpoint.config.arch.names[0],
            quantization=model.checkpoint.quantization,
            context=model.cache.capacity,
            vocab_size=model.checkpoint.config.vocab_size,
            device=str(model.transformer.device),
            dtype=str(model.transformer.dtype).removeprefix("torch."),
            weight_bytes=model.transformer.weight_bytes,
            cache_bytes=model.cache.nbytes,
            sampling=dict(model.checkpoint.config.sampling),
            cache=next(name for name, bits in BITS.items() if bits == model.cache.bits),
        )
        self.note = "; ".join(filter(None, (model.note, note)))
        self.model = model
        self.models = (model, draft) if draft else (model,)
        self._adapters: dict[str, Adapter] = {}
        self._generator = StreamingGenerator(
            model.transformer,
            model.cache,
            model.tokenizer,
            draft_model=draft.transformer if draft else None,
            draft_cache=draft.cache if draft else None,
            speculate=speculate,
        )

    def answer(
        self, request: wire.Generate, abort: Callable[[], bool], emit: Callable[[wire.Event], None]
    ) -> wire.Finished:
        """Generate the reply, emitting Prefill and Chunk events.

        ContextError when the prompt does not fit, ModelError when a LoRA cannot be applied, UsageError when there is no
        turn to answer or the form of the reply cannot be followed.
        """
        if not request.turns:
            raise UsageError("there is no message to answer", "send one first")
        asked = time.perf_counter()
        generator = self._generator
        generator.set_stop_conditions([*self.model.stop_ids, *self.model.stop_strings, *request.stop])
        prompt = self.model.encode_turns([(turn.role, turn.text) for turn in request.turns])
        try:
            start = generator.begin_stream_ex(
                prompt,
                request.sampling,
                max_new_tokens=request.max_tokens,
                abort=abort,
                continuing=request.turns[-1].role == "assistant",
                adapters=[Scaled(self._adapter(lora.path), lora.scale) for lora in request.loras],
                on_prefill=lambda done, total, cached: emit(wire.Prefill(request.id, done, total, cached)),
                extras=self._extras(request),
            )
        except ContextError as fault:
            raise ContextError(fault.message, self._advice(request.turns)) from None
        emit(wire.Prefill(request.id, start.prompt_tokens, start.prompt_tokens, start.cached_tokens))
        first = None
        while True:
            result = generator.stream_ex()
            first = first or time.perf_counter()
            if result.text:
                emit(wire.Chunk(request.id, result.text, result.reply_tokens))
            if result.stop_reason:
                break
        stats = wire.Stats(
            prompt_tokens=start.prompt_tokens,
            cached_tokens=start.cached_tokens,
            reply_tokens=result.reply_tokens,
            first_token_s=first - asked,
            decode_s=time.perf_counter() - first,
            seed=start.seed,
            **generator.speculated._asdict(),
        )
        return wire.Finished(request.id, result.stop_reason, stats)

    def _advice(self, turns: Sequence[wire.Turn]) -> str:
        """What to do where they do not fit the context: a question that stands alone cannot be asked in a new chat."""
        ways = ["shorten it"]
        if any(turn.role == "assistant" for turn in turns):
            ways.append("start a new conversation")
        if self.info.context < self.model.checkpoint.config.context:
            ways.append("load the model with a larger --ctx")
        return ", or ".join(ways)

    def _extras(self, request: wire.Generate) -> Extras:
        """What the reply is asked for besides its text."""
        form = request.form
        if form is None:
            return PLAIN
        if request.turns[-1].role == "assistant":
            raise UsageError("a reply that has begun cannot be given a form", "have it written anew")
        try:
            return Extras(constraint=COMPILERS[form.kind](self._generator.token_table(), form.text))
        except UsageError as fault:
            place = f"{form.source:.200}: " if form.source else ""
            raise UsageError(place + fault.message, fault.remedy) from None

    def _adapter(self, path: str) -> Adapter:
        if path not in self._adapters:
            self._adapters[path] = load_adapter(Path(path), self.model.transformer)
        return self._adapters[path]


class HostPlan:
    """A model that is found and checked, to be loaded once `replaced` is given up."""

    def __init__(
        self,
        path: Path,
        draft: Path | None,
        request: wire.Load,
        paths: Paths,
        progress: Progress,
        replaced: Host | None,
    ) -> None:
        """Check the model in the folder `path` as `request` wants it, and its draft model. ChatError when they cannot
        be loaded."""
        if request.speculate == "draft" and draft is None:
            raise UsageError("there is no draft model to speculate with", "name one with --draft-model")
        leaving = replaced.models if replaced else ()
        self._plan = plan_load(
            path, request.device, request.dtype, request.context, paths, progress, leaving, request.cache
        )
        is_reference = path.parent.name == "snapshots"  # in the hub's cache, where folders are named by commit hashes
        self._name = request.model if is_reference else self._plan.checkpoint.folder.name
        used = takes_draft_model(request.speculate, self._plan.device, self._plan.dtype)
        self._note = UNUSED if draft and not used else ""
        self._draft = plan_draft(draft, self._plan, paths, progress, leaving) if draft and used else None
        self._speculate = request.speculate

    def load(self, progress: Progress) -> Host:
        """Load the weights. ChatError when they cannot be."""
        draft = self._draft.load(progress) if self._draft else None  # first: then the other knows what is left
        return Host(self._plan.load(progress), self._name, draft, self._speculate, self._note)
