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

# In a source distribution, whose first folder is the package's name and version.
SOURCES = r"[^/]+/((flash_attn|hopper|causal_conv1d)/\w+|mamba_ssm(/\w+)*)\.py"
ARCHIVES = Path(sys.prefix) / "published"  # where `make setup` puts them


Definition = ast.FunctionDef | ast.ClassDef


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
            members = [member for member in sources if re.fullmatch(SOURCES, member.name)]
            read = ((member.name.partition("/")[2], sources.extractfile(member)) for member in members)
            return {name: file.read().decode() for name, file in read if file is not None}

    def signature(self, name: str) -> Signature:
        """Of the function, class or method with this dotted name, `self` left out; `()` after a part is what its call returns.

        Raises:
            NotPublishedError: when there is none.
        """
        parts = name.split(".")
        cut = max((n for n in range(1, len(parts)) if self._module(".".join(parts[:n]))), default=0)
        path, scope, instance = self._module(".".join(parts[:cut])), None, False
        for part in parts[cut:]:
            path, scope = self._definition(path, scope, part.removesuffix("()")) or (path, None)
            if scope is None:
                raise NotPublishedError(f"{self.archive.name} has no {name}: {path} lacks {part}")
            instance = part.endswith("()")
            if instance and isinstance(scope, ast.FunctionDef):
                assert isinstance(scope.returns, ast.Name), f"what {part} returns is not said"
                path, scope = self._definition(path, None, scope.returns.id) or (path, None)
        if instance:
            path, scope = self._definition(path, scope, "forward") or (path, None)
        if scope is None:
            raise NotPublishedError(f"{self.archive.name} has no {name}")
        return of_class(scope) if isinstance(scope, ast.ClassDef) else of_function(scope)

    def _module(self, name: str) -> str | None:
        """The path of the module with this dotted name."""
        path = name.replace(".", "/")
        return next((p for p in (f"{path}.py", f"{path}/__init__.py", f"hopper/{path}.py") if p in self.files), None)

    def _definition(self, path: str | None, scope: ast.AST | None, name: str) -> tuple[str, Definition] | None:
        """Where a class, or a module itself or by taking it from another one, defines the name."""
        if path is None:
            return None
        for node in ast.walk(scope or ast.parse(self.files[path])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node is not scope:
                return path, node
            if isinstance(node, ast.ImportFrom):
                base = path.split("/")[: -node.level] if node.level else []
                module = self._module(".".join([*base, *([node.module] if node.module else [])]))
                taken = [
                    alias.name for alias in node.names if (alias.asname or alias.name) == name or alias.name == "*"
                ]
                for original in taken if module != path else []:
                    if found := self._definition(module, None, name if original == "*" else original):
                        return found
        return None

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


def of_function(node: ast.FunctionDef) -> Signature:
    """What a function, or a method without `self`, is called with; a default's value does not matter."""
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
    method = bool(out) and out[0].name in ("self", "cls")
    return Signature(out[method:])


def of_class(node: ast.ClassDef) -> Signature:
    """That of `__init__`, or the fields of a dataclass."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return of_function(item)
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
            self.names |= dict.fromkeys(map(ast.unparse, node.targets), value)
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
        """The dotted name of what an expression is, if that is of a library; what a call returns is its name with `()`, but
        what an instance returns when it is called is no longer the library's.
        """
        if (bound := self.names.get(ast.unparse(node))) is not None:
            return bound
        if isinstance(node, ast.Attribute) and (base := self._name(node.value)) is not None:
            return f"{base}.{node.attr}"
        if isinstance(node, ast.Call) and (called := self._name(node.func)) is not None and called[-1] != ")":
            return f"{called}()"
        return None


def library_calls(folder: Path, libraries: tuple[str, ...]) -> Iterator[LibraryCall]:
    """Every call into these libraries that is made in the Python files of a folder."""
    for path in sorted(folder.rglob("*.py")):
        if any(library.rpartition(".")[2] in path.read_text() for library in libraries):
            yield from Calls(path, libraries).of()
