"""Conversion of SentencePiece `.model`, tiktoken `.tiktoken` and Mistral tekken files to `tokenizer.json`.

Each format's own library encodes a sample of the very corpus as well, and nothing is written unless all tokens agree:
conversions are known to be wrong in small things, and a corpus of slightly other tokens trains without a word.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.plain_text_tokenizer import PlainTextBackend, list_token_spellings
from mega_data.reading.decompression import import_optional
from mega_data.tokenizer import Tokenizer, save_tokenizer

SAMPLE = 1 << 22  # characters on which both must agree
LONGEST = 1 << 17  # characters of one document

_SPECIAL_TOKENS = 100_000  # fillers that a small file may state

SPACE = "▁"
BPE, UNIGRAM = 2, 1  # SentencePiece's kinds of model
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # and of pieces
UNREACHED = (UNKNOWN, CONTROL, BYTE)  # pieces that are not matched in a text


class ConvertedTokenizer(NamedTuple):
    """Converted tokenizer, the encoder of the format's own library, and the end token named by the file."""

    backend: Backend
    reference: Callable[[str], Sequence[int]]
    end: str | None


def convert_tokenizer(
    file: Path,
    folder: Path,
    texts: Iterable[str],
    *,
    pattern: str | None = None,
    special_tokens: Sequence[str] = (),
    overwrite: bool = False,
) -> Tokenizer:
    """Write `file` as `tokenizer.json` and `tokenizer_config.json` into `folder`, if both encode the beginning of
    `texts` equally.

    A tiktoken file holds nothing but tokens: `pattern`, the regular expression that cuts text before, and
    `special_tokens`, which come after the others, say the rest; the first of them ends a text.

    Raises:
        DataError: when the file cannot be read or expressed, the two differ (naming the text), or there is no text.
        MissingPackageError: naming the format's library.
    """
    if (folder / "tokenizer.json").exists() and not overwrite:
        raise DataError(
            f"{folder / 'tokenizer.json'}: exists already", hint="choose another folder, or say --overwrite"
        )
    try:
        converted = _convert_file(file, pattern, special_tokens)
    except (
        OSError,
        ValueError,
        LookupError,
        RuntimeError,
        ArithmeticError,
        AssertionError,
        TypeError,
        AttributeError,
    ) as error:  # fmt: skip - whatever the libraries raise for a damaged file
        raise DataError(f"{file}: cannot be read as a tokenizer ({error})") from error
    _compare_encodings(converted, file, texts)
    end = converted.end
    save_tokenizer(converted.backend, folder / "tokenizer.json", {"eos_token": end} if end else {})
    return Tokenizer(folder)


def _convert_file(file: Path, pattern: str | None, special_tokens: Sequence[str]) -> ConvertedTokenizer:
    if "tekken" in file.name and file.suffix == ".json":
        return _convert_tekken(file)
    if file.suffix == ".tiktoken":
        if pattern is None:
            raise DataError(
                f"{file}: does not say how text is cut before it is encoded",
                hint="--pattern is the regular expression that the model's code has for it",
            )
        return _convert_tiktoken(file, pattern, special_tokens)
    if file.suffix == ".model":
        return _convert_sentencepiece(file)
    raise DataError(f"{file}: no format that is known", hint="*.model, *.tiktoken and tekken*.json are")


def _check_tekken_counts(file: Path) -> None:
    """Require token counts that fit the file size, because the library creates a filler for every declared special
    token.

    Raises:
        ValueError: naming the count that does not fit.
    """
    size, config = file.stat().st_size, json.loads(file.read_bytes())["config"]
    for key in ("default_vocab_size", "default_num_special_tokens"):
        if not 0 <= config[key] <= max(size, _SPECIAL_TOKENS):
            raise ValueError(f"{key} = {config[key]:,} does not fit a file of {size:,} bytes")


def _convert_tekken(file: Path) -> ConvertedTokenizer:
    _check_tekken_counts(file)
    converter = import_optional("transformers.integrations.mistral.tokenizer", "tekken files").MistralConverter
    library = import_optional("mistral_common.tokens.tokenizers.tekken", "tekken files").Tekkenizer.from_file(file)
    return ConvertedTokenizer(
        converter(str(file)).converted(),
        lambda text: library.encode(text, bos=False, eos=False),
        library.id_to_piece(library.eos_id),
    )


def _convert_tiktoken(file: Path, pattern: str, special_tokens: Sequence[str]) -> ConvertedTokenizer:
    pairs = (line.split() for line in file.read_bytes().splitlines() if line.strip())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    tiktoken = import_optional("tiktoken", "tiktoken files")
    base: Any = import_optional("transformers.convert_slow_tokenizer", "tiktoken files").TikTokenConverter

    class Converter(base):  # type: ignore[misc]
        @staticmethod
        def load_tiktoken_bpe(_: str) -> dict[bytes, int]:
            return ranks  # tiktoken's own reader keeps a copy by the file's name, whatever becomes of the file

    converter = Converter(str(file), pattern=pattern, extra_special_tokens=list(special_tokens))
    library = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return ConvertedTokenizer(
        converter.converted(), library.encode_ordinary, special_tokens[0] if special_tokens else None
    )


def _convert_sentencepiece(file: Path) -> ConvertedTokenizer:
    library = import_optional("sentencepiece", ".model files").SentencePieceProcessor(model_file=str(file))
    proto = import_optional("sentencepiece.sentencepiece_model_pb2", ".model files").ModelProto.FromString(
        file.read_bytes()
    )
    trained, text = proto.trainer_spec, proto.normalizer_spec
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    if trained.model_type == BPE:
        reached = [(piece.piece, piece.score) for piece in proto.pieces if piece.type not in UNREACHED]
        vocabulary = {piece: index for index, (piece, _) in enumerate(scores)}
        model: models.Model = models.BPE(
            vocabulary, _list_merges(vocabulary, reached), unk_token=trained.unk_piece, fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )  # fmt: skip
    elif trained.model_type == UNIGRAM:
        model = models.Unigram(scores, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback)
    else:
        raise DataError(f"{file}: neither BPE nor Unigram, which alone can be expressed")
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(list(_convert_normalizers(text)))
    prefix = [decoders.Strip(" ", 1, 0)] if text.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix]
    )
    for piece in proto.pieces:
        if piece.type in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(piece.piece, special=piece.type == CONTROL, normalized=False)])
    return ConvertedTokenizer(
        backend, library.encode, library.id_to_piece(library.eos_id()) if library.eos_id() >= 0 else None
    )


def _convert_normalizers(text: Any) -> Iterator[normalizers.Normalizer]:
    """Yield the normalizers of SentencePiece's `NormalizerSpec`."""
    if text.precompiled_charsmap:
        yield normalizers.Precompiled(text.precompiled_charsmap)
    if text.remove_extra_whitespaces:
        yield normalizers.Replace(Regex("^ +| +$"), "")
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if text.add_dummy_prefix:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def _list_merges(vocabulary: dict[str, int], scores: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that merge into a piece of `scores`, those of the best pieces first."""
    found = []
    for piece, score in scores:
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        known = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-score, pair) for pair in known]
    found.sort(key=lambda item: item[0])
    return [pair for _, pair in found]


def _compare_encodings(converted: ConvertedTokenizer, file: Path, texts: Iterable[str]) -> None:
    """Encode the beginning of the corpus with both tokenizers, special tokens spelled in it as text, and require equal
    tokens.

    Raises:
        DataError: where they differ, or there is nothing to compare.
    """
    backend, plain, done = converted.backend, PlainTextBackend(converted.backend), 0
    with ProgressBar("comparing", total=SAMPLE, unit="characters") as bar:
        for number, text in enumerate(texts, 1):
            for start in range(0, min(len(text), SAMPLE), LONGEST):
                part = text[start : start + LONGEST]
                ours, theirs = plain.encode(part, add_special_tokens=False), converted.reference(part)
                if ours != list(theirs):
                    at = next(n for n, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
                    raise DataError(
                        f"{file}: document {number} has other tokens when converted: {ours[at : at + 4]} for"
                        f" {list(theirs[at : at + 4])}, after {backend.decode(ours[:at])[-40:]!r}",
                        hint="nothing was written; the model's own tokenizer.json, where there is one, is to be preferred",
                    )
                done += len(part)
                bar.advance(len(part))
            if done >= SAMPLE:
                break
    if not done:
        raise DataError(f"{file}: no text to compare the conversion on: every input is empty")
    _compare_spellings(converted, plain, file)
    logger.info("%s: the same tokens on %s characters", file, f"{done:,}")


def _compare_spellings(converted: ConvertedTokenizer, plain: PlainTextBackend, file: Path) -> None:
    """Warn about tokens whose spelling in a text both encode differently, such as user-defined symbols of
    SentencePiece.
    """
    spellings = list_token_spellings(converted.backend)
    different = [
        token
        for token in spellings
        for text in (token, f"a{token}b", f" {token} c")
        if plain.encode(text, add_special_tokens=False) != list(converted.reference(text))
    ]
    if different:
        logger.warning(
            "%s: texts that spell %d of the %d special, added and byte tokens have other tokens when converted: %s",
            file,
            len(set(different)),
            len(spellings),
            ", ".join(dict.fromkeys(different[:5])),
        )
