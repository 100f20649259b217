"""Fingerprints on disk: of the documents of this run, and of what earlier ones kept, with which it is compared.

`exact.bin` has 16 bytes a document, `minhash.bin` 4 for each hash of a signature, `places.bin` where it stands (`PLACE`).
Documents are numbered as they are kept, those of earlier runs first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.files import atomic_file
from mega_common.parsing import parse_json
from mega_data.cleaning.config import Duplicates
from mega_data.cleaning.fingerprints import Signatures, algorithm
from mega_data.cleaning.journal import Journal
from mega_data.cleaning.words import Hashes

# The number of an input and of a source, or -1 - i for the i-th earlier folder; `size` in bytes of UTF-8.
PLACE = np.dtype([("input", "<u4"), ("source", "<i4"), ("line", "<u8"), ("size", "<u8")])
Places = npt.NDArray[np.void]

CHUNK = 1 << 16  # documents read at once


def kinds(wanted: Duplicates) -> dict[str, Any]:
    """What fingerprints are made of; those of two runs can be compared where this is the same.

    Raises:
        MissingPackageError: when rensa is needed and not installed.
    """
    shape = wanted.minhash.model_dump(exclude={"threshold"}) if wanted.minhash else None
    return {"exact": wanted.exact, "minhash": {**shape, "algorithm": algorithm()} if shape else None}


def load_exact(folder: Path) -> Hashes:
    """The hashes of texts, uint64 [N, 2], on disk."""
    return _load(folder / "exact.bin", np.dtype("<u8"), 2)


def load_signatures(folder: Path, wanted: Duplicates) -> Signatures:
    """The signatures, uint32 [N, bands * rows], on disk."""
    assert wanted.minhash is not None
    return _load(folder / "minhash.bin", np.dtype("<u4"), wanted.minhash.bands * wanted.minhash.rows)


def load_places(folder: Path) -> Places:
    """Where documents stand, `PLACE` [N], on disk."""
    return _load(folder / "places.bin", PLACE, 1)[:, 0]


def _load(path: Path, dtype: np.dtype[Any], width: int) -> npt.NDArray[Any]:
    if not path.exists() or not path.stat().st_size:
        return np.zeros((0, width), dtype)
    return np.memmap(path, dtype, mode="r").reshape(-1, width)


def take_up(wanted: Duplicates, journal: Journal) -> int:
    """Add the fingerprints of the folders `wanted.against` to those of this run, and return how many documents they are.

    Raises:
        DataError: when a folder has none, or others than this run makes.
    """
    ours, count = kinds(wanted), 0
    for number, folder in enumerate(wanted.against):
        theirs = _kinds_of(folder)
        for name, kind in ours.items():
            if kind and theirs.get(name) != kind:
                raise DataError(
                    f"{folder}: its fingerprints ({name}: {theirs.get(name)}) cannot be compared with {kind}",
                    hint="clean it again with the same `duplicates` section",
                )
        rows = [(name, array) for name, array in _arrays(folder / "fingerprints", wanted) if ours.get(name)]
        documents = len(rows[0][1])
        for name, array in rows:
            for start in range(0, documents, CHUNK):
                journal.append(f"{name}.bin", array[start : start + CHUNK].tobytes())
        places = np.zeros(documents, PLACE)
        places["source"], places["line"] = -1 - number, np.arange(1, documents + 1)
        journal.append("places.bin", places.tobytes())
        count += documents
    return count


def _arrays(folder: Path, wanted: Duplicates) -> list[tuple[str, npt.NDArray[Any]]]:
    found: list[tuple[str, npt.NDArray[Any]]] = [("exact", load_exact(folder))] if wanted.exact else []
    return [*found, ("minhash", load_signatures(folder, wanted))] if wanted.minhash else found


def _kinds_of(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        found: dict[str, Any] | None = parse_json(path.read_text(encoding="utf-8")).get("fingerprints")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error})", hint="`mega data clean` writes it into its output"
        ) from error
    if not found:
        raise DataError(f"{folder}: has no fingerprints", hint="clean it with a `duplicates` section")
    return found


def keep_fingerprints(work: Path, wanted: Duplicates, first: int) -> dict[str, Any]:
    """Write the fingerprints of the documents that stay, of number `first` on, into the result; return their kinds."""
    kept = first + np.flatnonzero(np.load(work / "rules.npy", mmap_mode="r")[first:] == 0)
    folder = work / "result" / "fingerprints"
    for name, array in _arrays(work, wanted):
        with atomic_file(folder / f"{name}.bin") as stream:
            for start in range(0, len(kept), CHUNK):
                stream.write(array[kept[start : start + CHUNK]].tobytes())
    return kinds(wanted)
