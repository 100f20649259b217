from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chunked_data import documents, embed, found
from masked_data import save_word_pieces

from mega_common.errors import ConfigError, DataError, MissingPackageError
from mega_data.retrieval.document_chunks import DocumentChunks, NeighborLeakFilter
from mega_data.retrieval.neighbor_files import DatasetNeighbors, get_neighbors_path
from mega_data.retrieval.retrieve_neighbors import (
    ChunkEncoder,
    NearestNeighborIndex,
    RetrievalSettings,
    VectorShards,
    retrieve_neighbors,
    select_index_type,
)
from mega_data.token_files.dataset_info import TokenizerInfo, write_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

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
    index = NearestNeighborIndex(rows, 250, factory="Flat", probes=1)
    found = index.search_nearest(values, 3, lambda own, other: good[own[:, None], other] & (other >= 0))
    assert found.tolist() == brute(values, 250, 3, good)


def test_fewer_vectors_than_neighbors_are_all_found(vectors: tuple[VectorShards, npt.NDArray[np.float32]]) -> None:
    rows, values = vectors
    found = NearestNeighborIndex(rows, 2, factory="Flat", probes=1).search_nearest(
        values[:5], 3, lambda _, other: other >= 0
    )
    assert np.sort(found, 1).tolist() == [[-1, 0, 1]] * 5


def test_lists_that_are_all_looked_at_find_what_exact_search_does(
    vectors: tuple[VectorShards, npt.NDArray[np.float32]],
) -> None:
    rows, values = vectors

    def nearest(factory: str, probes: int) -> list[list[int]]:
        return (
            NearestNeighborIndex(rows, N, factory=factory, probes=probes)
            .search_nearest(values, 2, lambda _, o: o >= 0)
            .tolist()
        )

    exact = nearest("Flat", 1)
    assert nearest("IVF4,Flat", 99) == exact
    assert nearest("IVF4,Flat", 1) != exact


def test_what_cannot_be_built_is_told(vectors: tuple[VectorShards, npt.NDArray[np.float32]]) -> None:
    with pytest.raises(ConfigError, match="--index PQ3: faiss cannot build it for 300 vectors of 16 numbers"):
        NearestNeighborIndex(vectors[0], N, factory="PQ3", probes=1)
    with pytest.raises(ConfigError, match=r"--index Nope: .*could not parse"):
        NearestNeighborIndex(vectors[0], N, factory="Nope", probes=1)


def test_without_faiss_it_is_told_what_to_install(
    vectors: tuple[VectorShards, npt.NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'mega-data\[retro\]'"):
        NearestNeighborIndex(vectors[0], N, factory="Flat", probes=1)


def test_an_index_is_chosen_by_size() -> None:
    assert select_index_type(1000, 768) == "Flat"
    assert select_index_type(1 << 20, 768) == "IVF1024,Flat"
    assert select_index_type(1 << 30, 768) == "IVF8192,PQ64"
    assert select_index_type(1 << 30, 24) == "IVF8192,PQ8"


M = 8
ROWS = np.random.default_rng(3).integers(0, 60, (40, 20)).tolist()


def neighbors(prefix: Path) -> npt.NDArray[np.int64]:
    return np.asarray(np.load(get_neighbors_path(prefix) / "neighbors.npy"))


def test_a_planted_neighbor_is_found_and_is_read_with_what_follows(tmp_path: Path) -> None:
    planted = [*reversed(ROWS[0][:8]), *range(8)]  # the words of the first chunk in another order
    reader = documents(tmp_path / "d", [*ROWS, planted])
    info = found(tmp_path, tmp_path / "d", split=(1.0,))
    assert neighbors(tmp_path / "d")[0, 0] == 3 * len(ROWS)
    assert (info.data.last, info.database.last, info.index) == (122, 122, "Flat")
    read = DatasetNeighbors(get_neighbors_path(tmp_path / "d"), reader).read_neighbor_tokens(np.array([0, 2]))
    assert read.shape == (2, 2, 16)
    assert (read[0, 0] - 7).tolist() == planted


def test_exact_search_is_brute_force_without_the_own_document(tmp_path: Path) -> None:
    reader = documents(tmp_path / "d", ROWS)
    found(tmp_path, tmp_path / "d", neighbors=3)
    chunks = DocumentChunks(reader, M)
    texts = [" ".join(f"w{token - 7}" for token in row if token >= 0) for row in chunks.read_tokens(np.arange(120), M)]
    values = embed(texts, lambda _: None).astype(np.float64)
    distances = ((values[:, None] - values) ** 2).sum(2)
    numbers = np.arange(120)
    distances[~NeighborLeakFilter(chunks, chunks).mask_allowed_candidates(numbers, np.tile(numbers, (120, 1)))] = np.inf
    assert np.isinf(distances[0, :3]).all()
    told = np.take_along_axis(distances, neighbors(tmp_path / "d"), 1)
    np.testing.assert_array_equal(told, np.sort(distances, 1)[:, :3])  # of equal distances any


def test_only_what_train_has_is_found_and_another_database_as_a_whole(tmp_path: Path) -> None:
    documents(tmp_path / "d", ROWS)
    info = found(tmp_path, tmp_path / "d", split=(0.5, 0.5, 0))
    assert (info.database.first, info.database.last) == (0, 60)
    assert neighbors(tmp_path / "d").max() < 60
    assert neighbors(tmp_path / "d").shape == (120, 2)
    documents(tmp_path / "e", ROWS[7:9])
    info = found(tmp_path, tmp_path / "e", tmp_path / "d")
    assert info.database.last == 120
    copies = np.repeat([7, 8], 3)  # its documents are there too
    assert not (neighbors(tmp_path / "e") // 3 == copies[:, None]).any()
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in [*tmp_path.glob("e.*"), *tmp_path.glob("d.*")]:
        path.rename(moved / path.name)
    assert (
        DatasetNeighbors(moved / "e.neighbors", IndexedReader(moved / "e")).read_neighbor_tokens(np.array([0])).max()
        > 0
    )
    (moved / "d.idx").unlink()
    with pytest.raises(DataError, match=r"the database of these neighbors, .*/d, is missing"):
        DatasetNeighbors(moved / "e.neighbors", IndexedReader(moved / "e")).read_neighbor_tokens(np.array([0]))


class Killed(BaseException):
    """What no one catches."""


def test_a_run_that_was_killed_goes_on_and_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents(tmp_path / "d", ROWS)
    found(tmp_path, tmp_path / "d")
    straight = neighbors(tmp_path / "d")
    monkeypatch.setattr(VectorShards.__init__, "__defaults__", (50,))
    seen: list[int] = []

    def dying(texts: list[str], advance: Callable[[int], None]) -> npt.NDArray[np.float32]:
        seen.append(len(texts))
        if len(seen) == 2:
            raise Killed
        return embed(texts, advance)

    def run(identity: str = "1", **search: Any) -> None:
        words, settings = (
            Tokenizer(save_word_pieces(tmp_path / "words")),
            RetrievalSettings(**{"chunk_length": M, **search}),
        )
        retrieve_neighbors(
            tmp_path / "d", None, tmp_path / "out", words, ChunkEncoder("", identity, dying), settings, overwrite=False
        )

    with pytest.raises(Killed):
        run()
    assert not (tmp_path / "out").exists()
    run()
    assert seen == [50, 50, 50, 20]
    np.testing.assert_array_equal(np.load(tmp_path / "out/neighbors.npy"), straight)
    assert not (tmp_path / ".out.partial").exists()
    with pytest.raises(DataError, match="out: exists already"):
        run()


def test_of_another_encoder_nothing_is_kept(tmp_path: Path) -> None:
    documents(tmp_path / "d", ROWS)
    seen: list[int] = []

    def once(texts: list[str], advance: Callable[[int], None]) -> npt.NDArray[np.float32]:
        seen.append(len(texts))
        return embed(texts, advance)

    def run(identity: str, index: str) -> None:
        words, settings = Tokenizer(save_word_pieces(tmp_path / "words")), RetrievalSettings(M, index=index)
        retrieve_neighbors(
            tmp_path / "d", None, tmp_path / "out", words, ChunkEncoder("", identity, once), settings, overwrite=True
        )

    with pytest.raises(ConfigError, match="--index Nope"):
        run("1", "Nope")
    run("1", "Flat")
    assert seen == [120]  # with the vectors that were there
    with pytest.raises(ConfigError, match="--index Nope"):
        run("2", "Nope")
    run("3", "Flat")
    assert seen == [120, 120, 120]


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    documents(tmp_path / "d", ROWS[:2])
    other = documents(tmp_path / "e", ROWS[2:])
    found(tmp_path, tmp_path / "d")
    folder = get_neighbors_path(tmp_path / "d")
    with pytest.raises(
        DataError, match=r"d.neighbors: has the neighbors of another data set \(.*/d\) than .*/e, or of"
    ):
        DatasetNeighbors(folder, other)
    with pytest.raises(DataError, match=r"info.json: the neighbors are missing or incomplete"):
        DatasetNeighbors(tmp_path / "nothing", other)
    for name, eos in (("d", "a"), ("e", "b")):
        maker = TokenizerInfo(path="tok", fingerprint=eos, vocab_size=9)
        write_dataset_info(
            tmp_path / name, tokenizer=maker, append_eod=False, dtype="int32", documents=1, tokens=1, text_bytes=1,
            bin_sha256="",
        )  # fmt: skip
    with pytest.raises(DataError, match="e: has another tokenizer than"):
        found(tmp_path, tmp_path / "d", tmp_path / "e")
    np.save(folder / "neighbors.npy", np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"neighbors.npy: must be int64 \[6, 2\] as in info.json, not float64 \[3, 2\]"):
        DatasetNeighbors(folder, IndexedReader(tmp_path / "d")).read_neighbor_tokens(np.array([0]))
    (folder / "info.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match="is not a description of neighbors"):
        DatasetNeighbors(folder, IndexedReader(tmp_path / "d"))
