"""Commands typed, in this process."""

from __future__ import annotations

from collections.abc import Mapping

import typer
from typer.testing import CliRunner, Result

from mega_common.errors import MegaError


def typed(
    app: typer.Typer,
    *args: object,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    fails: type[MegaError] | None = None,
) -> Result:
    """What a command of `app` does, which ends well, or with this error."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env=env)
    if fails is not None:
        assert isinstance(result.exception, fails), result.output or result.exception
    else:
        assert result.exit_code == 0, result.output or result.exception
    return result
