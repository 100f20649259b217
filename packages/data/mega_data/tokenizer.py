"""Tokenizers in HuggingFace's `tokenizer.json` format, loaded without transformers and trained from text.

A tokenizer is a folder with `tokenizer.json` and optionally `tokenizer_config.json` (which names the end-of-text
token), or just the file `tokenizer.json`. `FILE.py:NAME` and `PACKAGE:NAME` name the tokenizer of an extension.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mega_common.atomic_files import compute_file_sha256, open_atomic_file, write_json_atomically
from mega_common.bounded_parsing import describe_json_type, read_json_file, refuse_lfs_pointer
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.extension_tokenizer import ExtensionBackend, TokenizerReference
from mega_data.plain_text_tokenizer import PlainTextBackend

END_OF_TEXT = "<|endoftext|>"

# Some folders, such as GPT-2's, do not name the end token.
DEFAULT_END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")

# Candidates for cuts of a long text: before a letter or digit that begins a line, and before a single space or
# punctuation mark between two letters or digits.
CUT_CANDIDATES = re.compile(r"(?<=\n)(?=[^\W_])|(?<=[^\W_])(?=[^\w\n][^\W_])")
WINDOW = 2048

# Prefixes of a piece whose tokens are removed again: a line end separates the text from a prefix that the tokenizer adds.
LEADS = ("", "\n")


class TextPiece(NamedTuple):
    """Segment of a long text to encode by itself; `exact` if the cut after it changes no token, `last` if none follows.

    It is encoded with `lead` before it, whose tokens are removed.
    """

    text: str
    exact: bool
    last: bool
    lead: str = ""


class TextSegmentBoundary(NamedTuple):
    """Cut of a long text: the end of a segment, the begin of the next one, and the text to encode before that.

    The tokens of that text (`lead`) are removed again, so that the next segment encodes as in the whole text.
    """

    end: int
    begin: int
    lead: str


class Tokenizer:
    """Encoder and decoder of text by one tokenizer.json, or by the tokenizer of an extension.

    With `specials_as_text` a special token spelled in a text is encoded as text.

    Attributes:
        path: path of the `tokenizer.json`, or `EXTENSION:NAME`.
        vocab_size: largest id + 1, including added and special tokens.
        eos_id: id of the end-of-text token, None if the folder names none.
        eos_token: spelling of the end-of-text token, or None.
        bos_id: id of the begin-of-text token, None if the folder names none.
        backend: the stored tokenizer, which parses special tokens.
        plain: encoder of special tokens as text, None without `specials_as_text`.
        fingerprint: SHA-256 of `tokenizer.json`, 64 hex digits; of an extension's tokenizer, of its vocabulary.
        extension: adapter of the tokenizer of an extension, or None for a tokenizer.json.

    Raises:
        DataError: if there is no tokenizer at `path`, or it has another format.
        ConfigError: if the extension that `path` names cannot be loaded.
    """

    def __init__(self, path: Path, *, specials_as_text: bool = False) -> None:
        self.extension: ExtensionBackend | None = None
        if (reference := TokenizerReference.parse(Path(path))) is not None:
            self.path, self.extension, self.plain, self.bos_id = reference.path, ExtensionBackend(reference), None, None
            self.backend = cast("Backend", self.extension)  # has the methods that mega calls
            self.vocab_size = max(self.backend.get_vocab().values()) + 1
            self.eos_token, self.fingerprint = self.extension.end_token, self.extension.fingerprint
            self.eos_id = None if self.eos_token is None else self.backend.token_to_id(self.eos_token)
            return
        self.path = _find_tokenizer_file(Path(path))
        try:
            self.backend = Backend.from_file(str(self.path))
        except BaseException as error:  # the library raises nothing narrower, and panics of Rust are not Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            with contextlib.suppress(OSError):
                refuse_lfs_pointer(self.path, DataError)
            raise DataError(
                f"{self.path}: must be a tokenizer.json that the `tokenizers` library can read ({error})",
                hint="give the folder of a model or tokenizer.json itself, or train one with `mega data train-tokenizer`",
            ) from None
        # The file may have settings of its author; a corpus truncated to 512 tokens would go unnoticed.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.plain = PlainTextBackend(self.backend) if specials_as_text else None
        ids = self.backend.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{self.path}: the vocabulary is empty")
        self.vocab_size = max(ids.values()) + 1
        self.eos_id = _find_eos_id(self.path.parent, ids)
        begin = _read_special_token(self.path.parent, "bos_token")
        self.bos_id = ids.get(begin[1]) if begin else None
        self.eos_token = self.backend.id_to_token(self.eos_id) if self.eos_id is not None else None
        self.fingerprint = compute_file_sha256(self.path)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of one text; `add_special_tokens` adds those of the tokenizer's template, such as [CLS]."""
        if self.plain is not None:
            return self.plain.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], dtype: npt.DTypeLike = np.int32) -> list[npt.NDArray[Any]]:
        """Return the token ids of each text, without the special tokens of the tokenizer's template, as arrays of `dtype`."""
        native = np.dtype(dtype).newbyteorder("=")
        if self.plain is not None:
            lists = self.plain.encode_batch(texts)
        else:
            lists = [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        # struct converts a list of integers in half the time of numpy
        return [np.frombuffer(pack(f"{len(ids)}{native.char}", *ids), native) for ids in lists]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, with special tokens spelled out unless `skip_special_tokens` is set."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def split_long_text(self, blocks: Iterable[str], size: int, leads: Sequence[str] = LEADS) -> Iterator[TextPiece]:
        """Yield the segments of a long text, which encode to the tokens of the whole text except at cuts that are not `exact`.

        The text comes in blocks; only one piece and a window around its end are kept in memory. Encoding takes over a
        hundred bytes of memory per byte of text, so half a gigabyte of text cannot be encoded in one call. Segments
        have `size` to 2 x `size` characters.

        A cut is made at a position where the text around it encodes to the same tokens with and without the cut. The
        space between two words is dropped there if the tokenizer puts one before each text; other cuts need one of
        `leads`, texts to try before a segment, with such a tokenizer. Text without such a position, such as a million
        digits in a row, is cut where it at least decodes to the same text, and the piece is not `exact`. If there is no
        such position, the rest is one piece.
        """
        blocks, text, start, more, lead = iter(blocks), "", 0, True, ""
        while True:
            while more and len(text) - start <= 2 * size + WINDOW:
                block = next(blocks, None)
                more = block is not None
                text, start = text[max(start - WINDOW, 0) :] + (block or ""), min(start, WINDOW)
            if len(text) - start <= size:
                break
            low, high = start + size, min(start + 2 * size, len(text))
            cut = self._find_exact_cut(text, low, high, leads)
            exact = cut is not None
            if cut is None and (cut := self._find_rough_cut(text, low, leads)) is None:
                break
            yield TextPiece(text[start : cut.end], exact, False, lead)
            start, lead = cut.begin, cut.lead
        yield TextPiece("".join([text[start:], *blocks]), True, True, lead)

    def encode_after_text(self, lead: str, text: str) -> list[int]:
        """Return the token ids that `text` has directly after the text `lead`, without the tokens of `lead`."""
        return self.encode(lead + text)[len(self.encode(lead)) :]

    def _find_exact_cut(
        self, text: str, low: int, high: int, leads: Sequence[str], tries: int = 64
    ) -> TextSegmentBoundary | None:
        """Return a cut that keeps all tokens of the whole text, or None."""
        for match, _ in zip(CUT_CANDIDATES.finditer(text, low, high), range(tries), strict=False):
            end = match.end()
            for begin in (end, end + 1) if text[end] == " " else (end,):
                left, right = text[max(end - WINDOW, 0) : end], text[begin : begin + WINDOW]
                whole, first = self.encode(left + text[end:begin] + right), self.encode(left)
                for lead in leads:
                    second = self.encode_after_text(lead, right)  # empty if lead and text are one unknown word
                    if second and whole == first + second:
                        return TextSegmentBoundary(end, begin, lead)
        return None

    def _find_rough_cut(self, text: str, low: int, leads: Sequence[str], tries: int = 64) -> TextSegmentBoundary | None:
        """Return a cut that keeps at least the decoded text, or None."""
        for cut in range(low, min(low + tries, len(text))):
            left, right = text[max(cut - WINDOW, 0) : cut], text[cut : cut + WINDOW]
            whole, first = self.decode(self.encode(left + right)), self.encode(left)
            for lead in leads:
                second = self.encode_after_text(lead, right)
                if second and whole == self.decode(first + second):
                    return TextSegmentBoundary(cut, cut, lead)
        return None


@contextlib.contextmanager
def disable_encoder_threads() -> Iterator[None]:
    """Context manager that prevents the encoding libraries from starting threads for each batch.
    It is for callers that use threads themselves.

    The libraries read this setting only from the environment; it is restored on exit.
    """
    settings = {"TOKENIZERS_PARALLELISM": "false", "FASTOKENS_BPE_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _find_tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix == ".py":
        raise DataError(f"{path}: must name the tokenizer of an extension", hint=f"give {path}:NAME")
    if file.is_file():
        return file
    if path.is_dir():
        names = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "tokenizer_config.json")
        other = [name for name in names if (path / name).exists()]
        raise DataError(
            f"{path}: tokenizer.json is missing in this folder" + (f", which has {', '.join(other)}" if other else ""),
            hint=f"convert it: mega data convert-tokenizer {path / other[0]} --input TEXTS --output FOLDER"
            if other and other[0].endswith(".model")
            else "download tokenizer.json of the model, or let transformers write it: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})",
        )
    raise DataError(
        f"{path}: no such tokenizer file or folder",
        hint="give a local folder with tokenizer.json, or FILE.py:NAME of an extension, or train a tokenizer with "
        "`mega data train-tokenizer`",
    )


def _find_eos_id(folder: Path, ids: dict[str, int]) -> int | None:
    if named := _read_special_token(folder, "eos_token"):
        file, token = named
        if token not in ids:
            raise DataError(f"{file}: eos_token {token!r} is not in the vocabulary of tokenizer.json")
        return ids[token]
    usual = [ids[token] for token in DEFAULT_END_TOKENS if token in ids]
    return usual[0] if len(usual) == 1 else None


def _read_special_token(folder: Path, key: str) -> tuple[Path, str] | None:
    """Return the token that the folder's settings name under `key`, and the file that names it."""
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if file.is_file():
            settings = read_json_file(file, DataError)
            if not isinstance(settings, dict):
                raise DataError(f"{file}: must be a JSON object, found {describe_json_type(settings)}")
            entry = settings.get(key)
            token = entry.get("content") if isinstance(entry, dict) else entry
            if token is None:
                continue
            if not isinstance(token, str):
                raise DataError(f"{file}: {key} must be a text, found {describe_json_type(token)}")
            return file, token
    return None


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path, *, overwrite: bool = False) -> Tokenizer:
    """Train a byte-level BPE tokenizer (GPT-2's type) on `texts`, write it to `folder`, and return it.
    The files are `tokenizer.json` and `tokenizer_config.json`.

    Token 0 is `<|endoftext|>`, followed by the 256 bytes, so every text can be encoded. transformers loads the folder.

    Raises:
        DataError: if `vocab_size` is too small for the bytes, the folder has a tokenizer already, or there is no text.
    """
    if vocab_size < 257:
        raise DataError(
            f"--vocab-size must be at least 257 (256 bytes and one end token), found {vocab_size}",
            hint="common sizes are 32000 to 128000, e.g. --vocab-size 32000",
        )
    file = folder / "tokenizer.json"
    if file.exists() and not overwrite:
        raise DataError(f"{file}: exists already", hint="choose another folder, or pass --overwrite")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with ProgressBar("training the tokenizer", unit="bytes") as bar:
        backend.train_from_iterator(_count_characters(texts, bar), trainer)
    if not bar.done:
        raise DataError(
            "training a tokenizer requires text, but every document of --input is empty",
            hint="give other files to --input",
        )
    if backend.get_vocab_size() < vocab_size:
        logger.warning(
            "the vocabulary has only %d tokens instead of %d: the text is too small",
            backend.get_vocab_size(),
            vocab_size,
        )
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    save_tokenizer(backend, file, {**names, "model_max_length": 1_000_000_000})
    return Tokenizer(folder)


def _count_characters(texts: Iterable[str], bar: ProgressBar) -> Iterator[str]:
    for text in texts:
        bar.advance(len(text))
        yield text


def save_tokenizer(backend: Backend, file: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer to a tokenizer.json, and tokenizer_config.json next to it.
    The file is `file`. The configuration has `config` and settings for transformers.

    Raises:
        DataError: if a file cannot be written.
    """
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    try:
        write_json_atomically(file.with_name("tokenizer_config.json"), settings)
        with open_atomic_file(file, text=True) as stream:
            stream.write(backend.to_str(pretty=True))
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror})") from error
