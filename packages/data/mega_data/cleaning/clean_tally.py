"""Counts of a cleaning run: by input and by rule, with samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

SHOWN = 300  # characters of a sample


@dataclass
class DocumentAmount:
    """Number of documents, and UTF-8 bytes of their texts."""

    documents: int = 0
    bytes: int = 0

    def add_amount(self, other: DocumentAmount) -> None:
        """Add the documents and bytes of another amount to this one, in place."""
        self.documents += other.documents
        self.bytes += other.bytes


def sum_document_amounts(amounts: Iterable[DocumentAmount]) -> DocumentAmount:
    """Return the total documents and bytes of several amounts."""
    result = DocumentAmount()
    for amount in amounts:
        result.add_amount(amount)
    return result


@dataclass
class RuleExample:
    """Example for the cleaning summary: beginning of a document that a rule dropped or changed.

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

    dropped: DocumentAmount = field(default_factory=DocumentAmount)
    changed: DocumentAmount = field(default_factory=DocumentAmount)
    why: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    samples: list[RuleExample] = field(default_factory=list)

    def add_sample(self, sample: RuleExample, count: int) -> None:
        """Keep an example if its rank is among the `count` lowest, which makes the kept ones a uniform draw."""
        self.samples = sorted([*self.samples, sample], key=lambda s: (s.rank, s.file, s.line))[:count]


@dataclass
class CleaningTally:
    """Counts of a cleaning run: documents `read` and `kept` per input as named by the user, per rule, and per detected
    language.
    """

    read: dict[str, DocumentAmount] = field(default_factory=dict)
    kept: dict[str, DocumentAmount] = field(default_factory=dict)
    rules: dict[str, RuleTally] = field(default_factory=dict)
    languages: dict[str, int] = field(default_factory=dict)

    def get_rule_tally(self, name: str) -> RuleTally:
        """Return the counts of the rule `name`, created if missing."""
        return self.rules.setdefault(name, RuleTally())

    def add_tally(self, other: CleaningTally, samples: int) -> None:
        """Add the counts of another tally to this one, and keep at most `samples` examples per rule."""
        for amounts, more in ((self.read, other.read), (self.kept, other.kept)):
            for name, amount in more.items():
                amounts.setdefault(name, DocumentAmount()).add_amount(amount)
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
