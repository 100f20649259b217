"""Strict configuration: unknown keys are refused, every problem is told at once, with its value and a way out.

A configuration is a tree of `Config` models. `parse` checks a plain mapping (from YAML, say) against it and raises one
`ConfigError` that lists all problems; `apply_overrides` puts `--set a.b=c` on top of a mapping before that.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from mega_common.errors import ConfigError
from mega_common.parsing import MISFITS, CoreLoader, parse_yaml, read_settings


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: where, what stands there, the rule it breaks, and a way out."""

    path: str
    rule: str
    value: object = None
    hint: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.path or '(whole file)'}{shown}: {self.rule}" + (f" -> {self.hint}" if self.hint else "")


class Config(BaseModel):
    """Base of every configuration section. Frozen; unknown keys are errors.

    Rules between fields go into `problems`, which is asked after the fields themselves are valid; all sections are
    asked before anything is raised, so a user sees every problem in one run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong between fields. Paths are relative to this section."""
        return iter(())

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Check `raw` and build the configuration.

        Raises:
            ConfigError: with every problem found, one a line.
        """
        found = list(_problems_of(cls, raw))
        if found:
            raise_problems(found, source)
        return cls.model_validate(raw)


def raise_problems(found: Sequence[Problem], source: str) -> None:
    """Raise one `ConfigError` that lists `found`."""
    count = f"{len(found)} problem" + ("s" if len(found) != 1 else "")
    raise ConfigError(f"{source}: {count}\n" + "\n".join(f"  {problem}" for problem in found))


def _problems_of(cls: type[Config], raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Field errors of the whole tree, then the rules: of the tree if unknown keys were all, else of its valid parts."""
    try:
        yield from _rule_problems(cls.model_validate(raw), "")
        return
    except ValidationError as error:
        details = error.errors(include_url=False)
    yield from _merged(_field_problem(cls, raw, detail) for detail in details)
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    yield from _rules_of_valid_parts(cls, _without(raw, unknown), "")


def _merged(found: Iterable[Problem]) -> list[Problem]:
    """One problem a path: a value that fits no member of a union is told once, with all that it could be."""
    by_path: dict[str, Problem] = {}
    for problem in found:
        earlier = by_path.get(problem.path)
        rules = dict.fromkeys([earlier.rule, problem.rule] if earlier else [problem.rule])
        by_path[problem.path] = replace(problem, rule=", or ".join(rules))
    return list(by_path.values())


def _without(raw: Mapping[str, Any], locations: Iterable[Sequence[int | str]]) -> dict[str, Any]:
    result: dict[str, Any] = _copy(raw)
    for location in locations:
        *parents, last = _in_document(raw, location)
        node: Any = result
        for part in parents:
            node = node[part]
        del node[last]
    return result


def _rules_of_valid_parts(cls: type[Config], raw: Mapping[str, Any], path: str) -> Iterator[Problem]:
    try:
        valid = cls.model_validate(raw)
    except ValidationError:
        for name, field in cls.model_fields.items():
            section, inner = _section_type(field.annotation), raw.get(field.alias or name)
            if section is not None and isinstance(inner, Mapping):
                yield from _rules_of_valid_parts(section, inner, f"{path}.{field.alias or name}".strip("."))
    else:
        yield from _rule_problems(valid, path)


def _rule_problems(config: Config, path: str) -> Iterator[Problem]:
    for problem in config.problems():
        yield replace(problem, path=f"{path}.{problem.path}".strip("."))
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        for index, item in enumerate(value) if isinstance(value, list | tuple) else [(None, value)]:
            if isinstance(item, Config):
                label = (field.alias or name) + ("" if index is None else f".{index}")
                yield from _rule_problems(item, f"{path}.{label}".strip("."))


def _section_type(annotation: object) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_type(inner))), None)


def _field_problem(cls: type[Config], raw: Mapping[str, Any], detail: Mapping[str, Any]) -> Problem:
    location = [str(part) for part in _in_document(raw, detail["loc"])]
    if detail["type"] == "missing":
        return Problem(".".join([*location, str(detail["loc"][-1])]), "required, but not given")
    path, value = ".".join(location), detail.get("input")
    if detail["type"] == "extra_forbidden":
        known = _keys_at(cls, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return Problem(path, "unknown key", hint=hint)
    rule = str(detail["msg"]).removeprefix("Value error, ")
    return Problem(path, rule[:1].lower() + rule[1:], value if not isinstance(value, Mapping) else None)


def _in_document(raw: Any, location: Sequence[int | str]) -> list[int | str]:
    """The parts of a location that stand in the document; pydantic adds the names of a union's members, for one."""
    found: list[int | str] = []
    for part in location:
        keys = range(len(raw)) if isinstance(raw, list) else raw if isinstance(raw, Mapping) else ()
        if part in keys:
            raw = raw[part]
            found.append(part)
    return found


def _keys_at(cls: type[Config], location: Sequence[str]) -> list[str]:
    for part in location:
        match = next((f for n, f in cls.model_fields.items() if part in (n, f.alias)), None)
        section = _section_type(match.annotation) if match else None
        if section is not None:
            cls = section
    return [field.alias or name for name, field in cls.model_fields.items()]


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: when the file is missing, is not YAML, repeats a key or is not a mapping.
    """
    raw = parse_yaml(read_settings(path), str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys with values, found {type(raw).__name__}")
    return raw


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `raw` with each `a.b=value` set; values are read as YAML, sections are made when missing.

    A number as a part of the path is an index into a list: `data.train.0.weight=0.5`.

    Raises:
        ConfigError: when an override is not of that form or goes through a value that is not a section.
    """
    result: dict[str, Any] = _copy(raw)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {override}: expected the form a.b=value")
        try:
            value = yaml.load(text, CoreLoader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError:
            value = text
        except (ConfigError, *MISFITS) as error:
            raise ConfigError(f"--set {override[:80]}: {error}") from None
        node: Any = result
        *parents, last = path.split(".")
        for part in parents:
            node = _child(node, part, override)
        _assign(node, last, value, override)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    if isinstance(node, dict):
        if not isinstance(node.get(part), dict | list):
            if node.get(part) is not None:
                raise ConfigError(f"--set {override}: {part!r} is a value, not a section")
            node[part] = {}
        return node[part]
    raise ConfigError(f"--set {override}: no section {part!r}")


def _assign(node: Any, part: str, value: object, override: str) -> None:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        node[int(part)] = value
    elif isinstance(node, dict):
        node[part] = value
    else:
        raise ConfigError(f"--set {override}: no place {part!r}")


def json_schema(cls: type[Config]) -> dict[str, Any]:
    """The JSON schema of a configuration, for editors that complete and check YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema(by_alias=True)}
