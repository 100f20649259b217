"""Tokenizer backend that encodes special tokens spelled in a text as plain text.

`encode_special_tokens` of `tokenizers` only stops the search for added tokens. The model still emits a special token
if it is in its vocabulary: Unigram matches every piece, WordPiece and WordLevel look up whole words, and BPE merges
characters to it. SentencePiece's library never does (control, unknown and byte pieces are not matched in a text). So
the vocabulary is rewritten here: special tokens get names that cannot occur in a text, and keep their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from mega_common.errors import DataError

TokenizerSpec = dict[str, Any]

HIDDEN = "\uffff\ufffe"  # noncharacters, which no text may contain
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class PlainTextBackend:
    """Wrapper of `tokenizers.Tokenizer` that treats the spelling of special and byte tokens as ordinary text.

    Attributes:
        json: rewritten tokenizer.json, for encoders other than `tokenizers`.
    """

    def __init__(self, backend: Backend) -> None:
        spec: TokenizerSpec = json.loads(backend.to_str())
        self._bytes, self._unk = _unigram_bytes(spec)
        self._words = _byte_token_ids(spec)
        self.json = json.dumps(hide_special_tokens(spec), ensure_ascii=False)
        self._backend = Backend.from_str(self.json)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, in which special tokens are ordinary text.
        Special tokens spelled in the text become ordinary tokens. With `add_special_tokens`, those of the tokenizer's
        template, such as [CLS], are added.
        """
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        self._check_byte_spellings(text, ids)
        if not self._bytes or self._unk not in ids:
            return ids
        pieces = zip(ids, encoding.tokens, strict=True)
        return [
            token_id
            for token, piece in pieces
            for token_id in (self._encode_as_bytes(piece) if token == self._unk else [token])
        ]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without the special tokens of the tokenizer's template at the ends."""
        lists = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        for number, text in enumerate(texts):
            self._check_byte_spellings(text, lists[number])
            if self._bytes and self._unk in lists[number]:  # encode_batch_fast does not return the pieces
                lists[number] = self.encode(text, add_special_tokens=False)
        return lists

    def _check_byte_spellings(self, text: str, ids: Sequence[int]) -> None:
        if self._words and not self._words.isdisjoint(ids) and BYTE.search(text):
            raise DataError(
                "a text that spells a byte token such as <0x41> is not supported with this tokenizer"
                " (byte_fallback with ignore_merges)",
                hint="pass --parse-special-tokens to encode the spelling as the token",
            )

    def _encode_as_bytes(self, piece: str) -> list[int]:
        """Return the byte tokens of a piece that is not in a Unigram vocabulary."""
        ids = [self._bytes.get(byte) for byte in piece.encode()]
        return [self._unk] if None in ids else [token_id for token_id in ids if token_id is not None]


def list_token_spellings(backend: Backend) -> list[str]:
    """Return the text of every added token, byte token and unknown token of a tokenizer."""
    spec: TokenizerSpec = json.loads(backend.to_str())
    byte_tokens = [token for token in backend.get_vocab(with_added_tokens=True) if BYTE.fullmatch(token)]
    added = [entry["content"] for entry in spec.get("added_tokens") or []]
    return list(dict.fromkeys([*added, *sorted(_unknown_token(spec["model"])), *sorted(byte_tokens)]))


def hide_special_tokens(spec: TokenizerSpec) -> TokenizerSpec:
    """Return a tokenizer.json specification with special tokens renamed so that no text contains them.
    All ids are kept.
    """
    model: TokenizerSpec = dict(spec["model"])
    special = {entry["content"] for entry in spec.get("added_tokens") or [] if entry["special"]} | _unknown_token(model)
    unigram = _is_unigram(model)
    fallback = {f"<0x{byte:02X}>" for byte in range(256)} if model.get("byte_fallback") else set()
    if not unigram:  # BPE looks up its byte tokens by name; only merges produce them from a text
        special -= fallback
    elif fallback:  # Unigram would match them: PlainTextBackend looks up bytes instead
        special |= fallback
        model["byte_fallback"] = False
    special -= _irreplaceable_characters(model, special)
    if unigram:
        model["vocab"] = [[_hide_token(piece, special), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {_hide_token(token, special): number for token, number in model["vocab"].items()}
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = _hide_token(model["unk_token"], special)
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes_special_token(pair, model, special, fallback)]
    added = [
        _hide_added_token(entry) if entry["content"] in special else entry for entry in spec.get("added_tokens") or []
    ]
    return {**spec, "model": model, "added_tokens": added}


def _hide_token(token: str, special: set[str]) -> str:
    return HIDDEN + token if token in special else token


def _hide_added_token(entry: Mapping[str, Any]) -> TokenizerSpec:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**entry, **plain, "content": HIDDEN + entry["content"]}


def _is_unigram(model: TokenizerSpec) -> bool:
    return isinstance(model["vocab"], list)


def _unknown_token(model: TokenizerSpec) -> set[str]:
    """Return the unknown token, if the model has one."""
    if _is_unigram(model):
        return set() if model.get("unk_id") is None else {model["vocab"][model["unk_id"]][0]}
    return {model["unk_token"]} & model["vocab"].keys() if model.get("unk_token") else set()


def _irreplaceable_characters(model: TokenizerSpec, special: set[str]) -> set[str]:
    """Return special tokens of one character without which a BPE model drops that character from a text."""
    if "merges" not in model or model.get("unk_token") or model.get("byte_fallback"):
        return set()
    return {token for token in special if len(token) == 1 and token in model["vocab"]}


def _makes_special_token(pair: Any, model: TokenizerSpec, special: set[str], fallback: set[str]) -> bool:
    """Return whether a merge produces a special or byte token, or continues a special one."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    whole = left + right.removeprefix(model.get("continuing_subword_prefix") or "")
    return whole in special or whole in fallback or left in special or right in special


def _unigram_bytes(spec: TokenizerSpec) -> tuple[dict[int, int], int]:
    """Return the token of each byte of a Unigram model that falls back to bytes, and its unknown token."""
    model = spec["model"]
    if not _is_unigram(model) or not model.get("byte_fallback"):
        return {}, -1
    ids = {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    return {byte: ids[name] for byte, name in names.items() if name in ids}, model["unk_id"]


def _byte_token_ids(spec: TokenizerSpec) -> set[int]:
    """Return the byte tokens of a BPE model that looks whole words up in its vocabulary first."""
    model = spec["model"]
    if not model.get("byte_fallback") or not model.get("ignore_merges"):
        return set()
    return {number for token, number in model["vocab"].items() if BYTE.fullmatch(token)}
