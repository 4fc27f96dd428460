"""A LoRA as PEFT saves it: which matrices of a model it changes, and by what.

A matrix W [out, in] becomes W + scale * B A with A [rank, in] and B [out, rank]; scale is alpha / rank, or alpha /
sqrt(rank) with use_rslora. Format: https://github.com/huggingface/peft, `LoraConfig` and `save_pretrained`.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from exl2chat.errors import ModelError
from exl2chat.model.checkpoint import PREFIXES
from exl2chat.model.config import ModelConfig
from exl2chat.model.fields import Fields
from exl2chat.model.folder import ModelFolder, open_folder
from exl2chat.model.tensors import FLOATS, TensorInfo, read_tensor_index

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1 << 14
MAX_ALPHA = 1e6
# What would change the model beyond W + scale * B A, or which part of it is meant.
REFUSED = (
    "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication", "trainable_token_indices",
    "target_parameters", "use_qalora", "alora_invocation_tokens",
)  # fmt: skip
# How A and B began. Others, such as PiSSA, also change the model's own weights, so that they fit no plain model.
INNOCENT_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_IN_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, PREFIXES))})layers\.(0|[1-9]\d{{0,4}})\.(\w+\.\w+)")
_HEADS = ("lm_head", "language_model.lm_head")
_PATTERN = re.compile(r"\^?[\w.\-]+\$?")
_NO_FOLDER = "give the folder of a LoRA as PEFT saves it, with adapter_config.json and adapter_model.safetensors"
_MERGE = "merge it into its model with PEFT, and load that"
_OTHER_MODEL = "use the LoRA with the model that it was made for"

Number = TypeVar("Number", int, float)
Place = Literal["qkv", "o", "gate_up", "down", "head"]


class Slot(NamedTuple):
    """Where a projection lies: outputs [start, start + out_features) of the matrix `place` of a layer, or the head."""

    place: Place
    start: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Update:
    """scale * B A for one projection of `layer`, None for the head: a [rank, in_features], b [out_features, rank]."""

    layer: int | None
    slot: Slot
    a: TensorInfo
    b: TensorInfo
    scale: float


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA on disk, checked against the model it is for."""

    folder: ModelFolder
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class _Config:
    """What adapter_config.json says; the patterns are module names, or their ends, that have other numbers."""

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return _look_up(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _look_up(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def open_lora(path: Path, config: ModelConfig) -> Lora:
    """The LoRA in the folder `path` for a model of `config`. ModelError in one line for anything missing, wrong or not
    supported."""
    folder, settings, pairs = _read(path)
    slots = _slots(config)
    return Lora(folder, tuple(_update(module, pair, settings, slots, config) for module, pair in pairs.items()))


def check_lora(path: Path) -> None:
    """ModelError in one line where the folder `path` is no LoRA that any model can use."""
    _read(path)


def _read(path: Path) -> tuple[ModelFolder, _Config, Mapping[str, tuple[TensorInfo, TensorInfo]]]:
    try:
        folder = open_folder(path)
    except ModelError as fault:
        raise ModelError(fault.message, _NO_FOLDER) from None
    values = folder.read_json(CONFIG)
    if values is None or WEIGHTS not in folder.files:
        raise ModelError(f"{folder.path}: there is no {CONFIG if values is None else WEIGHTS}", _NO_FOLDER)
    settings = _read_config(Fields(folder.where(CONFIG), values))
    tensors = read_tensor_index(ModelFolder(folder.path, {WEIGHTS: folder.files[WEIGHTS]}))
    if not tensors:
        raise ModelError(f"{folder.where(WEIGHTS)}: holds no tensors", _NO_FOLDER)
    return folder, settings, _pair(tensors)


def _read_config(fields: Fields) -> _Config:
    if fields.text("peft_type") != "LORA":
        raise fields.wrong("peft_type", "LORA")
    for name in REFUSED:
        if fields.values.get(name):
            shown = reprlib.repr(fields.values[name])
            raise ModelError(f"{fields.where}: {name} is {shown}, which is not supported", _MERGE)
    if fields.text("bias", "none") != "none":
        shown = reprlib.repr(fields.values["bias"])
        raise ModelError(f"{fields.where}: bias is {shown}; only 'none' is supported", _MERGE)
    start = fields.values.get("init_lora_weights")
    if start not in INNOCENT_STARTS:
        shown = reprlib.repr(start)
        raise ModelError(
            f"{fields.where}: init_lora_weights is {shown}: such a LoRA also changes the weights it is for",
            "convert it to a plain one with PEFT (path_initial_model_for_weight_conversion)",
        )
    ranks, alphas = fields.table("rank_pattern"), fields.table("alpha_pattern")
    return _Config(
        fields.integer("r", 1, MAX_RANK, 8),
        fields.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, 8),
        fields.flag("use_rslora", False),
        _read_patterns(ranks, lambda key: ranks.integer(key, 1, MAX_RANK)),
        _read_patterns(alphas, lambda key: alphas.number(key, -MAX_ALPHA, MAX_ALPHA)),
    )


def _read_patterns(table: Fields, read: Callable[[str], Number]) -> Mapping[str, Number]:
    """Numbers by module name. PEFT takes any regular expression; those of strangers can run for hours, so only names
    are taken, of which `^` and `$` may say where they begin and end."""
    patterns = {}
    for key in table.values:
        name = key.replace("\\.", ".")
        if not _PATTERN.fullmatch(name):
            raise ModelError(f"{table.where}: {reprlib.repr(key)} is not the name of a module", _MERGE)
        patterns[name.removesuffix("$")] = read(key)
    return patterns


def _look_up(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The number of the first pattern that is `module` or, unless it begins with ^, the end of its dotted name."""
    for pattern, value in patterns.items():
        if pattern in (module, f"^{module}") or module.endswith("." + pattern):
            return value
    return default


def _pair(tensors: Mapping[str, TensorInfo]) -> Mapping[str, tuple[TensorInfo, TensorInfo]]:
    """(A, B) by the name of the module they are for."""
    sides: dict[str, dict[str, TensorInfo]] = {"A": {}, "B": {}}
    for name, info in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(f"{info} is not of a LoRA of linear layers", _MERGE)
        sides[match[2]][match[1]] = info
    for alone in sorted(sides["A"].keys() ^ sides["B"].keys()):
        there = "A" if alone in sides["A"] else "B"
        raise ModelError(f"{sides[there][alone]} has no counterpart", "the file is damaged; download the LoRA again")
    return {module: (a, sides["B"][module]) for module, a in sides["A"].items()}


def _slots(config: ModelConfig) -> Mapping[str, Slot]:
    """The projections of a layer by the names of transformers, alone and fused."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": Slot("qkv", 0, hidden, queries),
        "self_attn.k_proj": Slot("qkv", queries, hidden, keys),
        "self_attn.v_proj": Slot("qkv", queries + keys, hidden, keys),
        "self_attn.qkv_proj": Slot("qkv", 0, hidden, queries + 2 * keys),
        "self_attn.o_proj": Slot("o", 0, queries, hidden),
        "mlp.gate_proj": Slot("gate_up", 0, hidden, inner),
        "mlp.up_proj": Slot("gate_up", inner, hidden, inner),
        "mlp.gate_up_proj": Slot("gate_up", 0, hidden, 2 * inner),
        "mlp.down_proj": Slot("down", 0, inner, hidden),
    }


def _update(
    module: str,
    pair: tuple[TensorInfo, TensorInfo],
    settings: _Config,
    slots: Mapping[str, Slot],
    config: ModelConfig,
) -> Update:
    layer, slot = _find_slot(module, pair[0], slots, config)
    rank = settings.rank_of(module)
    shapes = ((rank, slot.in_features), (slot.out_features, rank))
    for info, shape in zip(pair, shapes, strict=True):
        if info.dtype not in FLOATS:
            raise ModelError(f"{info} is {info.dtype}, not {' or '.join(sorted(FLOATS))}", _MERGE)
        if info.shape != shape:
            raise ModelError(f"{info} has shape {list(info.shape)}, not {list(shape)}", _OTHER_MODEL)
    return Update(layer, slot, *pair, settings.scale_of(module))


def _find_slot(
    module: str, info: TensorInfo, slots: Mapping[str, Slot], config: ModelConfig
) -> tuple[int | None, Slot]:
    """The layer and the slot of a module; ModelError where the model has none such, or it cannot be changed."""
    if module in _HEADS:
        return None, Slot("head", 0, config.hidden_size, config.vocab_size)
    match = _IN_LAYER.fullmatch(module)
    if match is None or match[2] not in slots:
        known = ", ".join(name.partition(".")[2] for name in slots)
        raise ModelError(f"{info} changes what cannot be changed; only {known} and lm_head can", _MERGE)
    if (layer := int(match[1])) >= config.num_layers:
        raise ModelError(f"{info}: the model has only {config.num_layers} layers", _OTHER_MODEL)
    return layer, slots[match[2]]
