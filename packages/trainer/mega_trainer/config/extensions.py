"""Extensions: Python modules outside of mega that add mixers, objectives, optimizers and more by name. No torch.

An extension is a module with a constant `EXTENSION`, an `Extension`. `load_extensions` imports the modules that run.yaml or
the command line names, and returns an `ExtensionRegistry` of all that they add.

Code is imported from nowhere else: never by a name that a checkpoint or a model's folder gives, unless it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args

from mega_common.errors import ConfigError
from mega_common.extension_block import (
    FUNCTION_FIELDS,
    FUNCTION_NAMES,
    BlockDeclaration,
    FunctionDeclaration,
)
from mega_common.extension_entries import Block, BlockTraits, Extension, Kernel, KernelOperation
from mega_common.extension_loader import find_installed_extensions, load_extension, name_extension_in_errors
from mega_common.layer_kinds import FEEDS, MIXERS
from mega_common.model_config import ModelConfig
from mega_common.strict_config import (
    ConfigProblem,
    find_config_problems,
    find_near_option,
    raise_config_error,
)
from mega_data.data_config import KindName
from mega_trainer.config.lr_schedule import ScheduleName
from mega_trainer.config.objective_config import USED
from mega_trainer.config.sections import OptimizerName

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
    "samplers": (),
    "tokenizers": (),
    "kernels": (),
}


@dataclass(frozen=True)
class ExtensionRegistry:
    """Extensions of a run, and the objects that they add, such as mixers and model families, of all extensions together."""

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
        """Return the extension that provides the object `name` of a kind, such as `mixers`."""
        return next(extension for extension in self.extensions if name in getattr(extension, kind))

    def select_kernels(self, names: Sequence[str]) -> list[Kernel]:
        """Return the extension kernels called `names`, which `find_kernel_problems` has accepted."""
        entries = self.entries("kernels")
        return [entries[name] for name in names]

    def find_kernel_problems(self, names: Sequence[str]) -> Iterator[ConfigProblem]:
        """Yield the problems of `kernels.functions`: a name of no extension, or two kernels for one operation."""
        entries, owners = self.entries("kernels"), dict[str, str]()
        for name in names:
            yield from find_extension_entry_problems(
                self, "kernels", "kernels.functions", name, {}, "kernels.functions"
            )
            operation = entries[name].operation if name in entries else name
            if operation in owners:
                rule = f"must have one kernel for {operation}, found {owners[operation]} and {name}"
                yield ConfigProblem("kernels.functions", rule, None, "remove kernels.functions, or one of them")
            owners[operation] = name

    def make_block_factories(self, model: ModelConfig) -> dict[str, Callable[[Any, int], Any]]:
        """Return {name: function `(build, layer) -> module`} of the extensions' layer blocks that the model uses."""
        return {
            name: self._bind_block(kind, name, section.options)
            for kind in ("mixers", "feed_forwards")
            for name, section in getattr(model, kind).items()
            if name in self.entries(kind)
        }

    def _bind_block(self, kind: str, name: str, options: Mapping[str, Any]) -> Callable[[Any, int], Any]:
        block: Block = self.entries(kind)[name]
        where = f"extension {self.find_extension(kind, name).name}: {name} in model.{kind}"
        parsed = block.options.parse(options)

        def build_block(build: Any, layer: int) -> Any:
            from mega_trainer.model.extension_blocks import check_block_output  # imports torch

            module = block.build(build, layer, parsed)
            module.register_forward_hook(partial(check_block_output, where))
            return module

        return build_block

    def bind_extension_functions(self, model: ModelConfig) -> dict[str, Callable[..., Any]]:
        """Return the extension functions that the model uses, with options bound, by model field such as `norm`."""
        found: dict[str, Callable[..., Any]] = {}
        for kind, key in FUNCTION_FIELDS.items():
            name = getattr(model, key)
            if name in self.entries(kind):
                entry = self.entries(kind)[name]
                function = getattr(entry, FUNCTION_ATTRIBUTES[kind])
                found[key] = partial(function, options=entry.options.parse(model.functions[name].options))
        return found


def load_extensions(references: Iterable[str]) -> ExtensionRegistry:
    """Import the extensions that `references` name: files, folders of packages, installed entry points, or modules.

    Raises:
        ConfigError: for an extension that is missing, raises, or was written for other interfaces, for two entries with one
            name, and for a kernel of an unknown operation.
    """
    found = [load_extension(reference) for reference in dict.fromkeys(references)]
    owners = {(_find_namespace(kind), name): ("mega", kind) for kind, names in BUILT_IN.items() for name in names}
    for extension in found:
        for name, kernel in extension.kernels.items():
            if kernel.operation not in get_args(KernelOperation):
                raise ConfigError(
                    f"extension {extension.name}: the operation of {name} in kernels must be one of "
                    f"{', '.join(get_args(KernelOperation))}, found {kernel.operation!r}",
                    hint="correct the extension",
                )
        for kind in BUILT_IN:
            for name in getattr(extension, kind):
                owner = owners.setdefault((_find_namespace(kind), name), (extension.name, kind))
                if owner != (extension.name, kind):
                    raise ConfigError(
                        f"extension {extension.name}: the name {name!r} in {kind} is already used by {owner[0]}"
                        + (f" in {owner[1]}" if owner[1] != kind else ""),
                        hint="rename it, or leave out one of the extensions",
                    )
    return ExtensionRegistry(found)


def _find_namespace(kind: str) -> str:
    """Return the kind of entries whose names must differ from those of `kind`; a layer's two blocks are one namespace."""
    return "mixers" if kind == "feed_forwards" else kind


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
    for name in sorted(missing - find_installed_extensions().keys()):
        raise ConfigError(
            f"{source}: the model requires the extension {name!r}, which is not installed",
            hint="name its file with --extension FILE, or install its package",
        )
    return load_extensions([*references, *sorted(missing)]) if missing else given


def add_block_declarations(model: Mapping[str, Any], registry: ExtensionRegistry) -> dict[str, Any]:
    """Return run.yaml's `model` section with the tensors and traits that each extension block of the model declares.

    The tensors are those of the module that the extension builds for one rank, without memory. A model whose other settings
    are not valid is returned with empty declarations, so that its problems are reported as usual.

    Raises:
        ConfigError: for options that the extension does not accept, if it raises, or if tensors of two blocks have one name.
    """
    out = _add_named_blocks(model, registry)
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
    from mega_ckpt.canonical_tensors import canonical_tensors  # imports torch

    config = ModelConfig.model_validate(out)
    for (kind, name), options in chosen.items():
        declared = _declare_block(config, registry, kind, name, options)
        out[kind] = {**out[kind], name: {**options, "declares": declared.model_dump(mode="json")}}
    canonical_tensors(ModelConfig.model_validate(out))  # raises if two tensors have one name
    return out


def _add_named_blocks(model: Mapping[str, Any], registry: ExtensionRegistry) -> dict[str, Any]:
    """Return the section `model` with an empty section for each block of an extension that only `layers` names.

    Raises:
        ConfigError: for a name that no extension has but that is like one of theirs, or is of the other kind; or if
            `mixers` or `feed_forwards` is no section.
    """
    out: dict[str, Any] = dict(model)
    layers = given if isinstance(given := model.get("layers"), list) else []
    groups = [item.get("of") if isinstance(item, Mapping) else [item] for item in layers]
    names = [str(name) for group in groups if isinstance(group, list) for name in group]
    used = {"layers": list(dict.fromkeys(half for name in names for half in name.split("+")))}
    added = {name: kind for kind in ("mixers", "feed_forwards") for name in registry.entries(kind)}
    for kind in ("mixers", "feed_forwards"):
        if not isinstance(section := out.get(kind) or {}, Mapping):
            raise ConfigError(f"model.{kind} = {section!r:.60} must be a section", hint=f"{kind}: {{NAME: {{...}}}}")
        used[kind] = [
            str(name)
            for name, options in section.items()
            if not isinstance(options, Mapping) or "declares" not in options
        ]
        missing = [name for name in used["layers"] if added.get(name) == kind and name not in section]
        out |= {kind: {**section, **{name: {} for name in missing}}} if missing else {}
    for section, found in used.items() if added else ():
        for name in found:
            near = find_near_option(name, [*added, *MIXERS, *FEEDS])
            if near in added and (name != near or added[near] != section != "layers"):
                raise ConfigError(
                    f"model.{section}: the extensions of this run have no {name!r} there",
                    hint=f"did you mean {near!r} of model.{added[near]}?",
                )
    return out


def add_function_declarations(model: Mapping[str, Any], registry: ExtensionRegistry) -> dict[str, Any]:
    """Return run.yaml's `model` section with the declaration of each extension function it uses, such as a norm.

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
    extension, options = registry.find_extension(kind, name).name, block.options.model_validate(raw)
    where = f"extension {extension}: {name} in model.{kind}"
    layer = max((n for n, halves in enumerate(config.layer_kinds) if name in halves), default=0)
    with name_extension_in_errors(where, str(getattr(block.build, "__module__", "")).partition(".")[0]):
        traits = block.declares(config, options)
        if not isinstance(traits, BlockTraits):
            raise ConfigError(f"{where}: declares returned {traits!r:.60}", hint="return BlockTraits(...) from it")
        tensors = list_block_tensors(
            config, lambda build, layer: block.build(build, layer, options), where, layer, recurrent=traits.recurrent
        )
    facts = {**asdict(traits), "shared_heads": traits.shared_heads or traits.heads}
    if facts["heads"] % facts["shared_heads"]:
        raise ConfigError(
            f"{where}: shared_heads = {traits.shared_heads} must divide heads = {traits.heads}",
            hint="correct the options or what declares returns",
        )
    return BlockDeclaration(extension=extension, tensors=tensors, **facts)


def find_extension_entry_problems(
    registry: ExtensionRegistry, kind: str, path: str, value: str, options: Mapping[str, Any], where: str
) -> Iterator[ConfigProblem]:
    """Yield a problem if a setting such as `objective.kind` names no known object, or `options` do not fit the object.

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
        near = find_near_option(value, known) or next((name for name in known if name.lower() in value.lower()), None)
        names = ", ".join(known) or "one that an extension adds"
        hint = f"set {path}={near}" if near else f"set extensions to the file that has it, or remove {path}"
        shown = None if path.endswith(f".{value}") else value
        # kernels.functions is a list: rules about it hold whatever it names
        yield ConfigProblem(path, f"must be {names}", shown, hint, unknown_choice=kind != "kernels")
    elif options:
        yield ConfigProblem(where, f"has no effect with {path} = {value}", hint=f"remove {where}")
