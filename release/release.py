"""Make a release: versions, changelog, tag, wheels.

    python release/release.py 0.2.0 --dry-run    says what would change
    python release/release.py 0.2.0              changes, commits and tags it; wheels lie in dist/
    python release/release.py --wheels           the wheels alone, of the version that is there

Nothing is sent anywhere: `git push --follow-tags` and an upload of dist/*.whl are yours. Wheels name each other by version
where the packages of the repository name each other by folder, so that any of them installs alone from an index.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("packages/common", "packages/data", "packages/ckpt", "packages/trainer", "packages/eval", "cli")
_VERSION = re.compile(r'^((?:__)?version(?:__)? = )"([^"]+)"', re.MULTILINE)
_BESIDE = re.compile(r" @ \{root:[^}]*\}/[\w/]+")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="such as 0.2.0; later than that of CHANGELOG.md's newest release")
    parser.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    parser.add_argument("--wheels", action="store_true", help="build the wheels alone")
    args = parser.parse_args()
    if args.wheels:
        wheels(ROOT, ROOT / "dist")
        return
    if args.version is None:
        parser.error("which version?")
    changes = prepared(ROOT, args.version, datetime.date.today().isoformat())
    for path in changes:
        print(f"{path.relative_to(ROOT)}")
    if args.dry_run:
        return
    if _git("status", "--porcelain"):
        sys.exit("there are changes that are not committed: a release is of what is committed")
    for path, text in changes.items():
        path.write_text(text, encoding="utf-8")
    wheels(ROOT, ROOT / "dist")
    _git("commit", "-qam", f"Release {args.version}")
    _git("tag", "-a", f"v{args.version}", "-m", section(changes[ROOT / "CHANGELOG.md"], args.version))
    print(f"tagged v{args.version}; git push --follow-tags sends it")


def prepared(root: Path, version: str, day: str) -> dict[Path, str]:
    """The new content of the files that say a version, and of the changelog.

    Raises:
        SystemExit: when the version is none, is not later than the last one, or nothing is unreleased.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"{version}: no version; semver's three numbers are wanted, such as 0.2.0")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    before = re.search(r"^## (\d+\.\d+\.\d+)", text, re.MULTILINE)
    if before and _numbers(version) <= _numbers(before[1]):
        sys.exit(f"{version}: is not later than {before[1]}, the last release")
    if not section(text, "Unreleased"):
        sys.exit("CHANGELOG.md: nothing stands under Unreleased")
    changed = {changelog: text.replace("## Unreleased\n", f"## Unreleased\n\n## {version} - {day}\n", 1)}
    for path in (path for package in PACKAGES for path in _files(root / package)):
        new, found = _VERSION.subn(rf'\g<1>"{version}"', path.read_text(encoding="utf-8"), count=1)
        if found:
            changed[path] = new
    return changed


def section(changelog: str, name: str) -> str:
    """What the changelog says of a release."""
    found = re.search(rf"^## {re.escape(name)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def wheels(root: Path, dist: Path) -> None:
    """Build a wheel of each package into `dist`, each naming the others by their version."""
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        for package in PACKAGES:
            copy = Path(name, package)
            shutil.copytree(root / package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            project = copy / "pyproject.toml"
            project.write_text(
                pinned(project.read_text(encoding="utf-8"), version_of(root / package)), encoding="utf-8"
            )
            subprocess.run(
                [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(dist), str(copy)], check=True
            )
    print(*sorted(path.name for path in dist.glob("*.whl")), sep="\n")


def pinned(project: str, version: str) -> str:
    """A pyproject.toml in which the packages beside it are named by version."""
    return _BESIDE.sub(f"=={version}", project)


def version_of(package: Path) -> str:
    """The version of a package, which its pyproject.toml or its module says."""
    found = (_VERSION.search(path.read_text(encoding="utf-8")) for path in _files(package))
    return next(match[2] for match in found if match)


def _files(package: Path) -> list[Path]:
    return [package / "pyproject.toml", *sorted(package.glob("mega_*/__init__.py"))]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
