"""Fingerprint files of this run's documents and of the documents kept by earlier runs.

`exact.bin` has 16 bytes a document, `minhash.bin` 4 for each hash of a signature, `places.bin` where it stands (`PLACE`).
Documents are numbered as they are kept, those of earlier runs first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.atomic_files import open_atomic_file
from mega_common.bounded_parsing import read_json_file
from mega_common.errors import DataError
from mega_data.cleaning.append_files import AppendJournal
from mega_data.cleaning.clean_config import DuplicatesRule
from mega_data.cleaning.duplicate_detection import Signatures, get_rensa_version
from mega_data.cleaning.text_words import Hashes

# The number of an input and of a source, or -1 - i for the i-th earlier folder; `size` in bytes of UTF-8.
PLACE = np.dtype([("input", "<u4"), ("source", "<i4"), ("line", "<u8"), ("size", "<u8")])
SeenPositions = npt.NDArray[np.void]

CHUNK = 1 << 16  # documents read at once


def describe_fingerprints(wanted: DuplicatesRule) -> dict[str, Any]:
    """Return the parameters of fingerprints; those of two runs are comparable if these are equal.

    Raises:
        MissingPackageError: when rensa is needed and not installed.
    """
    shape = wanted.minhash.model_dump(exclude={"threshold"}) if wanted.minhash else None
    return {"exact": wanted.exact, "minhash": {**shape, "algorithm": get_rensa_version()} if shape else None}


def load_text_hashes(folder: Path) -> Hashes:
    """Return the hashes of texts, uint64 [N, 2], memory-mapped."""
    return _map_file(folder / "exact.bin", np.dtype("<u8"), 2)


def load_signatures(folder: Path, wanted: DuplicatesRule) -> Signatures:
    """Return the MinHash signatures, uint32 [N, bands * rows], memory-mapped."""
    assert wanted.minhash is not None
    return _map_file(folder / "minhash.bin", np.dtype("<u4"), wanted.minhash.bands * wanted.minhash.rows)


def load_document_places(folder: Path) -> SeenPositions:
    """Return the source positions of documents, `PLACE` [N], memory-mapped."""
    return _map_file(folder / "places.bin", PLACE, 1)[:, 0]


def _map_file(path: Path, dtype: np.dtype[Any], width: int) -> npt.NDArray[Any]:
    if not path.exists() or not path.stat().st_size:
        return np.zeros((0, width), dtype)
    return np.memmap(path, dtype, mode="r").reshape(-1, width)


def import_fingerprints(wanted: DuplicatesRule, journal: AppendJournal) -> int:
    """Add the fingerprints of the folders `wanted.against` to those of this run, and return the number of their
    documents.

    Raises:
        DataError: when a folder has none, or others than this run makes.
    """
    ours, count = describe_fingerprints(wanted), 0
    for number, folder in enumerate(wanted.against):
        theirs = _read_fingerprint_kinds(folder)
        for name, kind in ours.items():
            if kind and theirs.get(name) != kind:
                raise DataError(
                    f"{folder}: its fingerprints ({name}: {theirs.get(name)}) cannot be compared with {kind}",
                    hint="clean it again with the same `duplicates` section",
                )
        rows = [(name, array) for name, array in _load_fingerprints(folder / "fingerprints", wanted) if ours.get(name)]
        documents = len(rows[0][1])
        for name, array in rows:
            for start in range(0, documents, CHUNK):
                journal.append_bytes(f"{name}.bin", array[start : start + CHUNK].tobytes())
        places = np.zeros(documents, PLACE)
        places["source"], places["line"] = -1 - number, np.arange(1, documents + 1)
        journal.append_bytes("places.bin", places.tobytes())
        count += documents
    return count


def _load_fingerprints(folder: Path, wanted: DuplicatesRule) -> list[tuple[str, npt.NDArray[Any]]]:
    found: list[tuple[str, npt.NDArray[Any]]] = [("exact", load_text_hashes(folder))] if wanted.exact else []
    return [*found, ("minhash", load_signatures(folder, wanted))] if wanted.minhash else found


def _read_fingerprint_kinds(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    summary = read_json_file(path, DataError, hint="`mega data clean` writes it into its output")
    found: dict[str, Any] | None = summary.get("fingerprints") if isinstance(summary, dict) else None
    if not found:
        raise DataError(f"{folder}: has no fingerprints", hint="clean it with a `duplicates` section")
    return found


def write_kept_fingerprints(work: Path, wanted: DuplicatesRule, first: int) -> dict[str, Any]:
    """Write the fingerprints of the kept documents, from number `first` on, to the result; return their parameters."""
    kept = first + np.flatnonzero(np.load(work / "rules.npy", mmap_mode="r")[first:] == 0)
    folder = work / "result" / "fingerprints"
    for name, array in _load_fingerprints(work, wanted):
        with open_atomic_file(folder / f"{name}.bin") as stream:
            for start in range(0, len(kept), CHUNK):
                stream.write(array[kept[start : start + CHUNK]].tobytes())
    return describe_fingerprints(wanted)
