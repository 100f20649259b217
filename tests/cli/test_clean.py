from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mega_cli.data import app
from mega_common.errors import ConfigError


def clean(*args: object) -> tuple[int, str]:
    """Exit status and standard output of `mega data clean ARGS`; a MegaError comes through, as to `mega`."""
    done = CliRunner().invoke(app, ["clean", *map(str, args)], catch_exceptions=False, env={"COLUMNS": "200"})
    return done.exit_code, done.stdout


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [{"text": text} for text in ("one two three", "one", "one two three", "mail me: a@example.com")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "clean.yaml").write_text("length: {min_words: 2}\npii:\nduplicates:\n")
    return tmp_path


def test_it_tells_what_went_and_why(corpus: Path) -> None:
    given = ("--input", corpus / "a.jsonl", "--output", corpus / "out", "--workers", 1)
    status, told = clean(*given, "--config", corpus / "clean.yaml")
    assert status == 0
    assert told.splitlines() == [
        f"{corpus / 'out'}: 2 of 4 documents kept, 29B of 51B of text (56.9%)",
        "  length                      1 dropped: words below 2 1",
        "  pii                         1 changed: 1 email",
        "  exact                       1 dropped: duplicate 1",
    ]


def test_set_stands_on_top_of_the_file(corpus: Path) -> None:
    given = ("--input", corpus / "a.jsonl", "--output", corpus / "out", "--workers", 1)
    status, told = clean(*given, "--config", corpus / "clean.yaml", "--set", "length.min_words=1", "--set", "pii=false")
    assert (status, "3 of 4" in told) == (0, True)


def test_no_rule_is_a_mistake(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"mega data clean requires rules"):
        clean("--input", corpus / "a.jsonl", "--output", corpus / "out")
