"""`mega new`: each template trains, and its test passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mega_cli.main import main
from mega_cli.new import ExtensionTemplate
from mega_data.token_files.indexed_writer import IndexedWriter


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data as in docs/start.md, and one package of each kind."""
    out = tmp_path_factory.mktemp("new")
    (out / "data").mkdir()
    with IndexedWriter(out / "data" / "train", np.dtype(np.uint16)) as writer:
        for document in np.random.default_rng(0).integers(0, 1024, (40, 100)):
            writer.add_document(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        for kind in ExtensionTemplate:
            assert call("new", kind, f"own_{kind}") == 0
    return out


@pytest.mark.parametrize("kind", ExtensionTemplate)
def test_a_new_package_trains(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    settings = ("train.steps=2", "data.seq_length=32", "data.tokenizer=null", "lr_schedule.warmup_steps=0")
    assert call("train", f"own_{kind}/run.yaml", *(f"--set={setting}" for setting in settings)) == 0
    assert (folder / f"runs/own_{kind}/checkpoints/step-00000002").is_dir()


def run_tests(folder: Path, chosen: str) -> None:
    """Run the tests of all new packages whose names match."""
    packages = [f"own_{kind}" for kind in ExtensionTemplate]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *packages]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_tests_of_new_packages_pass(folder: Path) -> None:
    run_tests(folder, "not layout")


@pytest.mark.long
def test_new_packages_are_verified_in_parallel_layouts(folder: Path) -> None:
    run_tests(folder, "layout")


def test_no_file_keeps_the_name_of_the_template(folder: Path) -> None:
    files = [path for path in folder.glob("own_*/*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) >= 5 * len(ExtensionTemplate)
    assert not [path for path in files if "my_extension" in path.read_text() or "my-extension" in path.read_text()]


def test_a_folder_is_not_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert call("new", "mixer", "own_mixer") == 2
    assert call("new", "mixer", "Own-Mixer") == 2
