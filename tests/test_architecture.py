"""docs/architecture.md agrees with the code: its map of modules lists every folder of the packages, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def mapped_folders() -> list[str]:
    """Return the folders that the section "Modules" lists, in its order."""
    block = TEXT.split("## Modules")[1].split("```")[1]
    return re.findall(r"^(?:packages|cli)/\S+", block, re.MULTILINE)


def source_folders() -> set[str]:
    """Return the folders of the packages and of the command line that hold modules."""
    modules = [*ROOT.glob("packages/*/mega_*/**/*.py"), *ROOT.glob("cli/mega_cli/**/*.py")]
    return {str(path.parent.relative_to(ROOT)) for path in modules}


def test_map_lists_every_folder_once() -> None:
    assert sorted(mapped_folders()) == sorted(source_folders())


def test_reading_path_exists() -> None:
    names = re.findall(r"`([\w/]+\.py)`", TEXT.split("## Reading path")[1].split("##")[0])
    roots = [ROOT / "cli", ROOT / "packages/trainer", ROOT / "packages/trainer/mega_trainer"]
    assert names
    assert not [name for name in names if not any((root / name).is_file() for root in roots)]
