"""LoRA folders for tests, as PEFT writes them, and the float64 changes they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK, ALPHA = 3, 5
Shapes = Mapping[str, tuple[int, int]]


def make_lora(
    folder: Path,
    shapes: Shapes,
    seed: int = 0,
    size: float = 1.0,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Write a random LoRA for modules of weights [out, in]. B A of each, float64, about as large as `size`.

    `ranks`: of modules that have another than RANK. `config`: fields of adapter_config.json.
    """
    rng = np.random.default_rng(seed)
    tensors, products = {}, {}
    for module, (rows, columns) in shapes.items():
        rank = (ranks or {}).get(module, RANK)
        a = rng.standard_normal((rank, columns)) * size * columns**-0.5
        b = rng.standard_normal((rows, rank)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        products[module] = np.einsum("or,ri->oi", b, a.astype(np.float32), dtype=np.float64)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    table = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "init_lora_weights": True, **config}
    (folder / "adapter_config.json").write_text(json.dumps(table))
    return products
