"""Checks of the paths and names that a run.yaml refers to, before the run starts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from mega_ckpt.lora import adapted, adapter_tensors, projections
from mega_ckpt.names import tensors_of
from mega_common.config import Problem
from mega_common.errors import ConfigError, DataError
from mega_common.lora import LoraConfig, meant
from mega_common.model_config import ModelConfig
from mega_common.remote import Remote, place
from mega_data.config import Source
from mega_data.files.fetch import as_given
from mega_data.files.indexed import bin_path, data_prefix, idx_path
from mega_data.order.parts import matching
from mega_trainer.config import RunConfig
from mega_trainer.plan.machine import load_machine

TASK_FILES = (".yaml", ".yml")
KNOWN_NAMES = 12  # names of modules in a hint


def input_problems(config: RunConfig, *, data: bool) -> list[Problem]:
    """List the inputs of a run that do not exist: files, folders, data sets, a machine, modules of the model.

    Args:
        config: a valid configuration.
        data: check the data sets and the tokenizer too.
    """
    found = [*_path_problems(config), *pattern_problems(config), *_machine_problems(config)]
    return [*found, *(_data_problems(config) if data else ())]


def pattern_problems(config: RunConfig) -> list[Problem]:
    """List the patterns of names in `lora`, `train` and `optimizer` that match nothing in the model."""
    found = [] if config.lora is None else list(_lora_problems(config.model, config.lora))
    named = {"train.freeze": config.train.freeze, "optimizer.lr_factors": list(config.optimizer.lr_factors)}
    if found or not any(named.values()):
        return found
    names = [*tensors_of(config.model)]
    names += [] if config.lora is None else adapter_tensors(adapted(config.model, config.lora))
    for key, patterns in named.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                found.append(Problem(key, "matches no tensor of the model", pattern, f"the first is {names[0]}"))
    return found


def _lora_problems(model: ModelConfig, lora: LoraConfig) -> Iterator[Problem]:
    modules = list(projections(model))
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    hint = f"the model has {', '.join(kinds[:KNOWN_NAMES])}"
    missing = [
        Problem(f"lora.{key}", "matches no projection of the model", pattern, hint)
        for key, patterns in (("modules", lora.modules), ("ranks", lora.ranks), ("alphas", lora.alphas))
        for pattern in patterns
        if not any(meant(module, [pattern]) for module in modules)
    ]
    yield from missing
    owners = [name.rpartition(".")[0] for name in tensors_of(model)]
    for pattern in lora.modules_to_save:
        if not any(meant(owner, [pattern]) for owner in owners):
            yield Problem("lora.modules_to_save", "matches no module of the model", pattern, "lm_head, embed_tokens")
    if not missing:
        try:
            adapted(model, lora)
        except ConfigError as error:
            yield Problem("lora", error.message, None, error.hint or "")


def _path_problems(config: RunConfig) -> Iterator[Problem]:
    objective, lora = config.objective, config.lora
    paths: Mapping[str, str | Path | None] = {
        "init_from": config.init_from,
        "checkpoint.load": config.checkpoint.load,
        "lora.init_from": lora.init_from if lora else None,
        "objective.teacher": objective.teacher,
        "objective.reference_model": objective.reference_model,
    }
    for key, path in paths.items():
        yield from _existence_problem(key, path)
    tasks = [Path(task) for task in config.eval.tasks if task.endswith(TASK_FILES)]
    for task in tasks:
        if not task.is_file():
            yield Problem("eval.tasks", "no such file", str(task))
    yield from _folder_problem("eval.include_path", config.eval.include_path)


def _machine_problems(config: RunConfig) -> Iterator[Problem]:
    if config.machine is not None:
        try:
            load_machine(config.machine)
        except ConfigError as error:
            yield Problem("machine", error.message.removeprefix("--machine "), None, error.hint or "")


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    yield from _existence_problem("data.tokenizer", data.tokenizer)
    yield from _folder_problem("data.image_folder", data.image_folder)
    for name in (name for name, count in config.samples.items() if name == "train" or count):
        for number, source in enumerate(getattr(data, name) or []):
            yield from _source_problems(f"data.{name}.{number}", source)


def _source_problems(key: str, source: Source) -> Iterator[Problem]:
    if _is_remote(source.path):
        return
    try:
        prefixes = matching(source)
    except DataError as error:
        yield Problem(f"{key}.path", error.message, None, error.hint or "")
        return
    for prefix in map(data_prefix, prefixes):
        missing = [path.name for path in (idx_path(prefix), bin_path(prefix)) if not path.is_file()]
        if missing:
            rule = "; ".join(f"{name}: no such file" for name in missing)
            yield Problem(f"{key}.path", rule, str(source.path), "mega data preprocess makes a data set")
    yield from _folder_problem(f"{key}.neighbors", source.neighbors)


def _existence_problem(key: str, path: str | Path | None) -> Iterator[Problem]:
    if path is not None and not _is_remote(path) and not Path(path).exists():
        yield Problem(key, "no such file or folder", str(path))


def _folder_problem(key: str, folder: Path | None) -> Iterator[Problem]:
    if folder is not None and not _is_remote(folder) and not folder.is_dir():
        rule = "is not a folder" if folder.exists() else "no such folder"
        yield Problem(key, rule, str(folder))


def _is_remote(path: str | Path) -> bool:
    try:
        return isinstance(place(as_given(Path(path))), Remote)
    except ConfigError:  # an unknown protocol, which is no file either
        return False
