"""The second pass: the fingerprints of all documents compared, and the duplicates taken out of each part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from mega_common.files import atomic_file, write_json
from mega_data.cleaning.config import CleanConfig, Duplicates
from mega_data.cleaning.duplicates import Numbers, exact_leaders, near_leaders, similarity
from mega_data.cleaning.known import Places, load_exact, load_places, load_signatures
from mega_data.cleaning.lines import SUFFIXES, line, packed
from mega_data.cleaning.tally import Amount, Sample, Tally
from mega_data.reading.sources import lookup
from mega_data.reading.unpack import opened

EXACT, NEAR = 1, 2
BLOCK = 1 << 20  # bytes of lines that are packed at once


class Split(NamedTuple):
    """A part of the first pass, by its number and those of its documents, `end` not included."""

    number: int
    start: int
    end: int


class Names(NamedTuple):
    """What the numbers of places stand for, sources, inputs, folders of earlier runs; and the key of the text."""

    sources: list[str]
    inputs: list[str]
    earlier: list[str]
    json_key: str


def compare(work: Path, wanted: Duplicates) -> None:
    """Find the duplicates, and write `leaders.npy` (of which each is one: int64 [N]) and `rules.npy` (uint8 [N]: 0 stays)."""
    if (work / "rules.npy").exists():
        return
    places = load_places(work)
    apart = None if wanted.between_inputs else places["input"].astype(np.int64)
    own = np.arange(len(places))
    leaders, rules = own, np.zeros(len(places), np.uint8)
    if wanted.exact:
        leaders = exact_leaders(load_exact(work), apart)
        rules[leaders != own] = EXACT
    if wanted.minhash is not None:
        clusters = near_leaders(load_signatures(work, wanted), wanted.minhash, leaders, apart)
        near = (clusters != own) & (rules == 0)
        rules[near] = NEAR
        leaders = np.where(near, clusters, leaders)
    for name, array in (("leaders.npy", leaders), ("rules.npy", rules)):  # the second one says that both are there
        with atomic_file(work / name) as stream:
            np.save(stream, array)


def split(part: Split, *, work: Path, config: CleanConfig, names: Names) -> Tally:
    """Write the part without its duplicates into the result, and these beside; count what went and stayed.

    What an interrupted run has done is not done again.
    """
    record = work / "second" / f"{part.number:05}.json"
    if record.exists():
        return TypeAdapter(Tally).validate_json(record.read_bytes())
    tally = Splitting(part, work, config, names).run() if part.start < part.end else Tally()
    write_json(record, asdict(tally))
    return tally


class Splitting:
    """One part on its way: its documents, and what was found about them."""

    def __init__(self, part: Split, work: Path, config: CleanConfig, names: Names) -> None:
        assert config.duplicates is not None
        self.part, self.work, self.config, self.names = part, work, config, names
        self.suffix = SUFFIXES[config.compression]
        self.leaders: Numbers = np.load(work / "leaders.npy", mmap_mode="r")
        self.rules = np.load(work / "rules.npy", mmap_mode="r")[part.start : part.end]
        self.places: Places = load_places(work)
        self.alike = np.zeros(len(self.rules))
        near = part.start + np.flatnonzero(self.rules == NEAR)
        if near.size:
            signatures = load_signatures(work, config.duplicates)
            self.alike[near - part.start] = similarity(signatures, near, self.leaders[near])
        self.tally = Tally()

    def run(self) -> Tally:
        """Write both files."""
        places = self.places[self.part.start : self.part.end]
        for number, name in enumerate(self.names.inputs):
            sizes = places["size"][(places["input"] == number) & (self.rules == 0)]
            if sizes.size:
                self.tally.kept[name] = Amount(sizes.size, int(sizes.sum()))
        result = self.work / "result"
        if (self.rules == 0).any():
            with atomic_file(result / "kept" / f"{self.part.number:05}{self.suffix}") as stream:
                self._write(stream, (raw for i, raw in self._lines() if not self.rules[i]))
        if self.rules.any():
            with atomic_file(result / "dropped" / f"{self.part.number:05}.duplicates{self.suffix}") as stream:
                self._write(stream, (self._dropped(i, raw) for i, raw in self._lines() if self.rules[i]))
        return self.tally

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with opened(str(self.work / "first" / f"{self.part.number:05}{self.suffix}"), lambda _: None) as stream:
            yield from enumerate(stream)

    def _write(self, stream: IO[bytes], lines: Iterable[bytes]) -> None:
        block, size = [], 0
        for raw in lines:
            block.append(raw)
            size += len(raw)
            if size >= BLOCK:
                stream.write(packed(block, self.config.compression))
                block, size = [], 0
        stream.write(packed(block, self.config.compression))

    def _dropped(self, i: int, raw: bytes) -> bytes:
        document, place = self.part.start + i, self.places[self.part.start + i]
        rule = "exact" if self.rules[i] == EXACT else "minhash"
        first = self._where(int(self.leaders[document]))
        detail = f"the text of {first}" if rule == "exact" else f"{self.alike[i]:.2f} like {first}"
        file, number, record = self.names.sources[place["source"]], int(place["line"]), json.loads(raw)
        counts = self.tally.rule(rule)
        counts.dropped.add(Amount(1, int(place["size"])))
        counts.why["duplicate"] = counts.why.get("duplicate", 0) + 1
        text = str(lookup(record, self.names.json_key))
        counts.sample(Sample.of(file, number, "duplicate", detail, text), self.config.samples)
        return line(
            {"rule": rule, "why": "duplicate", "detail": detail, "file": file, "line": number, "record": record}
        )

    def _where(self, document: int) -> str:
        place = self.places[document]
        if place["source"] < 0:
            return f"document {place['line']} of {self.names.earlier[-1 - place['source']]}"
        return f"{self.names.sources[place['source']]}:{place['line']}"
