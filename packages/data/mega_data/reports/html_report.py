"""HTML report `mega data report`: one self-contained page on token data sets and on cleaned corpora, and its statistics.

The statistics beyond counts are duplicates, frequent n-grams and languages. Exact duplicates are counted in the whole
data set; all other statistics use an evenly spaced sample of documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.atomic_files import open_atomic_file, write_json_atomically
from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import DataError, MissingPackageError
from mega_common.progress_logging import ProgressBar, format_with_decimal_unit, logger
from mega_data.cleaning.clean_config import MinHashConfig
from mega_data.cleaning.duplicate_detection import (
    compute_minhash_signatures,
    find_first_exact_duplicates,
    find_first_near_duplicates,
    hash_shingles,
)
from mega_data.cleaning.language_detection import load_lingua_detector
from mega_data.cleaning.text_words import hash_ngrams, hash_numbers
from mega_data.reading.decompression import import_optional_package
from mega_data.reports.inspect_dataset import DatasetInspection, inspect_dataset, load_original_tokenizer
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

Tokens = npt.NDArray[Any]

SAMPLE = 1 << 22  # tokens of the sample
LONGEST = 1 << 14  # tokens of one document
LANGUAGES = 1000  # documents for language detection
SHINGLE = 8  # tokens


@dataclass(frozen=True)
class DuplicateCounts:
    """Numbers of sequences of a data set that repeat an earlier one exactly, and in a sample nearly (None: not measured).
    They are out of `of` sequences, and of `sampled` ones.
    """

    of: int
    exact: int
    exact_tokens: int
    sampled: int
    near: int | None


@dataclass(frozen=True)
class FrequentNgram:
    """Frequent run of tokens in a sample of a data set: ids, number of occurrences, and text if a tokenizer is available."""

    ids: list[int]
    count: int
    text: str | None


def sample_sequences(reader: IndexedReader) -> list[Tokens]:
    """Return the beginnings of sequences spread evenly over a data set.
    They are about `SAMPLE` (4 Mi) tokens in all, or those of all sequences of a smaller data set.
    """
    count = len(reader)
    if reader.num_tokens > SAMPLE:
        count = max(1, int(SAMPLE / np.minimum(reader.lengths, LONGEST).mean()))
    numbers = np.unique(np.linspace(0, max(0, len(reader) - 1), count).astype(np.int64))
    return (
        [reader.read_sequence(int(i), 0, min(LONGEST, int(reader.lengths[i]))) for i in numbers] if len(reader) else []
    )


def count_duplicate_sequences(reader: IndexedReader, sampled: Sequence[Tokens]) -> DuplicateCounts:
    """Count the sequences that repeat an earlier one: exactly in the whole data set, and nearly (MinHash) in `sampled`.
    Near repetitions are counted if rensa is installed.
    """
    hashes = np.zeros((len(reader), 2), np.uint64)
    with ProgressBar("searching duplicates", total=len(reader) or None, unit="sequences") as bar:
        for i in range(len(reader)):
            digest = xxhash.xxh3_128_digest(reader.read_sequence(i).data)
            hashes[i] = np.frombuffer(digest, np.uint64)
            bar.advance(1)
    again = find_first_exact_duplicates(hashes) != np.arange(len(hashes))
    return DuplicateCounts(
        of=len(reader), exact=int(again.sum()), exact_tokens=int(reader.lengths[again].sum(dtype=np.int64)),
        sampled=len(sampled), near=count_near_duplicates(sampled),
    )  # fmt: skip


def count_near_duplicates(sequences: Sequence[Tokens]) -> int | None:
    """Return the number of sequences similar or equal to an earlier one by MinHash; None without the package rensa."""
    settings = MinHashConfig(ngram=SHINGLE)
    sets = [hash_shingles(hash_numbers(tokens), settings) for tokens in sequences]
    try:
        signatures = compute_minhash_signatures(sets, settings)
    except MissingPackageError as error:
        logger.warning("near duplicates are not counted: %s", error.message)
        return None
    numbers = np.arange(len(signatures))
    return int((find_first_near_duplicates(signatures, settings, numbers) != numbers).sum())


def find_frequent_ngrams(sequences: Sequence[Tokens], n: int, count: int) -> list[tuple[list[int], int]]:
    """Return (token ids, number) of the `count` most frequent runs of `n` tokens that occur at least twice in sequences.

    Of runs that overlap at their first occurrence only the most frequent is returned, so that a phrase is shown once.
    """
    if not sequences:
        return []
    flat = np.concatenate(sequences)
    hashes = hash_ngrams(hash_numbers(flat), n)
    owner = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    within = np.flatnonzero(owner[: hashes.size] == owner[n - 1 :][: hashes.size])
    _, first, counts = np.unique(hashes[within], return_index=True, return_counts=True)
    selected: list[tuple[int, int]] = []
    for i in np.lexsort((first, -counts)):
        start = int(within[first[i]])
        if len(selected) == count or counts[i] < 2:
            break
        if all(abs(start - other) >= n for other, _ in selected):
            selected.append((start, int(counts[i])))
    return [(flat[start : start + n].tolist(), times) for start, times in selected]


def count_languages(texts: Iterable[str]) -> dict[str, int] | None:
    """Return {ISO 639-1 code or `und`: number of texts}, the most frequent first; None without the package lingua."""
    try:
        detect = load_lingua_detector()
    except MissingPackageError as error:
        logger.warning("languages are not detected: %s", error)
        return None
    with ProgressBar("detecting languages", unit="texts") as bar:
        counts: Counter[str] = Counter()
        for text in texts:
            code, confidence = detect(text)
            counts[code if confidence >= 0.5 else "und"] += 1
            bar.advance(1)
    return dict(counts.most_common())


NGRAMS = (3, 8, 16)  # tokens
SHOWN = 12  # n-grams and tokens of each kind
HEAD = 160  # tokens of a sample


@dataclass(frozen=True)
class DatasetReport:
    """Report on a token data set: inspection, length percentiles, duplicates, frequent n-grams and languages.

    Attributes:
        text_bytes: UTF-8 bytes of its documents, None without a description.
        percentiles: number of tokens of a sequence, by percentile.
        sampled_tokens: number of tokens of the sample for `ngrams` and `languages`.
        languages: number of documents of the sample by ISO 639-1 code; None if not detected.
    """

    name: str
    inspection: DatasetInspection
    text_bytes: int | None
    percentiles: dict[int, int]
    duplicates: DuplicateCounts
    sampled_tokens: int
    languages: dict[str, int] | None
    ngrams: dict[int, list[FrequentNgram]]


def write_dataset_html_report(
    paths: Sequence[Path], output: Path, *, tokenizer: Tokenizer | None = None, samples: int = 4
) -> dict[str, Any]:
    """Write an HTML report on data sets (or `mega data clean` folders), and its values as JSON beside it; return these.
    The JSON file has the suffix `.json`.

    A path is the prefix of a data set, or an output folder of `mega data clean`.

    Raises:
        DataError: if a data set is damaged, a folder is not an output of mega, or the tokenizer differs.
        MissingPackageError: if jinja2 is not installed.
    """
    template = _load_template()
    cleaned = [path for path in paths if path.is_dir()]
    report: dict[str, Any] = {
        "version": 1,
        "made": datetime.now().astimezone().isoformat(" ", "minutes"),
        "sets": [asdict(build_dataset_report(path, tokenizer, samples)) for path in paths if path not in cleaned],
        "cleaned": [{"name": str(path), **_read_clean_summary(path)} for path in cleaned],
    }
    for described in report["sets"]:
        info = described["inspection"]["info"]
        described["inspection"]["info"] = info.model_dump() if info else None
    write_json_atomically(output.with_suffix(".json"), report)
    with open_atomic_file(output, text=True) as stream:
        stream.write(template.render(report))
    return report


def build_dataset_report(prefix: Path, tokenizer: Tokenizer | None, samples: int) -> DatasetReport:
    """Measure one token data set for a report: lengths, duplicates, frequent n-grams and languages.
    The report shows `samples` sequences.

    Raises:
        DataError: if it is damaged, or the tokenizer differs.
    """
    reader = IndexedReader(prefix)
    inspection = inspect_dataset(prefix, tokenizer, samples=samples, frequent=SHOWN, head=HEAD)
    tokenizer = tokenizer or load_original_tokenizer(read_dataset_info(reader.prefix))
    sampled = sample_sequences(reader)
    texts = (
        [tokenizer.decode(tokens[:1000].tolist()) for tokens in _select_spread(sampled, LANGUAGES)] if tokenizer else []
    )
    return DatasetReport(
        name=str(prefix),
        inspection=inspection,
        text_bytes=inspection.info.text_bytes if inspection.info else None,
        percentiles=_compute_percentiles(reader),
        duplicates=count_duplicate_sequences(reader, sampled),
        sampled_tokens=sum(map(len, sampled)),
        languages=count_languages(texts) if texts else None,
        ngrams={
            n: [FrequentNgram(ids, count, tokenizer.decode(ids) if tokenizer else None)
                for ids, count in find_frequent_ngrams(sampled, n, SHOWN)]
            for n in NGRAMS
        },
    )  # fmt: skip


def _select_spread(items: Sequence[Any], count: int) -> list[Any]:
    return (
        [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]
        if items
        else []
    )


def _compute_percentiles(reader: IndexedReader) -> dict[int, int]:
    levels = (1, 10, 50, 90, 99)
    if not len(reader):
        return {}
    return dict(zip(levels, np.percentile(reader.lengths, levels).astype(int).tolist(), strict=True))


def _read_clean_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        summary = parse_json_text(path.read_text(encoding="utf-8"))
        if summary["version"] != 1:
            raise DataError(f"{path}: has format version {summary['version']}; only version 1 is supported")
    except (OSError, ValueError, TypeError, KeyError) as error:
        hint = "give the prefix of a data set (data/wiki), or an output folder of `mega data clean`"
        raise DataError(f"{folder}: has no summary.json of mega data clean", hint=hint) from error
    return summary  # type: ignore[no-any-return]


def _load_template() -> Any:
    jinja2 = import_optional_package("jinja2", "mega data report")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "human": format_with_decimal_unit,
        "number": lambda value: f"{value:,}",
        "visible": _mark_whitespace,
    }
    return environment.get_template("report.html.jinja")


def _mark_whitespace(text: str) -> str:
    """Return a piece of text with marks for invisible characters."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
