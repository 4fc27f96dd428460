"""`input_mask` and `position_offsets` of the streaming generator."""

import pytest
import torch
from torch import Tensor

from exl2chat.errors import UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

GREEDY = ExLlamaV2Sampler.Settings.greedy()
COUNT = 10


def streamed(
    model: ExLlamaV2,
    tokenizer: ExLlamaV2Tokenizer,
    ids: Tensor,
    mask: Tensor | None = None,
    offset: Tensor | None = None,
) -> list[int]:
    stream = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=128), tokenizer)
    stream.set_stop_conditions([])
    stream.begin_stream_ex(ids, GREEDY, input_mask=mask, position_offsets=offset)
    for _ in range(COUNT):
        stream.stream_ex()
    reply: list[int] = stream.sequence_ids[0, -COUNT:].tolist()
    return reply


def test_padding_changes_nothing(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    """In exllamav2 without flash attention it is attended to (appendix B-1)."""
    short, long = "Once upon", "The people of the town were told that there"
    padded, offsets = tokenizer.encode([short, long], return_offsets=True)
    plain = tokenizer.encode(short)
    assert isinstance(plain, Tensor)
    expected = streamed(model, tokenizer, plain)
    row, offset = padded[:1], offsets[:1, None]
    assert streamed(model, tokenizer, row, tokenizer.padding_mask(row), offset) == expected
    assert streamed(model, tokenizer, row, row != tokenizer.pad_token_id) == expected
    assert streamed(model, tokenizer, row) != expected


def test_an_offset_changes_nothing(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    ids = tokenizer.encode("Once upon")
    assert isinstance(ids, Tensor)
    assert streamed(model, tokenizer, ids, offset=torch.tensor([[17]])) == streamed(model, tokenizer, ids)


def test_what_is_hidden_leaves_a_gap(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    ids = torch.arange(40, 80)[None]
    mask = torch.ones(1, 40, dtype=torch.bool)
    mask[0, 5:30] = False
    written = streamed(model, tokenizer, ids, mask)
    for position, token in enumerate(written):  # each the likeliest after a text whose hidden part is any other
        other = torch.cat([ids.where(mask, 7), torch.tensor([written[:position]], dtype=torch.int64)], 1)
        seen = torch.cat([mask, torch.ones(1, position, dtype=torch.bool)], 1)
        assert streamed(model, tokenizer, other, seen)[0] == token
    assert written != streamed(model, tokenizer, ids[:, mask[0]])


@pytest.mark.parametrize(
    ("mask", "offset", "message"),
    [
        (torch.ones(1, 3, dtype=torch.bool), None, "input_mask has shape"),
        (torch.tensor([[1, 1, 1, 0]]), None, "neither bool nor"),
        (torch.zeros(1, 4, dtype=torch.bool), None, "no tokens"),
        (None, torch.zeros(2, 1), "position_offsets has shape"),
    ],
)
def test_what_is_no_mask_is_refused(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, mask: Tensor | None, offset: Tensor | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        streamed(model, tokenizer, torch.arange(40, 44)[None], mask, offset)
