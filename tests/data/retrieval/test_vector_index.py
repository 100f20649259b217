from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pytest

from mega_common.errors import ConfigError, MissingPackageError
from mega_data.retrieval.vector_index import NearestVectors, VectorShards, select_index_type

N, D = 300, 16


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> tuple[VectorShards, npt.NDArray[np.float32]]:
    values = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
    rows = VectorShards(tmp_path_factory.mktemp("v"), "v", N, shard=128)
    for span in rows.iterate_missing_ranges():
        rows.write_shard(span.start, values[span.start : span.stop])
    return rows, values


def brute(values: npt.NDArray[np.float32], count: int, k: int, good: npt.NDArray[np.bool_]) -> list[list[int]]:
    """By all distances in fp64; `good`: bool [N, N]."""
    found = []
    for row, value in enumerate(values.astype(np.float64)):
        order = np.argsort(((values[:count] - value) ** 2).sum(1), kind="stable")
        chosen = [int(other) for other in order if good[row, other]][:k]
        found.append(chosen + [-1] * (k - len(chosen)))
    return found


@pytest.mark.parametrize("share", [0.9, 0.02, 0.0])
def test_exact_search_is_brute_force_among_what_is_allowed(
    vectors: tuple[VectorShards, npt.NDArray[np.float32]], share: float
) -> None:
    rows, values = vectors
    good = np.random.default_rng(2).random((N, N)) < share
    index = NearestVectors(rows, 250, factory="Flat", probes=1)
    found = index.search_nearest(values, 3, lambda own, other: good[own[:, None], other] & (other >= 0))
    assert found.tolist() == brute(values, 250, 3, good)


def test_fewer_vectors_than_neighbors_are_all_found(vectors: tuple[VectorShards, npt.NDArray[np.float32]]) -> None:
    rows, values = vectors
    found = NearestVectors(rows, 2, factory="Flat", probes=1).search_nearest(values[:5], 3, lambda _, other: other >= 0)
    assert np.sort(found, 1).tolist() == [[-1, 0, 1]] * 5


def test_lists_that_are_all_looked_at_find_what_exact_search_does(
    vectors: tuple[VectorShards, npt.NDArray[np.float32]],
) -> None:
    rows, values = vectors

    def nearest(factory: str, probes: int) -> list[list[int]]:
        return (
            NearestVectors(rows, N, factory=factory, probes=probes)
            .search_nearest(values, 2, lambda _, o: o >= 0)
            .tolist()
        )

    exact = nearest("Flat", 1)
    assert nearest("IVF4,Flat", 99) == exact
    assert nearest("IVF4,Flat", 1) != exact


def test_what_cannot_be_built_is_told(vectors: tuple[VectorShards, npt.NDArray[np.float32]]) -> None:
    with pytest.raises(ConfigError, match="--index PQ3: faiss cannot build it for 300 vectors of 16 numbers"):
        NearestVectors(vectors[0], N, factory="PQ3", probes=1)
    with pytest.raises(ConfigError, match=r"--index Nope: .*could not parse"):
        NearestVectors(vectors[0], N, factory="Nope", probes=1)


def test_without_faiss_it_is_told_what_to_install(
    vectors: tuple[VectorShards, npt.NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'mega-data\[retro\]'"):
        NearestVectors(vectors[0], N, factory="Flat", probes=1)


def test_an_index_is_chosen_by_size() -> None:
    assert select_index_type(1000, 768) == "Flat"
    assert select_index_type(1 << 20, 768) == "IVF1024,Flat"
    assert select_index_type(1 << 30, 768) == "IVF8192,PQ64"
    assert select_index_type(1 << 30, 24) == "IVF8192,PQ8"
