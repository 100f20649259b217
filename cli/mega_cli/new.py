"""`mega new`: write the package of a new extension, from templates that run as they are."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from mega_common.atomic_files import create_atomic_folder
from mega_common.errors import ConfigError

EXAMPLES = """Examples:

  mega new mixer my_mixer

  mega new attention_score my_bias

  mega new optimizer my_optimizer --output extensions/my_optimizer
"""
TEMPLATES = Path(__file__).parent / "templates"
PLACEHOLDER = "my_extension"  # name of the extension in the templates
RUN_FILE = "run.yaml"


class ExtensionTemplate(StrEnum):
    """Kinds of extensions that `mega new` has a template for."""

    MIXER = "mixer"
    FEED_FORWARD = "feed_forward"
    NORM = "norm"
    ACTIVATION = "activation"
    POSITION = "position"
    ATTENTION_SCORE = "attention_score"
    OBJECTIVE = "objective"
    OPTIMIZER = "optimizer"
    SCHEDULE = "schedule"
    CALLBACK = "callback"
    DATA = "data"
    FAMILY = "family"
    KERNEL = "kernel"
    SAMPLER = "sampler"
    TOKENIZER = "tokenizer"
    REWARD = "reward"
    FILTER = "filter"


FUNCTIONS = (ExtensionTemplate.REWARD, ExtensionTemplate.FILTER)  # named directly, without `EXTENSION`


def new_command(
    kind: Annotated[ExtensionTemplate, typer.Argument(help="Kind of extension; filter is a cleaning rule.")],
    name: Annotated[str, typer.Argument(help="Name of the extension and of its entry, e.g. my_mixer.")],
    output: Annotated[Path | None, typer.Option(help="Folder to create; default: NAME.")] = None,
) -> None:
    """Write the package of a new extension: its code, a test, a README, and a run.yaml that trains with it.

    The code works as it is: change it to yours. docs/extensions.md explains the interface.
    """
    _check_name(kind, name)
    folder = output or Path(name)
    if folder.exists():
        raise ConfigError(f"{folder} already exists", hint="give another NAME, or another --output")
    files = {target: _fill_in(text, name, folder) for target, text in _read_templates(kind, name).items()}
    with create_atomic_folder(folder) as partial:
        for target, text in files.items():
            (partial / target).write_text(text, encoding="utf-8")
    print(f"{folder}: {', '.join(files)}\nnext: the commands in {folder}/{RUN_FILE}, on the data of docs/start.md")


def _check_name(kind: ExtensionTemplate, name: str) -> None:
    """Check that a name can be that of a module and of an entry.

    Raises:
        ConfigError: if it cannot.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or iskeyword(name):
        raise ConfigError(
            f"NAME must be lower-case letters, digits and _, and not a keyword of Python, found {name!r}",
            hint="e.g. my_mixer",
        )
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise ConfigError(f"NAME = {name!r} is the name of an installed module", hint=f"e.g. my_{name}")
    from mega_trainer.config.extensions import BUILT_IN

    if any(name in names for names in BUILT_IN.values()):
        raise ConfigError(f"NAME = {name!r} is a name of mega", hint=f"e.g. my_{name}")


def _read_templates(kind: ExtensionTemplate, name: str) -> dict[str, str]:
    """Return the texts of the templates of a kind, by the name of the file to write."""
    own_test = TEMPLATES / f"{kind}_test.py"
    paths = {
        f"{name}.py": TEMPLATES / f"{kind}.py",
        f"test_{name}.py": own_test if own_test.exists() else TEMPLATES / "model_test.py",
        **{path.name.removeprefix(f"{kind}."): path for path in sorted(TEMPLATES.glob(f"{kind}.*.*"))},
        "README.md": TEMPLATES / ("function.md" if kind in FUNCTIONS else "README.md"),
    }
    found = {target: path.read_text(encoding="utf-8") for target, path in paths.items()}
    run = (TEMPLATES / f"{kind}.yaml").read_text(encoding="utf-8")
    usual = (TEMPLATES / RUN_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    rest = "".join(line for line in usual if f"\n{line.partition(':')[0]}:" not in run)
    project = (TEMPLATES / "pyproject.toml").read_text(encoding="utf-8")
    if kind in FUNCTIONS:
        project = re.sub(r"# Installed,.*?(?=\[tool)", "", project, flags=re.DOTALL)
    return {**found, RUN_FILE: run + rest, "pyproject.toml": project}


def _fill_in(text: str, name: str, folder: Path) -> str:
    """Return the text of a template with the name and the folder of the extension."""
    text = text.replace("./FOLDER", str(folder) if folder.is_absolute() else f"./{folder}").replace(
        "FOLDER", str(folder)
    )
    return text.replace(PLACEHOLDER, name).replace(PLACEHOLDER.replace("_", "-"), name.replace("_", "-"))
