"""Who may see whom: causality, a sliding window, document ends."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_trainer.model.context import attention_mask

CPU = torch.device("cpu")


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 14)), st.integers(0, 3), st.randoms())
def test_a_query_sees_itself_and_earlier_tokens_of_its_window_and_document(length, window, batch, rng) -> None:
    documents = None
    if batch:
        documents = torch.tensor([[rng.randint(0, 2) for _ in range(length)] for _ in range(batch)])
        documents = documents.sort(-1).values
    mask = attention_mask(length, window=window, documents=documents, device=CPU)
    if mask is None:
        assert documents is None
        assert window is None or window >= length
        return
    assert mask.shape == (batch or 1, 1, length, length)
    for row in range(batch or 1):
        for q in range(length):
            for k in range(length):
                sees = k <= q
                sees &= window is None or q - k < window
                sees &= documents is None or bool(documents[row, q] == documents[row, k])
                assert mask[row, 0, q, k] == sees


def test_plain_causal_attention_needs_no_mask() -> None:
    assert attention_mask(8, window=None, documents=None, device=CPU) is None
    assert attention_mask(8, window=8, documents=None, device=CPU) is None
    assert attention_mask(8, window=7, documents=None, device=CPU) is not None
