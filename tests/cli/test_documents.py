"""What README, docs and the packages' pages tell people to type, the command takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from mega_cli.main import build_typer_app
from mega_trainer.config.run_config import load_run_config

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("", "docs", "docker", "cli", "examples/*", "packages/*", "benchmarks")
PAGES = sorted(
    {page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md".lstrip("/"))} - {ROOT / "docs/log.md"}
)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command line of mega in a page's blocks of code, without variables in front and prompts."""
    for block in re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            typed = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?mega (.+)", line)
            if typed:
                yield shlex.split(re.split(r" \||&&|;|>", typed[1])[0], comments=True)


@cache
def everything() -> Any:
    """The tree of commands."""
    return typer.main.get_command(build_typer_app())


def unknown(words: list[str]) -> list[str]:
    """Commands and options among the words that there are not."""
    here = everything()
    while hasattr(here, "commands"):
        if not words or words[0].startswith("-"):
            return []
        name, *words = words
        if name not in here.commands:
            return [name]
        here = here.commands[name]
    known = {option for parameter in here.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    asked = words[: words.index("--")] if "--" in words else words
    # a word with spaces is the value of an option, such as `--serve-options '--precision bf16'`
    options = [word.split("=")[0] for word in asked if word.startswith("--") and " " not in word]
    return [option for option in options if option not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_pages_exist(page: Path) -> None:
    wrong = {shlex.join(words): unknown(words) for words in commands(page.read_text(encoding="utf-8"))}
    assert not {line: what for line, what in wrong.items() if what}


def test_commands_are_found_and_judged() -> None:
    found = list(commands("```bash\n$ OMP_NUM_THREADS=1 mega train run.yaml \\\n  --nope 3 | tee log\n```\n"))
    assert found == [["train", "run.yaml", "--nope", "3"]]
    assert unknown(found[0]) == ["--nope"]
    assert unknown(["data", "nothing"]) == ["nothing"]
    assert sum(len(list(commands(page.read_text(encoding="utf-8")))) for page in PAGES) > 20


def test_run_yaml_of_the_guide_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(# run.yaml.*?)```", text, re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    assert load_run_config(tmp_path / "run.yaml").parallel.virtual_stages == 2
