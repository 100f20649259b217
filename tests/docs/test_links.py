"""Links and images of all pages lead to files of the repository, or to pages that `make docs` generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ROOT, pages
from markdown_it import MarkdownIt

GENERATED = ("docs/reference/cli.md", "docs/reference/run-yaml.md", "docs/recipes.md", "docs/pictures/")


def targets(page: Path) -> Iterator[str]:
    """Yield the relative targets of a page's links and images, without anchors."""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            target = str(child.attrGet("href") or child.attrGet("src") or "").partition("#")[0]
            if target and "://" not in target and not target.startswith("mailto:"):
                yield target


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_exist(page: Path) -> None:
    missing = []
    for target in targets(page):
        path = (page.parent / target).resolve()
        if not path.exists() and not str(path.relative_to(ROOT)).startswith(GENERATED):
            missing.append(target)
    assert not missing


def test_missing_targets_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See [a](b.md#c), ![d](e.png) and [f](https://example.org).\n")
    assert list(targets(page)) == ["b.md", "e.png"]
