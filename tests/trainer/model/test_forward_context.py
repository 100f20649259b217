"""Who may see whom: causality, a sliding window, document ends."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.kernels.attention_masks import ALL, CAUSAL, materialize_dense_mask
from mega_trainer.model.forward_context import SequenceMask

CPU = torch.device("cpu")


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 14)), st.integers(0, 3), st.booleans(), st.randoms())
def test_a_query_sees_itself_and_earlier_tokens_of_its_window_and_document(length, window, batch, causal, rng) -> None:
    """Or later ones too, where not causal, as many."""
    documents = None
    if batch:
        documents = np.sort([[rng.randint(0, 2) for _ in range(length)] for _ in range(batch)])
    mask = materialize_dense_mask(
        sequence_mask(length, documents, causal=causal).mask_for_window(window), (batch or 1, length), length, CPU
    )
    assert mask.shape == (batch or 1, 1, length, length)
    for row in range(batch or 1):
        for q in range(length):
            for k in range(length):
                sees = k <= q or not causal
                sees &= window is None or abs(q - k) < window
                sees &= documents is None or bool(documents[row, q] == documents[row, k])
                assert mask[row, 0, q, k] == sees


def sequence_mask(length: int, documents: np.ndarray | None, *, causal: bool = True) -> SequenceMask:
    outline = None if documents is None else DocumentBounds.from_positions(documents, documents)
    return SequenceMask(length, CPU, outline and outline.document_starts, causal)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    assert sequence_mask(8, None).mask_for_window(None) == CAUSAL
    assert sequence_mask(8, None).mask_for_window(8) == CAUSAL
    assert sequence_mask(8, None).mask_for_window(7) != CAUSAL
    assert sequence_mask(8, None, causal=False).mask_for_window(8) == ALL
