from __future__ import annotations

from pathlib import Path

import numpy as np
from chunked_data import documents

from mega_data.retrieval.document_chunks import DocumentChunks


def test_chunks_begin_with_their_document_and_end_with_it(tmp_path: Path) -> None:
    chunks = DocumentChunks(documents(tmp_path / "d", [range(10), [], range(20, 28), [30]]), 4)
    assert chunks.starts.tolist() == [0, 3, 3, 5, 6]
    assert len(chunks) == 6
    assert chunks.find_documents(np.array([0, 2, 3, 5])).tolist() == [0, 0, 2, 3]
    found = np.where((own := chunks.read_tokens(np.array([[0, 2], [4, -1]]), 6)) >= 0, own - 7, -1)
    assert found[0].tolist() == [[0, 1, 2, 3, 4, 5], [8, 9, -1, -1, -1, -1]]
    assert found[1].tolist() == [[24, 25, 26, 27, -1, -1], [-1] * 6]
    assert chunks.find_sequence_chunks(1, 3) == range(3, 5)
    assert chunks.find_sequence_chunks(0, 4) == range(6)


def test_a_hash_is_of_the_content(tmp_path: Path) -> None:
    chunks = DocumentChunks(
        documents(tmp_path / "d", [[1, 2, 3, 4, 5, 6, 7, 8, 9], [0] + [1] * 7, [1, 2, 3, 4, 5, 6, 7, 8]]), 8
    )
    first, short, other, again = chunks.compute_hashes(0, 4).tolist()
    assert first == again != other
    assert short == 0
