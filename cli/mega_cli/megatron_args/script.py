"""Follows a script from top to bottom: which variables it sets and which commands it would start. Nothing is executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mega_cli.megatron_args.conditions import Truth, both, either, test
from mega_cli.megatron_args.shell import ASSIGNMENT, MARK, Expander, Lexer, Token, Word, shown, unknown
from mega_common.errors import ConfigError

DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
LEADING = frozenset({"then", "else", "do", "{", "}", "time"})
LOOPS = frozenset({"for", "while", "until", "select"})


@dataclass
class Script:
    """What a script comes to.

    Attributes:
        commands: each command that would be started, in order, as its words.
        remarks: what could not be followed, as (line, sentence).
    """

    variables: dict[str, list[Word]]
    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)


def read_script(text: str, variables: Mapping[str, list[Word]] | None = None, line: int = 1) -> Script:
    """Follow a script; `variables` are set before its first line.

    Raises:
        ConfigError: for a quote or a block that is never closed, with its line.
    """
    script = Script(dict(variables or {}))
    _Reader(Lexer(text, line).run(), script).block(frozenset(), live=True)
    return script


class _Reader:
    """A recursive descent over the tokens. What is not `live` is read over.

    `relevant` counts the statements that say something about training, read over or not.
    """

    def __init__(self, tokens: list[Token], script: Script) -> None:
        self.tokens, self.script, self.at = tokens, script, 0
        self.expander = Expander(script.variables)
        self.relevant = 0

    def block(self, closing: frozenset[str], *, live: bool) -> str:
        """Read statements up to one of the `closing` words; returns it."""
        start, joined = self._line(), ""
        status: Truth = True
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.raw in closing:
                self.at += 1
                return token.raw
            if token.kind == "operator":
                joined = token.raw
                self.at += 1
                continue
            wanted: Truth = status if joined == "&&" else (status is False) if joined == "||" else True
            before, line = self.relevant, token.line
            outcome = self._statement(live=live and wanted is True)
            if live and wanted is None and self.relevant > before:
                self._remark(line, "it is not known whether the condition before this command holds: it was not read")
            status = outcome if wanted is True else status
            joined = ""
        if closing:
            raise ConfigError(f"line {start}: a block begins here that no {' or '.join(sorted(closing))} ends")
        return ""

    def _line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 1

    def _remark(self, line: int, text: str) -> None:
        self.script.remarks.append((line, text))

    def _statement(self, *, live: bool) -> Truth:
        raw = self.tokens[self.at].raw
        if raw == "if":
            self._if(live)
        elif raw == "case":
            self._case(live)
        elif raw in LOOPS:
            self._loop(live)
        elif raw in LEADING:
            self.at += 1
        else:
            return self._simple(self._words(), live)
        return True

    def _words(self) -> list[Token]:
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at].kind != "operator":
            self.at += 1
        return self.tokens[start : self.at]

    def _if(self, live: bool) -> None:
        line, before, word = self._line(), self.relevant, "elif"
        decided: Truth = False
        self.at += 1
        while word != "fi":
            holds: Truth = True if word == "else" else self._condition("then")
            chosen = decided is False and holds is True
            decided = holds if decided is False else decided
            word = self.block(frozenset({"elif", "else", "fi"}), live=live and chosen)
        if live and decided is None and self.relevant > before:
            self._remark(line, "it is not known whether this `if` holds: none of its branches was read")

    def _condition(self, closing: str) -> Truth:
        """Whether the commands up to the word `closing` hold."""
        holds: Truth = True
        start, joined = self._line(), ""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.raw == closing:
                self.at += 1
                return holds
            if token.kind == "operator":
                joined = token.raw
                self.at += 1
                continue
            outcome = test([self.expander.text(word.raw, word.line) for word in self._words()])
            holds = both(holds, outcome) if joined == "&&" else either(holds, outcome) if joined == "||" else outcome
        raise ConfigError(f"line {start}: a condition begins here that no {closing!r} ends")

    def _case(self, live: bool) -> None:
        line, before = self._line(), self.relevant
        subject = self.expander.text(self.tokens[self.at + 1].raw, line) if self.at + 1 < len(self.tokens) else ""
        self.at += 3
        decided: Truth = None if MARK.search(subject) else False
        end = ";;"
        while end != "esac" and (patterns := self._patterns()):
            holds = any(fnmatchcase(subject, self.expander.text(pattern.raw, pattern.line)) for pattern in patterns)
            chosen = decided is False and holds
            decided = True if chosen else decided
            end = self.block(frozenset({";;", ";&", ";;&", "esac"}), live=live and chosen)
        if live and decided is None and self.relevant > before:
            self._remark(
                line, f"the value of this `case`, {shown(subject)}, is not known: none of its branches was read"
            )

    def _patterns(self) -> list[Token]:
        """The patterns before the next `)`; none at the end of the `case`."""
        found: list[Token] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token.raw == ")" or (token.raw == "esac" and not found):
                break
            found += [token] if token.kind == "word" else []
        return found

    def _loop(self, live: bool) -> None:
        line, before = self._line(), self.relevant
        if self.tokens[self.at].raw in ("for", "select"):
            words = self._words()
            if len(words) > 1 and words[1].raw.isidentifier():
                self.expander.variables[words[1].raw] = [Word(unknown(words[1].raw), line)]
            while self.at < len(self.tokens) and self.tokens[self.at].raw != "do":
                self.at += 1
            self.at += 1
        else:
            self.at += 1
            self._condition("do")
        self.block(frozenset({"done"}), live=live)
        if live and self.relevant > before:
            self._remark(line, "this loop was read as if it ran once")

    def _simple(self, words: Sequence[Token], live: bool) -> Truth:
        """A command or assignments."""
        if words[0].raw in DECLARING:
            words = [word for word in words[1:] if not word.raw.startswith("-")]
            self._assign(words, live)
            return True
        assigned = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word.raw)), len(words))
        if assigned == len(words):
            self._assign(words, live)
            return True
        words = words[assigned:]
        self.relevant += any(".py" in word.raw for word in words)
        if words[0].raw in ("[", "[[", "test", "true", "false"):
            return test([self.expander.text(word.raw, word.line) for word in words])
        if words[0].raw in ("source", ".") and live:
            self._remark(words[0].line, f"the file of `{words[0].raw} {words[-1].raw}` was not read")
        elif live:
            fields = [f for word in words if word.kind == "word" for f in self.expander.fields(word.raw, word.line)]
            self.script.commands += [fields] if fields else []
        return True

    def _assign(self, words: Sequence[Token], live: bool) -> None:
        for word in words:
            match = ASSIGNMENT.match(word.raw)
            self.relevant += match is not None
            if not live or not match:
                continue
            old = self.expander.variables.get(match["name"], []) if match["append"] else []
            if word.kind == "array":
                items = [f for item in word.items for f in self.expander.fields(item.raw, item.line)]
                self.expander.variables[match["name"]] = old + items
            else:
                text = self.expander.text(word.raw[match.end() :], word.line)
                self.expander.variables[match["name"]] = _appended(old, Word(_named(text, match["name"]), word.line))


def _appended(old: list[Word], word: Word) -> list[Word]:
    return [Word(old[0].text + word.text, old[0].line), *old[1:]] if old else [word]


def _named(text: str, name: str) -> str:
    """A value that is one of the script's own arguments is better known by the variable it is given to."""
    match = MARK.fullmatch(text)
    return unknown(name) if match and match[1].isdigit() else text
