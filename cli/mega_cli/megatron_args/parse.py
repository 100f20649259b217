"""The words of a training command as settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mega_cli.megatron_args.flags import Arguments, Flag, Given
from mega_cli.megatron_args.shell import MARK, Word, shown


def parse_arguments(words: Sequence[Word], table: Iterable[Flag], *, strict: bool = False) -> Arguments:
    """The arguments of a training command. Problems are kept for `Arguments.check`."""
    table, words = list(table), _joined(words)
    spellings = {name: flag for flag in table for name in (flag.name, *flag.aliases)}
    arguments = Arguments({flag.dest: flag for flag in reversed(table) if not flag.means}, strict)
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not word.text.startswith("--") or MARK.match(word.text, 2):
            _stray(word, arguments)
            continue
        spelling, equals, attached = word.text.partition("=")
        flag = spellings.get(spelling) or spellings.get(spelling.replace("_", "-"))
        most = flag.most if flag else float("inf")
        values = [attached] if equals else []
        while at < len(words) and len(values) < most and not words[at].text.startswith("--"):
            values.append(words[at].text)
            at += 1
        if flag is None or (strict and flag.fork):
            _other(spelling, values, word.line, [name for name in spellings if not spellings[name].fork], arguments)
            continue
        if spelling not in spellings:
            arguments.respelled.add(spelling)
        for given in _meant(flag, spelling, tuple(values), word.line, spellings):
            if equals and not flag.most:
                arguments.doubt(word.line, str(given), "takes no value", "")
            arguments.add(given)
    return arguments


def _joined(words: Sequence[Word]) -> list[Word]:
    """The words, those of a placeholder such as `<path to data>` as one."""
    found: list[Word] = []
    for word in words:
        if found and found[-1].text.count("<") > found[-1].text.count(">") and not word.text.startswith("--"):
            found[-1] = Word(f"{found[-1].text} {word.text}", found[-1].line)
        else:
            found.append(word)
    return found


def _text(spelling: str, values: Sequence[str]) -> str:
    return " ".join([shown(spelling), *(shown(value) or "''" for value in values)])


def _meant(
    flag: Flag, spelling: str, values: tuple[str, ...], line: int, spellings: Mapping[str, Flag]
) -> Iterator[Given]:
    """What a flag says in Megatron-LM's own flags."""
    text = _text(spelling, values)
    if not flag.means:
        on = flag.takes == "on" or (flag.takes == "switch" and not spelling.startswith("--no-"))
        yield Given(flag, on, values, text, line)
        return
    for part in flag.means.split("--")[1:]:
        name, *meant = part.split()
        own = spellings[f"--{name}"]
        filled = tuple(value for word in meant for value in (values if word == "{}" else (word,)))
        yield Given(own, own.takes == "on", filled, text, line)


def _other(spelling: str, values: Sequence[str], line: int, spellings: Sequence[str], arguments: Arguments) -> None:
    """A flag that no table has; the words up to the next flag are taken for its values."""
    near = difflib.get_close_matches(spelling.replace("_", "-"), spellings, n=1, cutoff=0.85)
    hint = f"did you mean {near[0]}?" if near else ""
    if arguments.strict:
        arguments.doubt(line, shown(spelling), "is no flag of Megatron-LM's", hint)
    else:
        flag = Flag(spelling, (), hint, "*" if values else "on", "str" if values else "", "", {})
        arguments.others.append(Given(flag, True, tuple(values), _text(spelling, values), line))


def _stray(word: Word, arguments: Arguments) -> None:
    if MARK.search(word.text):
        arguments.unread.append(shown(word.text))
        text = f"{shown(word.text)} is not known: flags that it may hold were not read"
        arguments.remarks.append((word.line, text))
    else:
        hint = 'if it belongs to the value before it, quote the array as well: "${ARGS[@]}"'
        arguments.doubt(word.line, shown(word.text), "stands where a flag should", hint)
