"""`mega train --check` names the files that a run would start from and that are not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_cli.train import _check_inputs
from mega_common.errors import ConfigError


def _config(load: str | None, tokenizer: str | None, adapter: str | None) -> Any:
    return SimpleNamespace(
        checkpoint=SimpleNamespace(load=load),
        data=SimpleNamespace(tokenizer=tokenizer),
        lora=SimpleNamespace(init_from=adapter) if adapter else None,
    )


def test_all_missing_inputs_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="3 problems") as found:
        _check_inputs(_config("no/load", "no/tokenizer", "no/adapter"), Path("run.yaml"), data=True)
    for key in ("run.yaml", "checkpoint.load", "data.tokenizer", "lora.init_from"):
        assert key in found.value.message


def test_inputs_that_are_there_remote_or_not_asked_for_pass(tmp_path: Path) -> None:
    _check_inputs(_config(str(tmp_path), None, None), Path("run.yaml"), data=True)
    _check_inputs(_config("s3://bucket/step", "no/tokenizer", None), Path("run.yaml"), data=False)
