"""Schema of a workflow file, its checks, and the settings of its stages compared by value."""

from __future__ import annotations

import difflib
import graphlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from typer.core import TyperGroup

from mega_cli.file_digests import iterate_files_matching_patterns
from mega_common.errors import ConfigError
from mega_common.strict_config import (
    ConfigProblem,
    StrictConfig,
    apply_config_overrides,
    describe_pydantic_rule,
    load_yaml_mapping,
)

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig

OptionScalar = str | int | float | bool

RUN_COMMANDS = ("train", "plan", "launch slurm", "launch kubernetes")  # their first argument is a run.yaml


class WorkflowStage(StrictConfig):
    """Stage of a workflow: one `mega` command with its inputs and outputs.
    Paths are relative to the workflow file's folder.

    Arguments and option values that name existing files, folders or token data sets are inputs automatically, as are the
    outputs of the stages in `needs`. A run.yaml is compared by its settings, not by its text; the files that it names for
    a training (data sets, tokenizer, initial weights) are inputs too.
    """

    run: str = Field(description="the mega command, as in 'data preprocess'")
    args: list[OptionScalar] = Field([], description="its positional arguments")
    options: dict[str, OptionScalar | list[OptionScalar]] = Field(
        {}, alias="with", description="its options by long name; true and false are flags, a list repeats the option"
    )
    needs: list[str] = Field([], description="stages that must be done before this one")
    inputs: list[str] = Field(
        [], description="further files, folders or globs; the stage runs again when their content changes"
    )
    outputs: list[str] = Field(min_length=1, description="files, folders or globs that the stage writes")
    on_change: Literal["start-over", "continue"] = Field(
        "start-over",
        description="when a finished stage must run again: move its outputs away first (start-over), or keep them (continue)",
    )

    @property
    def command_arguments(self) -> list[str]:
        """Command-line arguments of `mega` that run this stage of the workflow."""
        return self._words(self.options, self.args)

    @property
    def words_required_unchanged_to_resume(self) -> list[str]:
        """Words of the command of a workflow stage that must be unchanged for the stage to resume.
        If one of them changes, the stage starts over instead of resuming. Settings of a run.yaml are not included: they
        are compared by value.
        """
        if self.run_config_path is None:
            return self.command_arguments
        compared_by_value = {"set"} | ({"nproc"} if self.run == "train" else set())
        return self._words({k: v for k, v in self.options.items() if k not in compared_by_value}, self.args[1:])

    @property
    def run_config_path(self) -> str | None:
        """Path of the run.yaml that the stage's command takes, or None if it takes none."""
        return str(self.args[0]) if self.run in RUN_COMMANDS and self.args else None

    @property
    def setting_overrides(self) -> list[str]:
        """Values of the stage's `--set` options, which override its run.yaml."""
        given = self.options.get("set", [])
        return [str(item) for item in (given if isinstance(given, list) else [given])]

    def _words(
        self, options: Mapping[str, OptionScalar | list[OptionScalar]], args: Sequence[OptionScalar]
    ) -> list[str]:
        words = self.run.split()
        for key, value in options.items():
            for item in value if isinstance(value, list) else [value]:
                flag = f"--no-{key}" if item is False else f"--{key}"
                words += [flag] if isinstance(item, bool) else [flag, str(item)]
        return words + [str(arg) for arg in args]

    def possible_file_arguments(self) -> Iterator[str]:
        """Yield the stage's arguments and option values that may name files, also with `.bin` and `.idx` appended."""
        for value in (*self.args, *self.options.values()):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str):
                    yield from (item, f"{item}.bin", f"{item}.idx")

    def existing_file_arguments(self, base: Path) -> list[str]:
        """Return the stage's arguments and option values that name existing files, without its outputs and its run.yaml.
        Paths are relative to `base`.
        """
        return self.existing_inputs(
            base, (path for path in self.possible_file_arguments() if path != self.run_config_path)
        )

    def existing_inputs(self, base: Path, paths: Iterable[str]) -> list[str]:
        """Return those of `paths`, relative to `base`, that exist and are not outputs of this stage."""
        outputs = [base / output for output in self.outputs]
        existing = [path for path in paths if any(iterate_files_matching_patterns(base, [path]))]
        return [
            path
            for path in existing
            if not any(is_inside_folder(base / path, out) or is_inside_folder(out, base / path) for out in outputs)
        ]


class WorkflowConfig(StrictConfig):
    """Settings of a workflow file: its stages by name."""

    stages: dict[str, WorkflowStage] = Field(min_length=1)

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield the problems of a workflow: names of stages, unknown or cyclic needs, and conflicts of outputs.
        A conflict is a stage that overwrites an output of another stage, or reads it without needing the stage.
        """
        for name, stage in self.stages.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                yield ConfigProblem(f"stages.{name}", "the name of a stage may only contain letters, digits, - and _")
            for need in stage.needs:
                if need not in self.stages:
                    yield ConfigProblem(
                        f"stages.{name}.needs",
                        "the workflow has no such stage",
                        need,
                        suggest_nearest(need, self.stages),
                    )
        try:
            graphlib.TopologicalSorter({name: stage.needs for name, stage in self.stages.items()}).prepare()
        except graphlib.CycleError as error:
            yield ConfigProblem(
                "stages", "the stages need each other in a cycle: " + " -> ".join(reversed(error.args[1]))
            )
            return
        yield from self._path_problems()

    def _path_problems(self) -> Iterator[ConfigProblem]:
        outputs = [(maker, path) for maker, stage in self.stages.items() for path in stage.outputs]
        for name, stage in self.stages.items():
            earlier = self.ordered_stages(name)
            for maker, output in outputs:
                if maker not in earlier and any(
                    is_inside_folder(path, output) for path in (*stage.inputs, *stage.possible_file_arguments())
                ):
                    yield ConfigProblem(
                        f"stages.{name}", f"reads {output}, an output of stage {maker!r}", hint=f"needs: [{maker}]"
                    )
                for path in stage.outputs:
                    if maker != name and is_inside_folder(path, output):
                        yield ConfigProblem(
                            f"stages.{name}.outputs", f"is inside {output}, an output of stage {maker!r}", path
                        )

    def ordered_stages(self, until: str | None = None) -> list[str]:
        """Return the names of all stages, or of `until` and the stages it needs, each after the stages that it needs.
        Otherwise they are in the file's order.
        """
        ordered: dict[str, None] = {}

        def visit_stage(name: str) -> None:
            for need in self.stages[name].needs if name in self.stages else ():
                visit_stage(need)
            ordered.setdefault(name)

        for name in self.stages if until is None else [until]:
            visit_stage(name)
        return list(ordered)


def is_inside_folder(path: str | Path, folder: str | Path) -> bool:
    """Return True if `path` is `folder` or inside it, by their names only: links are not resolved."""
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder))


def reject_workflow_as_run_yaml(file: Path, raw: Mapping[str, Any], hint: str) -> None:
    """Raise a ConfigError if `raw`, the content of `file`, is a workflow where a run.yaml is expected."""
    if "stages" in raw and "model" not in raw:
        raise ConfigError(
            f"{file}: the file is a workflow (it has `stages`), not the configuration of a run", hint=hint
        )


def load_run_file(run: Path, overrides: Sequence[str], *, warn_unread: bool = False) -> RunConfig:
    """Read run.yaml with `--set` overrides; a workflow gives one error instead of one per unknown key.

    Raises:
        ConfigError: with every problem at once.
    """
    from mega_trainer.config.run_config import load_run_config

    try:
        return load_run_config(run, overrides, warn_unread=warn_unread)
    except ConfigError:
        if run.is_file():
            reject_workflow_as_run_yaml(run, load_yaml_mapping(run), f"mega run {run}")
        raise


def reject_run_yaml_as_workflow(file: Path, raw: Mapping[str, Any]) -> None:
    """Raise a ConfigError if `raw`, the content of `file`, is a run.yaml where a workflow is expected."""
    if "model" in raw and "stages" not in raw:
        hint = f"mega train {file}, or give a workflow file with `stages`"
        raise ConfigError(f"{file}: the file is the configuration of a run, not a workflow", hint=hint)


def find_command_problems(name: str, stage: WorkflowStage, root: TyperGroup) -> Iterator[ConfigProblem]:
    """Yield problems of a workflow stage's command and its options, checked against the `mega` command tree `root`."""
    node: Any = root
    for word in stage.run.split():
        known = node.commands if isinstance(node, TyperGroup) else {}
        if word not in known:
            yield ConfigProblem(
                f"stages.{name}.run", f"mega has no command {word!r}", stage.run, suggest_nearest(word, known)
            )
            return
        node = known[word]
    if isinstance(node, TyperGroup):
        yield ConfigProblem(
            f"stages.{name}.run", "requires a subcommand", stage.run, f"one of {', '.join(node.commands)}"
        )
        return
    options = {option for param in node.params for option in (*param.opts, *param.secondary_opts)}
    unknown = [word for word in stage.command_arguments if word.startswith("--") and word not in options]
    names = [option.removeprefix("--") for option in options if option.startswith("--")]
    for key in (word.removeprefix("--") for word in unknown):
        yield ConfigProblem(
            f"stages.{name}.with.{key}", f"mega {stage.run} has no such option", hint=suggest_nearest(key, names)
        )
    if unknown:
        return
    try:
        node.make_context(stage.run, list(stage.command_arguments)[len(stage.run.split()) :])
    except Exception as error:
        if not hasattr(error, "format_message"):  # errors of click, which Typer contains from 0.26 on, have it
            raise
        option = max(getattr(getattr(error, "param", None), "opts", ()) or ("",), key=len)
        key = f".{option.removeprefix('--')}" if option.startswith("--") else ""
        missing = type(error).__name__ == "MissingParameter"
        rule = (
            f"mega {stage.run} requires {option or error.format_message()}"
            if missing
            else describe_pydantic_rule(str(getattr(error, "message", error)))
        )
        yield ConfigProblem(f"stages.{name}.with{key}", rule)


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a mistyped name: the nearest known name, or all known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"


FlatSettings = dict[str, Any]

# Settings without effect on the trained model except rounding, and exceptions from them.
WITHOUT_EFFECT = (
    "parallel", "recompute", "offload", "profile", "batch.micro", "optimizer.offload", "data.cache", "device", "timeout_seconds", "log",
    "debug", "train", "checkpoint",
)  # fmt: skip
DECISIVE = ("train.steps", "train.seed", "checkpoint.path", "checkpoint.load")


@dataclass(frozen=True)
class StageRerunReason:
    """Reason why a workflow stage must run; with `start_over` it starts from nothing, else it resumes."""

    reason: str
    start_over: bool


def load_stage_settings(stage: WorkflowStage, base: Path) -> FlatSettings | None:
    """Return all settings of a workflow stage's run.yaml with its `--set` options applied, or None without a run.yaml.

    Raises:
        ConfigError: with all problems.
    """
    if stage.run_config_path is None:
        return None
    from mega_trainer.config.run_config import (  # here: workflows of other commands do not need the trainer
        RunConfig,
        resolve_run_config,
    )

    file = base / stage.run_config_path
    raw = apply_config_overrides(load_yaml_mapping(file), stage.setting_overrides)
    config = RunConfig.parse(resolve_run_config(raw, base=base), source=str(file))
    settings = config.model_dump(mode="json", by_alias=True)
    settings["lr_schedule"]["decay_steps"] = config.lr_schedule.decay_steps or config.train.steps
    return settings


def list_files_named_by_settings(settings: FlatSettings) -> list[str]:
    """Return the paths of data, tokenizer, initial weights and checkpoint that the settings of a run.yaml name.
    Data are the path itself and the files of a token data set with this prefix; not all of them exist.
    """
    from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, list_companion_files  # here, as above

    data = settings["data"]
    paths = [Path(source["path"]) for split in ("train", "valid", "test") for source in data[split] or ()]
    tokens = [
        str(path)
        for prefix in paths
        for path in (get_bin_path(prefix), get_idx_path(prefix), *list_companion_files(prefix).values())
    ]
    others = (data["tokenizer"], settings["init_from"], settings["checkpoint"]["load"])
    return [*tokens, *map(str, paths), *(name for name in others if name)]


def find_settings_rerun_reason(
    stage: WorkflowStage, before: FlatSettings | None, now: FlatSettings | None, *, done: bool
) -> StageRerunReason | None:
    """Return the reason why a stage must run after its run.yaml settings changed, or None if that changes no result.

    A training with remaining steps resumes from its checkpoints with the new settings, unless `model` changed. A finished
    training with other settings starts over.
    """
    changed = {
        path: values
        for path, values in diff_flat_settings(before or {}, now or {}).items()
        if _affects_result(stage, path)
    }
    if not changed:
        return None
    reason = ", ".join(f"{path}: {old!r} -> {new!r}" for path, (old, new) in list(changed.items())[:3])
    others = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    another_model = any(path.split(".")[0] == "model" for path in changed)
    old_steps, new_steps = changed.get("train.steps", (0, 0))
    resumes = stage.run == "train" and not another_model and (not done or new_steps > old_steps)
    return StageRerunReason(reason + others, start_over=not resumes)


def _affects_result(stage: WorkflowStage, path: str) -> bool:
    without_effect = any(f"{path}.".startswith(f"{section}.") for section in WITHOUT_EFFECT)
    return stage.run != "train" or path in DECISIVE or not without_effect


def diff_flat_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each setting that differs, by path; None for a missing value."""
    old, new = _flatten(before), _flatten(now)
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return {path: (old.get(path), new.get(path)) for path in paths}


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {p: v for key, item in value.items() for p, v in _flatten(item, f"{path}.{key}".strip(".")).items()}
