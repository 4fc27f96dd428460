"""`ExLlamaV2Lora`: a LoRA beside a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from exl2chat.engine.lora import Adapter, Scaled, load_adapter
from exl2chat.errors import UsageError
from exl2chat.model.lora import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from exl2chat.exllamav2.model import ExLlamaV2


class ExLlamaV2Lora:
    """A LoRA in memory, to be named in `loras` of a call. `lora_scaling` may be changed between calls."""

    def __init__(self, model: "ExLlamaV2", lora_config_path: str, lora_path: str, lora_scaling: float = 1.0) -> None:
        """Load the two files of one folder, for a model that is loaded. ModelError where they do not fit it; UsageError
        where they are called anything but what PEFT calls them: pickled weights are not read."""
        config, weights = Path(lora_config_path), Path(lora_path)
        if (config.name, weights.name) != (CONFIG, WEIGHTS) or config.parent != weights.parent:
            raise UsageError(f"ExLlamaV2Lora: {config} and {weights}", f"give {CONFIG} and {WEIGHTS} of one folder")
        self.lora_scaling = lora_scaling
        self._adapter: Adapter | None = load_adapter(config.parent, model.transformer)

    @classmethod
    def from_directory(cls, model: "ExLlamaV2", directory: str, lora_scaling: float = 1.0) -> "ExLlamaV2Lora":
        """The LoRA in a folder, `lora_scaling` times as strong as it was trained."""
        return cls(model, str(Path(directory) / CONFIG), str(Path(directory) / WEIGHTS), lora_scaling)

    def unload(self) -> None:
        """Forget the weights."""
        self._adapter = None

    def scaled(self) -> Scaled:
        """What our engine takes. UsageError after `unload`."""
        if self._adapter is None:
            raise UsageError("the LoRA was unloaded", "load it again")
        return Scaled(self._adapter, self.lora_scaling)


Loras: TypeAlias = ExLlamaV2Lora | Sequence[ExLlamaV2Lora] | None


def scaled_loras(loras: Loras) -> list[Scaled]:
    """The `loras` of a call, of which there may be one, several or none, as our engine takes them."""
    if loras is None:
        return []
    several = [loras] if isinstance(loras, ExLlamaV2Lora) else loras
    for lora in several:
        if not isinstance(lora, ExLlamaV2Lora):
            raise UsageError(f"loras holds a {type(lora).__name__}", "it is made of ExLlamaV2Lora")
    return [lora.scaled() for lora in several]
