"""`mega new`: write the package of a new extension, from templates that run as they are."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mega_common.errors import ConfigError

EXAMPLES = """Examples:

  mega new mixer my_mixer

  mega new optimizer my_optimizer --output extensions/my_optimizer
"""
TEMPLATES = Path(__file__).parent / "templates"
PLACEHOLDER = "my_extension"  # name of the extension in the templates


class ExtensionTemplate(StrEnum):
    """Kinds of extensions that `mega new` has a template for."""

    MIXER = "mixer"
    OBJECTIVE = "objective"
    DATA = "data"
    OPTIMIZER = "optimizer"
    FAMILY = "family"


def new_command(
    kind: Annotated[ExtensionTemplate, typer.Argument(help="Kind of extension.")],
    name: Annotated[str, typer.Argument(help="Name of the extension and of its entry, e.g. my_mixer.")],
    output: Annotated[Path | None, typer.Option(help="Folder to create; default: NAME.")] = None,
) -> None:
    """Write the package of a new extension: its code, a test, a README, and a run.yaml that trains with it.

    The code works as it is: change it to yours. docs/extensions.md explains the interface.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"NAME must be lower-case letters, digits and _, found {name!r}", hint="e.g. my_mixer")
    folder = output or Path(name)
    if folder.exists():
        raise ConfigError(f"{folder} already exists", hint="give another NAME, or another --output")
    folder.mkdir(parents=True)
    files = {
        f"{name}.py": f"{kind}.py", f"test_{name}.py": f"{kind}_test.py", "run.yaml": f"{kind}.yaml",
        "README.md": "README.md", "pyproject.toml": "pyproject.toml",
    }  # fmt: skip
    for target, template in files.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        text = text.replace(f"./{PLACEHOLDER}/", f"./{folder}/").replace(f" {PLACEHOLDER}/", f" {folder}/")
        text = text.replace(PLACEHOLDER, name).replace(PLACEHOLDER.replace("_", "-"), name.replace("_", "-"))
        (folder / target).write_text(text, encoding="utf-8")
    print(f"{folder}: {', '.join(files)}\nnext: mega train {folder}/run.yaml, on the data of docs/start.md")
