"""Object stores for tests: one in memory that can be watched and broken, and one that several ranks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class _WatchedFile(MemoryFile):
    def write(self, data: Any) -> int:
        self.fs.about("write")
        written = super().write(data)
        self.fs.done()
        return written


class Watched(MemoryFileSystem):
    """watched://: every change is announced before it happens (and may be refused), and told when it has."""

    protocol = "watched"
    root_marker = "/"
    store: ClassVar[dict[str, MemoryFile]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    announce: ClassVar[Callable[[str], None]] = staticmethod(lambda what: None)
    contents: ClassVar[list[dict[str, bytes]]] = []
    read: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("watched://").strip("/") if path.strip("/") else ""

    def about(self, what: str) -> None:
        type(self).announce(what)

    def done(self) -> None:
        self.contents.append(content())

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **options)
        self.about("create")
        file = _WatchedFile(self, self._strip_protocol(path), options.get("data"))
        file.commit()
        self.done()
        return file

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.about("read")
        data: bytes = super().cat_file(path, start, end, **options)
        self.read.append((path.rpartition("/")[2], len(data)))
        return data

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.about("list")
        return super().ls(path, detail, **options)

    def rm_file(self, path: str) -> None:
        self.about("remove")
        super().rm_file(path)
        self.done()


def write_objects(content: dict[str, bytes]) -> None:
    """Make this the content of watched://, and forget what was told."""
    fsspec.register_implementation("watched", Watched, clobber=True)
    Watched.store.clear()
    files = fsspec.filesystem("watched")
    for path, data in content.items():
        files.store[path] = MemoryFile(files, path, data)
    Watched.announce = staticmethod(lambda what: None)
    Watched.contents.clear()
    Watched.read.clear()


def content() -> dict[str, bytes]:
    """What is in watched://."""
    return {path: file.getvalue() for path, file in Watched.store.items()}


class Shared(LocalFileSystem):
    """shared://: a folder of this machine in the role of an object store, so that several processes see the same."""

    protocol = "shared"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("shared:/").removeprefix("shared:")))


def share(folder: Path) -> str:
    """The URL of a folder; to be called in every process."""
    fsspec.register_implementation("shared", Shared, clobber=True)
    fsspec.config.conf.setdefault("shared", {})["auto_mkdir"] = True
    return f"shared://{folder}"
