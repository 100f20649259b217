"""Continuations that have to obey a JSON schema or a Lark grammar, through llguidance."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError, MissingPackageError
from mega_data.tokenizer import Tokenizer
from mega_eval.text import Text


class Grammar:
    """Which tokens may follow, for one continuation."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V], minus infinity where a token must not follow."""
        try:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        except ValueError as error:
            raise DataError(f"the grammar cannot be followed any further ({_first_line(str(error))})") from None
        allowed = np.zeros(len(scores), dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: len(scores)]
        allowed[: len(known)] = known
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), float("-inf"))

    def accept(self, token: int) -> bool:
        """Take the token that follows; True if nothing may come after it.

        Raises:
            DataError: when the grammar does not allow the token, or has become too complex to be followed.
        """
        if not self._matcher.consume_token(token):
            raise DataError(f"the grammar cannot be followed any further ({_first_line(self._matcher.get_error())})")
        return bool(self._matcher.is_stopped())


class Grammars:
    """Reads grammars for one tokenizer, whose vocabulary is prepared with the first: that takes about a second."""

    def __init__(self, tokenizer: Text) -> None:
        self._tokenizer = tokenizer
        self._prepared: dict[frozenset[int], Any] = {}

    def read(self, grammar: str, ends: Collection[int]) -> Grammar:
        """A JSON schema, which begins with a brace, or a Lark grammar; `ends` are the tokens that may end the text.

        Raises:
            DataError: when it cannot be read, or the tokenizer is none whose tokens are known.
            MissingPackageError: when llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise MissingPackageError("grammars need llguidance", hint="pip install 'mega-eval[constraints]'") from None
        if not isinstance(self._tokenizer, Tokenizer):
            raise DataError("grammars need a tokenizer.json, which says how each token is spelt")
        key = frozenset(ends)
        if key not in self._prepared:
            self._prepared[key] = LLTokenizer(self._tokenizer.backend.to_str(), eos_token=sorted(key) or None)
        try:
            is_schema = grammar.lstrip().startswith("{")
            read = LLMatcher.grammar_from_json_schema if is_schema else LLMatcher.grammar_from_lark
            matcher = LLMatcher(self._prepared[key], read(grammar), log_level=0)
        except ValueError as error:
            raise DataError(f"the grammar cannot be read ({error})", hint="a JSON schema or a Lark grammar") from None
        if matcher.is_error():
            raise DataError(f"the grammar cannot be used ({_first_line(matcher.get_error())})")
        return Grammar(matcher)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]
