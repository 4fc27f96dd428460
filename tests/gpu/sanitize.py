"""One small case of every family of kernels for NVIDIA's compute-sanitizer, which `exl2chat bench --report` runs.

By hand, in a checkout: `compute-sanitizer --tool memcheck python tests/gpu/sanitize.py` (or racecheck). With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that memcheck sees where it ends.
"""

import torch

from exl2chat.engine.checkup import FAMILIES, TOLERANCE

if __name__ == "__main__":
    with torch.inference_mode():
        for name, family in FAMILIES.items():
            error = family.error(torch.device("cuda"))
            print(f"case {name}: {error:.1e}", flush=True)
            if error > TOLERANCE:
                raise SystemExit(f"{name} is wrong")
