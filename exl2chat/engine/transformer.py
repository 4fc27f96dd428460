"""The one forward pass. Architectures differ in which weights are there and in the numbers of the config.

Numerics: the residual stream, norms, RoPE, softmax and logits are float32; matrices multiply in the model's dtype.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2chat.engine.cache import KVCache, Span
from exl2chat.engine.weights import LayerWeights, Weights, load_weights
from exl2chat.model.checkpoint import Checkpoint
from exl2chat.model.config import ModelConfig
from exl2chat.ops import Norm, Ops, select
from exl2chat.progress import Progress

PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class View:
    """The cache as one layer sees it in one step: `new` [T, 2 * G, D] to be written, keys and values [1, G, S, D]
    within its window, `mask` as `Ops.visible` made it."""

    new: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model ready to run. Safe to share between caches; one thread at a time."""

    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype
    ops: Ops

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress
    ) -> "Transformer":
        """Bring a checkpoint onto `device`, to multiply in `dtype`; `placement.check_memory` says before if it fits."""
        weights = load_weights(checkpoint, device, dtype, progress)
        return cls(checkpoint.config, weights, device, dtype, select(device))

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def new_cache(self, context: int) -> KVCache:
        """An empty cache for up to `context` tokens."""
        return KVCache(self.config, context, self.device, self.dtype)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache, last_only: bool = False) -> Tensor:
        """Logits float32 [T, V] of `tokens` (int64 [T], T > 0) that follow those in `cache`, which then holds them too;
        with `last_only` [1, V], of the last. ContextError where they do not fit: the cache is then as it was.

        Give long inputs in chunks of PREFILL_CHUNK: memory grows with T * context.
        """
        count = tokens.shape[0]
        span = cache.span(count)
        x = F.embedding(tokens, self.weights.embedding).float()
        if self.config.embedding_scale != 1:
            x *= self.config.embedding_scale
        for layer, view in zip(self.weights.layers, self._views(span, count), strict=True):
            self._attend(x, layer, span, view)
            self._feed_forward(x, layer)
        cache.length += count
        return self._logits(x[-1:] if last_only else x)

    def _views(self, span: Span, count: int) -> list[View]:
        """A view for each layer, cut to what its window can reach. A mask is made once per window."""
        total = span.keys[0].shape[2]
        masks: dict[int | None, Tensor | None] = {}
        views = []
        for window, new, keys, values in zip(self.config.windows, span.new, span.keys, span.values, strict=True):
            reach = total if window is None else min(total, window + count - 1)
            if window not in masks:
                masks[window] = self.ops.visible(count, reach, window, self.device)
            if reach < total:
                keys, values = keys[:, :, -reach:], values[:, :, -reach:]
            views.append(View(new, keys, values, masks[window]))
        return views

    def _attend(self, x: Tensor, layer: LayerWeights, span: Span, view: View) -> None:
        """x += attention(norm(x)), having put the new keys and values where `view` looks."""
        config, ops = self.config, self.ops
        groups = config.num_kv_heads
        qkv = layer.qkv(ops.rms_norm(x, layer.attention_norm)).float().view(x.shape[0], -1, config.head_dim)
        turning = qkv[:, :-groups]
        if layer.head_norm is not None:
            turning.copy_(ops.rms_norm(turning, layer.head_norm))
        ops.rope_(turning, span.cos, span.sin)
        q, kv = qkv.split_with_sizes((config.num_heads, 2 * groups), 1)
        view.new.copy_(kv)
        mixed = ops.attention(q, view.keys, view.values, config.attention_scale, view.mask, config.attention_softcap)
        self._add(x, layer.o(mixed), layer.attention_post_norm)

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> None:
        """x += down(gate(norm(x)))."""
        inner = layer.gate_up(self.ops.rms_norm(x, layer.mlp_norm))
        out = layer.down(self.ops.gate(inner, self.config.arch.activation))
        self._add(x, out, layer.mlp_post_norm)

    def _add(self, x: Tensor, out: Tensor, norm: Norm | None) -> None:
        x += out if norm is None else self.ops.rms_norm(out.float(), norm)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.weights.head(self.ops.rms_norm(x, self.weights.final_norm)).float()
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)
