"""Conversion of SentencePiece `.model`, tiktoken `.tiktoken` and Mistral tekken files to `tokenizer.json`.

The library of each format also encodes a sample of the corpus, and nothing is written unless all tokens agree:
conversions tend to have small errors, and training on slightly wrong tokens gives no error.
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
from mega_data.reading.decompression import import_optional_package
from mega_data.tokenizer import Tokenizer, save_tokenizer

SAMPLE = 1 << 22  # characters that are compared
MAX_PART = 1 << 17  # characters that are compared at a time

_SPECIAL_TOKENS = 100_000  # filler tokens that a small file may declare

SPACE = "▁"
BPE, UNIGRAM = 2, 1  # model types of SentencePiece
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # piece types of SentencePiece
UNMATCHED = (UNKNOWN, CONTROL, BYTE)  # pieces that are not matched in a text


class ConvertedTokenizer(NamedTuple):
    """Converted tokenizer, the original library's encoder for comparison, and the file's end token, or None."""

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
    """Convert a SentencePiece, tiktoken or tekken file to `folder/tokenizer.json`; DataError if `texts` encode differently.
    `tokenizer_config.json` is written as well.

    A tiktoken file has only tokens. It also requires `pattern`, the regular expression that splits text before
    encoding, and `special_tokens`, which get the next ids; the first one is the end-of-text token.

    Raises:
        DataError: if the file cannot be read or converted, the tokens differ (naming the text), or there is no text.
        MissingPackageError: naming the library of the format.
    """
    if (folder / "tokenizer.json").exists() and not overwrite:
        raise DataError(
            f"{folder / 'tokenizer.json'}: exists already", hint="choose another folder, or pass --overwrite"
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
    ) as error:  # fmt: skip - the libraries raise any of these for a damaged file
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
                f"{file}: a .tiktoken file requires --pattern",
                hint="pass --pattern with the regular expression by which the model's code splits text",
            )
        return _convert_tiktoken(file, pattern, special_tokens)
    if file.suffix == ".model":
        return _convert_sentencepiece(file)
    if file.name == "tokenizer.json":
        raise DataError(
            f"{file}: is a tokenizer.json already and requires no conversion", hint=f"use --tokenizer {file.parent}"
        )
    raise DataError(
        f"{file}: is not a supported tokenizer file", hint="give a *.model, *.tiktoken or tekken*.json file"
    )


def _check_tekken_counts(file: Path) -> None:
    """Require token counts that fit the file size.

    The library creates a filler for every declared special token, which could take all memory.

    Raises:
        ValueError: naming the count that does not fit.
    """
    size, config = file.stat().st_size, json.loads(file.read_bytes())["config"]
    for key in ("default_vocab_size", "default_num_special_tokens"):
        if not 0 <= config[key] <= max(size, _SPECIAL_TOKENS):
            raise ValueError(f"{key} = {config[key]:,} does not fit a file of {size:,} bytes")


def _convert_tekken(file: Path) -> ConvertedTokenizer:
    _check_tekken_counts(file)
    converter = import_optional_package(
        "transformers.integrations.mistral.tokenizer", "converting tekken files"
    ).MistralConverter
    library = import_optional_package(
        "mistral_common.tokens.tokenizers.tekken", "converting tekken files"
    ).Tekkenizer.from_file(file)
    return ConvertedTokenizer(
        converter(str(file)).converted(),
        lambda text: library.encode(text, bos=False, eos=False),
        library.id_to_piece(library.eos_id),
    )


def _convert_tiktoken(file: Path, pattern: str, special_tokens: Sequence[str]) -> ConvertedTokenizer:
    pairs = (line.split() for line in file.read_bytes().splitlines() if line.strip())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    tiktoken = import_optional_package("tiktoken", "converting tiktoken files")
    base: Any = import_optional_package(
        "transformers.convert_slow_tokenizer", "converting tiktoken files"
    ).TikTokenConverter

    class Converter(base):  # type: ignore[misc]
        @staticmethod
        def load_tiktoken_bpe(_: str) -> dict[bytes, int]:
            return ranks  # tiktoken's reader caches files by name, even if the file changes

    converter = Converter(str(file), pattern=pattern, extra_special_tokens=list(special_tokens))
    library = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return ConvertedTokenizer(
        converter.converted(), library.encode_ordinary, special_tokens[0] if special_tokens else None
    )


def _convert_sentencepiece(file: Path) -> ConvertedTokenizer:
    library = import_optional_package("sentencepiece", "converting .model files").SentencePieceProcessor(
        model_file=str(file)
    )
    proto = import_optional_package(
        "sentencepiece.sentencepiece_model_pb2", "converting .model files"
    ).ModelProto.FromString(file.read_bytes())
    trained, text = proto.trainer_spec, proto.normalizer_spec
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    if trained.model_type == BPE:
        matched = [(piece.piece, piece.score) for piece in proto.pieces if piece.type not in UNMATCHED]
        vocabulary = {piece: index for index, (piece, _) in enumerate(scores)}
        model: models.Model = models.BPE(
            vocabulary, _list_merges(vocabulary, matched), unk_token=trained.unk_piece, fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )  # fmt: skip
    elif trained.model_type == UNIGRAM:
        model = models.Unigram(scores, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback)
    else:
        raise DataError(f"{file}: is neither a BPE nor a Unigram model; other types are not supported")
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
    merges = []
    for piece, score in scores:
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-score, pair) for pair in pairs]
    merges.sort(key=lambda item: item[0])
    return [pair for _, pair in merges]


def _compare_encodings(converted: ConvertedTokenizer, file: Path, texts: Iterable[str]) -> None:
    """Encode the beginning of the corpus with both tokenizers, and require equal tokens.

    Special tokens spelled in the corpus are encoded as text.

    Raises:
        DataError: if tokens differ, or there is no text.
    """
    backend, plain, done = converted.backend, PlainTextBackend(converted.backend), 0
    with ProgressBar("comparing", total=SAMPLE, unit="characters") as bar:
        for number, text in enumerate(texts, 1):
            for start in range(0, min(len(text), SAMPLE), MAX_PART):
                part = text[start : start + MAX_PART]
                ids, expected = plain.encode(part, add_special_tokens=False), list(converted.reference(part))
                if ids != expected:
                    at = next(n for n, (a, b) in enumerate(itertools.zip_longest(ids, expected)) if a != b)
                    raise DataError(
                        f"{file}: the converted tokenizer encodes document {number} differently:"
                        f" {ids[at : at + 4]} instead of {expected[at : at + 4]},"
                        f" after {backend.decode(ids[:at])[-40:]!r}",
                        hint="nothing was written; use the tokenizer.json of the model, if it has one",
                    )
                done += len(part)
                bar.advance(len(part))
            if done >= SAMPLE:
                break
    if not done:
        raise DataError(f"{file}: the comparison requires text, and every input is empty")
    _compare_spellings(converted, plain, file)
    logger.info("%s: equal tokens in %s characters", file, f"{done:,}")


def _compare_spellings(converted: ConvertedTokenizer, plain: PlainTextBackend, file: Path) -> None:
    """Warn about tokens whose spelling in a text both encode differently, such as SentencePiece's user-defined symbols."""
    spellings = list_token_spellings(converted.backend)
    different = [
        token
        for token in spellings
        for text in (token, f"a{token}b", f" {token} c")
        if plain.encode(text, add_special_tokens=False) != list(converted.reference(text))
    ]
    if different:
        logger.warning(
            "%s: the converted tokenizer encodes texts that spell %d of the %d special, added and byte tokens differently: %s",
            file,
            len(set(different)),
            len(spellings),
            ", ".join(dict.fromkeys(different[:5])),
        )
