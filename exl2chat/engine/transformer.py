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
        """Bring a checkpoint onto `device`, to multiply in `dtype`. ModelError where it does not fit."""
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
        views = self._views(span, count)
        x = F.embedding(tokens, self.weights.embedding).float()
        if self.config.embedding_scale != 1:
            x *= self.config.embedding_scale
        for layer, new, view in zip(self.weights.layers, span.new, views, strict=True):
            self._attend(x, layer, span, new, view)
            self._feed_forward(x, layer)
        cache.length += count
        return self._logits(x[-1:] if last_only else x)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.ops.rms_norm(x, self.weights.final_norm)
        logits = self.weights.head(x).float()
        cap = self.config.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)

    def _views(self, span: Span, count: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """(keys, values, mask) of each layer, cut to what its window can reach. A mask is made once per window."""
        total = span.seen[0].shape[2]
        masks: dict[int | None, Tensor | None] = {}
        views = []
        for index, window in enumerate(self.config.windows):
            reach = total if window is None else min(total, window + count - 1)
            if window not in masks:
                masks[window] = self.ops.visible(count, reach, window, self.device)
            keys, values = span.seen[2 * index], span.seen[2 * index + 1]
            if reach < total:
                keys, values = keys[:, :, -reach:], values[:, :, -reach:]
            views.append((keys, values, masks[window]))
        return views

    def _attend(
        self, x: Tensor, layer: LayerWeights, span: Span, new: Tensor, view: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """x += attention(norm(x)); the new keys and values go to `new` [2, G, T, D], which `view` looks at."""
        config, ops = self.config, self.ops
        groups, size = config.num_kv_heads, config.head_dim
        qkv = layer.qkv(ops.rms_norm(x, layer.attention_norm)).to(new.dtype)
        qkv = qkv.view(x.shape[0], -1, size)
        turned = qkv[:, :-groups]
        if layer.head_norm is not None:
            turned.copy_(ops.rms_norm(turned, layer.head_norm))
        ops.rope_(turned, span.cos, span.sin)
        new.copy_(qkv[:, -2 * groups :].unflatten(1, (2, groups)).permute(1, 2, 0, 3))
        keys, values, mask = view
        mixed = ops.attention(
            qkv[:, : -2 * groups], keys, values, config.attention_scale, mask, config.attention_softcap
        )
        self._add(x, layer.o(mixed), layer.attention_post_norm)

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> None:
        """x += down(gate(norm(x)))."""
        inner = layer.gate_up(self.ops.rms_norm(x, layer.mlp_norm))
        out = layer.down(self.ops.gate(inner, self.config.arch.activation))
        self._add(x, out, layer.mlp_post_norm)

    def _add(self, x: Tensor, out: Tensor, norm: Norm | None) -> None:
        x += out if norm is None else self.ops.rms_norm(out.float(), norm)
