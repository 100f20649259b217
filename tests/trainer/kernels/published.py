"""Signatures of libraries that can't be imported here, read from their published source; and the calls that we make to them."""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path

from torch._C import parse_schema

ARCHIVES = Path(sys.prefix) / "published"  # where `make setup` puts them


class NotPublishedError(Exception):
    """A name that a library's source lacks."""


@dataclass(frozen=True)
class Library:
    """One version of a library.

    Attributes:
        archive: its wheel or source distribution.
    """

    archive: Path

    @cached_property
    def files(self) -> dict[str, str]:
        """Its Python source by path, without the folder that a source distribution is in."""
        if self.archive.suffix == ".whl":
            with zipfile.ZipFile(self.archive) as wheel:
                return {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
        with tarfile.open(self.archive) as sources:
            members = [member for member in sources if re.fullmatch(r"[^/]+/(flash_attn|hopper)/\w+\.py", member.name)]
            read = ((member.name.partition("/")[2], sources.extractfile(member)) for member in members)
            return {name: file.read().decode() for name, file in read if file is not None}

    def signature(self, name: str) -> Signature:
        """Of the function or class with this dotted name, `self` left out.

        Raises:
            NotPublishedError: when there is none.
        """
        module, _, attribute = name.rpartition(".")
        path = next((path for path in self._paths(module) if path in self.files), None)
        if path is None:
            raise NotPublishedError(f"{self.archive.name} has no module {module}")
        found = self._defined(path, attribute)
        if found is None:
            raise NotPublishedError(f"{self.archive.name}: {path} has no {attribute}")
        return found

    def operator(self, name: str) -> Signature:
        """Of an operator of `torch.ops`, whose arguments a test of the library promises to keep."""
        kind = Parameter.POSITIONAL_OR_KEYWORD
        return Signature(
            [
                Parameter(a.name, kind, default=a.default_value if a.has_default_value() else Parameter.empty)
                for a in parse_schema(self.schema(name)).arguments
            ]
        )

    def schema(self, name: str) -> str:
        """The same as torch writes it, from `name(` on."""
        for node in ast.walk(ast.parse(self.files["hopper/test_flash_attn.py"])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{name}("):
                return node.value
        raise NotPublishedError(f"{self.archive.name} promises no operator {name}")

    def _paths(self, module: str) -> tuple[str, ...]:
        path = module.replace(".", "/")
        return f"{path}.py", f"{path}/__init__.py", f"hopper/{path}.py"

    def _defined(self, path: str, name: str) -> Signature | None:
        """Where a module defines the name, or takes it from another one of the library."""
        for node in ast.walk(ast.parse(self.files[path])):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return of_function(node)
            if isinstance(node, ast.ClassDef) and node.name == name:
                return of_class(node)
            if isinstance(node, ast.ImportFrom):
                taken = [
                    alias.name for alias in node.names if (alias.asname or alias.name) == name or alias.name == "*"
                ]
                for original in taken:
                    found = self._elsewhere(path, node, name if original == "*" else original)
                    if found is not None:
                        return found
        return None

    def _elsewhere(self, path: str, node: ast.ImportFrom, name: str) -> Signature | None:
        base = path.split("/")[: -node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        there = next((other for other in self._paths(module) if other in self.files and other != path), None)
        return None if there is None else self._defined(there, name)


def of_function(node: ast.FunctionDef, *, method: bool = False) -> Signature:
    """What a function is called with; a default's value does not matter."""
    given, out = node.args, []
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    for index, arg in enumerate(positional):
        kind = Parameter.POSITIONAL_ONLY if index < len(given.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        out.append(Parameter(arg.arg, kind, default=Parameter.empty if index < required else None))
    if given.vararg:
        out.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        out.append(Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None))
    if given.kwarg:
        out.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(out[method:])


def of_class(node: ast.ClassDef) -> Signature:
    """That of `__init__`, or the fields of a dataclass."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return of_function(item, method=True)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [Parameter(item.target.id, kind, default=None if item.value else Parameter.empty) for item in fields]  # type: ignore[union-attr]
    )


@dataclass(frozen=True)
class LibraryCall:
    """A call in our source.

    Attributes:
        name: dotted, of what is called.
        place: file and line.
        positional: how many arguments are given by their places.
        keywords: names of the others.
    """

    name: str
    place: str
    positional: int
    keywords: tuple[str, ...]

    def check(self, signature: Signature) -> None:
        """Raises TypeError when the arguments do not fit."""
        signature.bind(*range(self.positional), **dict.fromkeys(self.keywords))


@dataclass
class Calls(ast.NodeVisitor):
    """Finds the calls into libraries, by names bound in imports, and by attributes of `self` that are set to such.

    Attributes:
        libraries: the first parts of their dotted names.
    """

    path: Path
    libraries: tuple[str, ...]
    names: dict[str, str] = field(default_factory=dict)
    found: list[LibraryCall] = field(default_factory=list)

    def of(self) -> list[LibraryCall]:
        """All in the file."""
        tree = ast.parse(self.path.read_text())
        for _ in range(2):  # a name may be bound below its use
            self.found.clear()
            self.visit(tree)
        return self.found

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = alias.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside = dict(self.names)
        for _ in range(2):
            self.generic_visit(node)
        self.names = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._name(node.value)
        if value is not None:
            self.names[ast.unparse(node.targets[0])] = value
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        if name is not None and name.startswith(tuple(f"{library}." for library in self.libraries)):
            assert not any(isinstance(arg, ast.Starred) for arg in node.args), ast.unparse(node)
            keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
            call = LibraryCall(name, f"{self.path.name}:{node.lineno}", len(node.args), keywords)
            if call not in self.found:
                self.found.append(call)
        self.generic_visit(node)

    def _name(self, node: ast.expr) -> str | None:
        text = ast.unparse(node)
        parts = text.split(".")
        for cut in range(len(parts), 0, -1):
            bound = self.names.get(".".join(parts[:cut]))
            if bound is not None:
                return ".".join([bound, *parts[cut:]])
        return None


def library_calls(folder: Path, libraries: tuple[str, ...]) -> Iterator[LibraryCall]:
    """Every call into these libraries that is made in the Python files of a folder."""
    for path in sorted(folder.rglob("*.py")):
        if any(library.rpartition(".")[2] in path.read_text() for library in libraries):
            yield from Calls(path, libraries).of()
