"""Grammars on their own: white space in JSON, the cache of compiled grammars, and the tokens they allow."""

from __future__ import annotations

import json

import pytest

from mega_common.errors import DataError
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval import grammar_matcher as grammars_module
from mega_eval.grammar_compiler import check_grammar, compile_grammar, make_grammar_tokenizer
from mega_eval.grammar_matcher import GrammarCache

pytest.importorskip("llguidance")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(['{"a": 1, "b": [1, 2]}\n'] * 3, 270, tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{ "a" : 1 , "b" : [ 1 , 2 ] }', True),
        ('{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}', True),
        ('{\r\n\t"a": 1,\r\n\t"b": []\r\n}', True),
        ("{\n" + " " * 20 + '"a":1', True),
        ("{" + " " * 300, False),
        ("{" + "\n" * 300, False),
        ("{" + "\t" * 300, False),
        ("{" + " \n" * 300, False),
        ('{"a"' + " " * 300, False),
        ('{"a":' + "\n" * 300, False),
        ('{"a":1' + " " * 300, False),
        ('{"a":1,' + "\r\n" * 300, False),
        ('{"a":1,"b":[' + " " * 300, False),
        ('{"a":1,"b":[1' + "\n" * 300, False),
        ('{"a":1,"b":[1,' + " " * 300, False),
        ('{"a":1,"b":[1]' + " " * 300, False),
    ],
    ids=repr,
)
def test_white_space_between_tokens_of_json_is_bounded(text: str, allowed: bool, tokenizer: Tokenizer) -> None:
    matcher = compile_grammar(SCHEMA, make_grammar_tokenizer(tokenizer.backend.to_str(), [0]))
    tokens = tokenizer.encode(text)
    assert (matcher.validate_tokens(tokens) == len(tokens)) is allowed


def test_grammars_are_compiled_once_and_the_last_are_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "CACHED_GRAMMARS", 3)
    grammars = GrammarCache(tokenizer)
    for number in range(5):
        grammars.compile_and_cache(f'start: "{number}"', {0})
    assert [grammars.has_grammar(f'start: "{number}"', {0}) for number in range(5)] == [False, False, True, True, True]
    monkeypatch.setattr(grammars_module, "compile_grammar", lambda *_: 1 / 0)
    first, second = (grammars.get_grammar_matcher('start: "4"', {0}) for _ in range(2))
    assert first.accept_token(tokenizer.encode("4")[0])
    assert second.accept_token(tokenizer.encode("4")[0])  # a state of its own
    assert not grammars.has_grammar('start: "4"', {1})


def test_vocabularies_for_many_sets_of_ends_are_not_kept(tokenizer: Tokenizer) -> None:
    grammars = GrammarCache(tokenizer)
    for end in range(10):
        grammars.compile_and_cache('start: "x"', {end})
    assert len(grammars._prepared) == grammars_module.CACHED_TOKENIZERS


def test_a_token_that_a_grammar_does_not_allow_is_an_error(tokenizer: Tokenizer) -> None:
    grammar = GrammarCache(tokenizer).get_grammar_matcher('start: "ab"', {0})
    with pytest.raises(DataError, match="cannot continue the text"):
        grammar.accept_token(tokenizer.encode("c")[0])


@pytest.mark.parametrize(
    "grammar",
    [
        SCHEMA,
        "{}",
        '{"type": "object"}',
        '{"type": "string", "pattern": "^[a-z]{3}$"}',
        '{"enum": ["a", 1, null]}',
        'start: "a"',
        "start: /[a-z]+/",
        'start: "a" | "b" start',
        "start: /(.|\\n)*/",
        'start: ""',
    ],
)
def test_honest_grammars_pass_the_check(grammar: str, tokenizer: Tokenizer) -> None:
    check_grammar(grammar, tokenizer.backend.to_str(), {0})
