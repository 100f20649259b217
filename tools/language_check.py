"""Measure how the code reads, and fail where it reads worse than the limits below.

`python tools/language_check.py` measures the packages, the command line and the pages of documentation; `--places` lists
every place that counts. `python tools/language_check.py FOLDER...` measures any other source tree by the same rules, without
limits, for comparison.
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
NEEDS_NEIGHBOR = re.compile(r"(of|the same|such|those|these|its|their|so many|as|likewise|both)\b", re.IGNORECASE)
INCOMPLETE = re.compile(r"""(?!.*[.?!][)"'`]*$)""", re.MULTILINE)  # the first line ends inside a sentence
TELL = re.compile(r"(?<!\.)\b(?:tell|tells|told)\b(?!\()", re.IGNORECASE)  # `tell()` of a stream is an API

# Words and phrases that plain technical English replaces; CONTRIBUTING.md has the rule. "no longer" and "no more" are fine.
PRIVATE = re.compile(
    r"\b(?:goes on|go on|went on|so many|anew|likewise|lest|in vain|for ever|thereof|whereby|nobody|hollow|riders?"
    r"|where there is one|where there are none|is no (?!longer|more)\w+|are no (?!longer|more)\w+|was no (?!longer|more)\w+"
    r"|but for|at hand|under way|theirs|is that of|are those of|told alike|shared out|put off)\b",
    re.IGNORECASE,
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs"]

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
    "docstrings that open with a wh-clause, percent": Limit(at_most=0, goal="<= 0.5"),
    "docstrings that open with of/the same/such/those/its, percent": Limit(at_most=0, goal="0"),
    "docstrings whose first line is no complete sentence, percent": Limit(at_most=0, goal="0"),
    "tell/tells/told per 1,000 lines": Limit(at_most=0.1, goal="<= 0.1"),
    "private words per 1,000 lines": Limit(at_most=1, goal="0"),
    "mean length of a public function or class name": Limit(at_least=14, goal=">= 13"),
    "type names defined in more than one module": Limit(at_most=0, goal="<= 5"),
    "longest function of the packages, lines": Limit(at_most=60, goal="<= 60"),
    "longest function body of the command line, lines": Limit(at_most=65, goal="<= 80"),
    "code lines": Limit(at_most=86_200, goal="<= 46,000"),
    "files": Limit(at_most=635, goal="<= 430"),
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


def prose_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line of a module, or of a page without its code blocks."""
    in_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= path.suffix == ".md" and line.lstrip().startswith("```")
        if not in_code:
            yield number, line


def count_words(files: list[Path], words: re.Pattern[str]) -> tuple[float, list[str]]:
    """Return the matches per 1,000 lines, and the places of all of them."""
    lines, places = 0, []
    for path in files:
        for number, line in prose_lines(path):
            lines += 1
            places += [f"{path}:{number} {match[0]}" for match in words.finditer(line)]
    return 1000 * len(places) / max(1, lines), places


def measure_docstrings(nodes: list[tuple[Path, Definition]], opening: re.Pattern[str]) -> tuple[float, list[str]]:
    """Return the percentage of docstrings with an opening, and their places."""
    documented = [(path, node, text) for path, node in nodes if (text := ast.get_docstring(node)) is not None]
    places = [f"{path}:{node.lineno} {node.name}" for path, node, text in documented if opening.match(text)]
    return 100 * len(places) / max(1, len(documented)), places


def find_doubled_types(nodes: list[tuple[Path, Definition]]) -> list[str]:
    """Return the public class names that several modules define."""
    modules: dict[str, set[Path]] = defaultdict(set)
    for path, node in nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            modules[node.name].add(path)
    return [f"{name} in {len(paths)} modules" for name, paths in sorted(modules.items()) if len(paths) > 1]


def longest_function(nodes: list[tuple[Path, Definition]], *, body_only: bool = False) -> tuple[float, list[str]]:
    """Return the lines of the longest function, or of its body without the signature, and its place."""
    lengths = [
        (
            (node.end_lineno or 0) - (node.body[0].lineno if body_only else node.lineno) + 1,
            f"{path}:{node.lineno} {node.name}",
        )
        for path, node in nodes
        if not isinstance(node, ast.ClassDef)
    ]
    lines, place = max(lengths, default=(0, ""))
    return float(lines), [place]


def measure(files: list[Path], pages: list[Path]) -> dict[str, tuple[float, list[str]]]:
    """Return the value of each measure, and the places behind those that count places."""
    nodes = [(path, node) for path in files for node in definitions(ast.parse(path.read_text(encoding="utf-8")))]
    public = [(path, node) for path, node in nodes if not node.name.startswith("_")]
    lengths = [len(node.name) for _, node in public]
    doubles = find_doubled_types(nodes)
    commands = [(path, node) for path, node in nodes if "mega_cli" in path.parts]
    values = [
        measure_docstrings(nodes, CLAUSE),
        measure_docstrings(nodes, NEEDS_NEIGHBOR),
        measure_docstrings(public, INCOMPLETE),
        count_words([*files, *pages], TELL),
        count_words([*files, *pages], PRIVATE),
        (sum(lengths) / max(1, len(lengths)), []),
        (float(len(doubles)), doubles),
        longest_function([pair for pair in nodes if "mega_cli" not in pair[0].parts]),
        longest_function(commands, body_only=True),
        (float(sum(code_lines(path.read_text(encoding="utf-8")) for path in files)), []),
        (float(len(files)), []),
    ]
    return dict(zip(LIMITS, values, strict=True))


def main(arguments: list[str]) -> int:
    """Print each measure beside its limit; return 1 if a limit is passed."""
    show = "--places" in arguments
    folders = [Path(argument) for argument in arguments if not argument.startswith("--")]
    pages = (
        []
        if folders
        else [page for entry in PAGES for page in ([entry] if entry.is_file() else sorted(entry.rglob("*.md")))]
    )
    failed = False
    for name, (value, places) in measure(source_files(folders or OURS), pages).items():
        limit = LIMITS[name] if not folders else Limit()
        allowed = limit.allows(value)
        failed |= not allowed
        bound = limit.at_most if limit.at_most is not None else limit.at_least
        print(
            f"{'ok    ' if allowed else 'FAILED'} {name}: {value:,.1f}"
            + (f" (limit {bound:,g}, goal {limit.goal})" if bound is not None else "")
        )
        if show or not allowed:
            for place in places[: None if show else SHOWN]:
                print(f"         {place}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
