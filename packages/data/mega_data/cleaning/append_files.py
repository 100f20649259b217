"""Append-only output files with a record of their valid sizes, and compressed JSON lines."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from mega_common.atomic_files import add_path_to_errors, fsync_directory, write_json_atomically
from mega_data.reading.decompression import import_optional


class AppendJournal:
    """Append-only files in a folder. Everything appended before the last `commit_state` survives a crash; the rest is
    truncated at a resume.

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
        """Flush all appended data to disk, then write `state` and the file sizes atomically to `progress.json`."""
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
    """Return a record as one line of UTF-8 JSON; values without a JSON type, such as dates of a Parquet file, become
    text.
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
    return bytes(import_optional("pyarrow", "writing .zst files").Codec("zstd").compress(raw))
