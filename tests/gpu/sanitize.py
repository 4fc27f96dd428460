"""One small case of a family of kernels, for NVIDIA's compute-sanitizer. `exl2chat bench --report` runs all of them.

By hand, in a checkout, with the name of a family in `exl2chat.engine.checkup`:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitize.py attention
"""

import sys

import torch

from exl2chat.engine.checkup import FAMILIES, TOLERANCE

if __name__ == "__main__":
    with torch.inference_mode():
        error = FAMILIES[sys.argv[1]].error(torch.device("cuda"))
    if error > TOLERANCE:
        raise SystemExit(f"the result is wrong: its relative error is {error:.1e}")
