"""Files that only grow, and a record of how far they are good: a run that was ended in whatever way goes on from there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any

from mega_common.files import fsync_folder, naming, write_json


class Journal:
    """The growing files of a folder. What `commit` was told is there after any end, and nothing that came later.

    Attributes:
        sizes: bytes of each file, by its path in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        self._open: dict[str, IO[bytes]] = {}

    def begin(self, sizes: dict[str, int]) -> None:
        """Take files as they were at a commit; what was added to them after it goes."""
        for name, size in sizes.items():
            with naming(self.folder / name):
                os.truncate(self.folder / name, size)
        self.sizes = dict(sizes)

    def append(self, name: str, data: bytes) -> None:
        """Add to a file, which is made, or made anew, if no commit knew it."""
        if not data:
            return
        path = self.folder / name
        with naming(path):
            if name not in self._open:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open[name] = open(path, "ab" if name in self.sizes else "wb")  # noqa: SIM115 - closed by `close`
                fsync_folder(path.parent)
            self._open[name].write(data)
        self.sizes[name] = self.sizes.get(name, 0) + len(data)

    def commit(self, state: dict[str, Any]) -> None:
        """Make what was added last, and `state` with it."""
        for name in self._open:
            self._sync(name)
        write_json(self.folder / "progress.json", {**state, "sizes": self.sizes})

    def finish(self, name: str) -> None:
        """Close a file to which nothing will be added."""
        if name in self._open:
            self._sync(name)
            self._open.pop(name).close()

    def _sync(self, name: str) -> None:
        with naming(self.folder / name):
            self._open[name].flush()
            os.fsync(self._open[name].fileno())

    def close(self) -> None:
        """Close all files."""
        for stream in self._open.values():
            stream.close()
        self._open.clear()

    def clear(self) -> None:
        """Remove what an earlier run left."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()
