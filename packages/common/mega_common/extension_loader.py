"""Import of one extension: a file, the folder of a package, an installed entry point or a module.

Code is imported from nowhere else: never by a name that a checkpoint or a model's folder gives, unless it is installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, get_args, get_origin, get_type_hints

from mega_common.errors import ConfigError
from mega_common.extension_entries import Extension
from mega_common.progress_logging import logger

EXTENSION_API = 1  # version of the interfaces in mega_trainer.extend
OLDEST_API = 1  # versions from this one on are loaded, with a warning
FILE_MODULE = "mega_extension_"  # begin of the module names of extensions that are given as files
GROUP = "mega.extensions"  # entry points of installed packages


def find_installed_extensions() -> dict[str, EntryPoint]:
    """Return the entry point of each extension that an installed package announces, by the name of the extension."""
    return {point.name: point for point in entry_points(group=GROUP)}


def locate_error(error: Exception, package: str) -> str:
    """Return the file and line where an extension raised an error, such as `(mine.py, line 2)`.
    It is the last line of its file or `package` in the traceback, else the innermost line; "" for a syntax error, whose
    message has the place.
    """
    if isinstance(error, SyntaxError):
        return ""
    return find_extension_line(error, package) or _format_lines(list(traceback.walk_tb(error.__traceback__)))


def find_extension_line(error: Exception, package: str = "") -> str:
    """Return the innermost line of an extension's code in an error's traceback, such as `(mine.py, line 2)`.

    It is "" without one.
    """
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
    try:
        found = _import_reference(reference)
    except ConfigError:
        raise
    except Exception as error:
        where = locate_error(error, reference.partition(".")[0])
        raise ConfigError(
            f"extension {reference}: loading it raised {type(error).__name__}: {error} {where}".rstrip(),
            hint="correct the extension, or remove it from extensions",
        ) from error
    extension = getattr(found, "EXTENSION", None) if isinstance(found, ModuleType) else found
    if not isinstance(extension, Extension):
        raise ConfigError(
            f"extension {reference}: must have a constant EXTENSION of type mega_trainer.extend.Extension",
            hint="see docs/extensions.md, or run mega new mixer NAME for an example",
        )
    _check_entry_types(reference, extension)
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


def _check_entry_types(reference: str, extension: Extension) -> None:
    """Raise `ConfigError` for an entry of another type than its kind has, such as a class in place of a `Block`."""
    for field, kind in get_type_hints(Extension).items():
        if (arguments := get_args(kind)) and get_origin(kind) is Mapping:
            for name, entry in getattr(extension, field).items():
                if not isinstance(entry, arguments[1]):
                    raise ConfigError(
                        f"extension {reference}: {field}[{name!r}] must be a {arguments[1].__name__}, found {entry!r}",
                        hint=f"write {field}={{{name!r}: {arguments[1].__name__}(...)}}; see docs/extensions.md",
                    )


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
