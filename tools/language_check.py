"""Measure how the code reads, and fail where it reads worse than the limits below.

`python tools/language_check.py` measures the packages and the command line; `--places` lists every place that counts. `python tools/language_check.py FOLDER...`
measures any other source tree by the same rules, without limits, for comparison.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = [ROOT / "packages", ROOT / "cli"]

CLAUSE = re.compile(r"(what|whether|which|where|when|how|who)\b", re.IGNORECASE)
NEEDS_NEIGHBOUR = re.compile(r"(of|the same|such|those|these|its|their|so many|as|likewise|both)\b", re.IGNORECASE)
TELL = re.compile(r"\b(?:tell|tells|told)\b", re.IGNORECASE)

SHOWN = 10  # places below a limit that is passed, without --places

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Limit:
    """Bounds of one measure: the value that a change may not pass, and the goal."""

    at_most: float | None = None
    at_least: float | None = None
    goal: str = ""

    def allows(self, value: float) -> bool:
        """Return whether the value is inside the bounds."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


# A change that improves a measure also moves its limit, so that it never gets worse again.
LIMITS = {
    "docstrings that open with a wh-clause, percent": Limit(at_most=14.5, goal="<= 0.5"),
    "docstrings that open with of/the same/such/those/its, percent": Limit(at_most=5.4, goal="0"),
    "tell/tells/told per 1,000 lines": Limit(at_most=10.4, goal="<= 0.1"),
    "mean length of a public function or class name": Limit(at_least=8.0, goal=">= 13"),
    "type names defined in more than one module": Limit(at_most=59, goal="<= 5"),
    "longest function, lines": Limit(at_most=200, goal="<= 60"),
    "code lines": Limit(goal="<= 46,000"),
    "files": Limit(goal="<= 430"),
}


def source_files(folders: list[Path]) -> list[Path]:
    """Return the Python files below the folders, without tests."""
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if not {"tests", "test", ".venv", "build"} & set(path.relative_to(folder).parts)
        and not path.name.endswith("_test.py")
    )


def code_lines(text: str) -> int:
    """Count the lines that hold code: no blank line, no comment, no docstring."""
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    statement_begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            statement_begins = True
        elif token.type not in skipped:
            if not (statement_begins and token.type == tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
            statement_begins = False
    return len(lines)


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Yield every function and class of a module, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Definition))


def measure(files: list[Path]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return the value of each measure, and the places behind those that count places."""
    clauses, neighbours, longest = [], [], (0, "")
    documented = lines = code = tells = 0
    lengths: list[int] = []
    modules: dict[str, set[Path]] = defaultdict(set)
    for path in files:
        text = path.read_text(encoding="utf-8")
        lines += text.count("\n")
        code += code_lines(text)
        tells += len(TELL.findall(text))
        for node in definitions(ast.parse(text)):
            place = f"{path}:{node.lineno} {node.name}"
            if (docstring := ast.get_docstring(node)) is not None:
                documented += 1
                if CLAUSE.match(docstring):
                    clauses.append(place)
                elif NEEDS_NEIGHBOUR.match(docstring):
                    neighbours.append(place)
            if not node.name.startswith("_"):
                lengths.append(len(node.name))
            if isinstance(node, ast.ClassDef):
                if not node.name.startswith("_"):
                    modules[node.name].add(path)
            elif node.end_lineno is not None:
                longest = max(longest, (node.end_lineno - node.lineno + 1, place))
    doubles = sorted(
        (name for name, where in modules.items() if len(where) > 1), key=lambda name: (-len(modules[name]), name)
    )
    values = dict(
        zip(
            LIMITS,
            [
                100 * len(clauses) / max(1, documented),
                100 * len(neighbours) / max(1, documented),
                1000 * tells / max(1, lines),
                sum(lengths) / max(1, len(lengths)),
                float(len(doubles)),
                float(longest[0]),
                float(code),
                float(len(files)),
            ],
            strict=True,
        )
    )
    names = list(LIMITS)
    return values, {
        names[0]: clauses,
        names[1]: neighbours,
        names[4]: [f"{name} in {len(modules[name])} modules" for name in doubles],
        names[5]: [longest[1]],
    }


def main(arguments: list[str]) -> int:
    """Print each measure beside its limit; return 1 if a limit is passed."""
    show = "--places" in arguments
    folders = [Path(argument) for argument in arguments if not argument.startswith("--")]
    values, places = measure(source_files(folders or OURS))
    failed = False
    for name, value in values.items():
        limit = LIMITS[name] if not folders else Limit()
        allowed = limit.allows(value)
        failed |= not allowed
        bound = limit.at_most if limit.at_most is not None else limit.at_least
        print(
            f"{'ok    ' if allowed else 'FAILED'} {name}: {value:,.1f}"
            + (f" (limit {bound:,g}, goal {limit.goal})" if bound is not None else "")
        )
        if show or not allowed:
            for place in places.get(name, [])[: None if show else SHOWN]:
                print(f"         {place}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
