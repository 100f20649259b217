"""Checks of the paths and names that a run.yaml refers to, before the run starts. No torch."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.lora_tensors import adaptable_projections, adapted_modules, adapter_tensor_shapes
from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError, ConfigError, DataError, MegaError
from mega_common.lora_config import LoraConfig, matches_module_pattern
from mega_common.model_config import ModelConfig
from mega_common.object_store import RemotePath, parse_location
from mega_common.strict_config import ConfigProblem
from mega_data.data_config import DatasetSource
from mega_data.extension_tokenizer import TokenizerReference
from mega_data.kinds.fill_in_middle import FillInTheMiddle
from mega_data.reading.corpus_sources import find_corpus_sources
from mega_data.sampling.dataset_parts import find_matching_prefixes
from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, strip_data_suffix
from mega_data.token_files.remote_copies import restore_url_slashes
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.objectives.reward_process import is_module_name
from mega_trainer.plan.machine import load_machine

TASK_FILES = (".yaml", ".yml")
HINT_NAMES = 12  # names of modules in a hint


def find_input_problems(config: RunConfig, *, data: bool) -> list[ConfigProblem]:
    """Return a problem for each input of a run that does not exist.
    Inputs are files, folders, data sets, the named machine, and modules of the model.

    Args:
        config: a valid configuration.
        data: check the data sets, the tokenizer and the weights of the models too.
    """
    found = [*_path_problems(config, models=data), *find_unmatched_patterns(config), *_machine_problems(config)]
    return [*found, *(_data_problems(config) if data else ())]


def find_unmatched_patterns(config: RunConfig) -> list[ConfigProblem]:
    """Return a problem for each name pattern in run.yaml that matches nothing in the model.
    The patterns are in the `lora`, `train` and `optimizer` sections.
    """
    found = [] if config.lora is None else list(_lora_problems(config.model, config.lora))
    patterns_by_key = {"train.freeze": config.train.freeze, "optimizer.lr_factors": list(config.optimizer.lr_factors)}
    if found or not any(patterns_by_key.values()):
        return found
    names = [*canonical_tensors(config.model)]
    names += [] if config.lora is None else adapter_tensor_shapes(adapted_modules(config.model, config.lora))
    for key, patterns in patterns_by_key.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                found.append(
                    ConfigProblem(key, "must match a tensor of the model", pattern, f"use a name such as {names[0]}")
                )
    return found


def _lora_problems(model: ModelConfig, lora: LoraConfig) -> Iterator[ConfigProblem]:
    modules = list(adaptable_projections(model))
    kinds = sorted({module.rpartition(".")[2] for module in modules})
    hint = f"use names such as {', '.join(kinds[:HINT_NAMES])}"
    missing = [
        ConfigProblem(f"lora.{key}", "must match a projection of the model", pattern, hint)
        for key, patterns in (("modules", lora.modules), ("ranks", lora.ranks), ("alphas", lora.alphas))
        for pattern in patterns
        if not any(matches_module_pattern(module, [pattern]) for module in modules)
    ]
    yield from missing
    owners = [name.rpartition(".")[0] for name in canonical_tensors(model)]
    for pattern in lora.modules_to_save:
        if not any(matches_module_pattern(owner, [pattern]) for owner in owners):
            yield ConfigProblem(
                "lora.modules_to_save",
                "must match a module of the model",
                pattern,
                "use names such as lm_head or embed_tokens",
            )
    if not missing:
        try:
            adapted_modules(model, lora)
        except ConfigError as error:
            yield ConfigProblem("lora", error.message, None, error.hint or "")


def _path_problems(config: RunConfig, *, models: bool) -> Iterator[ConfigProblem]:
    objective, lora = config.objective, config.lora
    paths: Mapping[str, str | None] = {
        "init_from": config.init_from,
        "objective.teacher": objective.teacher,
        "objective.reference_model": objective.reference_model,
        "objective.reward_model": objective.reward_model,
    }
    for key, path in paths.items():
        found = list(_existence_problem(key, path))
        yield from found or (_model_problems(config, key, path) if models else ())
    yield from _existence_problem("checkpoint.load", config.checkpoint.load)
    yield from _existence_problem("lora.init_from", lora.init_from if lora else None)
    yield from _reward_problems(objective.rewards)
    tasks = [Path(task) for task in config.eval.tasks if task.endswith(TASK_FILES)]
    for task in tasks:
        if not task.is_file():
            yield ConfigProblem("eval.tasks", "must be an existing file", str(task), "correct the path")
    yield from _folder_problem("eval.include_path", config.eval.include_path)


def _model_problems(config: RunConfig, key: str, path: str | None) -> Iterator[ConfigProblem]:
    """Yield a problem if a local path is not that of a model."""
    if path is None or _is_remote(path):
        return
    try:
        open_weight_source(
            path,
            implementation="transformers" if config.model.transformers else "mega",
            families=config.registry.families,
        )
    except CheckpointError as error:
        yield ConfigProblem(key, f"must be a model: {error.message}", path, error.hint or "correct the path")


def _reward_problems(rewards: str | None) -> Iterator[ConfigProblem]:
    """Yield a problem if the file or module of a reward function is missing, or a file neither defines nor imports its name.
    The file is parsed and not run.
    """
    file, _, name = (rewards or "").rpartition(":")
    if file and is_module_name(file):
        if _is_missing_module(file):
            rule = f"must name a file that ends in .py or an installed module, found no module {file}"
            yield ConfigProblem("objective.rewards", rule, rewards, "correct the path, or install the package")
        return
    yield from _existence_problem("objective.rewards", file or None)
    try:
        tree = ast.parse(Path(file).read_bytes()) if file else ast.Module([], [])
    except (OSError, ValueError):
        return  # a missing file is another problem
    except SyntaxError as error:
        yield ConfigProblem(
            "objective.rewards", f"is not valid Python, line {error.lineno}: {error.msg}", rewards, "correct the file"
        )
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    others = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    others |= {(node.asname or node.name).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if functions and name not in functions and not others & {name, "*"}:
        rule = f"must name a function of {file}, found no {name!r}"
        near = (difflib.get_close_matches(name, functions, n=1) or functions[-1:])[0]
        yield ConfigProblem("objective.rewards", rule, rewards, f"set objective.rewards={file}:{near}")


def _is_missing_module(name: str) -> bool:
    """Return whether no module of this name is installed; a package on the way to it is imported."""
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


def _machine_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.machine is not None:
        try:
            load_machine(config.machine)
        except ConfigError as error:
            yield ConfigProblem("machine", error.message.removeprefix("--machine "), None, error.hint or "")


def _data_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    data = config.data
    if data.tokenizer is not None and TokenizerReference.parse(data.tokenizer) is not None:
        try:
            Tokenizer(data.tokenizer)
        except MegaError as error:
            yield ConfigProblem("data.tokenizer", error.message, None, error.hint or "")
    else:
        yield from _existence_problem("data.tokenizer", data.tokenizer)
    yield from _folder_problem("data.image_folder", data.image_folder)
    if "fim" in data.dataset_kinds and data.tokenizer is not None and data.tokenizer.exists():
        try:
            FillInTheMiddle(data.fim, Tokenizer(data.tokenizer), None)
        except MegaError as error:
            yield ConfigProblem("data.fim.tokens", error.message, None, error.hint or "")
    for name in (name for name, count in config.samples_per_split.items() if name == "train" or count):
        sources = getattr(data, name) or []
        for number, source in enumerate(sources):
            key = f"data.{name}.{number}.path" if len(sources) > 1 else f"data.{name}"
            yield from _source_problems(key, source)


def _source_problems(key: str, source: DatasetSource) -> Iterator[ConfigProblem]:
    if _is_remote(source.path):
        return
    names = [name.strip() for name in str(source.path).split(",")]
    if len(names) > 1 and all(Path(name).exists() or get_idx_path(Path(name)).exists() for name in names):
        yield ConfigProblem(
            key, "several data sets must be a list", str(source.path), f"set {key}=[{', '.join(names)}]"
        )
        return
    if source.is_raw:
        yield from _raw_source_problems(key, source)
        return
    try:
        prefixes = find_matching_prefixes(source)
    except DataError as error:
        yield ConfigProblem(key, error.message, None, error.hint or "")
        return
    for prefix in map(strip_data_suffix, prefixes):
        missing = [path.name for path in (get_idx_path(prefix), get_bin_path(prefix)) if not path.is_file()]
        if missing:
            rule = f"must have the files .idx and .bin, found no {' and no '.join(missing)}"
            others = [str(path.with_suffix("")) for path in prefix.parent.glob("*.idx")]
            near = difflib.get_close_matches(str(prefix), others, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "make a data set with mega data preprocess"
            yield ConfigProblem(key, rule, str(source.path), hint)
    yield from _folder_problem(f"{key.removesuffix('.path')}.neighbors", source.neighbors)


def _raw_source_problems(key: str, source: DatasetSource) -> Iterator[ConfigProblem]:
    try:
        find_corpus_sources([source.input_name])
    except DataError as error:
        yield ConfigProblem(key, error.message, None, error.hint or "")


def _existence_problem(key: str, path: str | Path | None) -> Iterator[ConfigProblem]:
    if path is not None and not _is_remote(path) and not Path(path).exists():
        yield ConfigProblem(key, "must be an existing file or folder", str(path), "correct the path")


def _folder_problem(key: str, folder: Path | None) -> Iterator[ConfigProblem]:
    if folder is not None and not _is_remote(folder) and not folder.is_dir():
        rule = "must be a folder, found a file" if folder.exists() else "must be an existing folder"
        yield ConfigProblem(key, rule, str(folder), "correct the path")


def _is_remote(path: str | Path) -> bool:
    try:
        return isinstance(parse_location(restore_url_slashes(Path(path))), RemotePath)
    except ConfigError:  # an unknown protocol: not a file either
        return False
