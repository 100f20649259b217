"""Strict configuration sections: unknown keys are errors, and all problems are reported at once with value and fix.

A configuration is a tree of `StrictConfig` models. `parse` validates a plain mapping (for example from YAML) and raises
one `ConfigError` that lists all problems; before that, `apply_config_overrides` applies `--set a.b=c` to the mapping.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mega_common.bounded_parsing import TAG_ERRORS, StrictYamlLoader, parse_yaml_text, read_settings_file
from mega_common.errors import ConfigError


@dataclass(frozen=True)
class ConfigProblem:
    """One problem of a configuration.
    It has the key's path (`model.num_layers`), its value, the violated rule and a hint for a fix.
    """

    path: str
    rule: str
    value: object = None
    hint: str = ""
    unknown_choice: bool = False  # the value names no known choice, so that rules about it are not meaningful

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {format_setting_value(self.value)}"
        return f"{self.path or '(whole file)'}{shown}: {self.rule}" + (f" -> {self.hint}" if self.hint else "")


def format_setting_value(value: object) -> str:
    """Return a value of a setting as a user writes it in YAML or JSON: true, null, 'a/path', [1, 2]."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {format_setting_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_setting_value, value)) + "]"
    if isinstance(value, BaseModel):
        return format_setting_value(value.model_dump(mode="json", exclude_unset=True))
    names: dict[object, str] = {True: "true", False: "false", None: "null"}
    return (
        names[value]
        if value is None or isinstance(value, bool)
        else repr(str(value) if isinstance(value, Path) else value)
    )


_PYDANTIC_RULES = {
    r"Input should be a valid integer.*": "must be a whole number",
    r"Input should be a valid number.*": "must be a number",
    r"Input should be a finite number": "must be a finite number",
    r"Input should be a valid boolean.*": "must be true or false",
    r"Input should be a valid string": "must be a text",
    r"Input should be a valid (?:list|tuple|set)": "must be a list",
    r"Input should be a valid (?:dictionary|mapping).*": "must be a section of keys with values",
    r"Input should be ": "must be ",
    r"(?:\w+) should have at (least|most) (\d+) (\w+)(?: after validation)?, not .*": r"must have at \1 \2 \3",
}

_SYNONYMS = {  # common terms of other trainers, and the option of run.yaml of that meaning
    "ppo": "grpo", "rl": "grpo", "rlhf": "grpo", "sft": "cross_entropy", "chat": "conversations",
    "swish": "swiglu", "silu": "swiglu", "rotary": "rope", "absolute": "learned", "chats": "conversations", "instructions": "conversations", "preferences": "pairs", "mlm": "masked", "lm": "text",
    "sigmoid": "dpo",
    "json": "text", "jsonl": "text", "parquet": "text", "csv": "text", "txt": "text",
}  # fmt: skip
MIN_FOREIGN_KEYS, SHOWN_KEYS, MAX_OPTIONS, MAX_SUGGESTED_DEPTH = 3, 4, 8, 2


class StrictConfig(BaseModel):
    """Base of every configuration section: a frozen pydantic model in which unknown keys are errors.

    Rules between fields go into `problems`, which is called when the fields themselves are valid. All sections are
    checked before an error is raised, so that one run reports every problem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _remove_null_lists(cls, raw: object) -> object:
        """Remove the keys of lists that are null: `--set data.raw.labels=null` restores the default."""
        if not isinstance(raw, Mapping) or None not in raw.values():
            return raw
        lists = {
            field.alias or name
            for name, field in cls.model_fields.items()
            if isinstance(field.get_default(call_default_factory=True), list | tuple)
        }
        return {key: value for key, value in raw.items() if value is not None or key not in lists}

    @classmethod
    def load_foreign_keys(cls) -> Mapping[str, str]:
        """Return the fix for each key of other programs' settings: a setting of the same meaning, or a sentence."""
        return {}

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between fields, with key paths relative to this section; sections override it."""
        return iter(())

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Return the configuration that a raw mapping gives; ConfigError with every problem, one per line."""
        problems = list(_find_foreign_file(cls, raw)) or list(find_config_problems(cls, raw))
        if problems:
            raise_config_error(problems, source)
        return cls.model_validate(raw)


def raise_config_error(problems: Sequence[ConfigProblem], source: str) -> None:
    """Raise one `ConfigError` that lists all `problems`; `source` names the file or other origin."""
    count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
    raise ConfigError(f"{source}: {count}\n" + "\n".join(f"  {problem}" for problem in problems))


def _find_foreign_file(cls: type[StrictConfig], raw: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield one problem if a file has several keys and none of them is known: it is a file of another kind."""
    known = _list_known_keys(cls, [])
    required = [field.alias or name for name, field in cls.model_fields.items() if field.is_required()]
    if len(raw) < MIN_FOREIGN_KEYS or raw.keys() & {*required}:
        return
    fixes, expected = cls.load_foreign_keys(), required or known
    if not any(key not in fixes and difflib.get_close_matches(key, known) for key in map(str, raw)):
        found = ", ".join(map(str, list(raw)[:SHOWN_KEYS]))
        rule = f"must have keys such as {', '.join(expected[:SHOWN_KEYS])}, found only other keys ({found} ...)"
        translated = "translate another trainer's file with mega train --from-hf-args FILE or --from-deepspeed FILE"
        foreign = any(key in fixes for key in raw)
        yield ConfigProblem("", rule, hint=translated if foreign else "give a file of the required kind")


def find_config_problems(cls: type[StrictConfig], raw: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield field errors of the whole tree, then violated rules of its valid parts.

    If only unknown keys are wrong, the rules are those of the whole tree. Rules about an unknown choice are left out.
    """
    try:
        problems = list(_rule_problems(cls.model_validate(raw), ""))
        unknown = [rf"\b{re.escape(problem.path)}\b" for problem in problems if problem.unknown_choice]
        yield from (
            problem
            for problem in problems
            if problem.unknown_choice or not any(re.search(path, f"{problem.path} {problem.rule}") for path in unknown)
        )
        return
    except ValidationError as error:
        details = error.errors(include_url=False)
    yield from _merge_by_path(problem for detail in details for problem in _find_field_problems(cls, raw, detail))
    extra = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    yield from _rules_of_valid_parts(cls, _remove_keys(raw, extra), "")


def find_conflicting_settings(config: StrictConfig, section: str, names: Iterable[str]) -> Iterator[ConfigProblem]:
    """Yield a problem for each setting among `names` that is given (true) and not supported with `section`."""
    for name in names:
        if getattr(config, name):
            yield ConfigProblem(name, f"is not supported with {section}", hint=f"leave out {name}")


def find_changed_settings(
    config: StrictConfig, section: str, required: Mapping[str, object]
) -> Iterator[ConfigProblem]:
    """Yield a problem for each setting that differs from its required value, the only one supported with `section`."""
    for name, value in required.items():
        if getattr(config, name) != value:
            fix = "leave it out" if value is None else f"{name}: {str(value).lower()}"
            yield ConfigProblem(name, f"is not supported with {section}", hint=fix)


def _merge_by_path(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """Merge problems with one path: a value that fits no member of a union is reported once with all alternatives."""
    by_path: dict[str, ConfigProblem] = {}
    for problem in problems:
        earlier = by_path.get(problem.path)
        rules = dict.fromkeys([earlier.rule, problem.rule] if earlier else [problem.rule])
        hint = earlier.hint if earlier and problem.rule == "must be a list" else problem.hint
        by_path[problem.path] = replace(problem, rule=", or ".join(rules), hint=hint)
    deeper = [path for path in by_path if "." in path]
    return [
        problem  # not that a value is no text, if it is a list with a problem inside
        for path, problem in by_path.items()
        if not (problem.rule.startswith("must be a ") and any(other.startswith(f"{path}.") for other in deeper))
    ]


def _remove_keys(raw: Mapping[str, Any], locations: Iterable[Sequence[int | str]]) -> dict[str, Any]:
    result: dict[str, Any] = _copy_tree(raw)
    for location in locations:
        *parents, last = _document_location(raw, location)
        node: Any = result
        for part in parents:
            node = node[part]
        del node[last]
    return result


def _rules_of_valid_parts(cls: type[StrictConfig], raw: Mapping[str, Any], path: str) -> Iterator[ConfigProblem]:
    try:
        valid = cls.model_validate(raw)
    except ValidationError:
        for name, field in cls.model_fields.items():
            section, inner = _section_type(field.annotation), raw.get(field.alias or name)
            if section is not None and isinstance(inner, Mapping):
                yield from _rules_of_valid_parts(section, inner, f"{path}.{field.alias or name}".strip("."))
    else:
        yield from _rule_problems(valid, path)


def _rule_problems(config: StrictConfig, path: str) -> Iterator[ConfigProblem]:
    for problem in config.problems():
        full = f"{path}.{problem.path}".strip(".")
        hint = _qualify_hint(problem.hint, path, full, type(config)) if path else problem.hint
        yield replace(problem, path=full, hint=hint)
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        for index, item in enumerate(value) if isinstance(value, list | tuple) else [(None, value)]:
            if isinstance(item, StrictConfig):
                label = (field.alias or name) + ("" if index is None else f".{index}")
                yield from _rule_problems(item, f"{path}.{label}".strip("."))


def _qualify_hint(hint: str, path: str, key: str, section: type[StrictConfig]) -> str:
    """Return a hint about the section at `path` with settings of the whole file: `head_dim: 8` as `set model.head_dim=8`.
    `key` is the whole path of the setting with the problem.
    """
    field = rf"(?:{'|'.join(f.alias or name for name, f in section.model_fields.items())})(?:\.[a-z_.0-9]+)?\b(?!=)"
    hint = re.sub(rf"(?:set )?\b({field}): (\[[^\]]*\]|[^\s,]+)", rf"set {path}.\1=\2", hint)
    listed = rf"\b(?:leave out|remove|set) {field}(?:(?:, | and ){field})*"
    hint = re.sub(listed, lambda found: re.sub(rf"\b({field})", rf"{path}.\1", found[0]), hint)
    return hint.replace("leave it out", f"leave out {key}").replace("leave out", "remove")


def _section_type(annotation: object) -> type[StrictConfig] | None:
    if isinstance(annotation, type) and issubclass(annotation, StrictConfig):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_type(inner))), None)


def _find_field_problems(
    cls: type[StrictConfig], raw: Mapping[str, Any], detail: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield the problem of one error of pydantic; for an unknown section with keys of other programs, one for each key."""
    location = [str(part) for part in _document_location(raw, detail["loc"])]
    path, value = ".".join(location), detail.get("input")
    if detail["type"] == "missing":
        yield ConfigProblem(".".join([*location, str(detail["loc"][-1])]), "is required")
    elif detail["type"] != "extra_forbidden":
        yield _describe_field_problem(cls, location, detail)
    else:
        hints = {".".join(key): suggest_other_key(cls, key, item) for key, item in _list_leaves(location, value)}
        if not any(hints.values()):
            hints = {path: _find_foreign_key_fix(cls, location, value) or _suggest_known_key(cls, location)}
        for key, hint in hints.items():
            yield ConfigProblem(key, "unknown key", hint=hint or "remove it; no setting has this name")


def _list_leaves(location: list[str], value: object) -> Iterator[tuple[list[str], object]]:
    """Yield the path and value of each setting in an unknown section; nothing for a value that is no section."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        path = [*location, str(key)]
        yield from _list_leaves(path, item) if isinstance(item, Mapping) else [(path, item)]


def _find_foreign_key_fix(cls: type[StrictConfig], location: Sequence[str], value: object) -> str:
    """Return the fix for a key of another program's settings: `set train.steps=5 instead`; empty if it is not known."""
    fixes = cls.load_foreign_keys()
    names = [part.strip().lower().replace("-", "_") for part in location if not part.isdigit()]
    paths = (".".join(names[start:]) for start in range(len(names)))
    fix = next((fixes[path] for path in paths if path in fixes), "")
    if fix and (value is None or (value is False and " " in fix)):
        return "remove it"
    if not fix or " " in fix:
        return fix
    if fix.endswith(".kind") and isinstance(value, str):
        value = _SYNONYMS.get(value.lower(), value)
    shown = "" if isinstance(value, Mapping) else f"={value if isinstance(value, str) else format_setting_value(value)}"
    return f"set {fix}{shown} instead"


def suggest_other_key(cls: type[StrictConfig], location: Sequence[str], value: object) -> str:
    """Return the fix for a key of another program or of another section of the configuration `cls`, else an empty text."""
    paths = list(_find_key_paths(cls, location[-1].replace("-", "_")))
    moved = f"did you mean {paths[0]}?" if len(paths) == 1 else ""
    return _find_foreign_key_fix(cls, location, value) or moved


def _suggest_known_key(cls: type[StrictConfig], location: Sequence[str]) -> str:
    """Return the hint for an unknown key: the nearest known keys, or else all known keys of its section."""
    known, wanted = _list_known_keys(cls, location[:-1]), location[-1].strip()
    if joined := re.fullmatch(r"(\w+):(\S+)", wanted):
        return f"write a space after the colon: {joined[1]}: {joined[2]}"
    parted = [name for name in known if set(wanted.split("_")) < set(name.split("_"))]
    near = [repr(name) for name in parted[:2] or difflib.get_close_matches(wanted, known, n=1)]
    near += sorted(_find_key_paths(cls, wanted))[:2]
    if near:
        return f"did you mean {' or '.join(near)}?"
    foreign = difflib.get_close_matches(wanted, cls.load_foreign_keys(), n=1, cutoff=0.85)
    fix = _find_foreign_key_fix(cls, foreign, {}) if foreign else ""
    return fix or f"known keys: {', '.join(sorted(known))}"


def _describe_field_problem(cls: type[StrictConfig], location: list[str], detail: Mapping[str, Any]) -> ConfigProblem:
    """Return the problem of a value that its setting does not accept."""
    path, value = ".".join(location), detail.get("input")
    rule, hint = describe_pydantic_rule(str(detail["msg"])), ""
    if detail["type"] == "literal_error" and isinstance(value, str):
        meant = find_near_option(value, re.findall(r"'([^']*)'", rule))
        hint = f"did you mean {meant!r}?" if meant else ""
    elif rule.startswith("must be a section"):
        fix = _find_foreign_key_fix(cls, location, value)
        hint = fix or _suggest_section_key(_find_section(cls, location), path, value)
    elif rule == "must be a list":
        field = _find_section(cls, location[:-1]).model_fields.get(location[-1])
        default = field.get_default(call_default_factory=True) if field and not field.is_required() else None
        listed = default if isinstance(default, list | tuple) and len(default) > 1 else [value]
        hint = f"set {path}={format_setting_value(listed)}"
    return ConfigProblem(path, rule, value if not isinstance(value, Mapping) else None, hint)


def find_near_option(value: str, options: Sequence[str]) -> str | None:
    """Return the option that a user most likely meant by an unknown value, or None.
    It has the same meaning or a similar spelling; short ones must be almost equal: 'ppo' is not a misspelled 'ipo'. Digits
    must be the same: 'fp4' is not a misspelled 'fp64'.
    """
    meant = _SYNONYMS.get(value.lower())
    if meant in options:
        return meant
    fits = [option for option in options if sorted(re.sub(r"\D", "", option)) == sorted(re.sub(r"\D", "", value))]
    return next(iter(difflib.get_close_matches(value, fits, n=1, cutoff=0.6 if len(value) > 4 else 0.8)), None)


def _find_key_paths(cls: type[StrictConfig], key: str, path: str = "") -> Iterator[str]:
    """Yield the paths of the sections' keys that are called `key`, anywhere in a configuration."""
    for name, field in cls.model_fields.items():
        label = path + (field.alias or name)
        if path and label == path + key:
            yield label
        section = _section_type(field.annotation)
        if section is not None and path.count(".") < MAX_SUGGESTED_DEPTH:
            yield from _find_key_paths(section, key, f"{label}.")


def describe_pydantic_rule(message: str) -> str:
    """Return pydantic's message of a violated rule in the words of the other rules: "must be a whole number"."""
    message = message.removeprefix("Value error, ")
    for pattern, rule in _PYDANTIC_RULES.items():
        if match := re.match(pattern, message):
            return match.expand(rule) + message[match.end() :]
    return message[:1].lower() + message[1:]


def _document_location(raw: Any, location: Sequence[int | str]) -> list[int | str]:
    """Return the parts of a pydantic error location that the document has (not names of union members)."""
    existing: list[int | str] = []
    for part in location:
        keys = range(len(raw)) if isinstance(raw, list) else raw if isinstance(raw, Mapping) else ()
        if part in keys:
            raw = raw[part]
            existing.append(part)
    return existing


def _suggest_section_key(section: type[StrictConfig], path: str, value: object) -> str:
    """Return the hint for a value in place of a section: its key that has the value as an option, else its keys."""
    fields = sorted(section.model_fields.items(), key=lambda each: not each[1].is_required())
    options: dict[str, list[str]] = {}
    for key, field in fields:
        found = [option for each in (field.annotation, *get_args(field.annotation)) for option in get_args(each)]
        options[key] = [option for option in found if isinstance(option, str)]
    if fits := next((key for key, names in options.items() if value in names), None):
        return f"set {path}.{fits}={value}"
    if fields and (names := options[fields[0][0]]):  # such as `kind` of `recompute`
        return f"set {path}.{fields[0][0]} to one of {', '.join(names[:MAX_OPTIONS])}"
    return f"its keys are {', '.join([key for key, _ in fields][:MAX_OPTIONS])}" if fields else ""


def _list_known_keys(cls: type[StrictConfig], location: Sequence[str]) -> list[str]:
    return [field.alias or name for name, field in _find_section(cls, location).model_fields.items()]


def _find_section(cls: type[StrictConfig], location: Sequence[str]) -> type[StrictConfig]:
    """Return the class of the innermost section on the path `location` below a configuration class."""
    for part in location:
        match = next((f for n, f in cls.model_fields.items() if part in (n, f.alias)), None)
        section = _section_type(match.annotation) if match else None
        if section is not None:
            cls = section
    return cls


def load_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; ConfigError if the file is missing or not a mapping.

    Raises:
        ConfigError: if the file is missing, is not YAML, repeats a key or is not a mapping.
    """
    if path.is_dir():
        inside = next((path / name for name in ("run.yaml", "workflow.yaml") if (path / name).is_file()), None)
        hint = (
            f"give {inside}"
            if inside
            else "give a file of settings, such as run.yaml; a model's folder is named in it: model.from"
        )
        raise ConfigError(f"{path}: is a folder, and a file is required", hint=hint)
    raw = parse_yaml_text(read_settings_file(path), str(path))
    if not isinstance(raw, dict):
        found = "no content" if raw is None else "a list" if isinstance(raw, list) else f"the value {raw!r:.60}"
        raise ConfigError(
            f"{path}: must have settings as KEY: VALUE, found {found}",
            hint="write one setting per line, e.g. output: runs/a",
        )
    return raw


def apply_config_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the configuration `raw` with each override `a.b=value` applied.
    Values are parsed as YAML, and missing sections are created.

    A number in the path is an index into a list: `data.train.0.weight=0.5`.

    Raises:
        ConfigError: if an override has another form, or a part of its path is not a section.
    """
    result: dict[str, Any] = _copy_tree(raw)
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ConfigError(
                f"--set must have the form KEY=VALUE, found {override!r}", hint="e.g. --set train.steps=100"
            )
        try:
            value = yaml.load(text, StrictYamlLoader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError:
            value = text
        except (ConfigError, *TAG_ERRORS) as error:
            raise ConfigError(f"--set {override[:80]}: {error}") from None
        node: Any = result
        *parents, last = path.split(".")
        for part in parents:
            node = _get_child_section(node, part, override)
        _assign_value(node, last, value, override)
    return result


def _copy_tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy_tree(item) for key, item in value.items()}
    return [_copy_tree(item) for item in value] if isinstance(value, list) else value


def _get_child_section(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        return node[int(part)]
    if isinstance(node, dict):
        if not isinstance(node.get(part), dict | list):
            if node.get(part) is not None:
                raise ConfigError(f"--set {override}: {part!r} is a value, not a section with keys")
            node[part] = {}
        return node[part]
    raise ConfigError(f"--set {override}: {part!r} is not an entry of its list", hint="entries are numbered from 0")


def _assign_value(node: Any, part: str, value: object, override: str) -> None:
    if isinstance(node, list) and part.isdigit() and int(part) < len(node):
        node[int(part)] = value
    elif isinstance(node, dict):
        node[part] = value
    else:
        raise ConfigError(f"--set {override}: {part!r} is not an entry of its list", hint="entries are numbered from 0")


def build_json_schema(cls: type[StrictConfig]) -> dict[str, Any]:
    """Return the JSON schema of the configuration class `cls`, for editors that complete and validate YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema(by_alias=True)}


ExtensionName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]  # of an entry that an extension adds
LayerCount = Annotated[int, Field(gt=0, le=10_000)]
ExpertCount = Annotated[int, Field(gt=0, le=100_000)]
RankCount = Annotated[int, Field(gt=0, le=1_000_000)]
SampleCount = Annotated[int, Field(gt=0, le=1_000_000)]
StageCount = Annotated[int, Field(gt=0, le=1_024)]
DimensionSize = Annotated[int, Field(gt=0, le=1 << 40)]  # widths, vocabulary size, steps: used in arithmetic only
MOST_BATCH_SIZES = 10_000  # sizes of a batch while it grows
