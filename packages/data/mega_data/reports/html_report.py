"""HTML report `mega data report`: one self-contained page on token data sets and on cleaned corpora."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mega_common.atomic_files import open_atomic_file, write_json_atomically
from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import DataError
from mega_common.progress_logging import format_number
from mega_data.reading.decompression import import_optional
from mega_data.reports.dataset_statistics import (
    LANGUAGES,
    DuplicateCounts,
    FrequentNgram,
    count_duplicates,
    count_languages,
    find_frequent_ngrams,
    sample_sequences,
)
from mega_data.reports.inspect_dataset import DatasetInspection, inspect_dataset, load_original_tokenizer
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

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


def write_html_report(
    paths: Sequence[Path], output: Path, *, tokenizer: Tokenizer | None = None, samples: int = 4
) -> dict[str, Any]:
    """Write an HTML report on data sets (or `mega data clean` folders) to `output`, and its data as JSON to a file with
    the suffix `.json`; return the data.

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
        "sets": [asdict(describe_dataset(path, tokenizer, samples)) for path in paths if path not in cleaned],
        "cleaned": [{"name": str(path), **_read_clean_summary(path)} for path in cleaned],
    }
    for described in report["sets"]:
        info = described["inspection"]["info"]
        described["inspection"]["info"] = info.model_dump() if info else None
    write_json_atomically(output.with_suffix(".json"), report)
    with open_atomic_file(output, text=True) as stream:
        stream.write(template.render(report))
    return report


def describe_dataset(prefix: Path, tokenizer: Tokenizer | None, samples: int) -> DatasetReport:
    """Measure one token data set for a report: lengths, duplicates, frequent n-grams and languages; `samples` sequences
    are shown.

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
        duplicates=count_duplicates(reader, sampled),
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
    jinja2 = import_optional("jinja2", "mega data report")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"human": format_number, "number": lambda value: f"{value:,}", "visible": _mark_whitespace}
    return environment.get_template("report.html.jinja")


def _mark_whitespace(text: str) -> str:
    """Return a piece of text with marks for invisible characters."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
