"""Blocks of the documentation run: titled blocks become files, `bash` blocks run in order in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if any(block.language == "bash" for block in blocks(page))
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_page_run(page: Path, tmp_path: Path) -> None:
    paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path, env={**os.environ, **paths},
                capture_output=True, text=True, timeout=600,
            )  # fmt: skip
            assert done.returncode == 0, f"{page}:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
