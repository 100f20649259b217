"""Constrained decoding: continuations that follow a JSON schema or a Lark grammar, through llguidance."""

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
from mega_eval.grammar_compiler import compile_grammar, first_error_line, make_grammar_tokenizer
from mega_eval.text_stream import TextTokenizer

CACHED_GRAMMARS = 64
CACHED_TOKENIZERS = 4  # one for each set of tokens that end a text


class GrammarMatcher:
    """Grammar state of one text during constrained generation, which gives the tokens allowed next."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask_scores(self, scores: Tensor) -> Tensor:
        """Return the scores [V] with minus infinity for tokens that the grammar does not allow next.

        Raises:
            DataError: when the grammar has become too complex.
        """
        try:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        except ValueError as error:
            raise DataError(f"the grammar cannot continue the text ({first_error_line(str(error))})") from None
        allowed = np.zeros(len(scores), dtype=bool)
        flags = np.unpackbits(bits, bitorder="little")[: len(scores)]
        allowed[: len(flags)] = flags
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), float("-inf"))

    def accept_token(self, token: int) -> bool:
        """Advance the grammar by the generated `token` (DataError if not allowed); return True if nothing may follow it.

        Raises:
            DataError: when the grammar does not allow the token, or has become too complex.
        """
        if not self._matcher.consume_token(token):
            raise DataError(f"the grammar cannot continue the text ({first_error_line(self._matcher.get_error())})")
        return bool(self._matcher.is_stopped())


class GrammarCache:
    """Cache of compiled grammars for one tokenizer.
    The first compilation prepares the vocabulary, which takes about a second.

    The last `CACHED_GRAMMARS` are kept. Thread-safe: one thread may `compile_and_cache` a grammar that another one uses.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._prepared: dict[frozenset[int], Any] = {}
        self._matchers: OrderedDict[tuple[str, frozenset[int]], Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def tokenizer_json(self) -> str:
        """Text of the cache's tokenizer in HuggingFace's tokenizer.json format.

        Raises:
            DataError: for another kind of tokenizer.
        """
        if not isinstance(self._tokenizer, Tokenizer):
            raise DataError("grammars require a tokenizer with tokenizer.json")
        return str(self._tokenizer.backend.to_str())

    def has_grammar(self, grammar: str, ends: Collection[int]) -> bool:
        """Return whether `grammar` is already compiled for the end tokens `ends`."""
        return (grammar, frozenset(ends)) in self._matchers

    def compile_and_cache(self, grammar: str, ends: Collection[int]) -> None:
        """Compile a grammar and cache the result for `get_grammar_matcher`.
        The grammar is compiled for the end tokens `ends`; beyond `CACHED_GRAMMARS` grammars the least recently used is
        dropped.
        """
        matcher, key = compile_grammar(grammar, self._tokenizer_for(frozenset(ends))), (grammar, frozenset(ends))
        with self._lock:
            self._matchers[key] = matcher
            while len(self._matchers) > CACHED_GRAMMARS:
                self._matchers.popitem(last=False)

    def get_grammar_matcher(self, grammar: str, ends: Collection[int]) -> GrammarMatcher:
        """Return a new matcher of `grammar`, compiled unless it is cached; `ends` are the tokens that may end the text.

        Args:
            grammar: JSON schema (starting with a brace) or Lark grammar.
            ends: tokens that may end the text.

        Raises:
            DataError: when the grammar is invalid, or the tokenizer has no tokenizer.json.
            MissingPackageError: when llguidance is not installed.
        """
        key = grammar, frozenset(ends)
        with self._lock:
            matcher = self._matchers.get(key)
            if matcher is not None:
                self._matchers.move_to_end(key)
        if matcher is None:
            self.compile_and_cache(grammar, ends)
            return self.get_grammar_matcher(grammar, ends)
        return GrammarMatcher(matcher.deep_copy())

    def _tokenizer_for(self, ends: frozenset[int]) -> Any:
        """Return llguidance's tokenizer for these end tokens, from the cache if possible."""
        tokenizer = self._prepared.get(ends) or make_grammar_tokenizer(self.tokenizer_json, ends)
        with self._lock:
            self._prepared[ends] = tokenizer
            while len(self._prepared) > CACHED_TOKENIZERS:
                del self._prepared[next(iter(self._prepared))]
        return tokenizer
