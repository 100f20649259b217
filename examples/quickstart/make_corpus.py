"""Make a small real corpus without a download: sources of the Python standard library that runs this.

Writes corpus/ and held-out/ beside this file, a module a file. Run it once before `mega run workflow.yaml`.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

TRAIN_BYTES = 600_000
HELD_OUT_BYTES = 60_000


def main() -> None:
    """Share the modules out by name: every eleventh is held out, so that both parts are of one kind."""
    here = Path(__file__).parent
    modules = [path for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if path.stat().st_size]
    held_out = modules[::11]
    write(here / "held-out", held_out, HELD_OUT_BYTES)
    write(here / "corpus", [path for path in modules if path not in held_out], TRAIN_BYTES)


def write(folder: Path, modules: list[Path], limit: int) -> None:
    """Copy modules into `folder` as long as `limit` bytes are not passed."""
    folder.mkdir(exist_ok=True)
    size = 0
    for path in modules:
        text = path.read_bytes()
        if size + len(text) <= limit:
            (folder / f"{path.stem}.txt").write_bytes(text)
            size += len(text)
    print(f"{folder.name}: {len(list(folder.iterdir()))} documents, {size:,} bytes")


if __name__ == "__main__":
    main()
