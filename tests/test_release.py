"""The release script: versions and changelog change together, and wheels name each other by version."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "release/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(release: Any, tmp_path: Path) -> Path:
    """The files of the repository that say a version."""
    for package in release.PACKAGES:
        for path in release._files(ROOT / package):
            (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0 - 2026-01-01\n\n- Old.\n"
    )
    return tmp_path


def test_all_packages_have_one_version(release: Any) -> None:
    assert len({release.version_of(ROOT / package) for package in release.PACKAGES}) == 1


def test_versions_and_changelog_change_together(release: Any, repository: Path) -> None:
    for path, text in release.prepared(repository, "0.2.0", "2026-12-01").items():
        path.write_text(text)
    assert {release.version_of(repository / package) for package in release.PACKAGES} == {"0.2.0"}
    text = (repository / "CHANGELOG.md").read_text()
    assert (release.section(text, "0.2.0"), release.section(text, "Unreleased")) == ("- New.", "")
    with pytest.raises(SystemExit, match="nothing stands under Unreleased"):
        release.prepared(repository, "0.3.0", "2026-12-02")


@pytest.mark.parametrize(
    ("version", "message"), [("0.1.0", "not later than"), ("0.0.9", "not later"), ("next", "no version")]
)
def test_versions_that_are_refused(release: Any, repository: Path, version: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        release.prepared(repository, version, "2026-12-01")


def test_a_wheel_asks_for_no_folder(release: Any) -> None:
    for package in release.PACKAGES:
        text = release.pinned((ROOT / package / "pyproject.toml").read_text(), "9.9.9")
        assert "{root" not in text
        if package == "cli":
            assert re.search(r'"mega-data\[all\]==9\.9\.9"', text)
