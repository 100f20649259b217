"""Disk cache of arrays that are slow to build, under a key that names their content.

A file is a magic, a checksum of all that follows, the length of a JSON header (`key`, and per array dtype, shape,
offset), the header, and the arrays at multiples of 64 bytes. A large file is read through a memory map, so the ranks of
a machine share one copy. There are no locks: a process that finds no file, or a damaged one, builds the arrays and
renames a complete file to its name. If the folder is read-only, every process builds the arrays itself.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.atomic_files import open_atomic_file
from mega_common.progress_logging import logger

Arrays = Mapping[str, npt.NDArray[Any]]

MAGIC = b"megaidx1"
HEAD = struct.Struct("<8sQ")
LENGTH = struct.Struct("<Q")
ALIGN = 64
MMAP_MIN_BYTES = 1 << 18  # a smaller file is read, because a memory map keeps it open


def load_or_build_arrays(folder: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays identified by `key` from a valid cache file, or build and store them.
    The cache file is in `folder`; the arrays are built by `build()`.

    `key` must name everything that the arrays depend on, including contents of files; names and times are not enough.
    """
    path = folder / f"{xxhash.xxh3_128_hexdigest(key.encode())}.arrays"
    cached = _load_arrays(path, key)
    if cached is not None:
        return cached
    start = time.monotonic()
    logger.info("building the index of the samples")
    logger.debug("%s: %s", path, key)
    arrays = build()
    logger.info("built in %.1f s: %s", time.monotonic() - start, path.name)
    try:
        _store_arrays(path, key, arrays)
    except OSError as error:
        logger.info("%s: cannot be written (%s); the index is kept in memory. Set data.cache to another folder",
                    path, error)  # fmt: skip
        return arrays
    return _load_arrays(path, key) or arrays


def _store_arrays(path: Path, key: str, arrays: Arrays) -> None:
    layout, offset = {}, 0
    for name, values in arrays.items():
        layout[name] = [values.dtype.str, list(values.shape), offset]
        offset += values.nbytes + -values.nbytes % ALIGN
    header = json.dumps({"key": key, "arrays": layout}).encode()
    header += b" " * (-(HEAD.size + LENGTH.size + len(header)) % ALIGN)
    parts: list[Any] = [LENGTH.pack(len(header)), header]
    for values in arrays.values():
        parts += [np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, bytes(-values.nbytes % ALIGN)]
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    with open_atomic_file(path) as stream:
        stream.write(HEAD.pack(MAGIC, digest.intdigest()))
        for part in parts:
            stream.write(part)


def _load_arrays(path: Path, key: str) -> Arrays | None:
    if not path.is_file():
        return None
    if path.stat().st_size > HEAD.size + LENGTH.size:
        large = path.stat().st_size > MMAP_MIN_BYTES
        raw: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r") if large else np.fromfile(path, np.uint8)
        body = raw[HEAD.size :]
        if raw[: HEAD.size].tobytes() == HEAD.pack(MAGIC, xxhash.xxh3_64_intdigest(body.data)):
            return _parse_arrays(body, key)
    logger.warning("%s: the cached index is damaged; building it again", path)
    return None


def _parse_arrays(body: npt.NDArray[np.uint8], key: str) -> Arrays | None:
    (length,) = LENGTH.unpack(body[: LENGTH.size].tobytes())
    base = LENGTH.size + length
    header = json.loads(body[LENGTH.size : base].tobytes())
    if header["key"] != key:
        return None
    return {
        name: np.frombuffer(body, dtype, int(np.prod(shape)), base + offset).reshape(shape)
        for name, (dtype, shape, offset) in header["arrays"].items()
    }
