"""Compilation of JSON schemas and Lark grammars by llguidance, without any other heavy import.

The time that a grammar takes to compile is not bounded by its length: `check_grammar` is for a process that can be ended.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from mega_common.errors import DataError, MissingPackageError

# White space between the tokens of JSON: a line end and its indent. Without a bound a model may repeat it without end.
WHITE_SPACE = r"(\r?\n)?[ \t]{0,20}"
STEPS = 16  # tokens that a grammar is followed for when it is checked


def make_grammar_tokenizer(tokenizer_json: str, ends: Collection[int]) -> Any:
    """Return llguidance's tokenizer for a tokenizer.json; `ends` are the tokens that may end a text.

    Raises:
        MissingPackageError: when llguidance is not installed.
    """
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise MissingPackageError("grammars need llguidance", hint="pip install 'mega-eval[constraints]'") from None
    return LLTokenizer(tokenizer_json, eos_token=sorted(ends) or None)


def check_grammar_file(grammar: str, file: Path) -> None:
    """Check that the text of a file is a JSON schema or a Lark grammar.

    Raises:
        DataError: naming the file.
        MissingPackageError: when llguidance is not installed.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise MissingPackageError("grammars need llguidance", hint="pip install 'mega-eval[constraints]'") from None
    try:
        source = grammar if grammar.lstrip().startswith("{") else LLMatcher.grammar_from_lark(grammar)
        if source is grammar:
            source = LLMatcher.grammar_from_json_schema(grammar)
        problem = LLMatcher.validate_grammar(source)
    except ValueError as error:
        problem = str(error)
    if problem:
        hint = "a JSON schema or a Lark grammar"
        raise DataError(f"{file}: the grammar cannot be read ({first_error_line(problem)})", hint=hint)


def compile_grammar(grammar: str, tokenizer: Any) -> Any:
    """Return a matcher for a JSON schema, which begins with a brace, or for a Lark grammar.

    Raises:
        DataError: when the grammar cannot be read or used.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        if grammar.lstrip().startswith("{"):
            source = LLMatcher.grammar_from_json_schema(grammar, defaults={"whitespace_pattern": WHITE_SPACE})
        else:
            source = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
    except ValueError as error:
        raise DataError(f"the grammar cannot be read ({error})", hint="a JSON schema or a Lark grammar") from None
    if matcher.is_error():
        raise DataError(f"the grammar cannot be used ({first_error_line(matcher.get_error())})")
    return matcher


def check_grammar(grammar: str, tokenizer_json: str, ends: Collection[int]) -> None:
    """Compile a grammar and follow it for some tokens, to check that this finishes in time.

    Raises:
        DataError: when the grammar cannot be read or used.
    """
    matcher = compile_grammar(grammar, _cached_tokenizer(tokenizer_json, frozenset(ends)))
    for step in range(STEPS):
        if matcher.is_stopped():
            return
        try:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
        except ValueError as error:
            raise DataError(f"the grammar cannot be followed ({first_error_line(str(error))})") from None
        token = mask.bit_length() if step % 2 else (mask & -mask).bit_length()  # the last or the first that is allowed
        matcher.consume_token(token - 1)


@lru_cache(maxsize=4)
def _cached_tokenizer(tokenizer_json: str, ends: frozenset[int]) -> Any:
    """Return llguidance's tokenizer, from a cache of four."""
    return make_grammar_tokenizer(tokenizer_json, ends)


def first_error_line(message: str) -> str:
    """Return the first line of an error message of llguidance."""
    return message.strip().partition("\n")[0]
