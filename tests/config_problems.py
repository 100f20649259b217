"""The form of configuration problems, and the configurations that their hints lead to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mega_common.strict_config import ConfigProblem, apply_config_overrides, find_config_problems
from mega_trainer.config.run_config import RunConfig

RULE = re.compile(
    r"(requires|conflicts with|must|is not supported|is required|has no effect|is missing)( |$|:)(?!.*[.;]$)"
)
HINT = re.compile(r"(set|remove|replace|reduce|change|shorten) .*[^.]$")
ASSIGNMENT = re.compile(r"([a-z_0-9.]+)=(\[[^\]]*\]|[^\s,;]+)")
REMOVAL = re.compile(r"remove ([a-z_0-9.]+)")


def list_problems(raw: dict[str, Any]) -> list[ConfigProblem]:
    return list(find_config_problems(RunConfig, raw))


def follow_hint(raw: dict[str, Any], hint: str) -> Iterator[dict[str, Any]]:
    """Yield the configuration after each alternative of a hint."""
    for part in re.split(r"[,;] or ", hint):
        changes = [f"{key}={value}" for key, value in ASSIGNMENT.findall(part)]
        removed = REMOVAL.findall(part)
        if changes or removed:
            changed = apply_config_overrides(raw, changes)
            for path in removed:
                remove(changed, path.split("."))
            yield changed


def remove(raw: dict[str, Any], path: list[str]) -> None:
    for part in path[:-1]:
        raw = raw[part]
    raw.pop(path[-1])


def check_form(problem: ConfigProblem) -> None:
    assert RULE.match(problem.rule), str(problem)
    assert HINT.match(problem.hint), str(problem)
