"""JSON lines, packed, in pieces that stand one after another in a file as one: gzip and zstd allow that."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mega_data.reading.unpack import package

SUFFIXES = {"gz": ".jsonl.gz", "zst": ".jsonl.zst", "none": ".jsonl"}


def line(record: Mapping[str, Any]) -> bytes:
    """A record as a line; what JSON has no word for, such as a date of a Parquet file, becomes its text."""
    return json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n"


def packed(lines: Iterable[bytes], compression: str) -> bytes:
    """Lines, compressed; of none, nothing.

    Raises:
        MissingPackageError: when zstd is asked for and pyarrow is not installed.
    """
    raw = b"".join(lines)
    if not raw or compression == "none":
        return raw
    if compression == "gz":
        return gzip.compress(raw, compresslevel=6, mtime=0)
    return bytes(package("pyarrow", ".zst files").Codec("zstd").compress(raw))
