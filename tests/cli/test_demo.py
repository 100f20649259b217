"""What the demo writes; that it runs is seen by running it (`make demo`)."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from mega_cli import demo
from mega_cli.main import build_typer_app
from mega_cli.workflow import load_workflow
from mega_trainer.config.run_config import load_run_config


def test_its_plans_are_valid_and_fit_together(tmp_path: Path) -> None:
    import typer.main

    demo._write_workflow(tmp_path, nproc=2, steps=24)
    config = load_run_config(tmp_path / "run.yaml")
    workflow = load_workflow(tmp_path / "workflow.yaml", [], typer.main.get_command(build_typer_app()))
    assert config.train.steps == 24
    assert workflow.ordered_stages() == [
        "tokenizer",
        "tokens",
        "held-out",
        "train-half",
        "train-rest",
        "export",
        "score",
    ]
    stages = yaml.safe_load((tmp_path / "workflow.yaml").read_text())["stages"]
    assert stages["train-half"]["with"] == {"set": "train.steps=12", "nproc": 2}


def test_a_longer_demo_begins_anew_and_the_same_goes_on(tmp_path: Path) -> None:
    demo._write_workflow(tmp_path, nproc=1, steps=24)
    (tmp_path / "run").mkdir()
    demo._write_workflow(tmp_path, nproc=2, steps=24)
    assert (tmp_path / "run").exists()
    demo._write_workflow(tmp_path, nproc=2, steps=48)
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "run.old-1").exists()


def test_its_corpus_is_the_standard_library_with_some_held_out(tmp_path: Path) -> None:
    demo._write_corpus(tmp_path)
    train, held_out = (
        [json.loads(line)["text"] for line in (tmp_path / name).open()] for name in ("train.jsonl", "held-out.jsonl")
    )
    assert sum(map(len, train)) > 10_000_000
    assert 50_000 < sum(map(len, held_out)) < 1_000_000
    assert not set(train) & set(held_out)
