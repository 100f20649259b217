"""Sources of a corpus: inputs named by the user (files, globs, folders, `hf:NAME`) as a list of `CorpusSource`s.

Their order depends on the names alone. Files of a folder that do not belong to the corpus (README and licence next to
data, test splits next to training data, token files of mega) are skipped, and the reason is logged.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mega_common.errors import DataError
from mega_common.object_store import ObjectVersion, RemotePath, parse_location
from mega_common.progress_logging import logger
from mega_data.reading.decompression import DAMAGE, STDIN, open_decompressed, peek_first_bytes
from mega_data.token_files.dataset_info import get_file_identity, is_dataset_info
from mega_data.token_files.indexed_reader import MAGIC

HUB = "hf:"  # prefix of the name of a data set of the HuggingFace Hub, or of a folder saved by `datasets`
FileFormat = Literal["jsonl", "json", "csv", "tsv", "parquet", "text", "datasets"]

NAMES: dict[str, FileFormat] = {
    ".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
PACKED = (".gz", ".bz2", ".xz", ".lzma", ".zst")
ABSENT = object()
WHOLE = ""  # key of the whole record, as JSON
BOM = b"\xef\xbb\xbf"

# Names of files that describe the data files of a folder.
COMPANION = re.compile(r"(readme|licen[cs]e|copying|notice|citation|dataset_infos?)\b.*", re.IGNORECASE)

# Names of splits on the HuggingFace Hub, anywhere in the path.
SPLIT = re.compile(
    r"(?<![a-z])(?:(train|training)|validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE
)
CONFIGS = re.compile(rb"\A---\n(?:(?!---\n).*\n)*?configs:")


@dataclass(frozen=True)
class CorpusSource:
    """One input of a corpus: a file or a byte range of it, a stream, or a split of a `datasets` data set.

    Attributes:
        kind: file format; None if it is detected from the content on opening.
        size: bytes on disk, 0 if unknown.
        changed: modification time in ns, or a number derived from the state of an object; 0 if unknown.
        found: found in a folder instead of given by name: a binary file is skipped instead of rejected.
        begin, end: byte range of a shard (`select_shard_sources`): the lines, or row groups of Parquet, that begin in
            it; a line begins at `begin`. An `end` of None is the end of the file.
    """

    name: str
    kind: FileFormat | None
    size: int = 0
    changed: int = 0
    found: bool = False
    begin: int = 0
    end: int | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of this source to read, 0 if unknown."""
        return (self.size if self.end is None else self.end) - self.begin

    @property
    def display_name(self) -> str:
        """Name of this source for messages with line numbers; `[BEGIN:]` follows if it is a byte range from BEGIN > 0.
        Lines are counted from BEGIN.
        """
        return f"{self.name}[{self.begin}:]" if self.begin else self.name

    @property
    def is_rereadable(self) -> bool:
        """True if this source can be read again and a change detected; false for streams and the HuggingFace Hub."""
        return bool(self.changed)


class HubDatasetName(NamedTuple):
    """Parts of the name of a data set of the HuggingFace Hub, or of a folder saved by `datasets`; absent parts are ""."""

    repository: str
    config: str
    split: str


@dataclass
class SkippedFiles:
    """Names of input files skipped in folders, by reason."""

    names: dict[str, dict[str, None]] = field(default_factory=dict)

    def add_files(self, reason: str, paths: Iterable[Path | str]) -> None:
        """Record skipped files under the reason for skipping them."""
        for path in paths:
            self.names.setdefault(reason, {})[str(path)] = None  # once, even if it is read again

    def log_reasons(self) -> None:
        """Log each reason for skipping files, with the first files that it concerns."""
        for reason, names in self.names.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.warning("skipped (%s): %s%s", reason, ", ".join(list(names)[:3]), more)


def find_corpus_sources(
    inputs: Sequence[str | Path], json_key: str = "text", skipped_files: SkippedFiles | None = None
) -> list[CorpusSource]:
    """Return the sources to read for `inputs` (files, folders, globs, URLs, `hf:NAME`, `-`), in order; else a DataError.
    Inputs are as given, and the files of a glob or folder sorted by name. Skipped files are added to `skipped_files`.

    A file of a folder or glob is read once, even if several links lead to it. All files of a folder are read except
    hidden ones, those in hidden folders, and those recorded in `skipped_files`. `hf:NAME[:CONFIG][@SPLIT]` is a data set of
    the HuggingFace Hub or a folder saved by `datasets`, by default the split `train`; `-` is standard input. URLs
    supported by fsspec (`s3://bucket/folder/*.jsonl`) can also be objects, globs or folders.

    Raises:
        ObjectStoreError: if an object store cannot be reached.
        DataError: if an input does not exist or is not a corpus, or a folder or glob is empty.
    """
    skipped_files = SkippedFiles() if skipped_files is None else skipped_files
    return [source for item in inputs for source in _expand_input(str(item), json_key, skipped_files)]


def split_hub_dataset_name(name: str) -> HubDatasetName:
    """Return the parts of `hf:NAME[:CONFIG][@SPLIT]`; a folder's name may contain a colon."""
    whole, _, split = name.removeprefix(HUB).partition("@")
    if Path(whole).is_dir() or ":" not in whole:
        return HubDatasetName(whole, "", split)
    repository, _, config = whole.rpartition(":")
    return HubDatasetName(repository, config, split)


def no_text_error(sources: Sequence[CorpusSource], found: str) -> DataError:
    """Return the error for inputs without a document that has text; `found` says what was found instead, with counts."""
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    if not more and Path(sources[0].name).is_file() and not Path(sources[0].name).stat().st_size:
        return DataError(f"{sources[0].name}: the file is empty", hint="check that --input names the right file")
    return DataError(
        f"{sources[0].name}{more}: no document with text ({found})",
        hint="check that --input names the right files, and --json-key the key or column of their text",
    )


def _expand_input(item: str, key: str, skipped_files: SkippedFiles) -> list[CorpusSource]:
    if item == STDIN:
        return [CorpusSource(STDIN, None)]
    if isinstance(location := parse_location(item), RemotePath):
        return _list_objects(location, key, skipped_files)
    if item.startswith(HUB):
        return [CorpusSource(item, "datasets")]
    path = Path(location)
    item = str(location) if "://" in item else item
    if path.is_dir():
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            raise DataError(
                f"{item}: is the folder of a model (config.json and *.safetensors), not of texts",
                hint=f"give the folder of the texts, or its files, such as '{item}/*.jsonl'",
            )
        return _list_folder(path, key, skipped_files)
    if path.exists():
        return [_describe_file(path)]
    if glob.has_magic(item):
        return _expand_glob(item, key, skipped_files)
    raise DataError(
        f"{item}: no such file or folder",
        hint="check the path; a data set of the HuggingFace Hub is written hf:NAME[:CONFIG][@SPLIT]",
    )


def _list_objects(url: RemotePath, key: str, skipped_files: SkippedFiles) -> list[CorpusSource]:
    """Return an object, the objects that a glob matches, or all objects below a URL, with the rules of a folder."""
    stamps = url.glob_object_versions()
    if not stamps:
        raise DataError(f"{url}: no object has this name, is below it or matches it")
    folder = not glob.has_magic(url) and list(stamps) != [url]
    begin = re.split(r"[*?[]", url)[0]
    visible = [name for name in stamps if "/." not in f"/{name.removeprefix(begin)}"]
    sources = [_describe_object(name, stamps[name], key, folder) for name in visible]
    return (
        _without_companions(_select_training_split(sources, Path(url), skipped_files), skipped_files)
        if folder
        else sources
    )


def _describe_object(name: str, stamp: ObjectVersion, key: str, found: bool) -> CorpusSource:
    path = Path(name)
    kind = _detect_format_by_name(path)
    if kind == "json":
        named = not found or path.suffix.lower() in PACKED
        kind = detect_file_format(_read_start(name), key, path, named=named)
    changed = int.from_bytes(hashlib.sha256(stamp.state.encode()).digest()[:6]) if stamp.state else 0
    return CorpusSource(name, kind, stamp.size, changed, found)


def _expand_glob(pattern: str, key: str, skipped_files: SkippedFiles) -> list[CorpusSource]:
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if not paths:
        raise DataError(
            f"{pattern}: no file matches", hint="check the folder and the file name extension of the pattern"
        )
    # With `**` a folder matches in addition to the files in it.
    folders = [] if "**" in pattern else [path for path in paths if path.is_dir()]
    files = set(_drop_links([path for path in paths if path.is_file()], skipped_files))
    sources: list[CorpusSource] = []
    for path in paths:
        sources += (
            [_describe_file(path)]
            if path in files
            else _list_folder(path, key, skipped_files)
            if path in folders
            else []
        )
    return sources


def _drop_links(paths: list[Path], skipped_files: SkippedFiles) -> list[Path]:
    """Return the paths without duplicate names of one file; the shortest name stays."""
    names: dict[tuple[int, int], Path] = {}
    for path in sorted(paths, key=lambda path: len(path.parts)):
        names.setdefault(get_file_identity(path), path)
    kept = [path for path in paths if names[get_file_identity(path)] == path]
    skipped_files.add_files("duplicate links", [path for path in paths if names[get_file_identity(path)] != path])
    return kept


def _describe_file(path: Path) -> CorpusSource:
    """Return the source of a file named by the user, with its format by name or else by content."""
    if path.suffix in (".info", ".json") and is_dataset_info(path):
        raise DataError(f"{path}: is the description of a mega data set, not a corpus", hint="give the original texts")
    status = path.stat()
    if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        raise DataError(f"{path}: is a device, not a file", hint="use `-` to read standard input")
    kind = _detect_format_by_name(path)
    if kind != "json":
        return CorpusSource(str(path), kind, status.st_size, status.st_mtime_ns if path.is_file() else 0)
    return CorpusSource(
        str(path), detect_file_format(_read_start(path), "", path, named=True), status.st_size, status.st_mtime_ns
    )


def _list_folder(folder: Path, key: str, skipped_files: SkippedFiles) -> list[CorpusSource]:
    card = folder / "README.md"
    saved = any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    if saved or (card.is_file() and CONFIGS.match(card.read_bytes()[: 1 << 20].replace(b"\r\n", b"\n"))):
        return [CorpusSource(f"{HUB}{folder}", "datasets", changed=folder.stat().st_mtime_ns)]
    paths = _drop_links(_walk_folder(folder, skipped_files), skipped_files)
    outputs = {path for path in paths if _is_mega_output(path)}
    skipped_files.add_files("mega data sets", sorted(outputs))
    sources = [_describe_folder_file(path, key) for path in paths if path not in outputs]
    sources = _without_companions(_select_training_split(sources, folder, skipped_files), skipped_files)
    if not sources:
        prefixes = sorted(str(path.with_suffix("")) for path in outputs if path.suffix == ".idx")
        hint = "give a folder with files of text, JSON lines, CSV or Parquet; hidden files and READMEs are not read"
        raise DataError(
            f"{folder}: no files to read in this folder" + (", only mega data sets" if prefixes else ""),
            hint=f"give the path of one data set without its ending: {', '.join(prefixes)}" if prefixes else hint,
        )
    return sources


def _walk_folder(folder: Path, skipped_files: SkippedFiles) -> list[Path]:
    paths: list[Path] = []
    for root, folders, files in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        skipped_files.add_files(
            "links to folders", [Path(root, name) for name in folders if Path(root, name).is_symlink()]
        )
        # Skip pipes, which may never end, and dangling links.
        visible = (Path(root, name) for name in sorted(files) if not name.startswith("."))
        paths += [path for path in visible if path.is_file()]
    return paths


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _is_mega_output(path: Path) -> bool:
    """Return whether a file was written by `mega data`, or by other tools in its format."""
    if path.suffix in (".bin", ".idx") and (index := path.with_suffix(".idx")).is_file():
        with open(index, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    return path.name.endswith(".quarantine.jsonl") or (path.suffix in (".info", ".json") and is_dataset_info(path))


def _describe_folder_file(path: Path, key: str) -> CorpusSource:
    kind = _detect_format_by_name(path)
    if kind == "json":
        # A .json next to source code has settings; a compressed one is a corpus.
        kind = detect_file_format(_read_start(path), key, path, named=path.suffix.lower() in PACKED)
    status = path.stat()
    return CorpusSource(str(path), kind, status.st_size, status.st_mtime_ns, found=True)


def _select_training_split(
    sources: list[CorpusSource], folder: Path, skipped_files: SkippedFiles
) -> list[CorpusSource]:
    """Return the data files without those whose names mark another split than train."""

    def split(source: CorpusSource) -> str:
        if source.kind in (None, "text"):
            return ""
        matches = list(SPLIT.finditer(str(Path(source.name).relative_to(folder))))
        return "" if not matches else "train" if matches[-1][1] else "other"

    splits = [split(source) for source in sources]
    if "train" not in splits:
        return sources
    others = [source.name for source, name in zip(sources, splits, strict=True) if name == "other"]
    skipped_files.add_files("other splits than train; give them by name to read them", others)
    return [source for source, name in zip(sources, splits, strict=True) if name != "other"]


def _without_companions(sources: list[CorpusSource], skipped_files: SkippedFiles) -> list[CorpusSource]:
    if all(source.kind in (None, "text") for source in sources):
        return sources
    companions = [s for s in sources if s.kind in (None, "text") and COMPANION.fullmatch(Path(s.name).name)]
    skipped_files.add_files("descriptions of the data", [source.name for source in companions])
    return [source for source in sources if source not in companions]


def get_content_suffix(path: Path) -> str:
    """Return the suffix of a file's content in lower case, such as `.jsonl` of `a.JSONL.gz`; "" if it has none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _detect_format_by_name(path: Path) -> FileFormat | None:
    return NAMES.get(get_content_suffix(path))


def _read_start(path: Path | str) -> bytes:
    with open_decompressed(str(path), lambda _: None) as stream, contextlib.suppress(*DAMAGE):
        return peek_first_bytes(stream)
    return b""


def detect_file_format(begin: bytes, key: str, path: Path, *, named: bool = False) -> FileFormat:
    """Return the format (Parquet, JSON lines, JSON or text) of a file whose first bytes are `begin`.
    With `named`, the file's name marks it as JSON.

    JSON lines are detected by a first line that is an object with `key`, or, for a name without a known suffix, by two
    lines that are objects. A JSON array, or objects over many lines, are detected by a first object with `key`.
    """
    if begin.startswith(b"PAR1"):
        return "parquet"
    begin = begin.removeprefix(BOM).lstrip()
    first, more, rest = begin.partition(b"\n")
    if begin.startswith(b"["):
        return "json" if named or _has_text(_parse_json_start(begin[1:]), key) else "text"
    if not begin.startswith(b"{"):
        return "jsonl" if named else "text"
    if not more and _parse_json_start(first) is None:  # one line, longer than `begin`
        return "jsonl" if named or f'"{key.rpartition(".")[2]}"'.encode() in first else "text"
    record = _parse_json_start(first, whole=True)
    if isinstance(record, dict):
        two = isinstance(_parse_json_start(rest.partition(b"\n")[0], whole=True), dict)
        return "jsonl" if named or _has_text(record, key) or (two and _has_uninformative_name(path)) else "text"
    if named:
        return "json" if first.rstrip()[-1:] in (b"{", b"[", b",") else "jsonl"
    return "json" if _has_text(_parse_json_start(begin), key) else "text"


def _has_uninformative_name(path: Path) -> bool:
    """Return whether a name does not determine the format: `part-00000`, `corpus.00001`, `notes.json`, or a pipe."""
    return _detect_format_by_name(path) == "json" or not path.suffix or any(map(str.isdigit, path.suffix))


def _parse_json_start(text: bytes, *, whole: bool = False) -> Any:
    """Return the JSON value at the start of a text, or of the whole text; None if there is none."""
    try:
        string = text.decode("utf-8", "ignore").strip()
        return json.loads(string) if whole else json.JSONDecoder().raw_decode(string)[0]
    except (ValueError, RecursionError):
        return None


def _has_text(record: Any, key: str) -> bool:
    return isinstance(record, dict) and isinstance(lookup_record_value(record, key), str)


def lookup_record_value(record: dict[str, Any], key: str) -> Any:
    """Return the value of a JSON record under `key`, or the marker ABSENT if it is missing.
    For a key `a.b` it is the value of `b` in the object under `a`.
    """
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


def log_file_formats(kinds: Counter[FileFormat], log: Callable[..., None] = logger.info) -> None:
    """Log the number of input files per detected format, because a wrongly detected format is a silent mistake."""
    words = {
        "jsonl": "JSON lines", "json": "JSON", "csv": "CSV", "tsv": "TSV", "parquet": "Parquet",
        "text": "plain text (one document per file)", "datasets": "data sets of `datasets`",
    }  # fmt: skip
    log("files read: %s", "; ".join(f"{count:,} as {words[kind]}" for kind, count in kinds.most_common()))
