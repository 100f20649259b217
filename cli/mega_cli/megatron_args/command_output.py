"""Output of small commands as far as their arguments and input determine it: `echo`, `basename`, `expr` and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mega_cli.megatron_args.arithmetic import evaluate_arithmetic
from mega_cli.megatron_args.shell_words import MARK

Arguments = Sequence[str]
SUBSTITUTION = re.compile(
    rf"s(?P<by>[^\w\s])(?P<old>[\w ,:=-]+)(?P=by)(?P<new>(?:[\w ,:=/.-]|{MARK.pattern})*)(?P=by)(?P<all>g?)"
)
LONGEST = 10_000  # numbers of a `seq`
LONGEST_OUTPUT = 1_000_000  # characters
LONGEST_COMMAND = 1000  # characters of a command of `sed`
WIDEST = 256  # characters of a range of `tr`


def simulate_output(name: str, arguments: Arguments, entered: str | None) -> str | None:
    """Return the output of a command for an input, or None if unknown."""
    command = COMMANDS.get(name)
    if command is None:
        return None
    if name in OPAQUE and any(MARK.search(text) for text in (*arguments, entered or "")):
        return None
    try:
        return command(arguments, entered)
    except (ValueError, IndexError, TypeError, KeyError, OverflowError, re.error):
        return None


def _echo(arguments: Arguments, _: str | None) -> str:
    options = 0
    while options < len(arguments) and re.fullmatch("-[neE]+", arguments[options]):
        options += 1
    text = " ".join(arguments[options:])
    if any("e" in option for option in arguments[:options]):
        text = _escaped(text)
    return text if any("n" in option for option in arguments[:options]) else text + "\n"


def _escaped(text: str) -> str:
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], "\\"), text)


def _printf(arguments: Arguments, _: str | None) -> str | None:
    form, values = _escaped(arguments[0]), list(arguments[1:])
    holders = re.findall(r"%[-0-9.]*[a-zA-Z%]", form)
    if any(not re.fullmatch(r"%s|%d|%%|%0?\d\d?d", holder) for holder in holders):
        return None
    width, made = sum(holder != "%%" for holder in holders), ""
    if len(form) * (1 + len(values)) > LONGEST_OUTPUT:
        raise ValueError("a long output")
    while True:
        row = iter(values[:width])
        made += re.sub(r"%[0-9]*[sd%]", lambda match, row=row: _held(match[0], row), form)  # type: ignore[misc]
        values = values[width:]
        if not values or not width:
            return made


def _held(holder: str, values: object) -> str:
    if holder == "%%":
        return "%"
    text = next(values, "")  # type: ignore[call-overload]
    return str(text) if holder[-1] == "s" else holder % int(text or 0)


def _basename(arguments: Arguments, _: str | None) -> str | None:
    path, suffix = arguments[0], "".join(arguments[1:2])
    last = path.rstrip("/").rpartition("/")[2]
    if MARK.search(last):
        return None
    return (last.removesuffix(suffix) if last != suffix else last) + "\n"


def _dirname(arguments: Arguments, _: str | None) -> str | None:
    path = arguments[0].rstrip("/")
    parent, slash, last = path.rpartition("/")
    if MARK.search(last):
        return None
    return (parent or ("/" if slash else ".")) + "\n"


def _expr(arguments: Arguments, _: str | None) -> str | None:
    value = evaluate_arithmetic(" ".join(arguments))
    return None if value is None or any(re.search("[^-+*/%()0-9]", text) for text in arguments) else f"{value}\n"


def _bc(_: Arguments, entered: str | None) -> str | None:
    """Return the output of `bc` for integers; division without `scale` rounds towards zero as a shell does."""
    if entered is None or re.search(r"[^-+*/%()0-9\s]", entered):
        return None
    value = evaluate_arithmetic(entered)
    return None if value is None else f"{value}\n"


def _seq(arguments: Arguments, _: str | None) -> str:
    numbers = list(map(int, arguments))
    first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) > 2 else 1)
    found = range(first, numbers[-1] + (1 if step > 0 else -1), step)
    if len(found) > LONGEST:
        raise ValueError("a long sequence")
    return "".join(f"{number}\n" for number in found)


def _cat(arguments: Arguments, entered: str | None) -> str | None:
    return entered if not arguments or arguments == ["-"] else None


def _tr(arguments: Arguments, entered: str | None) -> str | None:
    if entered is None or any(re.search(r"\\|\[|^-[^d]", text) for text in arguments):
        return None
    sets = [re.sub("(.)-(.)", _span, text) for text in arguments]
    if sets[0] == "-d":
        return entered.translate(dict.fromkeys(map(ord, sets[1])))
    return entered.translate(str.maketrans(sets[0], (sets[1] + sets[1][-1] * len(sets[0]))[: len(sets[0])]))


def _span(match: re.Match[str]) -> str:
    if ord(match[2]) - ord(match[1]) > WIDEST:
        raise ValueError("a long range")
    return "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1)))


def _cut(arguments: Arguments, entered: str | None) -> str | None:
    options = re.fullmatch(r"(?=.*-d\s?(?P<d>\S))(?=.*-f\s?(?P<f>\d+)\b).*", " ".join(arguments))
    if entered is None or not options or len(arguments) > 4:
        return None
    delimiter, number = options["d"], int(options["f"])
    rows = [line.split(delimiter) for line in entered.splitlines()]
    return "".join((row[0] if len(row) == 1 else row[number - 1] if number <= len(row) else "") + "\n" for row in rows)


def _sed(arguments: Arguments, entered: str | None) -> str | None:
    """Return the output of `s/text/text/` for texts without special characters; the replacement may be unknown."""
    command = SUBSTITUTION.fullmatch(arguments[0]) if len(arguments[0]) <= LONGEST_COMMAND else None
    if entered is None or not command or len(arguments) > 1:
        return None
    if len(entered) + entered.count(command["old"]) * len(command["new"]) > LONGEST_OUTPUT:
        return None
    if any(command["old"] in mark for mark in MARK.findall(entered)):
        return None
    return "".join(
        line.replace(command["old"], command["new"], -1 if command["all"] else 1) + "\n"
        for line in entered.splitlines()
    )


def _wc(arguments: Arguments, entered: str | None) -> str | None:
    counts: dict[str, Callable[[str], int]] = {
        "-l": lambda text: text.count("\n"), "-w": lambda text: len(text.split()), "-c": len,
    }  # fmt: skip
    return None if entered is None or len(arguments) != 1 else f"{counts[arguments[0]](entered)}\n"


COMMANDS: dict[str, Callable[[Arguments, str | None], str | None]] = {
    "echo": _echo, "printf": _printf, "basename": _basename, "dirname": _dirname, "expr": _expr, "bc": _bc, "seq": _seq,
    "cat": _cat, "tr": _tr, "cut": _cut, "sed": _sed, "wc": _wc, "true": lambda _, __: "", "false": lambda _, __: "",
    ":": lambda _, __: "",
}  # fmt: skip
OPAQUE = frozenset(COMMANDS) - {"echo", "printf", "basename", "dirname", "cat", "sed"}
