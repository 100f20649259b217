"""Any text to documents: JSON lines, Parquet, plain text, folders of source code, HuggingFace `datasets`.

`find_sources` turns what a user names (files, globs, folders, `hf:NAME`) into a list of `Source`s in an order that
depends on the names alone; `read` goes through one and yields each `Document`, or a `Rejected` where there is none to
be had, with the place it came from. What to do about a `Rejected` is the caller's business.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mega_common.errors import DataError, MissingPackageError

Kind = Literal["jsonl", "parquet", "text", "code", "datasets"]
Advance = Callable[[int], None]

JSON_LINES = (".jsonl", ".ndjson", ".json")
PACKED = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """A text of `size` UTF-8 bytes, and where it stands (`line` counts from 1; a Parquet row or a record likewise)."""

    text: str
    size: int
    file: str
    line: int

    @property
    def where(self) -> str:
        """`file:line`, as editors take it."""
        return f"{self.file}:{self.line}"


class Rejected(NamedTuple):
    """A place without a usable document, why, and what stands there. `binary`: a file of a folder that is no text."""

    reason: str
    content: str
    file: str
    line: int
    binary: bool = False


@dataclass(frozen=True)
class Source:
    """One file, or one `datasets` split. `size`: bytes on disk, 0 where unknown."""

    name: str
    kind: Kind
    size: int = 0


def find_sources(inputs: Sequence[str | Path]) -> list[Source]:
    """What to read, in order: inputs as given, a glob's or folder's files sorted by name.

    Of a folder every file counts but those in hidden folders, hidden ones and links to folders. In it `.jsonl` and
    `.parquet` are read as such and anything else as one document of text a file. `hf:NAME[:CONFIG][@SPLIT]` is a data
    set of the HuggingFace Hub or a folder that `datasets` saved, split `train` unless said otherwise.

    Raises:
        DataError: when an input does not exist, or a folder or glob holds nothing.
    """
    return [source for item in inputs for source in _expand(str(item))]


def _expand(item: str) -> Iterator[Source]:
    path = Path(item)
    if item.startswith("hf:"):
        yield Source(item, "datasets")
    elif path.is_file():
        yield _file(path, whole="text")
    elif path.is_dir():
        yield from _folder(path)
    elif glob.has_magic(item):
        found = sorted(glob.glob(item, recursive=True))
        if not found:
            raise DataError(f"{item}: no file matches")
        for name in found:
            # With `**` a folder matches beside the files in it.
            if Path(name).is_file():
                yield _file(Path(name), whole="text")
            elif "**" not in item:
                yield from _folder(Path(name))
    else:
        raise DataError(
            f"{item}: no such file or folder",
            hint="a data set of the HuggingFace Hub is written hf:NAME[:CONFIG][@SPLIT]",
        )


def _folder(folder: Path) -> list[Source]:
    if any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return [Source(f"hf:{folder}", "datasets")]
    found = []
    for root, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(root, name) for name in sorted(files) if not name.startswith(".")]
        # A pipe would be read for ever, and a dangling link not at all.
        found += [_file(path, whole="code") for path in paths if path.is_file()]
    if not found:
        raise DataError(f"{folder}: no files in this folder")
    return found


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _file(path: Path, whole: Kind) -> Source:
    suffixes = path.suffixes[-2:] if path.suffix in PACKED else path.suffixes[-1:]
    suffix = suffixes[0] if suffixes else ""
    # A .json beside source code is a setting, not a corpus.
    lines = JSON_LINES[:2] if whole == "code" else JSON_LINES
    kind = "jsonl" if suffix in lines else "parquet" if path.suffix == ".parquet" else whole
    return Source(str(path), kind, path.stat().st_size)


def read(source: Source, json_key: str, advance: Advance = lambda _: None) -> Iterator[Document | Rejected]:
    """The documents of a source; `advance` is told the bytes of the file as they are consumed.

    Raises:
        DataError: when the file as a whole cannot be read: permissions, a damaged archive, a column that is not there.
        MissingPackageError: when its format needs a package that is not installed.
    """
    if source.kind == "datasets":
        return _read_datasets(source, json_key)
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text, "code": _read_text}
    return readers[source.kind](source, json_key, advance)


def texts(inputs: Sequence[str | Path], json_key: str = "text") -> Iterator[str]:
    """The text of every document, for training a tokenizer; binary files of folders are passed over.

    Raises:
        DataError: at the first place without a usable document.
    """
    for source in find_sources(inputs):
        for item in read(source, json_key):
            if isinstance(item, Document):
                yield item.text
            elif not item.binary:
                raise DataError(f"{item.file}:{item.line}: {item.reason}")


def _checked(value: object, key: str, file: str, line: int, content: str | None = None) -> Document | Rejected:
    """The document of a value that should be text; lone surrogates, which JSON can spell, are none."""
    if not isinstance(value, str):
        return Rejected(f"{key!r} is {_named(value)}, not a string", content or repr(value), file, line)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        shown = content or value.encode("utf-8", "backslashreplace").decode()
        return Rejected(f"{key!r} is not valid Unicode (lone surrogate at character {error.start})", shown, file, line)
    return Document(value, size, file, line)


def _named(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _read_jsonl(source: Source, key: str, advance: Advance) -> Iterator[Document | Rejected]:
    with _opened(source.name, advance) as stream:
        for line, raw in enumerate(_guarded(stream, source.name), 1):
            if not raw.isspace():
                yield _parsed(raw.removeprefix(BOM) if line == 1 else raw, key, source.name, line)


def _parsed(raw: bytes, key: str, file: str, line: int) -> Document | Rejected:
    try:
        decoded = raw.decode()
        record = json.loads(decoded)
    except UnicodeDecodeError as error:
        return Rejected(f"not UTF-8 (byte {error.start} of the line)", _shown(raw), file, line)
    except (ValueError, RecursionError) as error:
        return Rejected(f"not JSON ({error})", _shown(raw), file, line)
    if not isinstance(record, dict):
        return Rejected(f"the line is {_named(record)}, not an object", _shown(raw), file, line)
    if key not in record:
        return Rejected(f"no key {key!r}; the keys are {', '.join(record) or 'none'}", _shown(raw), file, line)
    value = record[key]
    return _checked(
        value, key, file, line, None if isinstance(value, str) and value.isascii() else decoded.rstrip("\n")
    )


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace").rstrip("\n")


def _read_text(source: Source, key: str, advance: Advance) -> Iterator[Document | Rejected]:
    # An archive among source code is some program's data.
    with _opened(source.name, advance, unpack=source.kind != "code") as stream:
        raw = b"".join(_guarded(iter(lambda: stream.read(1 << 20), b""), source.name))
    try:
        text = raw.removeprefix(BOM).decode()
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start} of the file)"
        yield Rejected(reason, _shown(raw[:200]), source.name, 1, binary=source.kind == "code")
        return
    if source.kind == "code" and "\0" in text:
        yield Rejected("binary", "", source.name, 1, binary=True)
    else:
        yield _checked(text, "the text", source.name, 1)


def _read_parquet(source: Source, key: str, advance: Advance) -> Iterator[Document | Rejected]:
    parquet = _package("pyarrow.parquet", "Parquet files")
    arrow = _package("pyarrow", "Parquet files")
    try:
        with parquet.ParquetFile(source.name) as file:
            if key not in file.schema_arrow.names:
                raise DataError(
                    f"{source.name}: no column {key!r}", hint=f"the columns are {', '.join(file.schema_arrow.names)}"
                )
            line, rows = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(columns=[key], batch_size=256):
                for value in batch.column(0).to_pylist():
                    line += 1
                    yield _checked(value, key, source.name, line)
                advance(source.size * batch.num_rows // rows)
    except (OSError, ValueError, arrow.ArrowException) as error:
        raise DataError(f"{source.name}: cannot be read as Parquet ({error})") from error


def _read_datasets(source: Source, key: str) -> Iterator[Document | Rejected]:
    datasets = _package("datasets", "hf: inputs")
    name, _, split = source.name.removeprefix("hf:").partition("@")
    split = split or "train"
    try:
        rows = _load_datasets(datasets, name, split)
        for line, row in enumerate(rows, 1):
            if key not in row:
                raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {', '.join(row)}")
            yield _checked(row[key], key, source.name, line)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{source.name}: `datasets` cannot load it ({error})") from error


def _load_datasets(datasets: Any, name: str, split: str) -> Iterable[dict[str, Any]]:
    folder = Path(name)
    if any((folder / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        loaded: Any = datasets.load_from_disk(name)
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded  # type: ignore[no-any-return]
        if split not in loaded:
            raise DataError(
                f"hf:{name}: no split {split!r}", hint=f"the splits are {', '.join(loaded)}: hf:{name}@SPLIT"
            )
        return loaded[split]  # type: ignore[no-any-return]
    hub, _, config = (name, "", "") if folder.is_dir() else name.partition(":")
    return datasets.load_dataset(hub, config or None, split=split, streaming=True)  # type: ignore[no-any-return]


def _package(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingPackageError(f"{purpose} need the package {package}", hint=f"pip install {package}") from None


class _CountedFile(io.FileIO):
    """A file that tells how many bytes were read of it, beneath any decompression."""

    def __init__(self, name: str, advance: Advance) -> None:
        super().__init__(name)
        self.advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


def _opened(name: str, advance: Advance, *, unpack: bool = True) -> io.BufferedIOBase:
    try:
        plain = io.BufferedReader(_CountedFile(name, advance), 1 << 20)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error
    if unpack and name.endswith(".gz"):
        return gzip.open(plain)
    if unpack and name.endswith(".zst"):
        arrow = _package("pyarrow", ".zst files")
        return io.BufferedReader(arrow.input_stream(plain, compression="zstd"), 1 << 20)
    return plain


def _guarded(blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Pass on what is read; damage to the file under way becomes one sentence."""
    try:
        yield from blocks
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{name}: cannot be read to its end ({error})", hint="is the file damaged or truncated?"
        ) from error
