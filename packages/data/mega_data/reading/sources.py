"""Which files a corpus is: what a user names (files, globs, folders, `hf:NAME`) becomes a list of `Source`s.

Their order depends on the names alone. What lies in a folder and is no part of the corpus (README and licence beside
data, test splits beside training data, token files of ours) is left out, by a reason that is told.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mega_common.errors import DataError
from mega_common.log import logger
from mega_common.remote import Remote, Stamp, place
from mega_data.files.indexed import MAGIC
from mega_data.files.info import is_info
from mega_data.reading.unpack import DAMAGE, STDIN, head, opened

Kind = Literal["jsonl", "json", "csv", "tsv", "parquet", "text", "datasets"]

NAMES: dict[str, Kind] = {
    ".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
PACKED = (".gz", ".bz2", ".xz", ".zst")
ABSENT = object()
WHOLE = ""  # the key that stands for the whole record, as JSON
BOM = b"\xef\xbb\xbf"

# Beside data files these describe the data.
COMPANION = re.compile(r"(readme|licen[cs]e|copying|notice|citation|dataset_infos?)\b.*", re.IGNORECASE)

# How the files of a split are named on the HuggingFace Hub, anywhere in the path.
SPLIT = re.compile(
    r"(?<![a-z])(?:(train|training)|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE
)
CONFIGS = re.compile(rb"\A---\n(?:(?!---\n).*\n)*?configs:")


@dataclass(frozen=True)
class Source:
    """One file, one stream, or one `datasets` split.

    Attributes:
        kind: how it is read; None where only its content tells, when it is opened.
        size: bytes on disk, 0 where unknown; `changed` its modification time in ns, of an object a number for its state.
        found: in a folder, where anything may lie: what is no text there is left out and not refused.
        begin, end: of a file that several shards read, the bytes of this one's (`shards.cut`): the lines, or row groups
            of Parquet, that begin there; a line begins at `begin`. An `end` of None is the file's.
    """

    name: str
    kind: Kind | None
    size: int = 0
    changed: int = 0
    found: bool = False
    begin: int = 0
    end: int | None = None

    @property
    def bytes(self) -> int:
        """How many there are to read, 0 where unknown."""
        return (self.size if self.end is None else self.end) - self.begin

    @property
    def shown(self) -> str:
        """The name by which lines are told, which count from `begin`."""
        return f"{self.name}[{self.begin}:]" if self.begin else self.name

    @property
    def again(self) -> bool:
        """Whether the same can be read once more, and a change be seen: not of a stream, nor of the Hub."""
        return bool(self.changed)


@dataclass
class LeftOut:
    """What was left out of folders, by the reason."""

    names: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, reason: str, paths: Iterable[Path | str]) -> None:
        """Take note of files."""
        for path in paths:
            self.names.setdefault(reason, {})[str(path)] = None  # once, if it is read anew

    def tell(self) -> None:
        """Log each reason with its first files."""
        for reason, names in self.names.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning("left out, %s: %s%s", reason, ", ".join(list(names)[:3]), more)


def find_sources(inputs: Sequence[str | Path], json_key: str = "text", left_out: LeftOut | None = None) -> list[Source]:
    """What to read, in order: inputs as given, a glob's or folder's files sorted by name.

    A file of a folder or glob counts once, whatever links lead to it. Of a folder every file counts but those in hidden
    folders, hidden ones, and what is noted in `left_out`. `hf:NAME[:CONFIG][@SPLIT]` is a data set of the HuggingFace
    Hub or a folder that `datasets` saved, split `train` unless said otherwise; `-` is standard input. URLs that fsspec
    knows (`s3://bucket/folder/*.jsonl`) name objects, globs and folders likewise.

    Raises:
        RemoteError: when an object store cannot be asked.
        DataError: when an input does not exist, is no corpus, or a folder or glob holds nothing.
    """
    left_out = LeftOut() if left_out is None else left_out
    return [source for item in inputs for source in _expand(str(item), json_key, left_out)]


def _expand(item: str, key: str, left_out: LeftOut) -> list[Source]:
    if item == STDIN:
        return [Source(STDIN, None)]
    if isinstance(where := place(item), Remote):
        return _remote(where, key, left_out)
    if item.startswith("hf:"):
        return [Source(item, "datasets")]
    path = Path(where)
    item = str(where) if "://" in item else item
    if path.is_dir():
        return _folder(path, key, left_out)
    if path.exists():
        return [_named(path)]
    if glob.has_magic(item):
        return _glob(item, key, left_out)
    raise DataError(
        f"{item}: no such file or folder",
        hint="a data set of the HuggingFace Hub is written hf:NAME[:CONFIG][@SPLIT]",
    )


def _remote(where: Remote, key: str, left_out: LeftOut) -> list[Source]:
    """An object, those that a glob matches, or all below a URL, with a folder's rules."""
    found = where.matches()
    if not found:
        raise DataError(f"{where}: no such object, and none below it or that matches")
    folder = not glob.has_magic(where) and list(found) != [where]
    begin = re.split(r"[*?[]", where)[0]
    visible = [name for name in found if "/." not in f"/{name.removeprefix(begin)}"]
    sources = [_object(name, found[name], key, folder) for name in visible]
    return _without_companions(_training_split(sources, Path(where), left_out), left_out) if folder else sources


def _object(name: str, stamp: Stamp, key: str, found: bool) -> Source:
    path = Path(name)
    kind = _kind_by_name(path)
    if kind == "json":
        named = not found or path.suffix.lower() in PACKED
        kind = kind_by_content(_begin(name), key, path, named=named)
    changed = int.from_bytes(hashlib.sha256(stamp.state.encode()).digest()[:6]) if stamp.state else 0
    return Source(name, kind, stamp.size, changed, found)


def _glob(pattern: str, key: str, left_out: LeftOut) -> list[Source]:
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if not found:
        raise DataError(f"{pattern}: no file matches")
    # With `**` a folder matches beside the files in it.
    folders = [] if "**" in pattern else [path for path in found if path.is_dir()]
    files = set(_once([path for path in found if path.is_file()], left_out))
    sources: list[Source] = []
    for path in found:
        sources += [_named(path)] if path in files else _folder(path, key, left_out) if path in folders else []
    return sources


def _once(paths: list[Path], left_out: LeftOut) -> list[Path]:
    """The paths without further names of the same file; the shortest name stays."""
    names: dict[tuple[int, int], Path] = {}
    for path in sorted(paths, key=lambda path: len(path.parts)):
        names.setdefault(_identity(path), path)
    kept = [path for path in paths if names[_identity(path)] == path]
    left_out.add("links to what is read already", [path for path in paths if names[_identity(path)] != path])
    return kept


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _named(path: Path) -> Source:
    """A file that the user names: as its name says, and else as its content does."""
    if path.suffix in (".info", ".json") and is_info(path):
        raise DataError(f"{path}: is the description of a data set that mega made, not a corpus")
    found = path.stat()
    kind = _kind_by_name(path)
    if kind != "json":
        return Source(str(path), kind, found.st_size, found.st_mtime_ns if path.is_file() else 0)
    return Source(str(path), kind_by_content(_begin(path), "", path, named=True), found.st_size, found.st_mtime_ns)


def _folder(folder: Path, key: str, left_out: LeftOut) -> list[Source]:
    card = folder / "README.md"
    saved = any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    if saved or (card.is_file() and CONFIGS.match(card.read_bytes()[: 1 << 20].replace(b"\r\n", b"\n"))):
        return [Source(f"hf:{folder}", "datasets", changed=folder.stat().st_mtime_ns)]
    paths = _once(_walk(folder, left_out), left_out)
    own = {path for path in paths if _is_own(path)}
    left_out.add("data sets of mega's own", sorted(own))
    sources = [_in_folder(path, key) for path in paths if path not in own]
    sources = _without_companions(_training_split(sources, folder, left_out), left_out)
    if not sources:
        raise DataError(f"{folder}: no files in this folder")
    return sources


def _walk(folder: Path, left_out: LeftOut) -> list[Path]:
    paths: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        left_out.add("links to folders", [Path(root, name) for name in folders if Path(root, name).is_symlink()])
        # A pipe would be read for ever, and a dangling link not at all.
        visible = (Path(root, name) for name in sorted(files) if not name.startswith("."))
        paths += [path for path in visible if path.is_file()]
    return paths


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _is_own(path: Path) -> bool:
    """Whether a file is what `mega data` wrote, or other tools of the same format."""
    if path.suffix in (".bin", ".idx") and (index := path.with_suffix(".idx")).is_file():
        with open(index, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    return path.name.endswith(".quarantine.jsonl") or (path.suffix in (".info", ".json") and is_info(path))


def _in_folder(path: Path, key: str) -> Source:
    kind = _kind_by_name(path)
    if kind == "json":
        # A .json beside source code is a setting; a packed one is a corpus.
        kind = kind_by_content(_begin(path), key, path, named=path.suffix.lower() in PACKED)
    found = path.stat()
    return Source(str(path), kind, found.st_size, found.st_mtime_ns, found=True)


def _training_split(sources: list[Source], folder: Path, left_out: LeftOut) -> list[Source]:
    """Of data files whose names say to which split they belong, those for training."""

    def split(source: Source) -> str:
        if source.kind in (None, "text"):
            return ""
        said = list(SPLIT.finditer(str(Path(source.name).relative_to(folder))))
        return "" if not said else "train" if said[-1][1] else "other"

    splits = [split(source) for source in sources]
    if "train" not in splits:
        return sources
    others = [source.name for source, name in zip(sources, splits, strict=True) if name == "other"]
    left_out.add("other splits than train (give them by name to read them)", others)
    return [source for source, name in zip(sources, splits, strict=True) if name != "other"]


def _without_companions(sources: list[Source], left_out: LeftOut) -> list[Source]:
    if all(source.kind in (None, "text") for source in sources):
        return sources
    companions = [s for s in sources if s.kind in (None, "text") and COMPANION.fullmatch(Path(s.name).name)]
    left_out.add("files that describe the data beside them", [source.name for source in companions])
    return [source for source in sources if source not in companions]


def _kind_by_name(path: Path) -> Kind | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return NAMES.get(suffixes[-1]) if suffixes else None


def _begin(path: Path | str) -> bytes:
    with opened(str(path), lambda _: None) as stream, contextlib.suppress(*DAMAGE):
        return head(stream)
    return b""


def kind_by_content(begin: bytes, key: str, path: Path, *, named: bool = False) -> Kind:
    """How to read a file that begins with `begin`; `named`: its name says that it is JSON.

    JSON lines are known by a first line that is an object with `key`, or, where the name tells nothing, by two lines
    that are objects. A JSON array, or objects over many lines, are known by a first object with `key`.
    """
    if begin.startswith(b"PAR1"):
        return "parquet"
    begin = begin.removeprefix(BOM).lstrip()
    first, more, rest = begin.partition(b"\n")
    if begin.startswith(b"["):
        return "json" if named or _has(_value(begin[1:]), key) else "text"
    if not begin.startswith(b"{"):
        return "jsonl" if named else "text"
    if not more and _value(first) is None:  # one line, longer than what was read of the file
        return "jsonl" if named or f'"{key.rpartition(".")[2]}"'.encode() in first else "text"
    record = _value(first, whole=True)
    if isinstance(record, dict):
        two = isinstance(_value(rest.partition(b"\n")[0], whole=True), dict)
        return "jsonl" if named or _has(record, key) or (two and _tells_nothing(path)) else "text"
    if named:
        return "json" if first.rstrip()[-1:] in (b"{", b"[", b",") else "jsonl"
    return "json" if _has(_value(begin), key) else "text"


def _tells_nothing(path: Path) -> bool:
    """`part-00000`, `corpus.00001`, `notes.json` (which may be a setting), and what is read from a pipe."""
    return _kind_by_name(path) == "json" or not path.suffix or any(map(str.isdigit, path.suffix))


def _value(text: bytes, *, whole: bool = False) -> Any:
    """The JSON value that a text begins with, or is as a whole; None if there is none."""
    try:
        string = text.decode("utf-8", "ignore").strip()
        return json.loads(string) if whole else json.JSONDecoder().raw_decode(string)[0]
    except (ValueError, RecursionError):
        return None


def _has(record: Any, key: str) -> bool:
    return isinstance(record, dict) and isinstance(lookup(record, key), str)


def lookup(record: dict[str, Any], key: str) -> Any:
    """The value under a key, or under `a.b` that of `b` in the object under `a`; ABSENT where there is none."""
    if key == WHOLE:
        return json.dumps(record, ensure_ascii=False, default=str)
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return ABSENT
        value = value[part]
    return value


def describe(kinds: Counter[Kind], tell: Callable[..., None] = logger.info) -> None:
    """Log what was read as what, for a corpus that is taken for something else is a silent mistake."""
    words = {
        "jsonl": "JSON lines", "json": "JSON", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet",
        "text": "text, a document each", "datasets": "data sets of `datasets`",
    }  # fmt: skip
    tell("read: %s", "; ".join(f"{count:,} as {words[kind]}" for kind, count in kinds.most_common()))
