"""One small case of every family of kernels against the reference: does this GPU compute what it should?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2chat.engine.cache import KVCache
from exl2chat.engine.device_steps import RESULTS, sampling_row
from exl2chat.engine.sampler import Sampler
from exl2chat.engine.shapes import SHAPES
from exl2chat.ops import Heads, cuda, reference
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.packed import Plain, pack_norm
from exl2chat.ops.sample import TokenSampler
from exl2chat.ops.tiled import FEW_ROWS, Tiled, join
from exl2chat.ops.tiles import QUAD, STRIP, TILE, find_runs, pack_codes, pack_exl2_scales, pack_gptq_scales
from exl2chat.settings import Sampling

TOLERANCE = 2e-3  # of rms over rms; a float16 has 11 bits
INPUTS, COLUMNS = 512, 96
ROWS = (1, 5, 16, 40, FEW_ROWS + 1, 600)
NEXT = Plain(torch.empty(0), None)  # a matrix that takes rows as they are


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that are checked together: their files, and the relative error that they make on a device."""

    files: tuple[str, ...]
    error: Callable[[torch.device], float]


def relative(ours: Tensor, truth: Tensor) -> float:
    """The error's rms over that of the truth; infinite where something is not finite."""
    error = (ours.double() - truth.double()).norm() / truth.double().norm()
    return float(torch.nan_to_num(error, torch.inf))


def exl2(device: torch.device) -> float:
    """Products of 1 to many rows with EXL2 codes of 3 and 5 bits."""
    bits = [5] * (QUAD // TILE) + [3] * ((INPUTS - QUAD) // TILE)
    runs = find_runs(bits, [tile // 4 for tile in range(len(bits))], repeat_last=True)
    scale_codes = torch.randint(16, (INPUTS // QUAD, COLUMNS), dtype=torch.uint8, device=device)
    units = torch.rand(INPUTS // QUAD, device=device).half() / 2048
    codes, rows = [], []
    for run in runs:
        codes.append(torch.randint(1 << run.bits, (run.quads * QUAD, COLUMNS), dtype=torch.uint8, device=device))
        rows.append(codes[-1].double() - (1 << run.bits - 1))
    scales = (scale_codes.double() + 1).square() * units.double()[:, None]
    packed = torch.cat([pack_exl2_scales(scale_codes, units, run) for run in runs])
    words = torch.cat([pack_codes(part, run.bits) for part, run in zip(codes, runs, strict=True)])
    order = torch.randperm(INPUTS, device=device)
    matrix = Tiled(words, packed, runs, order, COLUMNS // STRIP, COLUMNS, False, None)
    return _product_error(matrix, torch.cat(rows) * scales.repeat_interleave(QUAD, 0))


def gptq(device: torch.device) -> float:
    """Products of 1 to many rows with GPTQ codes of 4 bits, with a bias."""
    (run,) = runs = find_runs([4] * (INPUTS // TILE), [tile // 4 for tile in range(INPUTS // TILE)], repeat_last=False)
    codes = torch.randint(16, (INPUTS, COLUMNS), dtype=torch.uint8, device=device)
    zeros = torch.randint(1, 17, (INPUTS // QUAD, COLUMNS), device=device)
    scales = torch.rand(INPUTS // QUAD, COLUMNS, device=device).half() / 64
    packed = pack_gptq_scales(scales, zeros.short(), run)
    order, bias = torch.randperm(INPUTS, device=device), torch.randn(COLUMNS, device=device)
    matrix = Tiled(pack_codes(codes, 4), packed, runs, order, COLUMNS // STRIP, COLUMNS, True, bias)
    exact = (codes.double() - zeros.repeat_interleave(QUAD, 0)) * scales.double().repeat_interleave(QUAD, 0)
    return _product_error(matrix, exact)


def _product_error(matrix: Tiled, exact: Tensor) -> float:
    """The worst error of x W + bias, where row i of `exact` multiplies column order[i] of x."""
    weight = join((matrix,))
    worst = 0.0
    for rows in ROWS:
        x = torch.randn(rows, INPUTS, device=exact.device).half()
        truth = x.double()[:, matrix.order] @ exact + (0 if matrix.bias is None else matrix.bias)
        worst = max(worst, relative(weight(x), truth))
    return worst


def rows(device: torch.device) -> float:
    """Embedding, norms, activation and logits."""
    ops = cuda.CudaOps(device)
    x, out = torch.randn(2, 3, 256, device=device)
    norm = pack_norm(torch.rand(256), 1e-5, device)
    table, tokens = torch.randn(50, 256, device=device).half(), torch.arange(3, device=device)
    wide = torch.randn(3, 512, device=device)
    pairs = [
        (ops.embed(tokens, table, 2.0), reference.embed(tokens, table, 2.0)),
        (ops.norm(x, norm, NEXT), reference.norm(x, norm, NEXT)),
        (ops.add_norm(x.clone(), out, norm, norm, NEXT), reference.add_norm(x.clone(), out, norm, norm, NEXT)),
        (ops.gate(wide, "silu", NEXT), reference.gate(wide, "silu", NEXT)),
        (ops.logits(wide, 30.0), reference.logits(wide, 30.0)),
    ]
    return max(relative(ours, truth) for ours, truth in pairs)


def attention(device: torch.device) -> float:
    """A prompt, then steps of one and of several tokens: over all tokens, in a window, with a soft cap, and over a
    quantised cache."""
    cases = ((None, None, PLAIN_BITS), (64, None, PLAIN_BITS), (None, 20.0, PLAIN_BITS), (None, None, 6))
    return max(_attention_error(device, window, cap, bits) for window, cap, bits in cases)


def _attention_error(device: torch.device, window: int | None, cap: float | None, bits: int) -> float:
    """Over a cache of `bits`, and for the reference one that holds the same or float32."""
    config = SHAPES["tiny"].config()
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.attention_scale, cap)
    windows = (window,) * config.num_layers
    ops = cuda.CudaOps(device)
    ours, truth = (KVCache(config, 512, device, dtype, bits) for dtype in (torch.float16, torch.float32))
    worst = 0.0
    for count in (300, 1, 5):
        ours.reserve(count)
        qkv = torch.randn(count, (heads.queries + 2 * heads.groups) * heads.size, device=device).half()
        attend = ops.attends(ours, count, heads, windows)[0]
        expect = reference.attends(truth, count, heads, windows)[0]
        worst = max(worst, relative(attend(qkv, None, NEXT), expect(qkv.float(), None, NEXT)))
        ours.length += count
        truth.length += count
    return worst


def drawing(device: torch.device) -> float:
    """Tokens drawn by all that the GPU knows: infinite where one is not the host's."""
    size, position = 5000, 7
    settings = Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=1)
    logits = torch.randn(1, size, device=device)
    memory = {"position": torch.tensor([position - 1], dtype=torch.int32, device=device),
              "token": torch.zeros(1, dtype=torch.int64, device=device),
              "results": torch.full((RESULTS,), -1, dtype=torch.int32).pin_memory()}  # fmt: skip
    sampler = TokenSampler(device, size)
    sampler.set_rows(sampling_row(settings, size, memory))
    sampler.queue(logits)
    torch.cuda.synchronize(device)
    expected = Sampler(settings, ()).sample(logits[0].numpy(force=True), position)
    return 0.0 if memory["token"].item() == expected else float("inf")


FAMILIES: Mapping[str, Family] = {
    "EXL2 products": Family(("gemv.cu", "gemm.cu", "arrange.cu", "reconstruct.cu"), exl2),
    "GPTQ products": Family(("gemv.cu", "gemm.cu", "arrange.cu", "reconstruct.cu"), gptq),
    "norms and activations": Family(("norm.cu", "gate.cu"), rows),
    "attention": Family(("attention.cu", "rope_cache.cu", "prefill_attention.cu", "expand_cache.cu"), attention),
    "drawing": Family(("sample.cu",), drawing),
}
