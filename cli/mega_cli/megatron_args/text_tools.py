"""Simulation of commands that transform text: `tr`, `cut`, `sed`, `awk`, `wc`, ..."""

from __future__ import annotations

import getopt
import re
import string
from collections.abc import Callable, Sequence

from mega_cli.megatron_args.calculators import evaluate_awk
from mega_cli.megatron_args.shell_words import MARK

Arguments = Sequence[str]
LONGEST_OUTPUT = 1_000_000  # characters
MOST_PARTS = 32  # most ranges of `cut`, and most items of awk's `print`
LONGEST_COMMAND = 1000  # characters of a program of `sed` or `awk`
SUBSTITUTION = re.compile(
    r"s(?P<by>[^\w\s\\])(?P<start>\^?)(?P<old>(?:(?!(?P=by))(?:[\w ,:=/-]|\\[./]))+)(?P<end>\$?)(?P=by)"
    rf"(?P<new>(?:(?!(?P=by))[\w ,:=/.-]|{MARK.pattern})*)(?P=by)(?P<all>g?)"
)
CHARACTER = re.compile(
    r"\[:(?P<named>[a-z]+):\]|(?P<first>\\.|[^\\])-(?P<last>\\.|[^\\])|(?P<one>\\.|[^\\])", re.DOTALL
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "-": "-"}
CLASSES = {
    "lower": string.ascii_lowercase, "upper": string.ascii_uppercase, "digit": string.digits, "space": "\t\n\v\f\r ",
    "blank": "\t ", "punct": string.punctuation, "alpha": string.ascii_uppercase + string.ascii_lowercase,
    "alnum": string.digits + string.ascii_uppercase + string.ascii_lowercase,
}  # fmt: skip
ASCII = "".join(map(chr, range(128)))
AWK_PRINT = re.compile(r"\s*(?P<begin>BEGIN\s*)?\{\s*print\b(?P<items>[^{}]*)\}\s*")
AWK_ITEM = re.compile(r'\$(?P<field>\d{1,4}|NF)|(?P<count>NF)|"(?P<text>[^"\\]*)"|(?P<comma>,)|\s+')


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their line breaks."""
    return text.removesuffix("\n").split("\n") if text else []


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def simulate_cat(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `cat` prints: its standard input `entered`; None if it is unknown or files are given."""
    return entered if not arguments or arguments == ["-"] else None


def simulate_tr(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `tr` prints, which translates, deletes or squeezes characters of its standard input `entered`; None
    if unknown.
    """
    options, names = getopt.getopt(list(arguments), "cCds", ["complement", "delete", "squeeze-repeats"])
    given = {name.lstrip("-")[0].lower() for name, _ in options}
    if entered is None or not entered.isascii() or not 1 <= len(names) <= 2:
        return None
    first, second = (
        _expand_character_set(names[0]),
        _expand_character_set(names[1], translated=True) if len(names) > 1 else "",
    )
    if "c" in given:
        first = "".join(char for char in ASCII if char not in first)
    if "d" in given:
        return None if second or "s" in given else entered.translate(dict.fromkeys(map(ord, first)))
    if second:
        if "c" in given:
            second = second[-1]
        entered = entered.translate(str.maketrans(first, (second + second[-1] * len(first))[: len(first)]))
    if "s" not in given:
        return entered if second else None
    return re.sub(f"([{re.escape(second or first)}])\\1+", r"\1", entered)


def _expand_character_set(text: str, *, translated: bool = False) -> str:
    """Return the characters of a set of `tr`."""
    if not text or not text.isascii() or re.search(r"\[=|\[.\*", text, re.DOTALL):
        raise ValueError("a character set that is not simulated")
    found, at = "", 0
    while match := CHARACTER.match(text, at):
        at = match.end()
        if match["named"]:
            if translated and match["named"] not in ("lower", "upper"):
                raise ValueError("tr does not translate to this class")
            found += CLASSES[match["named"]]
        elif match["one"]:
            found += _unescape(match["one"])
        else:
            first, last = _unescape(match["first"]), _unescape(match["last"])
            if first > last:
                raise ValueError("a range in reverse order")
            found += "".join(map(chr, range(ord(first), ord(last) + 1)))
    if at < len(text):
        raise ValueError("a character set that is not simulated")
    return found


def _unescape(character: str) -> str:
    return ESCAPES[character[1]] if len(character) > 1 else character


def simulate_cut(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `cut` prints for fields or characters of its standard input `entered`; None if unknown."""
    parsed, files = getopt.gnu_getopt(
        list(arguments), "d:f:c:s", ["delimiter=", "fields=", "characters=", "only-delimited"]
    )
    options = {name.lstrip("-")[0] if name != "--only-delimited" else "s": value for name, value in parsed}
    if entered is None or files or ("f" in options) == ("c" in options) or ("c" in options and not entered.isascii()):
        return None
    chosen, delimiter = _parse_ranges(options.get("f") or options["c"]), options.get("d", "\t")
    if "c" in options:
        return _join_lines(["".join(_select_parts(list(line), chosen)) for line in split_lines(entered)])
    if len(delimiter) != 1:
        return None
    rows = [line for line in split_lines(entered) if "s" not in options or delimiter in line]
    return _join_lines(
        [delimiter.join(_select_parts(row.split(delimiter), chosen)) if delimiter in row else row for row in rows]
    )


def _parse_ranges(text: str) -> list[tuple[int, int | None]]:
    """Return the ranges of a list such as `1,3-5,7-`."""
    found: list[tuple[int, int | None]] = []
    if text.count(",") >= MOST_PARTS:
        raise ValueError("the list is too long")
    for part in text.split(","):
        match = re.fullmatch(r"(?=.*\d)(\d{0,6})(-?)(\d{0,6})", part)
        if not match:
            raise ValueError("not a list of positions")
        first = int(match[1] or 1)
        found.append((first, first if not match[2] else int(match[3]) if match[3] else None))
    if any(first < 1 or (last is not None and last < first) for first, last in found):
        raise ValueError("not a list of positions")
    return found


def _select_parts(parts: Sequence[str], chosen: Sequence[tuple[int, int | None]]) -> list[str]:
    return [
        part
        for number, part in enumerate(parts, 1)
        if any(first <= number and (last is None or number <= last) for first, last in chosen)
    ]


def simulate_sed(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `sed s/old/new/` prints for a literal `old` in its standard input `entered`; `new` may contain
    unknown values. None if unknown.
    """
    program = arguments[1:] if arguments[0] == "-e" else arguments
    command = SUBSTITUTION.fullmatch(program[0]) if len(program[0]) <= LONGEST_COMMAND else None
    if entered is None or not command or len(program) > 1:
        return None
    old = re.sub(r"\\(.)", r"\1", command["old"])
    if len(entered) + entered.count(old) * len(command["new"]) > LONGEST_OUTPUT:
        return None
    if MARK.search(entered) and (command["start"] or command["end"]):
        return None
    if any(old in mark for mark in MARK.findall(entered)):
        return None
    pattern = re.compile(command["start"] + re.escape(old) + (r"\Z" if command["end"] else ""))
    changed = [pattern.sub(lambda _: command["new"], line, 0 if command["all"] else 1) for line in split_lines(entered)]
    return "\n".join(changed) + ("\n" if entered.endswith("\n") else "")


def simulate_awk(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `awk` prints for a program that only prints fields, texts, or an expression in `BEGIN`; None for
    other programs.
    """
    options, words = getopt.getopt(list(arguments), "F:")
    separator = options[-1][1] if options else " "
    program = AWK_PRINT.fullmatch(words[0]) if len(words[0]) <= LONGEST_COMMAND else None
    if not program or len(words) > 1 or (len(separator) > 1 and not separator.isalnum()) or separator == "t":
        return None
    printed = program["items"].strip().removesuffix(";").strip()
    if program["begin"]:
        return evaluate_awk(printed) + "\n"
    if entered is None or separator in ("", "\\", "\n"):
        return None
    items = _awk_items(printed or "$0")
    if len(items) > MOST_PARTS or len(entered) * len(items) > LONGEST_OUTPUT:
        return None
    rows = [(line, _awk_fields(line, separator)) for line in split_lines(entered)]
    return _join_lines(["".join(item(line, fields) for item in items) for line, fields in rows])


def _awk_fields(line: str, separator: str) -> list[str]:
    if separator == " ":
        return re.split("[ \t]+", line.strip(" \t")) if line.strip(" \t") else []
    return line.split(separator) if line else []


AwkItem = Callable[[str, Sequence[str]], str]


def _awk_items(text: str) -> list[AwkItem]:
    """Return functions for the items of awk's `print`; each returns the text of its item for a line."""
    items, at = list[AwkItem](), 0
    while match := AWK_ITEM.match(text, at):
        at = match.end()
        if match["field"] == "NF":
            items.append(lambda line, fields: fields[-1] if fields else line)
        elif match["field"]:
            items.append(_awk_field(int(match["field"])))
        elif match["count"]:
            items.append(lambda _, fields: str(len(fields)))
        elif match["comma"] or match["text"] is not None:
            constant = " " if match["comma"] else match["text"]
            items.append(lambda _, __, constant=constant: constant)  # type: ignore[misc]
    if at < len(text):
        raise ValueError("an awk expression that is not simulated")
    return items


def _awk_field(number: int) -> AwkItem:
    return lambda line, fields: line if number == 0 else fields[number - 1] if number <= len(fields) else ""


def simulate_head(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `head` prints: the first lines of its standard input `entered`; None if unknown."""
    count = _line_count(arguments)
    return None if entered is None or count is None else "".join(entered.splitlines(keepends=True)[:count])


def simulate_tail(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `tail` prints: the last lines of its standard input `entered`; None if unknown."""
    count = _line_count(arguments)
    if entered is None or count is None:
        return None
    return "".join(entered.splitlines(keepends=True)[-count:]) if count else ""


def _line_count(arguments: Arguments) -> int | None:
    match = re.fullmatch(r"(?:-n ?|--lines[= ]|-)(\d{1,6})", " ".join(arguments))
    return int(match[1]) if match else None if arguments else 10


def simulate_paste(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `paste -s` prints: the joined lines of its standard input `entered`; None if unknown."""
    parsed, files = getopt.gnu_getopt(list(arguments), "sd:", ["serial", "delimiters="])
    options = dict(parsed)
    delimiter = options.get("-d", options.get("--delimiters", "\t"))
    serial = "-s" in options or "--serial" in options
    if entered is None or not serial or files not in ([], ["-"]) or len(delimiter) != 1 or delimiter == "\\":
        return None
    return delimiter.join(split_lines(entered)) + "\n"


def simulate_rev(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `rev` prints: each line of its standard input `entered` in reverse; None if unknown."""
    return None if entered is None or arguments else "\n".join(line[::-1] for line in entered.split("\n"))


def simulate_wc(arguments: Arguments, entered: str | None) -> str | None:
    """Return what `wc` prints with one of -l, -w, -c, -m for its standard input `entered`; None if unknown."""
    counts: dict[str, Callable[[str], int]] = {
        "-l": lambda text: text.count("\n"), "-w": lambda text: len(text.split()),
        "-c": lambda text: len(text.encode()), "-m": len,
    }  # fmt: skip
    return None if entered is None or len(arguments) != 1 else f"{counts[arguments[0]](entered)}\n"
