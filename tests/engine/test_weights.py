"""Which layout each weight of a checkpoint gets."""

from pathlib import Path

import torch

from exl2chat.engine.nibbles import pack_gptq
from exl2chat.engine.weights import load_weights
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.ops.packed import Blocked, Half, Nibbles, Plain
from exl2chat.progress import silent

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CPU = torch.device("cpu")


def test_4_bit_gptq_runs_from_its_codes_in_bfloat16_only() -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-gptq4-g128-asym")
    for dtype, layout in ((torch.bfloat16, Nibbles), (torch.float16, Half)):
        layer = load_weights(checkpoint, CPU, dtype, silent).layers[0]
        assert {type(weight) for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)} == {layout}


def test_act_order_is_gathered_only_where_there_is_one() -> None:
    for name, shuffled in (("llama-gptq4-g128-asym", False), ("llama-gptq4-g128-actorder-sym", True)):
        packed = pack_gptq((open_checkpoint(GOLDEN / name).layers[0].o,), None)
        assert isinstance(packed, Nibbles)
        assert (packed.order is not None) == shuffled


def test_projections_shuffled_each_in_its_own_way_are_decoded_instead() -> None:
    qkv = open_checkpoint(GOLDEN / "llama-gptq4-g128-actorder-sym").layers[0].qkv
    assert all(pack_gptq((part,), None) is not None for part in qkv)
    assert pack_gptq(qkv, None) is None


def test_other_formats_are_not_taken_for_gptq() -> None:
    assert pack_gptq((open_checkpoint(GOLDEN / "llama-3.0bpw-exl2").layers[0].o,), None) is None


def test_the_head_is_cut_to_the_vocabulary() -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-3.0bpw-exl2")
    for dtype, layouts in ((torch.float32, Blocked | Plain), (torch.float16, Half), (torch.bfloat16, Half)):
        head = load_weights(checkpoint, CPU, dtype, silent).head
        assert isinstance(head, layouts)
        assert head(torch.zeros(1, checkpoint.config.hidden_size)).shape == (1, checkpoint.config.vocab_size)


def test_progress_tells_every_layer_and_ends_full() -> None:
    told: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(GOLDEN / "llama-3.0bpw-exl2")

    def tell(_stage: str, done: int = 0, total: int = 0, _unit: str = "") -> None:
        told.append((done, total))

    load_weights(checkpoint, CPU, torch.float16, tell)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
