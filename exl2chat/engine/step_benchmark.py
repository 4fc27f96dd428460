"""How near whole decoding steps on a GPU come to the memory bandwidth: Llama-3.1-8B's shape with random weights."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.engine.weights import LayerWeights, Weights
from exl2chat.model.arch import find_arch
from exl2chat.model.config import ModelConfig
from exl2chat.model.rope_config import Rope
from exl2chat.ops import select
from exl2chat.ops.kernel_benchmark import BODY, BODY_BITS, HEAD, HEAD_BITS, LAYERS, KernelRow, random_weight
from exl2chat.ops.packed import Norm, pack_norm

HIDDEN, (VOCABULARY,) = HEAD
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CONTEXTS = (128, 4096, 32768)
ROWS = (1, 5)
PROMPTS = (2048, 8192)
STEPS = 40


def measure_steps(device: torch.device, bandwidth: float) -> list[KernelRow]:
    """Steps of 1 and 5 tokens as a generator takes them, the logits of the last one on the host; a prompt's time.

    The ceiling of a step is a read, at `bandwidth` bytes per second, of the packed weights and of the cache that it
    looks at; that of a prompt is the products of its tokens with float16 copies of the matrices, by torch.mm.
    """
    model = random_model(device)
    cache = model.new_cache(max(CONTEXTS) + max(ROWS))
    cache.storage.normal_()
    result = []
    for count in PROMPTS:
        seconds = _median_seconds(partial(_read_prompt, model, cache, count), 4)
        ceiling = _prompt_ceiling(count, device)
        result.append(KernelRow(f"prompt of {count}", count, seconds * 1e6, ceiling * 1e6, "torch.mm"))
    for context in CONTEXTS:
        seen = cache.storage[..., 0, 0, :].nbytes * context
        for rows in ROWS:
            tokens = [1] * rows
            seconds = _median_seconds(partial(_step, model, cache, tokens, context), STEPS)
            ceiling = (model.weights.read_bytes + seen) / bandwidth
            name = f"step at context {context}"
            result.append(KernelRow(name, rows, seconds * 1e6, ceiling * 1e6, "a read of the weights and the cache"))
    return result


def random_model(device: torch.device) -> Transformer:
    """The shape of Llama-3.1-8B at about 4.1 bits per weight with a head of 6. Scales keep activations finite."""

    def norm() -> Norm:
        return pack_norm(torch.ones(HIDDEN), 1e-5, device)

    def layer() -> LayerWeights:
        qkv, o, gate_up, down = (random_weight(*BODY[name], BODY_BITS, device) for name in BODY)
        return LayerWeights(qkv, o, gate_up, down, norm(), norm(), None, None, None)

    config = ModelConfig(
        arch=find_arch(["LlamaForCausalLM"], "benchmark"),
        name="random weights of the shape of Llama-3.1-8B",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=BODY["down"][0],
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        norm_eps=1e-5,
        context=2 * max(CONTEXTS),
        rope=Rope(kind="default", theta=5e5, rotary_dim=HEAD_DIM),
        windows=(None,) * LAYERS,
        attention_scale=HEAD_DIM**-0.5,
        embedding_scale=1.0,
        tie_embeddings=False,
    )
    embedding = torch.randn(VOCABULARY, HIDDEN, device=device).half()
    layers = tuple(layer() for _ in range(LAYERS))
    weights = Weights(embedding, layers, norm(), random_weight(*HEAD, HEAD_BITS, device))
    ops = select(device, torch.float16, HEAD_DIM, HIDDEN, config.intermediate_size)
    return Transformer(config, weights, device, torch.float16, ops)


def _step(model: Transformer, cache: KVCache, tokens: list[int], context: int) -> None:
    cache.length = context
    ids = torch.tensor(tokens, device=model.device)
    model.forward(ids, cache, last_only=True)[-1].numpy(force=True)


def _read_prompt(model: Transformer, cache: KVCache, count: int) -> None:
    cache.truncate(0)
    tokens = torch.ones(count, dtype=torch.int64, device=model.device)
    for chunk in torch.split(tokens, prefill_chunk(model.device)):
        model.forward(chunk, cache, last_only=True)


def _prompt_ceiling(count: int, device: torch.device) -> float:
    """Seconds of the bare products of a prompt of `count` tokens."""
    total = 0.0
    x = torch.randn(count, max(k for k, _ in BODY.values()), device=device).half()
    for k, widths in BODY.values():
        matrix = torch.randn(k, sum(widths), device=device).half()
        total += LAYERS * _median_seconds(partial(torch.mm, x[:, :k], matrix), 10)
    return total


def _median_seconds(work: Callable[[], object], count: int) -> float:
    """Median wall time of `work`, the device's work included, after two runs that warm it up."""
    seconds = []
    for _ in range(count + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[2:])
