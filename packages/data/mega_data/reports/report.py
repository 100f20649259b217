"""`mega data report`: one HTML page, complete in itself, on token data sets and on how corpora were cleaned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mega_common.errors import DataError
from mega_common.files import atomic_file, write_json
from mega_common.log import human
from mega_common.parsing import parse_json
from mega_data.files.indexed import IndexedReader
from mega_data.files.info import read_info
from mega_data.reading.unpack import package
from mega_data.reports.inspect import Inspection, inspect, tokenizer_of
from mega_data.reports.measures import LANGUAGES, Duplicates, NGram, duplicates, frequent_ngrams, languages, sample
from mega_data.tokenizer import Tokenizer

NGRAMS = (3, 8, 16)  # tokens
SHOWN = 12  # n-grams and tokens of each kind
HEAD = 160  # tokens of a sample


@dataclass(frozen=True)
class SetReport:
    """A token data set.

    Attributes:
        text_bytes: UTF-8 bytes of its documents, None without a description.
        percentiles: tokens of a sequence, by percentile.
        sampled_tokens: of how many tokens `ngrams` and `languages` were taken.
        languages: documents of the sample by ISO 639-1 code; None if they were not told.
    """

    name: str
    inspection: Inspection
    text_bytes: int | None
    percentiles: dict[int, int]
    duplicates: Duplicates
    sampled_tokens: int
    languages: dict[str, int] | None
    ngrams: dict[int, list[NGram]]


def report(
    paths: Sequence[Path], output: Path, *, tokenizer: Tokenizer | None = None, samples: int = 4
) -> dict[str, Any]:
    """Write the page `output` and, beside it, the same as JSON; return that.

    A path is the prefix of a data set, or a folder that `mega data clean` wrote.

    Raises:
        DataError: when a data set is damaged, a folder is neither, or the tokenizer is another.
        MissingPackageError: without jinja2.
    """
    template = _template()
    cleaned = [path for path in paths if path.is_dir()]
    found: dict[str, Any] = {
        "version": 1,
        "made": datetime.now().astimezone().isoformat(" ", "minutes"),
        "sets": [asdict(describe(path, tokenizer, samples)) for path in paths if path not in cleaned],
        "cleaned": [{"name": str(path), **_summary(path)} for path in cleaned],
    }
    for described in found["sets"]:
        info = described["inspection"]["info"]
        described["inspection"]["info"] = info.model_dump() if info else None
    write_json(output.with_suffix(".json"), found)
    with atomic_file(output, text=True) as stream:
        stream.write(template.render(found))
    return found


def describe(prefix: Path, tokenizer: Tokenizer | None, samples: int) -> SetReport:
    """Look at one token data set from all sides.

    Raises:
        DataError: when it is damaged, or made by another tokenizer.
    """
    reader = IndexedReader(prefix)
    inspection = inspect(prefix, tokenizer, samples=samples, frequent=SHOWN, head=HEAD)
    tokenizer = tokenizer or tokenizer_of(read_info(reader.prefix))
    sampled = sample(reader)
    texts = [tokenizer.decode(tokens[:1000].tolist()) for tokens in _spread(sampled, LANGUAGES)] if tokenizer else []
    return SetReport(
        name=str(prefix),
        inspection=inspection,
        text_bytes=inspection.info.text_bytes if inspection.info else None,
        percentiles=_percentiles(reader),
        duplicates=duplicates(reader, sampled),
        sampled_tokens=sum(map(len, sampled)),
        languages=languages(texts) if texts else None,
        ngrams={
            n: [NGram(ids, count, tokenizer.decode(ids) if tokenizer else None)
                for ids, count in frequent_ngrams(sampled, n, SHOWN)]
            for n in NGRAMS
        },
    )  # fmt: skip


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    return (
        [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]
        if items
        else []
    )


def _percentiles(reader: IndexedReader) -> dict[int, int]:
    wanted = (1, 10, 50, 90, 99)
    return (
        dict(zip(wanted, np.percentile(reader.lengths, wanted).astype(int).tolist(), strict=True))
        if len(reader)
        else {}
    )


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if found["version"] != 1:
            raise DataError(f"{path}: is of version {found['version']}, which this mega does not know")
    except (OSError, ValueError, TypeError, KeyError) as error:
        hint = "give the prefix of a data set (data/wiki), or a folder that `mega data clean` wrote"
        raise DataError(f"{folder}: a folder without a summary.json of mega's", hint=hint) from error
    return found  # type: ignore[no-any-return]


def _template() -> Any:
    jinja2 = package("jinja2", "reports")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"human": human, "number": lambda value: f"{value:,}", "visible": _visible}
    return environment.get_template("report.html.jinja")


def _visible(text: str) -> str:
    """A piece of text with marks for what cannot be seen."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
