"""Simulation of small commands whose output depends only on arguments and input: `echo`, `basename`, `expr`, ..."""

from __future__ import annotations

import getopt
import re
from collections.abc import Callable

from mega_cli.megatron_args.calculators import simulate_bc, simulate_expr, simulate_seq
from mega_cli.megatron_args.shell_words import CLOSE, MARK
from mega_cli.megatron_args.text_tools import (
    LONGEST_OUTPUT,
    Arguments,
    simulate_awk,
    simulate_cat,
    simulate_cut,
    simulate_head,
    simulate_paste,
    simulate_rev,
    simulate_sed,
    simulate_tail,
    simulate_tr,
    simulate_wc,
)

ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def simulate_output(name: str, arguments: Arguments, entered: str | None) -> str | None:
    """Return what a small command such as `echo`, `basename` or `sed` prints for the standard input `entered`, or None
    if unknown; nothing is executed.
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
    "expr": simulate_expr, "bc": simulate_bc, "seq": simulate_seq, "cat": simulate_cat, "tr": simulate_tr, "cut": simulate_cut,
    "sed": simulate_sed, "awk": simulate_awk, "head": simulate_head, "tail": simulate_tail, "paste": simulate_paste,
    "rev": simulate_rev, "wc": simulate_wc, "true": lambda _, __: "", "false": lambda _, __: "", ":": lambda _, __: "",
}  # fmt: skip
OPAQUE = frozenset(COMMANDS) - {"echo", "printf", "basename", "dirname", "cat", "sed"}
