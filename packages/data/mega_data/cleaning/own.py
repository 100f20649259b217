"""`filter: module:function`, a rule of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mega_common.errors import ConfigError, DataError
from mega_data.cleaning.verdict import Drop, Record, Rule
from mega_data.cleaning.words import Text


def own(name: str, folder: Path) -> Rule:
    """The rule that asks `module:function`, the module standing in `folder` or being installed.

    Raises:
        ConfigError: when there is no such function.
    """
    judge_record = _function(name, folder)

    def judge(_: Text, record: Record) -> Drop | None:
        try:
            answer = judge_record(record)
        except Exception as error:
            raise DataError(f"filter {name} fails with {type(error).__name__}: {error}") from error
        if isinstance(answer, str):
            return Drop(answer)
        if not isinstance(answer, bool):
            raise DataError(f"filter {name} returns {answer!r}", hint="it must return True, False or a reason")
        return None if answer else Drop(name)

    return judge


def _function(name: str, folder: Path) -> Callable[[Record], Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = _beside(folder / f"{module_name}.py", module_name) or importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"filter {name}: {error}", hint=f"module.py stands in {folder}, or the module is installed"
        ) from error
    if not callable(function):
        raise ConfigError(f"filter {name}: is no function")
    return function  # type: ignore[no-any-return]


def _beside(path: Path, name: str) -> ModuleType | None:
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
