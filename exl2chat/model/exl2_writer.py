"""Float matrices to EXL2 tensors: round to nearest, with a search for the scales that lose least.

EXL2 (the format's own arithmetic, which the search follows to the bit): a group is some rows of the matrix [K, N] at
one width b. It has one float16 `q_scale_max`; m = float16(q_scale_max / 256), often subnormal. A column of the group
has a code n of 4 bits, its scale is s = float16((n + 1)^2 m), and a weight is (q - 2^(b-1)) s with q of b bits.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from exl2chat import __version__
from exl2chat.progress import Progress

Float32 = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Tensors = dict[str, npt.NDArray[Any]]

GROUP = 32
SQUARES = np.arange(1, 17, dtype=np.float32) ** 2
COLUMNS = 2048  # columns searched at a time: 32 x 2048 float32 stay in a core's second-level cache
# Scale codes tried, from the smallest that clips nothing. The coarser neighbour takes 3 % off the error at 8 bits, as
# its step may suit a column better; the finer ones clip a little and take off 12 % at 4 bits and 20 % at 3.
OFFSETS = np.array([1, 0, -1, -2])
# Group maxima tried, as fractions of the one that reaches the largest weight of the group. The two below 1 take 0.8 %
# off the error at 4 bits and nothing at 8 (SmolLM2); four more take off 0.1 %.
FRACTIONS = (1.0, 0.9, 0.8)


@dataclass(frozen=True, slots=True)
class Source:
    """A float model to convert. `tensors` gives each one float32 when called, under its Hugging Face name and in that
    layout (a linear weight is [N, K]); `files` are to be copied beside them: tokenizer, template and such."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    tensors: Mapping[str, Callable[[], Float32]]


def write_checkpoint(source: Source, folder: Path, bits: int, head_bits: int, progress: Progress) -> None:
    """`source` as an EXL2 model in `folder`, all linear weights at `bits` and the head at `head_bits` per weight.

    Embedding and norms stay float16. The head is always written, from the embedding where the two are tied.
    """
    linears = {
        name.removesuffix(".weight"): load for name, load in source.tensors.items() if name.endswith("_proj.weight")
    }
    head = source.tensors.get("lm_head.weight", source.tensors["model.embed_tokens.weight"])
    plain = source.tensors.keys() - {f"{key}.weight" for key in linears} - {"lm_head.weight"}
    tensors: Tensors = {name: source.tensors[name]().astype(np.float16) for name in sorted(plain)}
    # The head is a fifth of the work in a small model: first, so that it does not finish alone.
    jobs = {"lm_head": (head, head_bits)} | {key: (load, bits) for key, load in linears.items()}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {pool.submit(_quantize_linear, load, width): key for key, (load, width) in jobs.items()}
        try:
            for done, future in enumerate(as_completed(running), 1):
                tensors |= {f"{running[future]}.{role}": value for role, value in future.result().items()}
                progress("converting to EXL2", done, len(running), "matrices")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    save_file(tensors, folder / "output.safetensors", {"format": "pt"})
    quantization = {"quant_method": "exl2", "version": __version__, "bits": float(bits), "head_bits": head_bits}
    config = {**source.config, "torch_dtype": "float16", "quantization_config": quantization}
    for name, data in {**source.files, "config.json": to_json(config)}.items():
        (folder / name).write_bytes(data)


def to_json(document: Mapping[str, Any]) -> bytes:
    """`document` as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def _quantize_linear(load: Callable[[], Float32], bits: int) -> Tensors:
    weight = np.ascontiguousarray(load().T)
    return quantize(weight, [bits] * (len(weight) // GROUP))


def quantize(weight: Float32, widths: Sequence[int]) -> Tensors:
    """The EXL2 tensors of `weight` [K, N] float32, in original row order: one group of 32 rows per entry of `widths`.

    K is 32 len(widths); widths are 8, 6, 5, 4, 3 or 2, descending. N is padded with zero weights to a multiple of 32.
    Returns q_weight [R, N] int32, q_groups [2 G] int16, q_scale [G, N/8] int32, q_scale_max [G] float16 and
    q_invperm [K] int32.
    """
    weight = np.pad(weight, ((0, 0), (0, -weight.shape[1] % 32)))
    groups = [
        _quantize_group(weight[row : row + GROUP], bits)
        for row, bits in zip(range(0, len(weight), GROUP), widths, strict=True)
    ]
    starts = np.cumsum([0, *widths[:-1]])
    return {
        "q_weight": np.concatenate([words for words, _, _ in groups]).view(np.int32),
        "q_groups": np.stack([np.array(widths), starts], axis=1).reshape(-1).astype(np.int16),
        "q_scale": _pack_nibbles(np.stack([codes for _, codes, _ in groups])).view(np.int32),
        "q_scale_max": np.array([top for _, _, top in groups], np.float16),
        "q_invperm": np.arange(len(weight), dtype=np.int32),
    }


def _quantize_group(weight: Float32, bits: int) -> tuple[Words, Words, np.float16]:
    """Packed words [bits, N] uint32, scale codes [N] uint32 and q_scale_max of one group [32, N]."""
    half = 1 << (bits - 1)
    # The scale each column needs so that nothing is clipped; the negative side reaches one step further.
    needed = np.maximum(weight.max(axis=0) / (half - 1), weight.min(axis=0) / -half)
    tops = {_representable(needed.max() * fraction) for fraction in FRACTIONS}
    searched = [(top, *_search_codes(weight, needed, top, half)) for top in sorted(tops)]
    top, codes, _ = min(searched, key=lambda found: float(found[2]))
    scale = _scales(top)[codes]
    levels = np.clip(np.rint(weight / scale), -half, half - 1).astype(np.int32) + half
    return _pack_rows(levels.astype(np.uint32), bits), codes.astype(np.uint32), top


def _representable(top: float) -> np.float16:
    """`top` or a little more, such that top / 256 is a float16 too (its smallest is 2^-24): no rounding is left."""
    step = np.float16(max(top / 256, 2.0**-24))
    if step * 256.0 < top:
        step = np.nextafter(step, np.float16(np.inf))
    return np.float16(np.float32(step) * 256)


def _scales(top: np.float16) -> Float32:
    """The 16 column scales that `top` = q_scale_max offers, float32 holding float16 values."""
    step = np.float16(np.float32(top) / 256)
    scales: Float32 = (SQUARES * np.float32(step)).astype(np.float16).astype(np.float32)
    return scales


def _search_codes(
    weight: Float32, needed: Float32, top: np.float16, half: int
) -> tuple[npt.NDArray[np.intp], np.float64]:
    """The best scale code of each column [N], and the squared error of the group with them.

    Tried are the smallest scale that clips nothing and its neighbours.
    """
    scales = _scales(top)
    covering = np.minimum(np.searchsorted(scales, needed), 15)
    best, total = np.empty_like(covering), np.float64(0)
    for start in range(0, weight.shape[1], COLUMNS):
        part = slice(start, start + COLUMNS)
        candidates = np.clip(covering[part] + OFFSETS[:, None], 0, 15)
        errors = np.stack([_squared_error(weight[:, part], scales[codes], half) for codes in candidates])
        choice = errors.argmin(axis=0)
        best[part] = np.take_along_axis(candidates, choice[None], axis=0)[0]
        total += errors.min(axis=0).sum(dtype=np.float64)
    return best, total


def _squared_error(weight: Float32, scale: Float32, half: int) -> Float32:
    """What rounding [32, N] to multiples of `scale` [N] loses in each column, summed squares [N]."""
    levels = weight / scale
    np.rint(levels, out=levels)
    np.clip(levels, -half, half - 1, out=levels)
    levels *= scale
    levels -= weight
    errors: Float32 = np.einsum("kn,kn->n", levels, levels)
    return errors


def _pack_rows(levels: Words, bits: int) -> Words:
    """[32, N] values of `bits` bits to [bits, N] words: value i of a column owns its bits [i b, (i + 1) b)."""
    words = np.zeros((bits, levels.shape[1]), np.uint32)
    for row, values in enumerate(levels):
        word, shift = divmod(row * bits, 32)
        words[word] |= values << np.uint32(shift)
        if shift + bits > 32:
            words[word + 1] |= values >> np.uint32(32 - shift)
    return words


def _pack_nibbles(codes: Words) -> Words:
    """[G, N] values of 4 bits to [G, N/8] words, the first column in the lowest bits."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words: Words = np.bitwise_or.reduce(codes.reshape(len(codes), -1, 8) << shifts, axis=2)
    return words
