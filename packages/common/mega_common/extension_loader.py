"""Import of one extension: a file, the folder of a package, an installed entry point or a module.

Code is imported from nowhere else: never by a name that a checkpoint or a model's folder gives, unless it is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, get_args, get_origin, get_type_hints

from mega_common.errors import ConfigError, MegaError
from mega_common.extension_entries import Extension
from mega_common.progress_logging import logger
from mega_common.strict_config import StrictConfig

EXTENSION_API = 1  # version of the interfaces in mega_trainer.extend
OLDEST_API = 1  # versions from this one on are loaded, with a warning
FILE_MODULE = "mega_extension_"  # begin of the module names of extensions that are given as files
GROUP = "mega.extensions"  # entry points of installed packages
_BLOCK = {"build": "build, layer, options", "declares": "model, options"}
# Functions of an entry, by its kind, and the arguments that mega passes to each; those after * are passed by name.
CALLS: Mapping[str, Mapping[str, str]] = {
    "mixers": _BLOCK, "feed_forwards": _BLOCK, "norms": {"normalize": "x, weight, eps, *, options"},
    "activations": {"activate": "x, *, options"}, "positions": {"encode": "x, positions, *, options"},
    "attention_scores": {"modify": "score, batch, head, query, key, *, options"},
    "objectives": {"token_loss": "log_probs, log_normalizers, *, options"}, "optimizers": {"build": "settings, options"},
    "schedules": {"share": "done, *, options"}, "callbacks": {"build": "options"},
    "data_kinds": {"build": "part, context, num_samples, *, options"},
    "samplers": {"adjust": "scores, prompt, generated, *, options"}, "tokenizers": {"build": ""},
}  # fmt: skip


def find_installed_extensions() -> dict[str, EntryPoint]:
    """Return the entry point of each extension that an installed package announces, by the name of the extension."""
    return {point.name: point for point in entry_points(group=GROUP)}


@contextmanager
def name_extension_in_errors(title: str, package: str, hint: str = "correct the extension") -> Iterator[None]:
    """Context manager that converts exceptions except `MegaError`s to a `ConfigError` with `title` and the extension's line.
    That is the last line of its file or `package` in the traceback, else the innermost line; a syntax error has the place in its
    message.
    """
    try:
        yield
    except MegaError:
        raise
    except (Exception, SystemExit) as error:
        where = find_extension_line(error, package) or _format_lines(list(traceback.walk_tb(error.__traceback__)))
        where = "" if isinstance(error, SyntaxError) else f" {where}"
        raise ConfigError(f"{title} raised {type(error).__name__}: {error}{where}", hint=hint) from error


def find_extension_line(error: BaseException, package: str = "") -> str:
    """Return the innermost line of an extension's code in a traceback, such as `(mine.py, line 2)`; "" without one."""
    return _format_lines(
        [
            (frame, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if (name := str(frame.f_globals.get("__name__", "")).partition(".")[0]).startswith(FILE_MODULE)
            or (package and name == package)
        ]
    )


def _format_lines(lines: list[tuple[FrameType, int]]) -> str:
    """Return the innermost of these lines of a traceback as text; "" without one."""
    return "".join(f"({Path(frame.f_code.co_filename).name}, line {line})" for frame, line in lines[-1:])


def load_extension(reference: str) -> Extension:
    """Import one extension from a file, a package's folder, an entry point or a module, and check its interfaces.

    Raises:
        ConfigError: for an extension that is missing, raises, or was written for other interfaces.
    """
    hint = "correct the extension, or remove it from extensions"
    with name_extension_in_errors(f"extension {reference}: loading it", reference.partition(".")[0], hint):
        found = _import_reference(reference)
    extension = getattr(found, "EXTENSION", None) if isinstance(found, ModuleType) else found
    if not isinstance(extension, Extension):
        raise ConfigError(
            f"extension {reference}: must have a constant EXTENSION of type mega_trainer.extend.Extension",
            hint="see docs/extensions.md, or run mega new mixer NAME for an example",
        )
    _check_entries(reference, extension)
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


def _check_entries(reference: str, extension: Extension) -> None:
    """Raise `ConfigError` for an entry of another type than its kind has, or with options or functions of another form."""
    for field, kind in get_type_hints(Extension).items():
        if (arguments := get_args(kind)) and get_origin(kind) is Mapping:
            for name, entry in getattr(extension, field).items():
                where = f"extension {reference}: {field}[{name!r}]"
                if not isinstance(entry, arguments[1]):
                    raise ConfigError(
                        f"{where} must be a {arguments[1].__name__}, found {entry!r}",
                        hint=f"write {field}={{{name!r}: {arguments[1].__name__}(...)}}; see docs/extensions.md",
                    )
                options = getattr(entry, "options", StrictConfig)
                if not (isinstance(options, type) and issubclass(options, StrictConfig)):
                    raise ConfigError(f"{where}.options must be a subclass of StrictConfig, found {options!r:.60}")
                for attribute, names in CALLS.get(field, {}).items():
                    names = names.replace("x,", "gate, up,") if getattr(entry, "gated", False) else names
                    check_call(f"{where}.{attribute}", getattr(entry, attribute), names)


def check_call(where: str, function: Any, names: str) -> None:
    """Raise ConfigError unless an extension's function accepts the arguments `names`, such as `x, *, options`.
    Built-in functions, whose parameters Python does not know, are not checked. `where` is the name of the function in
    the extension.
    """
    positional, _, keywords = names.partition("*, ")
    name = "__init__" if isinstance(function, type) else getattr(function, "__name__", "function")
    hint = f"write def {name}({'self, ' if name == '__init__' or inspect.ismethod(function) else ''}{names})"
    try:
        inspect.signature(function).bind(*filter(None, positional.split(", ")), **dict.fromkeys(keywords.split()))
    except ValueError:
        return
    except TypeError:
        if not inspect.isbuiltin(function):
            found = f"{name}{inspect.signature(function)}" if callable(function) else f"{function!r:.60}"
            text = f"{where} must be a function with the arguments ({names}), found {found}"
            raise ConfigError(text, hint=hint) from None


def _import_reference(reference: str) -> Any:
    """Import a file, the folder of a package, an installed entry point or a module."""
    if is_extension_path(reference):
        return _import_file(reference)
    if reference in (installed := find_installed_extensions()):
        return installed[reference].load()
    try:
        spec = importlib.util.find_spec(reference)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"extension {reference}: is neither installed nor a module that Python finds",
            hint="give a Python file, ./FILE.py, or a folder with an __init__.py"
            if Path(reference).exists()
            else f"install its package, or give its path: ./{reference}.py",
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
