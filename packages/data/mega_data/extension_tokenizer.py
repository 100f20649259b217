"""Tokenizers of extensions: a class with `encode`, `decode` and `vocabulary`, named as `FILE.py:NAME` or `PACKAGE:NAME`.

A checkpoint records the tokenizer in the file `extension_tokenizer.json`, without its code: {"extension", "version",
"tokenizer", "fingerprint"}.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import DataError, MegaError
from mega_common.extension_entries import CustomTokenizer, Extension
from mega_common.extension_loader import find_installed_extensions, is_extension_path, load_extension
from mega_common.progress_logging import logger

RECORD_FILE = "extension_tokenizer.json"  # among the files that are copied along with a model
_REFERENCE = re.compile(r"([^:]+):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class TokenizerReference:
    """Reference to a tokenizer that an extension provides, `EXTENSION:NAME`.

    Attributes:
        extension: file, folder or installed name of the extension, as in `extensions` of run.yaml.
        name: name of the tokenizer in the extension.
    """

    extension: str
    name: str

    @classmethod
    def parse(cls, path: Path) -> TokenizerReference | None:
        """Return the reference that a path such as `my_tokenizer.py:words` is, or None for a file or folder."""
        found = None if path.exists() else _REFERENCE.fullmatch(str(path))
        if found is None:
            return None
        extension, name = found.groups()
        is_file = is_extension_path(extension) or Path(extension).exists()
        return cls(str(Path(extension).resolve()) if is_file else extension, name)

    @property
    def path(self) -> Path:
        """Reference as the path of a tokenizer, `EXTENSION:NAME`."""
        return Path(f"{self.extension}:{self.name}")


@dataclass(frozen=True)
class ExtensionEncoding:
    """Result of encoding one text: its token ids."""

    ids: list[int]


class ExtensionBackend:
    """Adapter of an extension's tokenizer to the methods of `tokenizers.Tokenizer` that mega calls.

    Any other method, such as the character offsets that conversations require, raises DataError.

    Attributes:
        extension: the extension with the tokenizer.
        end_token: name of the end-of-text token in the vocabulary, or None.
        fingerprint: SHA-256 of the names of extension and tokenizer and of the vocabulary, 64 hex digits.

    Raises:
        DataError: if the extension has no such tokenizer, or its vocabulary cannot be used.
        ConfigError: if the extension cannot be loaded.
    """

    def __init__(self, reference: TokenizerReference) -> None:
        self._where = str(reference.path)
        self.extension: Extension = load_extension(reference.extension)
        entry = self.extension.tokenizers.get(reference.name)
        if not isinstance(entry, CustomTokenizer):
            known = ", ".join(self.extension.tokenizers) or "none"
            raise DataError(
                f"{self._where}: the extension {self.extension.name} has no tokenizer {reference.name!r}; it has {known}",
                hint="name one of its tokenizers",
            )
        self._code = self._call("build", entry.build)
        vocabulary = getattr(self._code, "vocabulary", None)
        if not isinstance(vocabulary, Mapping) or not _are_token_ids(list(vocabulary.values())):
            raise DataError(
                f"{self._where}: vocabulary must map the name of each token to an id of its own, an integer from 0 on"
            )
        self._ids: dict[str, int] = {str(name): number for name, number in vocabulary.items()}
        self._names = {number: name for name, number in self._ids.items()}
        self.end_token: str | None = getattr(self._code, "end_token", None)
        if self.end_token is not None and self.end_token not in self._ids:
            raise DataError(f"{self._where}: end_token {self.end_token!r} is not in the vocabulary")
        facts = [self.extension.name, reference.name, sorted(self._ids.items()), self.end_token]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        """Refuse a method that tokenizers of extensions do not have.

        Raises:
            DataError: for any name that is not private.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        raise DataError(
            f"{self._where}: conversations, grammars, images and embeddings require a tokenizer.json, found a tokenizer of an "
            f"extension (which has no {name})",
            hint="use a tokenizer with tokenizer.json for them",
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> ExtensionEncoding:
        """Return the token ids of a text, all of which is ordinary text; there are no special tokens to add.
        Raises DataError for an id that is not in the vocabulary.
        """
        found = [int(token) for token in self._call("encode", self._code.encode, text)]
        if unknown := [token for token in found if token not in self._names]:
            raise DataError(f"{self._where}: encode returned the id {unknown[0]}, which is not in the vocabulary")
        return ExtensionEncoding(found)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[ExtensionEncoding]:
        """Return the token ids of each text."""
        return [self.encode(text) for text in texts]

    encode_batch_fast = encode_batch

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; unknown ids, and the end token if special tokens are skipped, are left out."""
        hidden = self._ids.get(self.end_token or "", -1) if skip_special_tokens else -1
        known = [token for token in ids if token in self._names and token != hidden]
        return str(self._call("decode", self._code.decode, known))

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:
        """Return the id of each token by its name."""
        return dict(self._ids)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Return an empty mapping, since tokenizers of extensions have no added tokens."""
        return {}

    def token_to_id(self, name: str) -> int | None:
        """Return the id of a token, or None if the vocabulary does not have it."""
        return self._ids.get(name)

    def id_to_token(self, token: int) -> str | None:
        """Return the name of a token, or None for an id outside the vocabulary."""
        return self._names.get(token)

    def make_record(self, name: str) -> bytes:
        """Return the content of `extension_tokenizer.json` for the tokenizer `name`."""
        record = {
            "extension": self.extension.name, "version": self.extension.version, "tokenizer": name,
            "fingerprint": self.fingerprint,
        }  # fmt: skip
        return json.dumps(record, indent=1).encode()

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except MegaError:
            raise
        except Exception as error:
            raise DataError(f"{self._where}: {what} raised {type(error).__name__}: {error}") from error


def _are_token_ids(values: Sequence[Any]) -> bool:
    return bool(values) and len(set(values)) == len(values) and all(type(v) is int and v >= 0 for v in values)


def find_recorded_tokenizer(record: bytes, extensions: Sequence[str], source: str) -> Path:
    """Return the tokenizer path that an `extension_tokenizer.json` names; an error if its extension is missing or changed.

    Args:
        record: content of the file.
        extensions: extensions that the command or run names; installed ones are found by their names.
        source: where the file comes from, for messages.

    Raises:
        DataError: if the extension is missing, or its tokenizer has another vocabulary than the recorded one.
    """
    raw = parse_json_text(record)
    name, version, tokenizer, fingerprint = (
        raw.get(key) for key in ("extension", "version", "tokenizer", "fingerprint")
    )
    installed = [name] if name in find_installed_extensions() else []
    found = next((ref for ref in [*extensions, *installed] if load_extension(ref).name == name), None)
    if found is None:
        raise DataError(
            f"{source}: the tokenizer requires the extension {name!r}, which is not installed",
            hint="name its file with --extension FILE, or install its package",
        )
    reference = TokenizerReference(found, str(tokenizer))
    path = reference.path if found == name else Path(f"{Path(found).resolve()}:{tokenizer}")
    backend = ExtensionBackend(reference)
    if backend.fingerprint != fingerprint:
        raise DataError(
            f"{source}: the tokenizer {tokenizer} of the extension {name} has another vocabulary than when it was saved",
            hint=f"use version {version} of the extension",
        )
    if backend.extension.version != version:
        logger.warning("%s: version of the extension %s: %s -> %s", source, name, version, backend.extension.version)
    return path
