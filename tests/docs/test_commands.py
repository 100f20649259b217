"""Every command that a page shows is one: the command line's own parser takes its words."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from doc_pages import ROOT, commands, named, pages

from mega_cli.main import build_typer_app

APP = typer.main.get_command(build_typer_app())


def parse(words: list[str], *, whole: bool) -> None:
    """Raise what the command line would, of a `whole` command also where it lacks something."""
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
def test_commands_are_those_of_the_command_line(page: Path) -> None:
    wrong = []
    for line, words, whole in commands(page):
        try:
            parse(words, whole=whole)
        except Exception as error:  # noqa: BLE001 - those of the parser are its own
            wrong.append(f"{page.name}:{line}: mega {' '.join(words)}: {error}")
    assert not wrong


@pytest.mark.parametrize("words", ["trian run.yaml", "train --no-such-option", "train --nproc many", "data preprocess"])
def test_a_command_that_is_none_is_found(words: str) -> None:
    with pytest.raises(Exception, match=r"."):
        parse(words.split(), whole=True)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_that_a_page_names_are_there(page: Path) -> None:
    assert not [name for name in named(page) if not (ROOT / name).exists()]
