"""Append-only output files of a cleaning run: an append journal, compressed JSON lines, and document fingerprints.

`AppendJournal` records the valid sizes of the files, so that a crash loses only what was appended after the last commit.

Fingerprint files describe the documents of this run and those kept by earlier runs: `exact.bin` has 16 bytes per
document, `minhash.bin` 4 bytes per hash of a signature, `places.bin` the source positions (`POSITION`). Documents are
numbered in the order in which they are kept, those of earlier runs first.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mega_common.atomic_files import add_path_to_errors, fsync_directory, open_atomic_file, write_json_atomically
from mega_common.bounded_parsing import read_json_file
from mega_common.errors import DataError
from mega_data.cleaning.clean_config import DuplicatesRule
from mega_data.cleaning.duplicate_detection import Signatures, get_rensa_version
from mega_data.cleaning.text_words import Hashes
from mega_data.reading.decompression import import_optional_package


class AppendJournal:
    """Append-only files in a folder, with a state that is committed with them.
    Everything appended before the last `commit_state` survives a crash; the rest is truncated at a resume.

    Attributes:
        sizes: bytes of each file, by its path in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        self._open: dict[str, IO[bytes]] = {}

    def resume_from_sizes(self, sizes: dict[str, int]) -> None:
        """Truncate each named file to its size in bytes at the last commit, to resume from there."""
        for name, size in sizes.items():
            with add_path_to_errors(self.folder / name):
                os.truncate(self.folder / name, size)
        self.sizes = dict(sizes)

    def append_bytes(self, name: str, data: bytes) -> None:
        """Append `data` to the file `name`, which is created (or replaced) if no commit contains it."""
        if not data:
            return
        path = self.folder / name
        with add_path_to_errors(path):
            if name not in self._open:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open[name] = open(path, "ab" if name in self.sizes else "wb")  # noqa: SIM115 - closed by `close`
                fsync_directory(path.parent)
            self._open[name].write(data)
        self.sizes[name] = self.sizes.get(name, 0) + len(data)

    def commit_state(self, state: dict[str, Any]) -> None:
        """Flush all appended data to disk, then save the state from which an interrupted run resumes.
        The `state` and the file sizes are written atomically to `progress.json`.
        """
        for name in self._open:
            self._sync_file(name)
        write_json_atomically(self.folder / "progress.json", {**state, "sizes": self.sizes})

    def close_file(self, name: str) -> None:
        """Flush the file `name` to disk and close it, when nothing more will be appended to it."""
        if name in self._open:
            self._sync_file(name)
            self._open.pop(name).close()

    def _sync_file(self, name: str) -> None:
        with add_path_to_errors(self.folder / name):
            self._open[name].flush()
            os.fsync(self._open[name].fileno())

    def close(self) -> None:
        """Close all open files of the journal, without a commit."""
        for stream in self._open.values():
            stream.close()
        self._open.clear()

    def clear_folder(self) -> None:
        """Delete all files of an earlier run in the journal's folder, except the lock."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()


SUFFIXES = {"gz": ".jsonl.gz", "zst": ".jsonl.zst", "none": ".jsonl"}


def encode_json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as one line of UTF-8 JSON.
    Values without a JSON type, such as dates of a Parquet file, become text.
    """
    return json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n"


def compress_lines(lines: Iterable[bytes], compression: str) -> bytes:
    """Return the lines joined and compressed by `compression` (gz, zst or none); empty bytes for no lines.

    Raises:
        MissingPackageError: if zstd is chosen and pyarrow is not installed.
    """
    raw = b"".join(lines)
    if not raw or compression == "none":
        return raw
    if compression == "gz":
        return gzip.compress(raw, compresslevel=6, mtime=0)
    return bytes(import_optional_package("pyarrow", "writing .zst files").Codec("zstd").compress(raw))


# Number of the input, number of the source (-1 - i for the i-th earlier folder), line, and size in UTF-8 bytes.
POSITION = np.dtype([("input", "<u4"), ("source", "<i4"), ("line", "<u8"), ("size", "<u8")])
DocumentPositions = npt.NDArray[np.void]

CHUNK = 1 << 16  # documents read at once


def get_fingerprint_parameters(rule: DuplicatesRule) -> dict[str, Any]:
    """Return the parameters of a rule's fingerprints (exact, MinHash); only fingerprints with equal ones are comparable.

    Raises:
        MissingPackageError: if rensa is required and not installed.
    """
    shape = rule.minhash.model_dump(exclude={"threshold"}) if rule.minhash else None
    return {"exact": rule.exact, "minhash": {**shape, "algorithm": get_rensa_version()} if shape else None}


def load_text_hashes(folder: Path) -> Hashes:
    """Return the documents' text hashes that a cleaning run wrote to `folder/exact.bin`, uint64 [N, 2], memory-mapped."""
    return _map_file(folder / "exact.bin", np.dtype("<u8"), 2)


def load_signatures(folder: Path, rule: DuplicatesRule) -> Signatures:
    """Return the MinHash signatures in `folder/minhash.bin`, uint32 [N, bands * rows], memory-mapped; no rows if missing."""
    assert rule.minhash is not None
    return _map_file(folder / "minhash.bin", np.dtype("<u4"), rule.minhash.bands * rule.minhash.rows)


def load_document_positions(folder: Path) -> DocumentPositions:
    """Return the position of each document of a cleaning run: structured array of input, source, line and size.
    The array is `places.bin` of the run's `folder`, memory-mapped, [N] of the dtype `POSITION`.
    """
    return _map_file(folder / "places.bin", POSITION, 1)[:, 0]


def _map_file(path: Path, dtype: np.dtype[Any], width: int) -> npt.NDArray[Any]:
    if not path.exists() or not path.stat().st_size:
        return np.zeros((0, width), dtype)
    return np.memmap(path, dtype, mode="r").reshape(-1, width)


def append_earlier_cleaning_fingerprints(rule: DuplicatesRule, journal: AppendJournal) -> int:
    """Append the fingerprints of the cleaning runs in `rule.against` to this run's; return their number of documents.

    Raises:
        DataError: if a folder has no fingerprints, or their parameters differ.
    """
    parameters, count = get_fingerprint_parameters(rule), 0
    for number, folder in enumerate(rule.against):
        other = _read_fingerprint_kinds(folder)
        for name, kind in parameters.items():
            if kind and other.get(name) != kind:
                raise DataError(
                    f"{folder}: its fingerprints ({name}: {other.get(name)}) cannot be compared with {kind}",
                    hint="clean that corpus again with the same `duplicates` section",
                )
        fingerprints = _load_fingerprints(folder / "fingerprints", rule)
        rows = [(name, array) for name, array in fingerprints if parameters.get(name)]
        documents = len(rows[0][1])
        for name, array in rows:
            for start in range(0, documents, CHUNK):
                journal.append_bytes(f"{name}.bin", array[start : start + CHUNK].tobytes())
        positions = np.zeros(documents, POSITION)
        positions["source"], positions["line"] = -1 - number, np.arange(1, documents + 1)
        journal.append_bytes("places.bin", positions.tobytes())
        count += documents
    return count


def _load_fingerprints(folder: Path, rule: DuplicatesRule) -> list[tuple[str, npt.NDArray[Any]]]:
    arrays: list[tuple[str, npt.NDArray[Any]]] = [("exact", load_text_hashes(folder))] if rule.exact else []
    return [*arrays, ("minhash", load_signatures(folder, rule))] if rule.minhash else arrays


def _read_fingerprint_kinds(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    hint = "name an output folder of `mega data clean` in duplicates.against"
    summary = read_json_file(path, DataError, hint=hint)
    found: dict[str, Any] | None = summary.get("fingerprints") if isinstance(summary, dict) else None
    if not found:
        raise DataError(f"{folder}: has no fingerprints", hint="clean that corpus with a `duplicates` section")
    return found


def write_kept_fingerprints(work: Path, rule: DuplicatesRule, first: int) -> dict[str, Any]:
    """Write the fingerprints of the kept documents, for later cleaning runs; return the parameters of the fingerprints.
    Documents are those from number `first` on; the folder is `work/result/fingerprints`.
    """
    kept = first + np.flatnonzero(np.load(work / "rules.npy", mmap_mode="r")[first:] == 0)
    folder = work / "result" / "fingerprints"
    for name, array in _load_fingerprints(work, rule):
        with open_atomic_file(folder / f"{name}.bin") as stream:
            for start in range(0, len(kept), CHUNK):
                stream.write(array[kept[start : start + CHUNK]].tobytes())
    return get_fingerprint_parameters(rule)
