"""Folders of sentence-transformers whose transformer is in a folder of its own, such as `0_Transformer`."""

from __future__ import annotations

from pathlib import Path

from mega_common.bounded_parsing import read_json_file
from mega_common.errors import CheckpointError

LISTING = "modules.json"


def find_transformer_folder(folder: Path) -> Path | None:
    """Return the folder of the transformer, where `modules.json` names one inside `folder`; else None.

    Raises:
        CheckpointError: when `modules.json` is not JSON, or names a folder that is missing or elsewhere.
    """
    if not (folder / LISTING).is_file() or (folder / "config.json").exists():
        return None
    listing = read_json_file(folder / LISTING, CheckpointError)
    first = listing[0] if isinstance(listing, list) and listing else None
    name = first.get("path") if isinstance(first, dict) else None
    if not isinstance(name, str) or not name:
        return None
    inner = folder / name
    if not inner.resolve().is_relative_to(folder.resolve()) or inner.resolve() == folder.resolve():
        raise CheckpointError(f"{folder / LISTING}: path {name!r} is outside the folder")
    if not inner.is_dir():
        raise CheckpointError(
            f"{folder / LISTING}: path {name!r} is not a folder", hint="was the download interrupted?"
        )
    return inner
