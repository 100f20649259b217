"""Content digests of files and code, which skip files whose size and modification time are unchanged."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from mega_common.atomic_files import compute_file_sha256
from mega_common.progress_logging import ProgressBar
from mega_common.strict_config import StrictConfig

# Each package with the packages that it imports.
STACKS = {
    "mega_common": ("mega_common",),
    "mega_data": ("mega_common", "mega_data"),
    "mega_ckpt": ("mega_common", "mega_ckpt"),
    "mega_trainer": ("mega_common", "mega_data", "mega_ckpt", "mega_trainer"),
    "mega_eval": ("mega_common", "mega_data", "mega_ckpt", "mega_trainer", "mega_eval"),
}
COMMAND_PACKAGES = {"data": "mega_data", "ckpt": "mega_ckpt", "train": "mega_trainer"}

# A file that is changed twice within one tick of the file system's clock keeps its time stamp, so a digest is only
# recorded for a file that was unchanged for this many seconds.
UNCHANGED_SECONDS = 2.0
SHOW_PROGRESS = 1 << 29  # bytes: below this, reading takes less than two seconds


class CachedFileDigest(StrictConfig):
    """Size in bytes, modification time in ns and hex SHA-256 of a file when it was last read."""

    size: int
    mtime_ns: int
    sha256: str


class FileDigests:
    """SHA-256 digests of files with paths relative to `base`; files of known size and time are not read again.
    Known are the `records` of an earlier run, passed as `known`.
    """

    def __init__(self, base: Path, known: Mapping[str, CachedFileDigest]) -> None:
        self.base = base
        self.known = dict(known)
        self.records: dict[str, CachedFileDigest] = {}

    def hash_matching_files(self, patterns: Iterable[str]) -> dict[str, str]:
        """Return {file name: hex SHA-256}, sorted by name, of all files that paths, folders and glob patterns match."""
        names = sorted(set(iterate_files_matching_patterns(self.base, patterns)))
        unknown = [name for name in names if not self._is_known(name)]
        size = sum((self.base / name).stat().st_size for name in unknown)
        with contextlib.ExitStack() as stack:
            shown = ProgressBar("reading files", total=size, unit="bytes") if size > SHOW_PROGRESS else None
            advance = stack.enter_context(shown).advance if shown else None
            for name in unknown:
                self._read(name, advance)
        return {name: self.known[name].sha256 for name in names}

    def _is_known(self, name: str) -> bool:
        now, record = (self.base / name).stat(), self.known.get(name)
        same = record is not None and (record.size, record.mtime_ns) == (now.st_size, now.st_mtime_ns)
        if record is not None and same:
            self.records[name] = record
        return same

    def _read(self, name: str, advance: Callable[[int], None] | None) -> None:
        path = self.base / name
        before = path.stat()
        sha256 = compute_file_sha256(path, advance=advance)
        record = CachedFileDigest(size=before.st_size, mtime_ns=before.st_mtime_ns, sha256=sha256)
        self.known[name] = record
        if time.time() - before.st_mtime > UNCHANGED_SECONDS:
            self.records[name] = record


def iterate_files_matching_patterns(base: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Yield the files that `patterns` match, relative to `base`: files, all files in folders, and globs."""
    for pattern in patterns:
        exists = os.path.exists(base / pattern)  # Path.exists raises for text that is too long for a name
        for found in [pattern] if exists else glob.glob(pattern, root_dir=base, recursive=True):
            if (base / found).is_dir():
                for folder, _, names in os.walk(base / found, followlinks=True):
                    inner = os.path.relpath(folder, base / found)
                    yield from (relative_path_name(base, os.path.join(found, inner, name)) for name in names)
            else:
                yield relative_path_name(base, found)


def relative_path_name(base: Path, path: str) -> str:
    """Return a normalized path: relative to `base`, or absolute if `path` is an absolute path outside of `base`."""
    absolute = Path(os.path.normpath(base / path))
    is_outside = os.path.isabs(path) and not absolute.is_relative_to(base)
    return str(absolute) if is_outside else os.path.relpath(absolute, base)


def compute_code_digest(command: str) -> str:
    """Return one digest of the Python sources of a `mega` command: its modules and mega's packages that it needs."""
    files: list[Path] = []
    for package in STACKS[COMMAND_PACKAGES.get(command, "mega_eval")]:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            files += sorted(Path(folder).rglob("*.py"))
    here = Path(__file__).parent
    files += sorted([*here.glob(f"{command}*.py"), *here.glob(f"{command}/*.py")])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parent.name}/{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()
