"""What came of a corpus, counted: by input, by rule, with samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

SHOWN = 300  # characters of a sample


@dataclass
class Amount:
    """Documents, and the UTF-8 bytes of their texts."""

    documents: int = 0
    bytes: int = 0

    def add(self, other: Amount) -> None:
        """Count more."""
        self.documents += other.documents
        self.bytes += other.bytes


def total(amounts: Iterable[Amount]) -> Amount:
    """The sum of amounts."""
    result = Amount()
    for amount in amounts:
        result.add(amount)
    return result


@dataclass
class Sample:
    """A document that a rule dropped or changed, by its begin; `rank` is a hash of its place, by which samples are drawn."""

    rank: int
    file: str
    line: int
    why: str
    detail: str
    text: str

    @classmethod
    def of(cls, file: str, line: int, why: str, detail: str, text: str) -> Sample:
        """The sample of a document."""
        return cls(xxhash.xxh32_intdigest(f"{file}:{line}".encode()), file, line, why, detail, text[:SHOWN])


@dataclass
class OfRule:
    """What a rule did: documents that it dropped, by its reasons, and changed, by what it found."""

    dropped: Amount = field(default_factory=Amount)
    changed: Amount = field(default_factory=Amount)
    why: dict[str, int] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def sample(self, sample: Sample, count: int) -> None:
        """Keep a sample if it is among the `count` of the lowest rank, which is an even draw from all."""
        self.samples = sorted([*self.samples, sample], key=lambda s: (s.rank, s.file, s.line))[:count]


@dataclass
class Tally:
    """All counts. `read` and `kept` are by input as the user named it; `languages` counts documents."""

    read: dict[str, Amount] = field(default_factory=dict)
    kept: dict[str, Amount] = field(default_factory=dict)
    rules: dict[str, OfRule] = field(default_factory=dict)
    languages: dict[str, int] = field(default_factory=dict)

    def rule(self, name: str) -> OfRule:
        """The counts of a rule."""
        return self.rules.setdefault(name, OfRule())

    def add(self, other: Tally, samples: int) -> None:
        """Count in what was counted elsewhere."""
        for own, others in ((self.read, other.read), (self.kept, other.kept)):
            for name, amount in others.items():
                own.setdefault(name, Amount()).add(amount)
        add_counts(self.languages, other.languages)
        for name, theirs in other.rules.items():
            mine = self.rule(name)
            mine.dropped.add(theirs.dropped)
            mine.changed.add(theirs.changed)
            add_counts(mine.why, theirs.why)
            add_counts(mine.found, theirs.found)
            for sample in theirs.samples:
                mine.sample(sample, samples)


def add_counts(counts: dict[str, int], more: dict[str, int]) -> None:
    """Add numbers by name."""
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
