"""Extensions: Python modules outside of mega that add mixers, objectives, optimizers and more by name. No torch.

An extension is a module with a constant `EXTENSION`, an `Extension`. `load_extensions` imports the modules that run.yaml or
the command line names, and returns an `ExtensionRegistry` of all that they add.

Code is imported from nowhere else: never by a name that a checkpoint or a model's folder gives, unless it is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from mega_common.errors import ConfigError
from mega_common.extension_block import (
    FUNCTION_FIELDS,
    FUNCTION_NAMES,
    BlockDeclaration,
    ExtensionBlock,
    FunctionDeclaration,
)
from mega_common.layer_kinds import FEEDS, MIXERS
from mega_common.model_config import ModelConfig
from mega_common.progress_logging import logger
from mega_common.strict_config import (
    ConfigProblem,
    StrictConfig,
    find_config_problems,
    find_near_option,
    raise_config_error,
)
from mega_data.data_config import KindName
from mega_trainer.config.lr_schedule import ScheduleName
from mega_trainer.config.objective_config import USED
from mega_trainer.config.sections import OptimizerName

EXTENSION_API = 1  # version of the interfaces in this module and in mega_trainer.extend
OLDEST_API = 1  # versions from this one on are loaded, with a warning
FILE_MODULE = "mega_extension_"  # begin of the module names of extensions that are given as files
GROUP = "mega.extensions"  # entry points of installed packages


class NoOptions(StrictConfig):
    """Options of an extension's entry that has no settings."""


@dataclass(frozen=True)
class BlockTraits:
    """Facts that the trainer may assume of an extension's block, see `BlockDeclaration`.

    Attributes:
        heads: heads, which tensor ranks split.
        shared_heads: heads that others share, such as key/value heads; None: `heads`.
        recurrent: the block carries a state from token to token.
        context_parallel: the block exchanges what context ranks need; otherwise parallel.cp > 1 is refused.
        flops_per_token: forward FLOPs per token in addition to those of its matrices.
        flops_per_key: forward FLOPs for each pair of a query and a visible key.
        keys: most keys that a query sees, such as a chunk; None: all.
    """

    heads: int = 1
    shared_heads: int | None = None
    recurrent: bool = False
    context_parallel: bool = False
    flops_per_token: float = 0.0
    flops_per_key: float = 0.0
    keys: int | None = None


@dataclass(frozen=True)
class Block:
    """Token mixer or feed-forward block of an extension.

    Attributes:
        build: class or function `(build: LayerBuilder, layer: int, options) -> nn.Module`.
        options: the settings of its section in `model.mixers` or `model.feed_forwards`.
        declares: function `(model: ModelConfig, options) -> BlockTraits`.
    """

    build: Callable[[Any, int, Any], Any]
    options: type[StrictConfig] = NoOptions
    declares: Callable[[ModelConfig, Any], BlockTraits] = lambda model, options: BlockTraits()


@dataclass(frozen=True)
class NormFunction:
    """Norm of the residual stream of an extension.

    Attributes:
        normalize: differentiable function `(x, weight, eps, *, options) -> y` of x [.., D] and the weight [D], 1 at first, or
            None with `model.norm_weight: false`. It works on one token at a time: over the last axis only.
        options: the settings of its section in `model.functions`.
    """

    normalize: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class ActivationFunction:
    """Elementwise activation of feed-forward blocks and experts of an extension.

    Attributes:
        activate: differentiable elementwise function `(x, *, options) -> y`, or `(gate, up, *, options) -> y` if it is gated.
        gated: the feed-forward block has a gate projection.
        options: the settings of its section in `model.functions`.
    """

    activate: Callable[..., Any]
    gated: bool = False
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class PositionFunction:
    """Position encoding of an extension, in place of the rotary one.

    Attributes:
        encode: differentiable function `(x, positions, *, options) -> y` of queries or keys x [B, S, H, d] and their positions
            int64 [B or 1, S], which begin at 0 in each document. Heads and tokens may be parts: it works on each alone.
        options: the settings of its section in `model.functions`.
    """

    encode: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class ScoreFunction:
    """Modification of attention scores of an extension, as torch's FlexAttention defines it (arXiv:2412.05496).

    Attributes:
        modify: differentiable function `(score, batch, head, query, key, *, options) -> score` of the scaled scores and int64
            indices that broadcast; -inf masks a pair. `head` counts all heads of the model. Keys after a query, of another
            document or outside a window are masked afterwards. Query and key are positions in the row, of which
            only the difference is meaningful. Each query must keep a key.
        options: the settings of its section in `model.functions`.
    """

    modify: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Objective:
    """Training objective of an extension: the mean of a loss over all unmasked tokens.

    Attributes:
        token_loss: function `(log_probs, log_normalizers, *, options) -> losses` of fp32 or fp64 tensors [n], one element for
            each token: the log-probability of its label, and the logarithm of the sum of all exponentials of its logits.
            It must be differentiable and elementwise.
        options: the settings of `objective.options`.
    """

    token_loss: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Optimizer:
    """Elementwise optimizer of an extension.

    Attributes:
        build: class or function `(settings: OptimizerConfig, options) -> ElementwiseUpdate`.
        options: the settings of `optimizer.options`.
    """

    build: Callable[[Any, Any], Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Schedule:
    """Shape of a learning-rate decay.

    Attributes:
        share: function `(done, *, options) -> share` from the part of the decay that has passed, 0 to 1, to the part of
            `optimizer.lr - lr_schedule.min_lr` that remains, usually 1 to 0.
        options: the settings of `lr_schedule.options`.
    """

    share: Callable[..., float]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Callback:
    """Function that is called between steps.

    Attributes:
        build: class or function `(options) -> after_step`, where `after_step(FinishedStep)` is called on all ranks after each
            step and returns numbers for metrics.jsonl, by name; they are logged as `CALLBACK/NAME`.
        options: the settings of its section in `callbacks`.
    """

    build: Callable[[Any], Callable[[Any], Mapping[str, float]]]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class DataKind:
    """Kind of data set.

    Attributes:
        build: function `(part: DatasetPart, context: DatasetContext, num_samples: int, *, options) -> DatasetSamples`.
        options: the settings of `data.options`.
    """

    build: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Extension:
    """Additions of one extension module to mega, such as mixers, objectives and optimizers, by kind and name.

    Attributes:
        name: name of the extension, which checkpoints record.
        version: version of the extension, which checkpoints record.
        api: version of mega's interfaces that it was written for.
        mixers: token mixers, for `model.layers` and `model.mixers`.
        feed_forwards: feed-forward blocks, for `model.layers` and `model.feed_forwards`.
        norms: for `model.norm`.
        activations: for `model.activation`.
        positions: for `model.position`.
        attention_scores: for `model.attention_scores`.
        objectives: for `objective.kind`.
        optimizers: for `optimizer.name`.
        schedules: for `lr_schedule.name`.
        callbacks: for `callbacks`.
        data_kinds: for `data.kind`.
        families: `ModelFamily` declarations of HuggingFace folders.
    """

    name: str
    version: str
    api: int
    mixers: Mapping[str, Block] = field(default_factory=dict)
    feed_forwards: Mapping[str, Block] = field(default_factory=dict)
    norms: Mapping[str, NormFunction] = field(default_factory=dict)
    activations: Mapping[str, ActivationFunction] = field(default_factory=dict)
    positions: Mapping[str, PositionFunction] = field(default_factory=dict)
    attention_scores: Mapping[str, ScoreFunction] = field(default_factory=dict)
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    data_kinds: Mapping[str, DataKind] = field(default_factory=dict)
    families: Sequence[Any] = ()


# The function of an entry, by its kind.
FUNCTION_ATTRIBUTES = {
    "norms": "normalize", "activations": "activate", "positions": "encode", "attention_scores": "modify"
}  # fmt: skip
BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "mixers": MIXERS,
    "feed_forwards": FEEDS,
    **{kind: FUNCTION_NAMES[key] for kind, key in FUNCTION_FIELDS.items()},
    "objectives": tuple(USED),
    "optimizers": get_args(OptimizerName),
    "schedules": get_args(ScheduleName),
    "callbacks": (),
    "data_kinds": get_args(KindName),
}


@dataclass(frozen=True)
class ExtensionRegistry:
    """The extensions of a run and, merged, all that they add."""

    extensions: Sequence[Extension] = ()

    @property
    def versions(self) -> dict[str, str]:
        """Version of each extension, by its name."""
        return {extension.name: extension.version for extension in self.extensions}

    @property
    def families(self) -> Sequence[Any]:
        """Model families of all extensions."""
        return [family for extension in self.extensions for family in extension.families]

    def entries(self, kind: str) -> dict[str, Any]:
        """Return the registered extension objects of one kind, such as `mixers`, by name."""
        return {name: entry for extension in self.extensions for name, entry in getattr(extension, kind).items()}

    def find_extension(self, kind: str, name: str) -> Extension:
        """Return the extension that has the entry `name` of a kind, such as `mixers`."""
        return next(extension for extension in self.extensions if name in getattr(extension, kind))

    def make_block_factories(self, model: ModelConfig) -> dict[str, Callable[[Any, int], Any]]:
        """Return functions `(build, layer) -> module` of the model's blocks of extensions, with their options bound."""
        return {
            name: _bind_options(self.entries(kind)[name], section.options)
            for kind in ("mixers", "feed_forwards")
            for name, section in getattr(model, kind).items()
            if name in self.entries(kind)
        }

    def bind_functions(self, model: ModelConfig) -> dict[str, Callable[..., Any]]:
        """Return the functions of extensions that the model uses, with their options bound, by its fields such as `norm`."""
        found: dict[str, Callable[..., Any]] = {}
        for kind, key in FUNCTION_FIELDS.items():
            name = getattr(model, key)
            if name in self.entries(kind):
                entry = self.entries(kind)[name]
                function = getattr(entry, FUNCTION_ATTRIBUTES[kind])
                found[key] = partial(function, options=entry.options.parse(model.functions[name].options))
        return found


def _bind_options(block: Block, options: Mapping[str, Any]) -> Callable[[Any, int], Any]:
    parsed = block.options.parse(options)
    return lambda build, layer: block.build(build, layer, parsed)


def load_extensions(references: Iterable[str]) -> ExtensionRegistry:
    """Import the extensions that `references` name: files, folders of packages, installed entry points, or modules.

    Raises:
        ConfigError: for an extension that is missing, raises, or was written for other interfaces, and for two entries
            with one name.
    """
    found = [_load_extension(reference) for reference in dict.fromkeys(references)]
    owners: dict[tuple[str, str], str] = {(kind, name): "mega" for kind, names in BUILT_IN.items() for name in names}
    for extension in found:
        for kind in BUILT_IN:
            for name in getattr(extension, kind):
                owner = owners.setdefault((kind, name), extension.name)
                if owner != extension.name:
                    raise ConfigError(
                        f"extension {extension.name}: the name {name!r} in {kind} is already used by {owner}",
                        hint="rename it, or leave out one of the extensions",
                    )
    return ExtensionRegistry(found)


def load_model_extensions(model: ModelConfig, references: Iterable[str], source: str) -> ExtensionRegistry:
    """Return the extensions that a saved model requires: those of `references`, and installed ones that it names.

    Raises:
        ConfigError: naming the first that is missing; `source` is where the model was saved.
    """
    given = load_extensions(references)
    blocks = [block.declaration for kind in (model.mixers, model.feed_forwards) for block in kind.values()]
    functions = [section.declares for section in model.functions.values() if section.declares is not None]
    named = {block.extension for block in blocks} | {function.extension for function in functions}
    missing = named - given.versions.keys()
    installed = {point.name for point in entry_points(group=GROUP)}
    for name in sorted(missing - installed):
        raise ConfigError(
            f"{source}: the model requires the extension {name!r}, which is not installed",
            hint="name its file with --extension FILE, or install its package",
        )
    return load_extensions([*references, *sorted(missing)]) if missing else given


def _locate_error(error: Exception, package: str) -> str:
    """Return the file and line where an extension raised an error: the last line of its file or `package` in the traceback,
    else the innermost line.
    """
    frames = [
        (frame.f_globals.get("__name__", "").partition(".")[0], Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [each for each in frames if each[0].startswith(FILE_MODULE) or each[0] == package]
    _, file, line = (own or frames)[-1]
    return f"({file}, line {line})"


def _load_extension(reference: str) -> Extension:
    """Import one extension."""
    try:
        found = _import_reference(reference)
    except ConfigError:
        raise
    except Exception as error:
        where = _locate_error(error, reference.partition(".")[0])
        raise ConfigError(
            f"extension {reference}: loading it raised {type(error).__name__}: {error} {where}",
            hint="correct the extension, or remove it from extensions",
        ) from error
    extension = getattr(found, "EXTENSION", None) if isinstance(found, ModuleType) else found
    if not isinstance(extension, Extension):
        raise ConfigError(
            f"extension {reference}: must have a constant EXTENSION of type mega_trainer.extend.Extension",
            hint="see docs/extensions.md, or run mega new mixer NAME for an example",
        )
    if not OLDEST_API <= extension.api <= EXTENSION_API:
        raise ConfigError(
            f"extension {reference}: was written for version {extension.api} of mega's interfaces, and this mega has "
            f"version {EXTENSION_API}",
            hint="update " + ("mega" if extension.api > EXTENSION_API else "the extension: see CHANGELOG.md"),
        )
    if extension.api < EXTENSION_API:
        message = "extension %s: was written for version %d of mega's interfaces; the next version will refuse it"
        logger.warning(message, reference, extension.api)
    return extension


def _import_reference(reference: str) -> Any:
    """Import a file, the folder of a package, an installed entry point or a module."""
    if is_extension_path(reference):
        return _import_file(reference)
    installed = [point for point in entry_points(group=GROUP) if point.name == reference]
    if installed:
        return installed[0].load()
    try:
        spec = importlib.util.find_spec(reference)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"extension {reference}: is neither installed nor a module that Python finds",
            hint=f"install its package, or give its path: ./{reference}.py",
        )
    return importlib.import_module(reference)


def is_extension_path(reference: str) -> bool:
    """Return whether a reference to an extension is a path of a file or folder, not the name of an installed one."""
    return reference.endswith(".py") or "/" in reference or reference.startswith(".")


def _import_file(reference: str) -> ModuleType:
    """Import a Python file or the folder of a package, once for each path in a process."""
    path = Path(reference).resolve()
    file = path / "__init__.py" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"extension {reference}: no such file", hint="give a Python file, or a folder with an __init__.py"
        )
    name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(path)] if path.is_dir() else None
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # so that its dataclasses and its own submodules can be imported
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def add_block_declarations(model: Mapping[str, Any], registry: ExtensionRegistry) -> dict[str, Any]:
    """Return the section `model` of run.yaml with the declaration of each block of an extension.

    The tensors are those of the module that the extension builds for one rank, without memory. A model whose other settings
    are not valid is returned with empty declarations, so that its problems are reported as usual.

    Raises:
        ConfigError: for options that the extension does not accept, or if it raises.
    """
    out: dict[str, Any] = dict(model)
    chosen = {
        (kind, name): options
        for kind in ("mixers", "feed_forwards")
        if isinstance(section := out.get(kind), Mapping)
        for name, options in section.items()
        if name in registry.entries(kind)
    }
    for (kind, name), given in chosen.items():
        if not isinstance(given, Mapping | None):
            raise ConfigError(f"model.{kind}.{name} = {given!r:.60} must be a section with the block's options")
        options = chosen[kind, name] = {key: value for key, value in (given or {}).items() if key != "declares"}
        block = registry.entries(kind)[name]
        if found := list(find_config_problems(block.options, options)):
            path = f"model.{kind}.{name}"
            raise_config_error([replace(each, path=f"{path}.{each.path}".strip(".")) for each in found], "run.yaml")
        extension = registry.find_extension(kind, name)
        empty = BlockDeclaration(extension=extension.name, tensors={})
        out[kind] = {**out[kind], name: {**options, "declares": empty.model_dump(mode="json")}}
    if not chosen or list(find_config_problems(ModelConfig, out)):
        return out
    config = ModelConfig.model_validate(out)
    for (kind, name), options in chosen.items():
        declared = _declare_block(config, registry, kind, name, options)
        out[kind] = {**out[kind], name: {**options, "declares": declared.model_dump(mode="json")}}
    return out


def add_function_declarations(model: Mapping[str, Any], registry: ExtensionRegistry) -> dict[str, Any]:
    """Return the section `model` of run.yaml with the declaration of each norm and activation of an extension.

    Raises:
        ConfigError: for options that the extension does not accept.
    """
    out: dict[str, Any] = dict(model)
    for kind, key in FUNCTION_FIELDS.items():
        name, sections = out.get(key), out.get("functions") or {}
        if not isinstance(name, str) or name not in registry.entries(kind) or not isinstance(sections, Mapping):
            continue
        entry, given = registry.entries(kind)[name], sections.get(name) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"model.functions.{name} = {given!r:.60} must be a section with the function's options")
        options = {option: value for option, value in given.items() if option != "declares"}
        if found := list(find_config_problems(entry.options, options)):
            path = f"model.functions.{name}"
            raise_config_error([replace(each, path=f"{path}.{each.path}".strip(".")) for each in found], "run.yaml")
        extension = registry.find_extension(kind, name).name
        declares = FunctionDeclaration(extension=extension, gated=getattr(entry, "gated", False))
        out["functions"] = {**sections, name: {**options, "declares": declares.model_dump(mode="json")}}
    return out


def _declare_block(
    config: ModelConfig, registry: ExtensionRegistry, kind: str, name: str, raw: Mapping[str, Any]
) -> BlockDeclaration:
    from mega_trainer.model.extension_blocks import list_block_tensors  # imports torch

    block: Block = registry.entries(kind)[name]
    extension, options = registry.find_extension(kind, name), block.options.model_validate(raw)
    try:
        traits = block.declares(config, options)
        if not isinstance(traits, BlockTraits):
            raise ConfigError(
                f"extension {extension.name}: declares of {name} in model.{kind} returned {traits!r:.60}",
                hint="return BlockTraits(...) from it",
            )
        tensors = list_block_tensors(config, lambda build, layer: block.build(build, layer, options))
    except ConfigError:
        raise
    except Exception as error:
        where = _locate_error(error, str(getattr(block.build, "__module__", "")).partition(".")[0])
        raise ConfigError(
            f"extension {extension.name}: {name} in model.{kind} raised {type(error).__name__}: {error} {where}",
            hint="correct the extension",
        ) from error
    facts = {**asdict(traits), "shared_heads": traits.shared_heads or traits.heads}
    if facts["heads"] % facts["shared_heads"]:
        raise ConfigError(
            f"extension {extension.name}: shared_heads = {traits.shared_heads} of {name} in model.{kind} must divide "
            f"heads = {traits.heads}",
            hint="correct the options or what declares returns",
        )
    return BlockDeclaration(extension=extension.name, tensors=tensors, **facts)


def find_extension_entry_problems(
    registry: ExtensionRegistry, kind: str, path: str, value: str, options: Mapping[str, Any], where: str
) -> Iterator[ConfigProblem]:
    """Yield the problems of a setting that names an entry of mega or of an extension, and of its options.

    Args:
        kind: kind of entry, such as `objectives`.
        path: key of the setting, such as `objective.kind`.
        value: the name.
        options: settings of the entry.
        where: key of the options, such as `objective.options`.
    """
    added = registry.entries(kind)
    if value in added:
        for problem in find_config_problems(added[value].options, options):
            yield replace(problem, path=f"{where}.{problem.path}".strip("."))
        return
    known = [*BUILT_IN[kind], *added]
    if value not in known:
        near = find_near_option(value, known)
        names = ", ".join(known) or "one that an extension adds"
        hint = f"set {path}={near}" if near else f"set extensions to the file that has it, or remove {path}"
        yield ConfigProblem(path, f"must be {names}", value, hint)
    elif options:
        yield ConfigProblem(where, f"has no effect with {path} = {value}", hint=f"remove {where}")


__all__ = [
    "EXTENSION_API", "ActivationFunction", "Block", "BlockTraits", "Callback", "DataKind", "Extension", "ExtensionBlock",
    "ExtensionRegistry", "NoOptions", "NormFunction", "Objective", "Optimizer", "PositionFunction", "Schedule", "ScoreFunction", "add_block_declarations",
    "add_function_declarations", "find_extension_entry_problems", "load_extensions", "load_model_extensions",
]  # fmt: skip
