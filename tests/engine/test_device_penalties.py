"""The window as tensors against the one that counts token by token."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.device_penalties import UNSEEN, count_window
from exl2chat.engine.embeddings import FIRST_ID, IDS
from exl2chat.engine.penalties import PenaltyWindow

VOCABULARY = 7
TOKENS = st.integers(0, VOCABULARY - 1) | st.integers(FIRST_ID, FIRST_ID + IDS)


@given(st.lists(TOKENS, min_size=1, max_size=40), st.integers(-1, 50), st.integers(0, 20))
def test_the_counts_are_those_of_the_host(tokens: list[int], reach: int, decay: int) -> None:
    counted = [min(token, VOCABULARY) for token in tokens]
    window = PenaltyWindow(reach, decay, counted)
    ids, counts = window._ids[: len(set(counted))], window._counts[:, : len(set(counted))]
    expected = np.zeros((4, VOCABULARY + 1))
    expected[3] = UNSEEN
    expected[:, ids] = counts
    seen, positions, history = count_window(torch.tensor(tokens), reach, decay, VOCABULARY, 41)
    assert (seen[:, :3].numpy() == expected[[0, 1, 3]].T).all()
    assert (positions.numpy() == expected[2]).all()
    assert history[: len(tokens)].tolist() == counted
