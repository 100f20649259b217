"""The form of configuration problems, and the configurations that their hints lead to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mega_common.strict_config import ConfigProblem, StrictConfig, apply_config_overrides, find_config_problems
from mega_trainer.config.run_config import RunConfig

RULE = re.compile(
    r"(requires|conflicts with|must|is not supported|is required|has no effect|is missing)( |$|:)(?!.*[.;]$)"
)
HINT = re.compile(r"(set|remove|replace|reduce|change|shorten) .*[^.]$")
ASSIGNMENT = re.compile(r"([a-z_0-9.]+)=(\[[^\]]*\]|[^\s,;]+)")
REMOVAL = re.compile(r"remove ([a-z_0-9.]+(?:(?:, | and )[a-z_0-9]+\.[a-z_0-9.]+)*)")


def list_problems(raw: dict[str, Any]) -> list[ConfigProblem]:
    return list(find_config_problems(RunConfig, raw))


def follow_hint(raw: dict[str, Any], hint: str) -> Iterator[dict[str, Any]]:
    """Yield the configuration after each alternative of a hint."""
    for part in re.split(r"[,;] or ", hint):
        changes = [f"{key}={value}" for key, value in ASSIGNMENT.findall(part)]
        removed = [path for found in REMOVAL.findall(part) for path in re.split(", | and ", found)]
        if changes or removed:
            changed = apply_config_overrides(raw, changes)
            for path in removed:
                remove(changed, path.split("."))
            yield changed


def remove(raw: dict[str, Any], path: list[str]) -> None:
    for part in path[:-1]:
        raw = raw[part]
    raw.pop(path[-1], None)


def check_hints(cls: type[StrictConfig], raw: dict[str, Any]) -> None:
    """Assert that each alternative of each hint for a configuration solves the problem and causes no other."""
    before = list(find_config_problems(cls, raw))
    rules = {(problem.path, problem.rule) for problem in before}
    for problem in before:
        for alternative in follow_hint(raw, problem.hint):
            after = {(each.path, each.rule) for each in find_config_problems(cls, alternative)}
            assert (problem.path, problem.rule) not in after, str(problem)
            assert after <= rules, (str(problem), after - rules)


def check_form(problem: ConfigProblem) -> None:
    assert RULE.match(problem.rule), str(problem)
    assert HINT.match(problem.hint), str(problem)
