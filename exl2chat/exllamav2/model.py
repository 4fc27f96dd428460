"""`ExLlamaV2`: the model object."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress as RichProgress
from torch import Tensor

from exl2chat.engine.cache import BITS
from exl2chat.engine.embeddings import check_prompt
from exl2chat.engine.lora import with_adapters
from exl2chat.engine.placement import candidate, choose_device, choose_dtype, plan_memory
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import ModelError, UsageError
from exl2chat.exllamav2.config import ExLlamaV2Config
from exl2chat.exllamav2.embedding import Embeddings, spliced
from exl2chat.exllamav2.lora import Loras, scaled_loras
from exl2chat.exllamav2.unsupported import refuse_set
from exl2chat.progress import Progress, silent

if TYPE_CHECKING:
    from exl2chat.exllamav2.cache import ExLlamaV2Cache

Callback = Callable[[int, int], None]
CallbackGen = Callable[[int, int], Iterable[Any]]


class ExLlamaV2:
    """A model on one device, loaded by `load` or `load_autosplit`."""

    tp_context = None

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False) -> None:
        refuse_set("ExLlamaV2", lazy_load=lazy_load)
        self.config = config
        self._transformer: Transformer | None = None

    @property
    def loaded(self) -> bool:
        return self._transformer is not None

    @property
    def transformer(self) -> Transformer:
        """The loaded model; ModelError when there is none."""
        if self._transformer is None:
            raise ModelError("the model is not loaded", "call load() or load_autosplit(cache) first")
        return self._transformer

    def load(
        self,
        gpu_split: list[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: object = None,
        progress: bool = False,
    ) -> None:
        """Load everything. callback(done, total) is called as it proceeds; `progress` shows a bar instead."""
        refuse_set("ExLlamaV2.load", gpu_split=gpu_split, lazy=lazy, stats=stats, callback_gen=callback_gen)
        self._load(None, callback, progress)

    def load_gen(
        self,
        gpu_split: list[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        progress: bool = False,
    ) -> Iterator[Any]:
        """`load`, and what callback_gen(done, total) yields as it proceeds."""
        refuse_set("ExLlamaV2.load_gen", gpu_split=gpu_split, lazy=lazy, stats=stats, progress=progress)
        return _told(lambda tell: self._load(None, tell, False), callback, callback_gen)

    def load_autosplit(
        self,
        cache: "ExLlamaV2Cache",
        reserve_vram: int | list[int] | None = None,
        last_id_only: bool = False,  # noqa: ARG002
        callback: Callback | None = None,
        callback_gen: object = None,
        progress: bool = False,
    ) -> None:
        """Load everything and see to it that a lazy `cache` fits beside it. ModelError when it does not.

        last_id_only shrinks the reference's trial run; there is none here.
        """
        refuse_set("ExLlamaV2.load_autosplit", reserve_vram=reserve_vram, callback_gen=callback_gen)
        self._load(cache, callback, progress)

    def load_autosplit_gen(
        self,
        cache: "ExLlamaV2Cache",
        reserve_vram: int | list[int] | None = None,
        last_id_only: bool = False,  # noqa: ARG002
        callback: Callback | None = None,
        callback_gen: CallbackGen | None = None,
        progress: bool = False,
    ) -> Iterator[Any]:
        """`load_autosplit`, and what callback_gen(done, total) yields as it proceeds."""
        refuse_set("ExLlamaV2.load_autosplit_gen", reserve_vram=reserve_vram, progress=progress)
        return _told(lambda tell: self._load(cache, tell, False), callback, callback_gen)

    def load_tp(self, *args: object, **kwargs: object) -> None:  # noqa: ARG002
        """UsageError: a model runs on one device."""
        raise UsageError("ExLlamaV2.load_tp: tensor parallelism is not supported", "call load_autosplit, on one device")

    def _load(self, cache: "ExLlamaV2Cache | None", callback: Callback | None, progress: bool) -> None:
        if callback is not None and progress:
            raise UsageError("a callback and progress=True exclude each other", "choose one")
        checkpoint = self.config.checkpoint()
        device = choose_device(self.config.device)
        dtype = choose_dtype(self.config.dtype, device)
        bits, context = (cache.bits, cache.capacity) if cache else (BITS["fp16"], 0)
        plan_memory(candidate(checkpoint, device, dtype, bits), device, dtype, context)
        if progress:
            with RichProgress(transient=True) as bar:
                self._transformer = Transformer.load(checkpoint, device, dtype, _bar_progress(bar))
        else:
            self._transformer = Transformer.load(checkpoint, device, dtype, _callback_progress(callback))
        if cache is not None:
            cache.reset()

    def unload(self) -> None:
        """Forget the weights."""
        self._transformer = None

    def is_quant(self) -> bool:
        """Whether any linear weight is quantised."""
        checkpoint = self.config.checkpoint()
        return any(linear.kind != "plain" for layer in checkpoint.layers for linear in layer.linears)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        cache: "ExLlamaV2Cache | None" = None,
        input_mask: Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Loras = None,
        return_last_state: bool = False,
        position_offsets: Tensor | None = None,
        abort_event: Event | None = None,
        cpu_logits: bool = False,
        indexed_embeddings: Embeddings = None,
        **kwargs: object,
    ) -> Tensor | None:
        """Logits float32 [1, T, V] of `input_ids` [1, T], or [1, 1, V] with `last_id_only`; they join those in `cache`.

        In chunks of config.max_input_len. None with `preprocess_only`, or once `abort_event` is set. `loras` change the
        model for this call. indexed_embeddings: as input_embeddings of `begin_stream_ex`.
        """
        refuse_set("ExLlamaV2.forward", input_mask=input_mask, return_last_state=return_last_state)
        refuse_set("ExLlamaV2.forward", position_offsets=position_offsets, **kwargs)
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise UsageError(f"input_ids has shape {list(input_ids.shape)}", "it is [1, T]: one row of tokens")
        input_ids, embedded = spliced(input_ids, indexed_embeddings)
        ids = input_ids[0].tolist()
        model = replace(with_adapters(self.transformer, scaled_loras(loras)), embedded=embedded)
        check_prompt(ids, model.config.vocab_size, model.config.hidden_size, embedded)  # an unknown id ends the process
        kv = cache.kv if cache is not None else model.new_cache(input_ids.shape[1])
        kv.claim(self)  # generators over it forget what they know
        last_only = last_id_only or preprocess_only
        logits = []
        for start in range(0, len(ids), self.config.max_input_len):
            if abort_event is not None and abort_event.is_set():
                return None
            inputs = model.inputs(ids[start : start + self.config.max_input_len])
            logits.append(model.forward(inputs, kv, last_only))
        if preprocess_only:
            return None
        result = logits[-1] if last_only else torch.cat(logits)
        return (result.cpu() if cpu_logits else result).unsqueeze(0)


def _told(
    load: Callable[[Callback], None], callback: Callback | None, callback_gen: CallbackGen | None
) -> Iterator[Any]:
    """Load in a thread, and yield here what `callback_gen` has to say of every step."""
    steps: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(load, lambda *step: steps.put(step))
        loading.add_done_callback(lambda _: steps.put(None))
        for step in iter(steps.get, None):
            if callback is not None:
                callback(*step)
            if callback_gen is not None:
                yield from callback_gen(*step)
        loading.result()


def _callback_progress(callback: Callback | None) -> Progress:
    if callback is None:
        return silent

    def tell(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:  # noqa: ARG001
        callback(done, total)

    return tell


def _bar_progress(bar: RichProgress) -> Progress:
    task = bar.add_task("loading", total=None)

    def tell(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:  # noqa: ARG001
        bar.update(task, description=stage, completed=done, total=total or None)

    return tell
