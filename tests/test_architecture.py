"""What docs/architecture.md says there is, there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from mega_trainer.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rooms() -> Iterator[Path]:
    """The modules of the guide to the rooms: a package's first line has its folder, further folders stand below it."""
    package = folder = Path()
    block = TEXT.split("## Rooms")[1].split("```")[1].split("\ntests/")[0]
    for line in block.strip().splitlines():
        names = re.sub(r"<[^>]*>|\([^)]*\)", "", line).split()
        if names[0].endswith("/"):
            place = Path(names.pop(0))
            package, folder = (place, place) if not line.startswith(" ") else (package, package / place)
        yield from (ROOT / folder / f"{name}.py" for name in names)


def test_rooms_are_there() -> None:
    assert not [path for path in rooms() if not path.is_file()]


def test_precisions_are_those_of_the_configuration() -> None:
    listed = re.search(r"precisions: `([^`]*)`", TEXT)
    assert listed is not None
    assert set(listed[1].split(", ")) == set(get_args(RunConfig.model_fields["precision"].annotation))
