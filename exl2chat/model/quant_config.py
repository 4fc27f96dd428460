"""What config.json says of a model's quantisation. The tensors decide; this settles only what they cannot tell."""

from dataclasses import dataclass

from exl2chat.model.fields import Fields
from exl2chat.model.folder import ModelFolder

MAX_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """GPTQ's figures, 0 where nothing is said: `bits` must agree with the shapes, `group_size` is the rows per group
    where no g_idx tells. v2: zero points are stored as they are, otherwise minus one."""

    bits: int = 0
    group_size: int = 0
    v2: bool = False


def read_quant_config(folder: ModelFolder, config: Fields) -> QuantConfig:
    """From `quantization_config`, else from quantize_config.json, where GPTQ models of old keep it.

    ModelError for a method that is neither EXL2 nor GPTQ: some of them store tensors under the same names.
    """
    table = config.table("quantization_config")
    if not table.values:
        name = "quantize_config.json"
        table = Fields(folder.where(name), folder.read_json(name) or {})
    method = table.text("quant_method", "gptq")
    if method not in ("exl2", "gptq"):
        raise table.wrong("quant_method", "exl2 or gptq (or unquantised weights)")
    if method == "exl2":
        return QuantConfig()
    layout = table.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise table.wrong("checkpoint_format", "gptq or gptq_v2")
    per_module = "dynamic" in table  # rules that give some weights other figures
    return QuantConfig(
        0 if per_module else table.integer("bits", 2, 8, 0),
        0 if per_module else max(table.integer("group_size", -1, MAX_GROUP, 0), 0),
        layout == "gptq_v2",
    )
