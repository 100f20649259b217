from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from commands import typed
from local_tasks import assert_same, write_model, write_tasks
from typer.testing import Result

import mega_cli
from mega_ckpt.source import read_model_config
from mega_cli.compare import compare_command
from mega_cli.eval import eval_command
from mega_common.errors import ConfigError, DataError, MegaError, MissingPackageError
from mega_trainer.config.extensions import load_extensions

pytest.importorskip("lm_eval", reason="lm-evaluation-harness")
pytestmark = pytest.mark.usefixtures("quick_harness")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    write_tasks(folder, 6)
    return folder


def mega(*args: object, fails: type[MegaError] | None = None) -> Result:
    app = typer.Typer()
    app.command("eval")(eval_command)
    app.command("compare")(compare_command)
    return typed(app, *args, fails=fails)


def test_two_models_on_tasks_compared(folder: Path, tmp_path: Path) -> None:
    tasks = f"{folder / 'choice.yaml'},{folder / 'rolling.yaml'}"
    files, picture = [], ["--picture", tmp_path / "a.svg"] if find_spec("matplotlib") else []
    for precision in ("fp32", "bf16"):
        files.append(tmp_path / f"{precision}.json")
        shown = mega(
            "eval", folder, "--tasks", tasks, "--precision", precision, "--device", "cpu", "--log-samples", "--output", files[-1],
            "--limit", 4, "--csv", tmp_path / "a.csv", *picture,
        )  # fmt: skip
        assert "local_choice" in shown.stdout
        assert "bits_per_byte" in shown.stdout
    results = json.loads(files[0].read_text())
    assert results["config"]["model_args"] == {"model": str(folder), "precision": "fp32", "max_length": 64}
    assert len(results["samples"]["local_choice"]) == 4
    assert "local_choice,none,acc," in (tmp_path / "a.csv").read_text()
    assert not picture or "<!-- local_choice -->" in (tmp_path / "a.svg").read_text()
    differing = tmp_path / "differing.jsonl"
    found = json.loads(mega("compare", *files, "--json", "-", "--per-sample", differing).stdout)
    assert {(one["task"], one["metric"]) for one in found} >= {
        ("local_choice", "acc"),
        ("local_rolling", "bits_per_byte"),
    }
    assert sum(one["lower"] + one["higher"] for one in found) == len(differing.read_text().splitlines()) > 0
    told = mega("compare", files[0], files[0], "--json", tmp_path / "same.json").stdout
    assert "mcnemar" in told
    assert "t-test" in told
    assert {one["p"] for one in json.loads((tmp_path / "same.json").read_text())} == {1.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "requires --data or --tasks"),
        (["--data", "a", "--tasks", "b"], "--data conflicts with --tasks"),
        (["--data", "a", "--limit", 3], "--limit requires --tasks, found --data"),
        (["--data", "a", "--tp", 1], "--tp requires --tasks, found --data"),
        (["--tasks", "a", "--json", "x"], "--json requires --data, found --tasks"),
        (["--tasks", "a", "--no-check-tokenizer"], "--check-tokenizer requires --data"),
        (["--tasks", "none.yaml"], "none.yaml: the task file does not exist"),
        (["--tasks", "a", "--include-path", "nowhere"], "nowhere: the folder does not exist"),
        (["--tasks", "a", "--nproc", 3, "--tp", 2], "3 ranks do not fit the layout tp 2, ep 1, pp 1"),
        (["--tasks", "a", "--tp", 2, "--ep", 3, "--pp", 2], "6 ranks do not fit the layout tp 2, ep 3, pp 2"),
    ],
)
def test_options_that_do_not_go_together(folder: Path, options: list[object], said: str) -> None:
    assert said in str(mega("eval", folder, *options, fails=ConfigError).exception)


def test_tasks_want_the_harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    error = mega("eval", folder, "--tasks", "hellaswag", fails=MissingPackageError).exception
    assert "pip install 'packages/eval[tasks]'" in str(error)


def test_a_tokenizer_without_a_template_has_no_chats(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    options = ["--tasks", folder / "choice.yaml", "--apply-chat-template"]
    assert "no chat template" in str(mega("eval", tmp_path, *options, fails=DataError).exception)


def test_tasks_on_a_folder_of_an_extensions_family(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    extension = str(Path(mega_cli.__file__).parent / "templates/family.py")
    (family,) = load_extensions([extension]).families
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(family.write_config_json(read_model_config(folder))))
    options = ["--tasks", folder / "choice.yaml", "--limit", 2, "--device", "cpu", "--extension", extension]
    assert mega("eval", tmp_path, *options).stdout == mega("eval", folder, *options).stdout


@pytest.mark.long
def test_ranks_started_by_the_command_give_what_one_gives(folder: Path, tmp_path: Path) -> None:
    tasks = ",".join(str(folder / f"{kind}.yaml") for kind in ("choice", "rolling", "generation"))
    found = []
    for options in ([], ["--nproc", "4", "--tp", "2"]):
        out = tmp_path / f"{len(options)}.json"
        command = [sys.executable, "-m", "mega_cli.main", "eval", str(folder), "--tasks", tasks, "--output", str(out)]
        done = subprocess.run([*command, "--log-samples", "--offline", *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("local_choice") == 1  # one rank tells
        found.append(json.loads(out.read_text()))
    assert_same(found[1], found[0])
