"""Fingerprint files of this run's documents and of the documents kept by earlier runs.

`exact.bin` has 16 bytes per document, `minhash.bin` 4 bytes per hash of a signature, `places.bin` the source positions
(`POSITION`). Documents are numbered in the order in which they are kept, those of earlier runs first.
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

# Number of the input, number of the source (-1 - i for the i-th earlier folder), line, and size in UTF-8 bytes.
POSITION = np.dtype([("input", "<u4"), ("source", "<i4"), ("line", "<u8"), ("size", "<u8")])
DocumentPositions = npt.NDArray[np.void]

CHUNK = 1 << 16  # documents read at once


def describe_fingerprints(rule: DuplicatesRule) -> dict[str, Any]:
    """Return the parameters of the document fingerprints; fingerprints of two cleaning runs are comparable if these are
    equal.

    Raises:
        MissingPackageError: if rensa is required and not installed.
    """
    shape = rule.minhash.model_dump(exclude={"threshold"}) if rule.minhash else None
    return {"exact": rule.exact, "minhash": {**shape, "algorithm": get_rensa_version()} if shape else None}


def load_text_hashes(folder: Path) -> Hashes:
    """Return the text hashes in `folder/exact.bin`, one per document, uint64 [N, 2], memory-mapped."""
    return _map_file(folder / "exact.bin", np.dtype("<u8"), 2)


def load_signatures(folder: Path, rule: DuplicatesRule) -> Signatures:
    """Return the MinHash signatures in `folder/minhash.bin`, one per document, uint32 [N, bands * rows], memory-mapped."""
    assert rule.minhash is not None
    return _map_file(folder / "minhash.bin", np.dtype("<u4"), rule.minhash.bands * rule.minhash.rows)


def load_document_positions(folder: Path) -> DocumentPositions:
    """Return the source position of each document from `folder/places.bin`, structured dtype `POSITION` [N], memory-
    mapped.
    """
    return _map_file(folder / "places.bin", POSITION, 1)[:, 0]


def _map_file(path: Path, dtype: np.dtype[Any], width: int) -> npt.NDArray[Any]:
    if not path.exists() or not path.stat().st_size:
        return np.zeros((0, width), dtype)
    return np.memmap(path, dtype, mode="r").reshape(-1, width)


def import_fingerprints(rule: DuplicatesRule, journal: AppendJournal) -> int:
    """Append the fingerprints of the earlier cleaning runs in `rule.against` to this run's files; return the number of
    their documents.

    Raises:
        DataError: if a folder has no fingerprints, or their parameters differ.
    """
    parameters, count = describe_fingerprints(rule), 0
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
    """Write the fingerprints of the kept documents, from document number `first` on, to `work/result/fingerprints`;
    return the fingerprint parameters.
    """
    kept = first + np.flatnonzero(np.load(work / "rules.npy", mmap_mode="r")[first:] == 0)
    folder = work / "result" / "fingerprints"
    for name, array in _load_fingerprints(work, rule):
        with open_atomic_file(folder / f"{name}.bin") as stream:
            for start in range(0, len(kept), CHUNK):
                stream.write(array[kept[start : start + CHUNK]].tobytes())
    return describe_fingerprints(rule)
