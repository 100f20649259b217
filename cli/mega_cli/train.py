"""`mega train`: check the run, then train it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  mega train run.yaml

  mega train run.yaml --set batch.micro=2 --set optimizer.lr=1e-4

  mega train run.yaml --check

  mega train --schema > run.schema.json
"""


def train_command(
    run: Annotated[Path | None, typer.Argument(help="The run's configuration, run.yaml.", show_default=False)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: a.b=value. Repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the configuration, print it resolved, and stop.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run.yaml, for editors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell more.")] = False,
) -> None:
    """Train a model as run.yaml says. The same command goes on from the newest checkpoint of its output folder."""
    import json

    import yaml

    from mega_common.config import json_schema
    from mega_common.errors import ConfigError
    from mega_common.log import setup_log
    from mega_trainer.config import RunConfig, load_run

    if schema:
        print(json.dumps(json_schema(RunConfig), indent=1))
        return
    if run is None:
        raise ConfigError("no run.yaml given", hint="mega train run.yaml; see mega train --help")
    config = load_run(run, set_ or [])
    if check:
        print(yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False), end="")
        return
    setup_log(verbose=verbose)
    from mega_trainer.build import Ranks
    from mega_trainer.train import run as train

    train(config, Ranks())
