"""LoRAs over packed weights, through every way in which these multiply."""

import pytest
import torch

from exl2chat.engine.lora import Adapted, Delta
from exl2chat.ops.kernel_benchmark import random_weight

CUDA = torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 16, 24, 512, 600])
def test_a_delta_is_added_to_some_columns(rows: int) -> None:
    torch.manual_seed(rows)
    weight = random_weight(256, (96, 64), [(4, 1.0)], CUDA)
    a, b = torch.randn(8, 256, device=CUDA).half(), torch.randn(64, 8, device=CUDA).half()
    x = torch.randn(rows, 256, device=CUDA).half()
    expected = weight(x).double()
    expected[:, 96:] += 0.5 * (x.double() @ a.double().T) @ b.double().T
    y = Adapted(weight, (Delta(a, b, 96, 0.5),))(x)
    assert (y - expected).norm() < 1e-3 * expected.norm()
