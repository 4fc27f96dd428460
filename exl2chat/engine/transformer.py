"""The one forward pass. Architectures differ in which weights are there and in the numbers of the config.

Numerics: the residual stream, norms, RoPE, softmax and logits are float32; matrices multiply in the model's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl2chat.engine.cache import KVCache
from exl2chat.engine.embeddings import FIRST_ID, InputEmbeddings, fill
from exl2chat.engine.weights import Weights, load_weights
from exl2chat.model.checkpoint import Checkpoint
from exl2chat.model.config import ModelConfig
from exl2chat.ops import Heads, Ops, compile_for, select
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.sample import TokenSampler
from exl2chat.progress import Progress

if TYPE_CHECKING:
    from exl2chat.engine.lora import Scaled

PREFILL_CHUNK = 512
GPU_PREFILL_CHUNK = 2048
# Steps of so many tokens take every kernel that steps of any other number do.
REHEARSED = (1, 2, 5, 8, 12, 16, 24, 33, 65, 128, 512, GPU_PREFILL_CHUNK)


def prefill_chunk(device: torch.device) -> int:
    """How many tokens of a prompt to read at a time. More on a GPU, which decodes every weight once per chunk."""
    return GPU_PREFILL_CHUNK if device.type == "cuda" else PREFILL_CHUNK


def rehearsed(capacity: int) -> list[int]:
    """REHEARSED in a cache for `capacity` tokens, up to the largest step that it has room for."""
    return sorted({min(count, capacity) for count in REHEARSED})


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model ready to run. Safe to share between caches; one thread at a time.

    `adapters` are the LoRAs that `weights` carry (`lora.with_adapters`): keys and values depend on them. `embedded` is
    what `inputs` knows beside tokens.
    """

    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    cache_bits: int = PLAIN_BITS  # of the caches that it makes (cache.BITS)
    adapters: "tuple[Scaled, ...]" = ()
    embedded: tuple[InputEmbeddings, ...] = ()

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
        cache_bits: int = PLAIN_BITS,
    ) -> "Transformer":
        """Bring a checkpoint onto `device`, to multiply in `dtype`; `placement.plan_memory` says before if it fits."""
        config = checkpoint.config
        weights = load_weights(checkpoint, device, dtype, progress)
        ops = select(device, dtype, config.head_dim, config.hidden_size, config.intermediate_size)
        return cls(config, weights, device, dtype, ops, cache_bits)

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    @property
    def recorded_rows(self) -> int:
        """Steps of up to so many tokens may be recorded as graphs. None with adapters: a graph would go on without
        them, or with them, whatever holds by then."""
        return 0 if self.adapters else self.ops.recorded_rows

    def new_cache(self, context: int) -> KVCache:
        """An empty cache for up to `context` tokens."""
        return KVCache(self.config, context, self.device, self.dtype, self.cache_bits)

    @torch.inference_mode()
    def warm_up(self, cache: KVCache, progress: Progress) -> None:
        """On a GPU: compile the kernels that a chat over `cache`, which is empty, will need, and take one step of the
        largest kind, so that memory that is not there is missed now. ModelError where a kernel does not compile."""
        if self.device.type != "cuda":
            return

        def take(count: int, start: int) -> None:
            cache.length = start
            cache.reserve(count)
            self.step(torch.zeros(count, dtype=torch.int64, device=self.device), cache, True)

        counts = rehearsed(cache.capacity)

        def rehearse() -> None:
            for count in counts:
                take(count, 0)
                take(count, cache.capacity - count)
            if self.ops.recorded_rows:  # without our kernels the host draws
                TokenSampler(self.device, 1).queue(torch.empty(1, 1, device=self.device))

        compile_for(rehearse, progress)
        progress("trying the largest step")
        take(counts[-1], cache.capacity - counts[-1])
        cache.truncate(0)

    @torch.inference_mode()
    def inputs(self, tokens: Sequence[int]) -> Tensor:
        """`tokens` as `forward` takes them: int64 [T]; float32 [T, hidden] where some are of `embedded`. Ids from
        FIRST_ID on that are not, as a draft model sees those of its target, become rows of zeros."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        if max(tokens) < FIRST_ID:
            return ids.to(self.device)
        beyond = ids >= FIRST_ID
        known = ids.masked_fill(beyond, 0).to(self.device)
        x = self.ops.embed(known, self.weights.embedding, self.config.embedding_scale)
        x[beyond.to(self.device)] = 0
        fill(x, ids, self.embedded)
        return x

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        """Logits float32 [T, V] of `tokens` (int64 [T], T > 0, or what `inputs` gives) that follow those in `cache`,
        which then holds them too; with `last_only` [1, V], of the last. ContextError where they do not fit: the cache
        is then as it was.

        Give long inputs in chunks of `prefill_chunk`: memory grows with T * context.
        """
        count = tokens.shape[0]
        cache.reserve(count)
        if count <= self.recorded_rows and not tokens.is_floating_point():
            logits = cache.graphs.run(tokens, lambda tokens: self.step(tokens, cache, False))
            logits = logits[-1:] if last_only else logits
        else:
            logits = self.step(tokens, cache, last_only)
        cache.length += count
        return logits

    def step(self, tokens: Tensor, cache: KVCache, last_only: bool, places: Tensor | None = None) -> Tensor:
        """The logits of tokens for which the cache has room, as `forward`, but that `cache.length` stays as it is. With
        up to `ops.recorded_rows` tokens they follow those before `cache.position`, whatever the length. Of all of them,
        of the last, or of those at `places` int64 [n]."""
        config, weights, ops = self.config, self.weights, self.ops
        heads = Heads(
            config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, config.attention_softcap
        )
        attends = ops.attends(cache, tokens.shape[0], heads, config.windows)
        embedded = tokens.is_floating_point()
        x = tokens.clone() if embedded else ops.embed(tokens, weights.embedding, config.embedding_scale)
        y = ops.norm(x, weights.layers[0].attention_norm, weights.layers[0].qkv)
        for layer, attend, (norm, following) in zip(weights.layers, attends, weights.following, strict=True):
            mixed = layer.o(attend(layer.qkv(y), layer.head_norm, layer.o))
            y = ops.add_norm(x, mixed, layer.attention_post_norm, layer.mlp_norm, layer.gate_up)
            inner = ops.gate(layer.gate_up(y), config.arch.activation, layer.down)
            y = ops.add_norm(x, layer.down(inner), layer.mlp_post_norm, norm, following)
        if places is not None or (last_only and tokens.shape[0] > 1):
            x = x[-1:] if places is None else x.index_select(0, places)
            y = ops.norm(x, weights.final_norm, weights.head)  # not y's: it may lie in a form of its number of rows
        return ops.logits(weights.head(y), config.logit_softcap)
