"""A disk that forgets: records the file operations of a program, and replays any part of them as a crash would leave it.

The rules are those of POSIX at its worst. What was written to a file is certain after an fsync of the file; before, any
prefix of it may be there, or zeros in its place. A name made, removed or changed in a folder is certain after an fsync of
the folder; before, each such change may or may not have happened, whatever happened to the others. A rename happens
whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Operation:
    """One change of the disk, or a `mark` of the program's own; paths are relative to the recorded root."""

    when: int
    kind: str
    path: str
    data: bytes = b""
    to: str = ""


@dataclass
class Recording:
    """What was done below `root`, in order."""

    root: Path
    operations: list[Operation] = field(default_factory=list)

    def add(self, kind: str, path: Path, data: bytes = b"", to: Path | None = None) -> None:
        """Append an operation, unless it is elsewhere."""
        if path.is_relative_to(self.root):
            target = to.relative_to(self.root).as_posix() if to else ""
            where = path.relative_to(self.root).as_posix()
            self.operations.append(Operation(time.monotonic_ns(), kind, where, data, target))

    def mark(self, what: str) -> None:
        """Append a note of the program's own."""
        self.operations.append(Operation(time.monotonic_ns(), "mark", what))


@contextlib.contextmanager
def recorded(root: Path, *, complete: bool = True) -> Iterator[Recording]:
    """Record what the program does below `root`, an empty folder, through the functions of `os`.

    With `complete`, the recording is replayed and compared with the real folder, so that nothing can go past it.
    """
    recording, paths = Recording(root), dict[int, Path]()
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")}

    def place(path: Any, dir_fd: int | None = None) -> Path:
        return (paths[dir_fd] if dir_fd is not None else Path.cwd()) / path

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        full = place(path, dir_fd)
        new = bool(flags & os.O_CREAT) and not full.exists()
        descriptor: int = real["open"](path, flags, mode, dir_fd=dir_fd)
        paths[descriptor] = full
        if new:
            recording.add("create", full)
        return descriptor

    def write(descriptor: int, data: Any) -> int:
        # Short writes are legal, and give more moments to crash at.
        count: int = real["write"](descriptor, data[: max(200, len(data) // 2)])
        recording.add("write", paths.get(descriptor, Path("/")), bytes(data[:count]))
        return count

    def fsync(descriptor: int) -> None:
        real["fsync"](descriptor)
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        recording.add("fsync-folder" if is_folder else "fsync", paths[descriptor])

    def rename(source: Any, target: Any) -> None:
        real["rename"](source, target)
        recording.add("rename", place(source), to=place(target))

    def simple(name: str) -> Callable[..., None]:
        def call(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            real[name](path, *args, dir_fd=dir_fd)
            recording.add(name, place(path, dir_fd))

        return call

    replaced = {"open": open_, "write": write, "fsync": fsync, "rename": rename, "replace": rename}
    replaced |= {name: simple(name) for name in ("mkdir", "unlink", "rmdir")}
    with mock.patch.multiple(os, **replaced):
        yield recording
    if complete:
        disk = Disk({})
        for operation in recording.operations:
            disk.apply(operation)
        assert disk.kept() == tree(root), "something was done that was not recorded"


Tree = dict[str, "bytes | Tree"]


def tree(folder: Path) -> Tree:
    """The content of a folder."""
    return {path.name: tree(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


@dataclass
class File:
    """Bytes that are certain, and bytes that were written after those."""

    certain: bytes = b""
    written: bytes = b""


@dataclass
class Folder:
    """Names that are certain, names as the program sees them, and the changes in between."""

    certain: dict[str, File | Folder] = field(default_factory=dict)
    seen: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, File | Folder]] = field(default_factory=list)

    def change(self, gone: str | None, made: str | None, node: File | Folder) -> None:
        """Take a name away, give one, or both at once."""
        _change(self.seen, gone, made, node)
        self.changes.append((gone, made, node))


def _change(names: dict[str, File | Folder], gone: str | None, made: str | None, node: File | Folder) -> None:
    if gone is not None and names.get(gone) is node:
        del names[gone]
    if made is not None:
        names[made] = node


class Disk:
    """The state of a disk while operations happen to it."""

    def __init__(self, content: Tree) -> None:
        self.root = _certain(content)

    def apply(self, operation: Operation) -> None:
        """Let an operation happen; nothing of it is certain yet."""
        if operation.kind == "mark":
            return
        above, name = self._find(operation.path)
        match operation.kind:
            case "create":
                above.change(None, name, File())
            case "mkdir":
                above.change(None, name, Folder())
            case "unlink" | "rmdir":
                above.change(name, None, above.seen[name])
            case "rename":
                other, target = self._find(operation.to)
                assert other is above, "a rename between folders is not one change"
                above.change(name, target, above.seen[name])
            case "write":
                self._file(operation.path).written += operation.data
            case "fsync":
                file = self._file(operation.path)
                file.certain, file.written = file.certain + file.written, b""
            case "fsync-folder":
                folder = above.seen[name] if name else self.root
                assert isinstance(folder, Folder)
                folder.certain, folder.changes = dict(folder.seen), []
            case _:
                raise AssertionError(operation)

    def kept(self) -> Tree:
        """What a program that goes on sees: all of it."""
        return _content(self.root, lambda folder: folder.seen, lambda file: file.certain + file.written)

    def lost(self) -> Tree:
        """What is there after a crash at the worst: only what is certain."""
        return _content(self.root, lambda folder: folder.certain, lambda file: file.certain)

    def torn(self, choose: random.Random) -> Tree:
        """What may be there after a crash: what is certain, and some of the rest."""

        def names(folder: Folder) -> dict[str, File | Folder]:
            out = dict(folder.certain)
            for change in folder.changes:
                if choose.random() < 0.5:
                    _change(out, *change)
            return out

        def data(file: File) -> bytes:
            some = file.written[: choose.randint(0, len(file.written))]
            return file.certain + (bytes(len(some)) if choose.random() < 0.3 else some)

        return _content(self.root, names, data)

    def _find(self, path: str) -> tuple[Folder, str]:
        *parents, name = [part for part in path.split("/") if part != "."] or [""]
        folder = self.root
        for part in parents:
            below = folder.seen[part]
            assert isinstance(below, Folder)
            folder = below
        return folder, name

    def _file(self, path: str) -> File:
        folder, name = self._find(path)
        file = folder.seen[name]
        assert isinstance(file, File)
        return file


def _certain(content: Tree) -> Folder:
    names = {name: File(one) if isinstance(one, bytes) else _certain(one) for name, one in content.items()}
    return Folder(dict(names), dict(names))


def _content(
    folder: Folder, names: Callable[[Folder], dict[str, File | Folder]], data: Callable[[File], bytes]
) -> Tree:
    return {
        name: data(node) if isinstance(node, File) else _content(node, names, data)
        for name, node in names(folder).items()
    }


def write_tree(content: Tree, folder: Path) -> None:
    """Make a real folder of it."""
    folder.mkdir()
    for name, one in content.items():
        if isinstance(one, bytes):
            (folder / name).write_bytes(one)
        else:
            write_tree(one, folder / name)


def crashes(operations: Sequence[Operation], seeds: int) -> Iterator[tuple[int, str, Tree]]:
    """Every moment, and for each what may be there then: (operations done, how, content), each content once."""
    disk = Disk({})
    for done in range(len(operations) + 1):
        if done:
            disk.apply(operations[done - 1])
        told: list[Tree] = []
        torn = [(f"torn {seed}", disk.torn(random.Random(f"{done} {seed}"))) for seed in range(seeds)]
        for how, found in [("all kept", disk.kept()), ("all lost", disk.lost()), *torn]:
            if found not in told:
                told.append(found)
                yield done, how, found
