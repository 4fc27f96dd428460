"""Missing, misshapen and unusable tensors: (name, golden model, change to its copy, what the message must say)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.model.model_files import EXL2, GPTQ, PLAIN, Tensors, edit_json, edit_tensors

Change = Callable[[Path], object]
DOWN = "model.layers.0.mlp.down_proj"  # [512, 256]
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


def drop(name: str) -> Change:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def put(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name])

    return lambda folder: edit_tensors(folder, change)


def item(index: object, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


def table(*pairs: int) -> Callable[[np.ndarray], np.ndarray]:
    """A q_groups in place of the golden one."""
    return lambda _: np.array(pairs, np.int64).astype(np.uint16).view(np.int16)


TENSORS: list[tuple[str, str, Change, str]] = [
    *(
        (f"no {name}", EXL2, drop(name), name)
        for name in (
            EMBEDDING, NORM, "model.norm.weight", "model.layers.1.post_attention_layernorm.weight", f"{DOWN}.q_groups",
            f"{DOWN}.q_scale", f"{DOWN}.q_scale_max", f"{DOWN}.q_invperm", "lm_head.q_scale",
        )
    ),
    ("no q_weight", EXL2, drop(f"{DOWN}.q_weight"), f"no file holds tensor {DOWN}"),
    ("no head", PLAIN, drop("lm_head.weight"), "no file holds tensor lm_head"),
    *((f"no {role}", GPTQ, drop(f"{DOWN}.{role}"), f"{DOWN}.{role} is missing") for role in ("qzeros", "scales")),
    ("no plain weight", PLAIN, drop(f"{DOWN}.weight"), f"no file holds tensor {DOWN}"),
    ("only a q norm", EXL2, lambda folder: edit_tensors(folder, lambda t: t.update(
        {"model.layers.0.self_attn.q_norm.weight": np.ones(64, np.float16)})), "k_norm"),
    ("q norm too long", EXL2, lambda folder: edit_tensors(folder, lambda t: t.update(
        {"model.layers.0.self_attn.q_norm.weight": np.ones(65, np.float16)})), "q_norm"),
    ("bias too long", EXL2, lambda folder: edit_tensors(folder, lambda t: t.update(
        {f"{DOWN}.bias": np.ones(257, np.float16)})), f"{DOWN}.bias has shape"),
    ("bias not finite", EXL2, lambda folder: edit_tensors(folder, lambda t: t.update(
        {f"{DOWN}.bias": np.full(256, np.nan, np.float16)})), f"{DOWN}.bias holds values"),
    ("embedding transposed", EXL2, put(EMBEDDING, np.transpose), EMBEDDING),
    ("embedding of integers", EXL2, put(EMBEDDING, lambda a: a.view(np.int16)), "is I16"),
    ("embedding flat", EXL2, put(EMBEDDING, np.ravel), EMBEDDING),
    ("norm too short", EXL2, put(NORM, lambda a: a[:-1]), NORM),
    ("norm of two ranks", EXL2, put(NORM, lambda a: a[None]), NORM),
    ("norm without rank", EXL2, put(NORM, lambda a: a[0]), NORM),
    ("norm of integers", EXL2, put(NORM, lambda a: a.view(np.int16)), NORM),
    ("norm holds NaN", EXL2, put(NORM, item(5, np.nan)), NORM),
    ("norm holds infinity", EXL2, put("model.norm.weight", item(0, np.inf)), "model.norm.weight"),
    ("weight transposed", PLAIN, put(f"{DOWN}.weight", np.transpose), f"{DOWN}.weight"),
    ("weight of integers", PLAIN, put(f"{DOWN}.weight", lambda a: a.view(np.int16)), "is I16"),
    ("head too short", PLAIN, put("lm_head.weight", lambda a: a[:-1]), "lm_head.weight"),
    *(
        (f"{role} {what}", EXL2, put(f"{DOWN}.{role}", change), f"{DOWN}.q_")
        for role in ("q_weight", "q_scale", "q_scale_max", "q_invperm")
        for what, change in (
            ("too narrow", lambda a: a[..., :-1]), ("flat in 2 ranks", lambda a: a.reshape(-1, 1)),
            ("without rank", lambda a: a.ravel()[0]), ("of floats", lambda a: a.astype(np.float32)),
            ("empty", lambda a: a[:0]),
        )
    ),
    ("no groups at all", EXL2, lambda folder: edit_tensors(folder, lambda tensors: tensors.update(
        {f"{DOWN}.{role}": tensors[f"{DOWN}.{role}"][:0] for role in ("q_groups", "q_scale", "q_scale_max")})),
        f"{DOWN}.q_groups has shape [0], not [2]"),
    ("q_weight a row short", EXL2, put(f"{DOWN}.q_weight", lambda a: a[:-1]), "q_groups"),
    ("q_weight a row longer", EXL2, put(f"{DOWN}.q_weight", lambda a: np.concatenate([a, a[:1]])), "q_groups"),
    *(
        (f"q_groups {what}", EXL2, put(f"{DOWN}.q_groups", change), f"{DOWN}.q_")
        for what, change in (
            ("empty", lambda a: a[:0]), ("odd", lambda a: a[:-1]), ("of 32 bits", lambda a: a.astype(np.int32)),
            ("of two ranks", lambda a: a.reshape(-1, 2)), ("without rank", lambda a: a[0]),
            ("width 7", item(0, 7)), ("width 0", item(0, 0)), ("width -4", item(0, -4)), ("width 16", item(0, 16)),
            ("width 1", item(-2, 1)), ("widths rising", item(-2, 8)), ("first start not 0", item(1, 1)),
            ("starts falling", item(5, 0)), ("start beyond the end", item(-1, -1)), ("start repeated", item(3, 0)),
            ("uneven start", item(3, 3)), ("all zero", lambda a: a * 0), ("all ones", lambda a: a * 0 - 1),
            ("one group of all rows", table(8, 0)),
        )
    ),
    *(
        (f"q_scale_max holds {value}", EXL2, put(f"{DOWN}.q_scale_max", item(0, value)), f"{DOWN}.q_scale_max holds")
        for value in (np.nan, np.inf, -np.inf)
    ),
    *(
        (f"q_invperm {what}", EXL2, put(f"{DOWN}.q_invperm", change), "q_invperm is not a permutation")
        for what, change in (
            ("repeats a row", lambda a: np.where(a == 7, 8, a)), ("below 0", lambda a: a - 1),
            ("too high", lambda a: a + 1), ("huge", item(0, 2**31 - 1)), ("all zero", lambda a: a * 0),
        )
    ),
    *(
        (f"{role} {what}", GPTQ, put(f"{DOWN}.{role}", change), f"{DOWN}.")
        for role in ("qweight", "qzeros", "scales", "g_idx")
        for what, change in (
            ("too narrow", lambda a: a[..., :-1]), ("too short", lambda a: a[:-1]), ("empty", lambda a: a[:0]),
            ("without rank", lambda a: a.ravel()[0]), ("of bytes", lambda a: a.astype(np.int8)),
        )
    ),
    ("g_idx below 0", GPTQ, put(f"{DOWN}.g_idx", item(3, -1)), f"{DOWN}.g_idx names group"),
    ("g_idx too high", GPTQ, put(f"{DOWN}.g_idx", item(3, 4)), f"{DOWN}.g_idx names group"),
    ("g_idx huge", GPTQ, put(f"{DOWN}.g_idx", item(3, 2**31 - 1)), f"{DOWN}.g_idx names group"),
    ("g_idx of floats", GPTQ, put(f"{DOWN}.g_idx", lambda a: a.astype(np.float32)), f"{DOWN}.g_idx is F32"),
    ("scales hold NaN", GPTQ, put(f"{DOWN}.scales", item((1, 1), np.nan)), f"{DOWN}.scales holds"),
    ("scales hold infinity", GPTQ, put(f"{DOWN}.scales", item((0, 0), np.inf)), f"{DOWN}.scales holds"),
    ("five bits", GPTQ, put(f"{DOWN}.qweight", lambda a: np.concatenate([a, a[:16]])), "2, 3, 4 or 8 bits"),
    ("bits against the config", GPTQ, lambda folder: edit_json(
        folder, {"quantization_config": {"quant_method": "gptq", "bits": 8}}), "of 8 by config.json"),
    ("groups against the config", GPTQ, lambda folder: (
        edit_json(folder, {"quantization_config": {"quant_method": "gptq", "group_size": 64}}),
        drop(f"{DOWN}.g_idx")(folder)), "quantization_config.group_size"),
]  # fmt: skip
