"""Commands on all pages are valid for the parser of the command line, and the files they name exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from doc_pages import ROOT, commands, named, pages

from mega_cli.main import build_typer_app

APP = typer.main.get_command(build_typer_app())


def parse_command(words: list[str], *, whole: bool) -> None:
    """Parse a command, and raise the error of the command line; for a `whole` command also if something is missing."""
    command, context = (
        APP,
        APP.make_context("mega", [word for word in words if word != "--debug"], resilient_parsing=True),
    )
    while (found := getattr(command, "commands", None)) and (rest := [*context._protected_args, *context.args]):
        name, *rest = rest
        if name not in found:
            raise ValueError(f"no command {name!r}")
        command = found[name]
        context = command.make_context(name, rest, parent=context, resilient_parsing=not whole)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_valid(page: Path) -> None:
    wrong = []
    for line, words, whole in commands(page):
        try:
            parse_command(words, whole=whole)
        except Exception as error:  # noqa: BLE001 - the parser raises errors of its own
            wrong.append(f"{page.name}:{line}: mega {' '.join(words)}: {error}")
    assert not wrong


@pytest.mark.parametrize("words", ["trian run.yaml", "train --no-such-option", "train --nproc many", "data preprocess"])
def test_invalid_command_is_detected(words: str) -> None:
    with pytest.raises(Exception, match=r"."):
        parse_command(words.split(), whole=True)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    assert not [name for name in named(page) if not (ROOT / name).exists()]
