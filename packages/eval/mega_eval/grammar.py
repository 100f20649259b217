"""Continuations that have to obey a JSON schema or a Lark grammar, through llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_data.tokenizer import Tokenizer
from mega_eval.grammar_source import compile_grammar, first_line, tokenizer_of
from mega_eval.text import Text

KEPT = 64  # compiled grammars
KEPT_TOKENIZERS = 4  # vocabularies, one for each set of tokens that end a text


class Grammar:
    """Tokens that may follow, for one continuation."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V], minus infinity where a token must not follow.

        Raises:
            DataError: when the grammar has become too complex to be followed.
        """
        try:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        except ValueError as error:
            raise DataError(f"the grammar cannot be followed any further ({first_line(str(error))})") from None
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
            raise DataError(f"the grammar cannot be followed any further ({first_line(self._matcher.get_error())})")
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiled grammars of one tokenizer, whose vocabulary is prepared with the first: that takes about a second.

    The last `KEPT` are kept. Thread-safe: a thread can `prepare` a grammar that another reads afterwards.
    """

    def __init__(self, tokenizer: Text) -> None:
        self._tokenizer = tokenizer
        self._prepared: dict[frozenset[int], Any] = {}
        self._matchers: OrderedDict[tuple[str, frozenset[int]], Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer in HuggingFace's format.

        Raises:
            DataError: when it is another kind of tokenizer.
        """
        if not isinstance(self._tokenizer, Tokenizer):
            raise DataError("grammars need a tokenizer.json, which says how each token is spelt")
        return str(self._tokenizer.backend.to_str())

    def has(self, grammar: str, ends: Collection[int]) -> bool:
        """Whether a grammar is compiled already."""
        return (grammar, frozenset(ends)) in self._matchers

    def prepare(self, grammar: str, ends: Collection[int]) -> None:
        """Compile a grammar and keep it; see `read`."""
        matcher, key = compile_grammar(grammar, self._tokenizer_for(frozenset(ends))), (grammar, frozenset(ends))
        with self._lock:
            self._matchers[key] = matcher
            while len(self._matchers) > KEPT:
                self._matchers.popitem(last=False)

    def read(self, grammar: str, ends: Collection[int]) -> Grammar:
        """Return the grammar for one text; `ends` are the tokens that may end it.

        Args:
            grammar: a JSON schema, which begins with a brace, or a Lark grammar.
            ends: tokens.

        Raises:
            DataError: when it cannot be read, or the tokenizer is none whose tokens are known.
            MissingPackageError: when llguidance is not installed.
        """
        key = grammar, frozenset(ends)
        with self._lock:
            matcher = self._matchers.get(key)
            if matcher is not None:
                self._matchers.move_to_end(key)
        if matcher is None:
            self.prepare(grammar, ends)
            return self.read(grammar, ends)
        return Grammar(matcher.deep_copy())

    def _tokenizer_for(self, ends: frozenset[int]) -> Any:
        tokenizer = self._prepared.get(ends) or tokenizer_of(self.tokenizer_json, ends)
        with self._lock:
            self._prepared[ends] = tokenizer
            while len(self._prepared) > KEPT_TOKENIZERS:
                del self._prepared[next(iter(self._prepared))]
        return tokenizer
