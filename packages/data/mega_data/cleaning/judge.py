"""A batch of documents through the rules, in whichever process: lines to write, fingerprints, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mega_common.errors import DataError, MegaError
from mega_data.cleaning.config import CleanConfig
from mega_data.cleaning.fingerprints import exact_hashes, signatures
from mega_data.cleaning.known import PLACE, Places
from mega_data.cleaning.lines import line, packed
from mega_data.cleaning.rules import rules
from mega_data.cleaning.tally import Amount, Sample, Tally, add_counts
from mega_data.cleaning.verdict import Drop, Record, Rule
from mega_data.cleaning.words import Text
from mega_data.reading.documents import Document, Rejected


class Settings(NamedTuple):
    """What a process needs to judge: the configuration as JSON, the key of the text, where files stand, which run it is."""

    config: str
    json_key: str
    folder: str
    ngrams: str
    made_from: str


@dataclass
class Batch:
    """Items of one input, and what of the inputs is done with them: (source, items)."""

    input: str
    items: list[Document | Rejected] = field(default_factory=list)
    size: int = 0
    upto: tuple[int, int] = (0, 0)
    read: float = 0


@dataclass
class Judged:
    """What comes of a batch: packed lines for each folder, fingerprints and places of the documents kept, counts."""

    lines: dict[str, bytes]
    exact: bytes
    minhash: bytes
    places: Places
    tally: Tally


def judge(batch: Batch, settings: Settings) -> Judged:
    """Ask every rule about every document of a batch.

    Raises:
        MegaError: when a rule cannot be had or a function of the user's fails.
    """
    return _judge(settings).batch(batch)


@cache
def _judge(settings: Settings) -> Judge:
    """The rules are built once a process: a model of languages takes seconds to load."""
    return Judge(settings)


class Judge:
    """The rules of a configuration."""

    def __init__(self, settings: Settings) -> None:
        self.config = CleanConfig.model_validate_json(settings.config)
        self.json_key = settings.json_key
        self.rules: dict[str, Rule] = rules(self.config, Path(settings.folder), Path(settings.ngrams))

    def batch(self, batch: Batch) -> Judged:
        """The rules asked about each document, in order."""
        tally, kept, places = Tally(), [], []
        lines: dict[str, list[bytes]] = {"kept": [], "dropped": [], "changed": []}
        for item in batch.items:
            if isinstance(item, Rejected):
                lines["dropped"].append(self._unreadable(item, tally))
                continue
            tally.read.setdefault(batch.input, Amount()).add(Amount(1, item.size))
            text, record = self._one(item, tally, lines)
            if text is not None:
                kept.append(text)
                places.append((0, 0, item.line, len(text.text.encode())))
                lines["kept"].append(line(record))
        found = np.array(places, PLACE)
        if kept and self.config.duplicates is None:
            tally.kept[batch.input] = Amount(len(kept), int(found["size"].sum()))
        exact, minhash = self._fingerprints(kept)
        return Judged({name: packed(made, self.config.compression) for name, made in lines.items()},
                      exact, minhash, found, tally)  # fmt: skip

    def _fingerprints(self, kept: Sequence[Text]) -> tuple[bytes, bytes]:
        wanted = self.config.duplicates
        if wanted is None:
            return b"", b""
        exact = exact_hashes(kept).tobytes() if wanted.exact else b""
        return exact, signatures(kept, wanted.minhash).tobytes() if wanted.minhash else b""

    def _unreadable(self, item: Rejected, tally: Tally) -> bytes:
        rule = tally.rule("unreadable")
        rule.dropped.add(Amount(1, 0))
        add_counts(rule.why, {item.reason.partition(" (")[0]: 1})
        rule.sample(Sample.of(item.file, item.line, item.reason, "", item.content), self.config.samples)
        return line({"rule": "unreadable", "why": item.reason, "file": item.file, "line": item.line,
                     "content": item.content})  # fmt: skip

    def _one(self, item: Document, tally: Tally, lines: dict[str, list[bytes]]) -> tuple[Text | None, Record]:
        """The text and record as they stay, or no text if the document goes."""
        original: Record = item.record if item.record is not None else {self.json_key: item.text}
        text, record, changed_by = Text(item.text), original, []
        place = {"file": item.file, "line": item.line}
        for name, rule in self.rules.items():
            try:
                verdict = rule(text, record)
            except MegaError as error:
                raise DataError(f"{item.where}: {error.message}", hint=error.hint) from error
            if name == "language" and text.language is not None:
                add_counts(tally.languages, {text.language: 1})
            if verdict is None:
                continue
            counts = tally.rule(name)
            if isinstance(verdict, Drop):
                counts.dropped.add(Amount(1, item.size))
                add_counts(counts.why, {verdict.why: 1})
                counts.sample(Sample.of(item.file, item.line, *verdict, item.text), self.config.samples)
                about = {"rule": name, "why": verdict.why, "detail": verdict.detail}
                lines["dropped"].append(line({**about, **place, "record": original}))
                return None, record
            counts.changed.add(Amount(1, item.size))
            add_counts(counts.found, verdict.counts)
            found = ", ".join(f"{count} {kind}" for kind, count in verdict.counts.items())
            counts.sample(Sample.of(item.file, item.line, "changed", found, verdict.text), self.config.samples)
            changed_by.append(name)
            text, record = Text(verdict.text), with_text(record, self.json_key, verdict.text)
        if changed_by:
            lines["changed"].append(line({"rules": changed_by, **place, "record": original}))
        return text, record


def with_text(record: Record, key: str, text: str) -> Record:
    """A copy of a record with another text under a key, or under `a.b` in the object `a`."""
    if key in record or "." not in key:
        return {**record, key: text}
    first, _, rest = key.partition(".")
    inner: dict[str, Any] = record[first]
    return {**record, first: with_text(inner, rest, text)}
