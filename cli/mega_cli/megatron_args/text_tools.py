"""Simulation of commands that transform text: `tr`, `cut`, `sed`, `awk`, `wc`, ..."""

from __future__ import annotations

import getopt
import re
import string
from collections.abc import Callable, Sequence

from mega_cli.megatron_args.calculators import (
    evaluate_awk_expression,
    simulate_bc_command,
    simulate_expr_command,
    simulate_seq_command,
)
from mega_cli.megatron_args.shell_words import CLOSE, MARK

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


def simulate_cat_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the standard input `entered`, which `cat` prints; None if it is unknown or files are given."""
    return entered if not arguments or arguments == ["-"] else None


def simulate_tr_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `tr` would have, or None if that is unknown.
    The command translates, deletes or squeezes characters of its standard input `entered`.
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


def simulate_cut_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `cut` would have, or None if that is unknown.
    The command prints fields or characters of its standard input `entered`.
    """
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


def simulate_sed_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output of the shell command `sed s/old/new/` for a literal `old`, or None if it is unknown.
    The standard input is `entered`; `new` may contain unknown values.
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


def simulate_awk_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `awk` would have for a simple program, None for other programs.
    A simple program only prints fields, texts, or an expression in `BEGIN`.
    """
    options, words = getopt.getopt(list(arguments), "F:")
    separator = options[-1][1] if options else " "
    program = AWK_PRINT.fullmatch(words[0]) if len(words[0]) <= LONGEST_COMMAND else None
    if not program or len(words) > 1 or (len(separator) > 1 and not separator.isalnum()) or separator == "t":
        return None
    printed = program["items"].strip().removesuffix(";").strip()
    if program["begin"]:
        return evaluate_awk_expression(printed) + "\n"
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


def simulate_head_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `head` would have, or None if that is unknown.
    The output is the first lines of its standard input `entered`.
    """
    count = _line_count(arguments)
    return None if entered is None or count is None else "".join(entered.splitlines(keepends=True)[:count])


def simulate_tail_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `tail` would have, or None if that is unknown.
    The output is the last lines of its standard input `entered`.
    """
    count = _line_count(arguments)
    if entered is None or count is None:
        return None
    return "".join(entered.splitlines(keepends=True)[-count:]) if count else ""


def _line_count(arguments: Arguments) -> int | None:
    match = re.fullmatch(r"(?:-n ?|--lines[= ]|-)(\d{1,6})", " ".join(arguments))
    return int(match[1]) if match else None if arguments else 10


def simulate_paste_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output of `paste -s`: the joined lines of its standard input `entered`; None if it is unknown."""
    parsed, files = getopt.gnu_getopt(list(arguments), "sd:", ["serial", "delimiters="])
    options = dict(parsed)
    delimiter = options.get("-d", options.get("--delimiters", "\t"))
    serial = "-s" in options or "--serial" in options
    if entered is None or not serial or files not in ([], ["-"]) or len(delimiter) != 1 or delimiter == "\\":
        return None
    return delimiter.join(split_lines(entered)) + "\n"


def simulate_rev_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `rev` would have, or None if that is unknown.
    The output is each line of its standard input `entered` in reverse.
    """
    return None if entered is None or arguments else "\n".join(line[::-1] for line in entered.split("\n"))


def simulate_wc_command(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output that the shell command `wc` would have, or None if that is unknown.
    The command has one of -l, -w, -c, -m; its standard input is `entered`.
    """
    counts: dict[str, Callable[[str], int]] = {
        "-l": lambda text: text.count("\n"), "-w": lambda text: len(text.split()),
        "-c": lambda text: len(text.encode()), "-m": len,
    }  # fmt: skip
    return None if entered is None or len(arguments) != 1 else f"{counts[arguments[0]](entered)}\n"


ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def simulate_shell_command_output(name: str, arguments: Arguments, entered: str | None) -> str | None:
    """Return the output of a small shell command such as `echo` or `sed`, without running it, or None if unknown.
    The standard input is `entered`.
    """
    command = COMMANDS.get(name)
    if command is None:
        return None
    if name in OPAQUE and any(MARK.search(text) for text in (*arguments, entered or "")):
        return None
    try:
        return command(arguments, entered)
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, re.error, getopt.GetoptError):
        return None


def _echo_output(arguments: Arguments, _: str | None) -> str:
    options = 0
    while options < len(arguments) and re.fullmatch("-[neE]+", arguments[options]):
        options += 1
    text = " ".join(arguments[options:])
    letters = "".join(arguments[:options])
    if letters.rfind("e") > letters.rfind("E"):
        text = _resolve_escapes(text, "abcefrvxuU01234567")
    return text if "n" in letters else text + "\n"


def _resolve_escapes(text: str, others: str) -> str:
    """Return a text with the escapes of newlines, tabs and backslashes resolved.

    Raises:
        ValueError: if it has one of the escapes `others`.
    """
    if any(letter in others for letter in ESCAPED.findall(text)):
        raise ValueError("an escape that is not simulated")
    return ESCAPED.sub(lambda match: {"n": "\n", "t": "\t", "\\": "\\"}.get(match[1], match[0]), text)


def _printf_output(arguments: Arguments, _: str | None) -> str | None:
    arguments = arguments[1:] if arguments[0] == "--" else arguments
    if arguments[0].startswith("-"):
        return None
    form, values = _resolve_escapes(arguments[0], "abcefrvxuU01234567\"'?"), list(arguments[1:])
    specifiers = re.findall(r"%[-+ #0-9.*']*[a-zA-Z%]?", form)
    if any(not re.fullmatch(r"%s|%d|%%|%0?\d\d?d|%\.\df", specifier) for specifier in specifiers):
        return None
    width, output = sum(specifier != "%%" for specifier in specifiers), ""
    if len(form) * (1 + len(values)) > LONGEST_OUTPUT:
        raise ValueError("the output is too long")
    while True:
        row = iter(values[:width])
        output += re.sub(r"%[0-9.]*[sdf%]", lambda match, row=row: _format_value(match[0], row), form)  # type: ignore[misc]
        values = values[width:]
        if not values or not width:
            return output


def _format_value(specifier: str, values: object) -> str:
    if specifier == "%%":
        return "%"
    text = str(next(values, ""))  # type: ignore[call-overload]
    if specifier[-1] == "s":
        return text
    if not re.fullmatch(r"-?(0|[1-9]\d{0,14})" + (r"(\.\d{1,9})?" if specifier[-1] == "f" else ""), text or "0"):
        raise ValueError("not a decimal number")
    return specifier % (float(text or 0) if specifier[-1] == "f" else int(text or 0))


def _basename_output(arguments: Arguments, _: str | None) -> str | None:
    options, names = getopt.getopt(list(arguments), "s:", ["suffix="])
    if len(names) > (1 if options else 2):
        return None
    path, suffix = names[0], options[-1][1] if options else "".join(names[1:2])
    last = path.rstrip("/").rpartition("/")[2] or path[:1]
    if CLOSE in last:
        return None
    return (last.removesuffix(suffix) if last != suffix else last) + "\n"


def _dirname_output(arguments: Arguments, _: str | None) -> str | None:
    names = getopt.getopt(list(arguments), "")[1]
    path = names[0].rstrip("/")
    parent, slash, last = path.rpartition("/")
    if CLOSE in last or len(names) > 1:
        return None
    return (parent.rstrip("/") or ("/" if slash or names[0].startswith("/") else ".")) + "\n"


COMMANDS: dict[str, Callable[[Arguments, str | None], str | None]] = {
    "echo": _echo_output, "printf": _printf_output, "basename": _basename_output, "dirname": _dirname_output,
    "expr": simulate_expr_command, "bc": simulate_bc_command, "seq": simulate_seq_command, "cat": simulate_cat_command, "tr": simulate_tr_command, "cut": simulate_cut_command,
    "sed": simulate_sed_command, "awk": simulate_awk_command, "head": simulate_head_command, "tail": simulate_tail_command, "paste": simulate_paste_command,
    "rev": simulate_rev_command, "wc": simulate_wc_command, "true": lambda _, __: "", "false": lambda _, __: "", ":": lambda _, __: "",
}  # fmt: skip
OPAQUE = frozenset(COMMANDS) - {"echo", "printf", "basename", "dirname", "cat", "sed"}
