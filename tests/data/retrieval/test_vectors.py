from __future__ import annotations

from pathlib import Path

import numpy as np

from mega_data.retrieval.retrieve_neighbors import VectorShards


def test_rows_lie_in_files_that_are_whole_or_absent(tmp_path: Path) -> None:
    rows, values = VectorShards(tmp_path, "v", 10, shard=4), np.arange(20, dtype=np.float32).reshape(10, 2)
    for span in (range(4), range(8, 10)):
        rows.write_shard(span.start, values[span.start : span.stop])
    assert list(rows.iterate_missing_ranges()) == [range(4, 8)]
    rows.write_shard(4, values[4:8])
    assert not list(rows.iterate_missing_ranges())
    for first, last in ((0, 10), (3, 9), (4, 8), (5, 6)):
        np.testing.assert_array_equal(np.concatenate(list(rows.iterate_blocks(first, last))), values[first:last])
    assert rows.sample_rows(0, 10, 3)[:, 0].tolist() == [0, 6, 8, 14, 16]
    assert len(rows) == 10
