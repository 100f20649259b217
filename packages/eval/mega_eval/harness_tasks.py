"""Downstream tasks of EleutherAI's lm-evaluation-harness, used as a library for tasks and metrics."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from mega_common.atomic_files import open_atomic_file
from mega_common.bounded_parsing import check_yaml_limits, read_settings_file
from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import logger
from mega_eval.harness_model import HarnessModel, fingerprint_model

Results = dict[str, Any]  # the harness's own


@dataclass(frozen=True)
class HarnessTaskOptions:
    """Options for running tasks of the lm-evaluation-harness.

    Attributes:
        include_path: folder with additional tasks.
        num_fewshot: solved examples before each question; None: default of the task.
        limit: number of samples of each task, or, below 1, their share; None: all.
        apply_chat_template: render each question as a chat message.
        log_samples: keep each sample with its request, answer and score under "samples".
        cache: folder of cached answers, or None.
    """

    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    log_samples: bool = False
    cache: Path | None = None


def find_harness_tasks(names: Sequence[str], include_path: Path | None = None) -> TaskManager:
    """Return an index of lm-evaluation-harness tasks that contains `names`: tasks or groups of the harness, patterns
    such as `mmlu_*`, or YAML files.

    Raises:
        ConfigError: when a task, file or folder does not exist.
    """
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path}: the folder does not exist")
    for name in names:
        if _is_file(name) and not Path(name).is_file():
            raise ConfigError(f"{name}: the task file does not exist")
    for file in _task_files(names, include_path):
        check_yaml_limits(file)
    others = [name for name in names if not _is_file(name)]
    # a group in a file can name other tasks
    groups = [name for name in names if _is_file(name) and re.search(r"(?m)^group\s*:", read_settings_file(Path(name)))]
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if groups or not all(manager.match_tasks([name]) for name in others):
        logger.info("reading the harness's index of tasks")  # takes seconds
        manager = TaskManager(include_path=include_path)
    for name in others:
        if not manager.match_tasks([name]):
            raise unknown_task_error(name, manager.all_tasks)
    return manager


def unknown_task_error(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for the unknown task `name`; its hint suggests the nearest of the `known` names."""
    near = difflib.get_close_matches(name, known, 1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(
        f"task {name!r} does not exist",
        hint=f"{suggestion}for a task of your own, pass a path ending in .yaml, or --include-path FOLDER",
    )


def run_harness_tasks(
    model: HarnessModel,
    names: Sequence[str],
    options: HarnessTaskOptions,
    model_info: Mapping[str, Any] | None = None,
    manager: TaskManager | None = None,
) -> Results:
    """Run tasks of the lm-evaluation-harness on a model and return its results; called on rank 0, while the other ranks
    run `follow_first_rank`.

    Args:
        model: the model.
        names: names of tasks, as for `find_harness_tasks`.
        options: options for running tasks.
        model_info: fields to add under "config" of the results.
        manager: result of `find_harness_tasks` for these names; found if None.

    Raises:
        ConfigError: when a task does not exist.
        DataError: when the data of a task cannot be loaded, or a required chat template is missing.
    """
    if options.apply_chat_template and model.template is None:
        raise DataError(
            f"{model.text.tokenizer.path.parent}: --apply-chat-template requires a chat template, and there is none",
            hint="leave out --apply-chat-template",
        )
    manager = manager or find_harness_tasks(names, options.include_path)
    results: Results = simple_evaluate(
        model, tasks=_load_tasks(manager, names), task_manager=manager, num_fewshot=options.num_fewshot,
        limit=options.limit if options.limit is None or options.limit < 1 else int(options.limit),
        use_cache=None if options.cache is None else str(options.cache / fingerprint_model(model)),
        apply_chat_template=options.apply_chat_template, log_samples=options.log_samples,
    )  # fmt: skip
    results["config"] |= {"model": "mega", **(model_info or {})}
    return results


def format_results_table(results: Results) -> str:
    """Return results of the lm-evaluation-harness as text tables: first tasks, then groups of tasks."""
    tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    return "\n".join(str(one) for one in tables)


def write_task_results(path: Path, results: Results) -> None:
    """Write results as a JSON file in the format of the lm-evaluation-harness."""
    with open_atomic_file(path, text=True) as stream:
        json.dump(results, stream, indent=2, default=handle_non_serializable, ensure_ascii=False)


def _task_files(names: Sequence[str], include_path: Path | None) -> list[Path]:
    """Return the YAML files of the user's own tasks, with those that they may include."""
    named = [Path(name) for name in names if _is_file(name)]
    including = {path.parent for path in named if re.search(r"(?m)^include\s*:", read_settings_file(path))}
    includable = [file for folder in including for file in folder.glob("*.y*ml")]
    return sorted({*named, *includable, *(include_path.rglob("*.y*ml") if include_path else ())})


def _is_file(name: str) -> bool:
    """Return whether a task name is a YAML file."""
    return name.endswith((".yaml", ".yml"))


def _load_tasks(manager: TaskManager, names: Sequence[str]) -> list[Any]:
    """Return the tasks and groups of these names, with their data."""
    found: list[Any] = []
    for name in names:
        try:
            loaded = manager.load([name] if _is_file(name) else manager.match_tasks([name]))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise DataError(
                f"task {name} cannot be loaded ({lines[0]})",
                hint="without access to the HuggingFace hub its data must be in HuggingFace's cache: run the same command on"
                " a machine with access, or use local files in a task of your own (dataset_path: json)",
            ) from error
        groups = loaded["groups"].values()
        inner = {child for group in groups for child in group.child_names}
        found += [one for one in (*groups, *loaded["tasks"].values()) if _task_name(one) not in inner]
    return found


def _task_name(one: Any) -> str:
    """Return the name of a task or group."""
    return str(one.task_name if hasattr(one, "task_name") else one.name)
