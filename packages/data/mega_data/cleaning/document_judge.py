"""Application of the rules to a batch of documents in a worker process: output lines, fingerprints, counts and samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mega_common.errors import DataError, MegaError
from mega_data.cleaning.append_files import POSITION, DocumentPositions, compress_lines, encode_json_line
from mega_data.cleaning.clean_config import CleanConfig
from mega_data.cleaning.duplicate_detection import compute_text_minhash_signatures, hash_texts
from mega_data.cleaning.quality_rules import CleaningRule, DropDocumentVerdict, TextRecord
from mega_data.cleaning.rule_builder import build_cleaning_rules
from mega_data.cleaning.text_words import AnalyzedText
from mega_data.reading.documents import Document, RejectedItem

SHOWN = 300  # characters of a sample


@dataclass
class DocumentAndByteCounts:
    """Number of documents, and UTF-8 bytes of their texts."""

    documents: int = 0
    bytes: int = 0

    def add_amount(self, other: DocumentAndByteCounts) -> None:
        """Add the documents and bytes of another amount to this one, in place."""
        self.documents += other.documents
        self.bytes += other.bytes


def sum_document_and_byte_counts(amounts: Iterable[DocumentAndByteCounts]) -> DocumentAndByteCounts:
    """Return the total documents and bytes of several amounts."""
    result = DocumentAndByteCounts()
    for amount in amounts:
        result.add_amount(amount)
    return result


@dataclass
class RuleExample:
    """Example of a cleaning rule's effect, for the summary: beginning of a document that the rule dropped or changed.

    `rank` is a hash of its source position; the samples of the lowest ranks are kept.
    """

    rank: int
    file: str
    line: int
    why: str
    detail: str
    text: str

    @classmethod
    def from_document(cls, file: str, line: int, why: str, detail: str, text: str) -> RuleExample:
        """Return the example of a document at line `line` of `file`, with the text cut to 300 characters."""
        return cls(xxhash.xxh32_intdigest(f"{file}:{line}".encode()), file, line, why, detail, text[:SHOWN])


@dataclass
class RuleTally:
    """Counts of one cleaning rule: dropped documents by reason, changed documents by finding, and examples."""

    dropped: DocumentAndByteCounts = field(default_factory=DocumentAndByteCounts)
    changed: DocumentAndByteCounts = field(default_factory=DocumentAndByteCounts)
    why: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    samples: list[RuleExample] = field(default_factory=list)

    def add_sample(self, sample: RuleExample, count: int) -> None:
        """Keep `sample` as an example if its random rank is among the `count` lowest.
        The kept examples are therefore a uniform draw.
        """
        self.samples = sorted([*self.samples, sample], key=lambda s: (s.rank, s.file, s.line))[:count]


@dataclass
class CleaningTally:
    """Counts of a cleaning run: documents read and kept, by input, by rule and by detected language.
    Inputs have the names that the user gave.
    """

    read: dict[str, DocumentAndByteCounts] = field(default_factory=dict)
    kept: dict[str, DocumentAndByteCounts] = field(default_factory=dict)
    rules: dict[str, RuleTally] = field(default_factory=dict)
    languages: dict[str, int] = field(default_factory=dict)

    def get_rule_tally(self, name: str) -> RuleTally:
        """Return the counts of the rule `name`, created if missing."""
        return self.rules.setdefault(name, RuleTally())

    def add_tally(self, other: CleaningTally, samples: int) -> None:
        """Add the counts of another tally to this one, and keep at most `samples` examples per rule."""
        for amounts, more in ((self.read, other.read), (self.kept, other.kept)):
            for name, amount in more.items():
                amounts.setdefault(name, DocumentAndByteCounts()).add_amount(amount)
        add_counts(self.languages, other.languages)
        for name, added in other.rules.items():
            rule = self.get_rule_tally(name)
            rule.dropped.add_amount(added.dropped)
            rule.changed.add_amount(added.changed)
            add_counts(rule.why, added.why)
            add_counts(rule.found, added.found)
            for sample in added.samples:
                rule.add_sample(sample, samples)


def add_counts(counts: dict[str, int], more: dict[str, int]) -> None:
    """Add the counts `more` to `counts` in place, key by key."""
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


class CleaningWorkerSettings(NamedTuple):
    """Settings of a worker process that cleans documents.
    They are the configuration as JSON, the text's key in a JSON record, folders, and the digest of the run's inputs.
    """

    config: str
    json_key: str
    folder: str
    ngrams: str
    made_from: str


@dataclass
class CleaningBatch:
    """Documents and rejected items of one input to clean together.
    The input position after them is (source number, items).
    """

    input: str
    items: list[Document | RejectedItem] = field(default_factory=list)
    size: int = 0
    end_position: tuple[int, int] = (0, 0)
    read: float = 0


@dataclass
class CleanedBatch:
    """Result of cleaning a batch of documents: compressed output lines, fingerprints, source positions and counts."""

    lines: dict[str, bytes]
    exact: bytes
    minhash: bytes
    positions: DocumentPositions
    tally: CleaningTally


def clean_batch(batch: CleaningBatch, settings: CleaningWorkerSettings) -> CleanedBatch:
    """Apply every rule of the configuration, except deduplication, to every document of a batch.

    Raises:
        MegaError: if a rule cannot be built or a user-defined filter fails.
    """
    return _get_judge(settings).clean_documents(batch)


@cache
def _get_judge(settings: CleaningWorkerSettings) -> DocumentCleaner:
    """Return the judge of this process, built once because a language model takes seconds to load."""
    return DocumentCleaner(settings)


class DocumentCleaner:
    """Cleaner of documents by all rules of a configuration except deduplication."""

    def __init__(self, settings: CleaningWorkerSettings) -> None:
        self.config = CleanConfig.model_validate_json(settings.config)
        self.json_key = settings.json_key
        self.rules: dict[str, CleaningRule] = build_cleaning_rules(
            self.config, Path(settings.folder), Path(settings.ngrams)
        )

    def clean_documents(self, batch: CleaningBatch) -> CleanedBatch:
        """Apply the rules to each document of a batch, in order; a document stops at the first rule that drops it."""
        tally, kept, positions = CleaningTally(), [], []
        lines: dict[str, list[bytes]] = {"kept": [], "dropped": [], "changed": []}
        for item in batch.items:
            if isinstance(item, RejectedItem):
                lines["dropped"].append(self._drop_unreadable(item, tally))
                continue
            tally.read.setdefault(batch.input, DocumentAndByteCounts()).add_amount(DocumentAndByteCounts(1, item.size))
            text, record = self._judge_document(item, tally, lines)
            if text is not None:
                kept.append(text)
                positions.append((0, 0, item.line, len(text.text.encode())))
                lines["kept"].append(encode_json_line(record))
        array = np.array(positions, POSITION)
        if kept and self.config.duplicates is None:
            tally.kept[batch.input] = DocumentAndByteCounts(len(kept), int(array["size"].sum()))
        exact, minhash = self._compute_fingerprints(kept)
        compressed = {name: compress_lines(records, self.config.compression) for name, records in lines.items()}
        return CleanedBatch(compressed, exact, minhash, array, tally)

    def _compute_fingerprints(self, kept: Sequence[AnalyzedText]) -> tuple[bytes, bytes]:
        duplicates = self.config.duplicates
        if duplicates is None:
            return b"", b""
        exact = hash_texts(kept).tobytes() if duplicates.exact else b""
        return exact, compute_text_minhash_signatures(kept, duplicates.minhash).tobytes() if duplicates.minhash else b""

    def _drop_unreadable(self, item: RejectedItem, tally: CleaningTally) -> bytes:
        rule = tally.get_rule_tally("unreadable")
        rule.dropped.add_amount(DocumentAndByteCounts(1, 0))
        add_counts(rule.why, {item.reason.partition(" (")[0]: 1})
        rule.add_sample(
            RuleExample.from_document(item.file, item.line, item.reason, "", item.content), self.config.samples
        )
        return encode_json_line({"rule": "unreadable", "why": item.reason, "file": item.file, "line": item.line,
                     "content": item.content})  # fmt: skip

    def _judge_document(
        self, item: Document, tally: CleaningTally, lines: dict[str, list[bytes]]
    ) -> tuple[AnalyzedText | None, TextRecord]:
        """Return the remaining text and record of a document; no text if it is dropped."""
        original: TextRecord = item.record if item.record is not None else {self.json_key: item.text}
        text, record, changed_by = AnalyzedText(item.text), original, []
        position = {"file": item.file, "line": item.line}
        for name, rule in self.rules.items():
            try:
                verdict = rule(text, record)
            except MegaError as error:
                raise DataError(f"{item.location}: {error.message}", hint=error.hint) from error
            if name == "language" and text.language is not None:
                add_counts(tally.languages, {text.language: 1})
            if verdict is None:
                continue
            counts = tally.get_rule_tally(name)
            if isinstance(verdict, DropDocumentVerdict):
                counts.dropped.add_amount(DocumentAndByteCounts(1, item.size))
                add_counts(counts.why, {verdict.why: 1})
                counts.add_sample(
                    RuleExample.from_document(item.file, item.line, *verdict, item.text), self.config.samples
                )
                about = {"rule": name, "why": verdict.why, "detail": verdict.detail}
                lines["dropped"].append(encode_json_line({**about, **position, "record": original}))
                return None, record
            counts.changed.add_amount(DocumentAndByteCounts(1, item.size))
            add_counts(counts.found, verdict.counts)
            detail = ", ".join(f"{count} {kind}" for kind, count in verdict.counts.items())
            counts.add_sample(
                RuleExample.from_document(item.file, item.line, "changed", detail, verdict.text), self.config.samples
            )
            changed_by.append(name)
            text, record = AnalyzedText(verdict.text), replace_record_text(record, self.json_key, verdict.text)
        if changed_by:
            lines["changed"].append(encode_json_line({"rules": changed_by, **position, "record": original}))
        return text, record


def replace_record_text(record: TextRecord, key: str, text: str) -> TextRecord:
    """Return a copy of a record with `text` under `key`, or for a key `a.b` under `b` in the object `a`."""
    if key in record or "." not in key:
        return {**record, key: text}
    first, _, rest = key.partition(".")
    inner: dict[str, Any] = record[first]
    return {**record, first: replace_record_text(inner, rest, text)}
