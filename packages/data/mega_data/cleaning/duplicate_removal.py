"""Second pass of cleaning: compare the fingerprints of all documents, and remove the duplicates from each part."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from mega_common.atomic_files import open_atomic_file, write_json_atomically
from mega_data.cleaning.append_files import (
    SUFFIXES,
    DocumentPositions,
    compress_lines,
    encode_json_line,
    load_document_positions,
    load_signatures,
    load_text_hashes,
)
from mega_data.cleaning.clean_config import CleanConfig, DuplicatesRule
from mega_data.cleaning.document_judge import CleaningTally, DocumentAndByteCounts, RuleExample
from mega_data.cleaning.duplicate_detection import (
    Numbers,
    estimate_jaccard_similarity,
    find_first_exact_duplicates,
    find_first_near_duplicates,
)
from mega_data.reading.corpus_sources import lookup_record_value
from mega_data.reading.decompression import open_decompressed

EXACT, NEAR = 1, 2
BLOCK = 1 << 20  # bytes of lines that are compressed at once


class FirstPassOutputFile(NamedTuple):
    """Output file of a cleaning run's first pass: its number, and its range of document numbers [start, end)."""

    number: int
    start: int
    end: int


class SourceNameTables(NamedTuple):
    """Names of sources, inputs and earlier cleaning runs' folders, by the numbers in document positions.
    The text's key in a JSON record is included.
    """

    sources: list[str]
    inputs: list[str]
    earlier: list[str]
    json_key: str


def find_duplicates(work: Path, rule: DuplicatesRule) -> None:
    """Find the duplicates in a cleaning run's first-pass output; write `leaders.npy` and `rules.npy` to `work`, unless done.

    The files are `leaders.npy`, the original of each document, int64 [N], and `rules.npy`, 0 for a kept document, else
    `EXACT` or `NEAR`, uint8 [N]. Does nothing if they exist.
    """
    if (work / "rules.npy").exists():
        return
    positions = load_document_positions(work)
    dataset_numbers = None if rule.between_inputs else positions["input"].astype(np.int64)
    own = np.arange(len(positions))
    leaders, rules = own, np.zeros(len(positions), np.uint8)
    if rule.exact:
        leaders = find_first_exact_duplicates(load_text_hashes(work), dataset_numbers)
        rules[leaders != own] = EXACT
    if rule.minhash is not None:
        clusters = find_first_near_duplicates(load_signatures(work, rule), rule.minhash, leaders, dataset_numbers)
        near = (clusters != own) & (rules == 0)
        rules[near] = NEAR
        leaders = np.where(near, clusters, leaders)
    for name, array in (("leaders.npy", leaders), ("rules.npy", rules)):  # the second one says that both are there
        with open_atomic_file(work / name) as stream:
            np.save(stream, array)


def remove_part_duplicates(
    part: FirstPassOutputFile, *, work: Path, config: CleanConfig, names: SourceNameTables
) -> CleaningTally:
    """Write the kept documents and the duplicates of a first-pass file to their folders; return the counts.
    Kept documents go to `result/kept` and duplicates to `result/dropped`.

    What an interrupted run has done is not done again.
    """
    record = work / "second" / f"{part.number:05}.json"
    if record.exists():
        return TypeAdapter(CleaningTally).validate_json(record.read_bytes())
    tally = (
        FirstPassDeduplication(part, work, config, names).write_files() if part.start < part.end else CleaningTally()
    )
    write_json_atomically(record, asdict(tally))
    return tally


class FirstPassDeduplication:
    """Deduplication of one output file of a cleaning run's first pass: its documents, and which of them are duplicates."""

    def __init__(self, part: FirstPassOutputFile, work: Path, config: CleanConfig, names: SourceNameTables) -> None:
        assert config.duplicates is not None
        self.part, self.work, self.config, self.names = part, work, config, names
        self.suffix = SUFFIXES[config.compression]
        self.leaders: Numbers = np.load(work / "leaders.npy", mmap_mode="r")
        self.rules = np.load(work / "rules.npy", mmap_mode="r")[part.start : part.end]
        self.positions: DocumentPositions = load_document_positions(work)
        self.similarity = np.zeros(len(self.rules))
        near = part.start + np.flatnonzero(self.rules == NEAR)
        if near.size:
            signatures = load_signatures(work, config.duplicates)
            self.similarity[near - part.start] = estimate_jaccard_similarity(signatures, near, self.leaders[near])
        self.tally = CleaningTally()

    def write_files(self) -> CleaningTally:
        """Write the kept and the dropped documents of one first-pass file to the run's result folder; return the counts."""
        positions = self.positions[self.part.start : self.part.end]
        for number, name in enumerate(self.names.inputs):
            sizes = positions["size"][(positions["input"] == number) & (self.rules == 0)]
            if sizes.size:
                self.tally.kept[name] = DocumentAndByteCounts(sizes.size, int(sizes.sum()))
        result = self.work / "result"
        if (self.rules == 0).any():
            with open_atomic_file(result / "kept" / f"{self.part.number:05}{self.suffix}") as stream:
                self._write_lines(stream, (raw for i, raw in self._read_lines() if not self.rules[i]))
        if self.rules.any():
            with open_atomic_file(result / "dropped" / f"{self.part.number:05}.duplicates{self.suffix}") as stream:
                self._write_lines(
                    stream, (self._describe_dropped(i, raw) for i, raw in self._read_lines() if self.rules[i])
                )
        return self.tally

    def _read_lines(self) -> Iterator[tuple[int, bytes]]:
        with open_decompressed(
            str(self.work / "first" / f"{self.part.number:05}{self.suffix}"), lambda _: None
        ) as stream:
            yield from enumerate(stream)

    def _write_lines(self, stream: IO[bytes], lines: Iterable[bytes]) -> None:
        block, size = [], 0
        for raw in lines:
            block.append(raw)
            size += len(raw)
            if size >= BLOCK:
                stream.write(compress_lines(block, self.config.compression))
                block, size = [], 0
        stream.write(compress_lines(block, self.config.compression))

    def _describe_dropped(self, i: int, raw: bytes) -> bytes:
        document, position = self.part.start + i, self.positions[self.part.start + i]
        rule = "exact" if self.rules[i] == EXACT else "minhash"
        first = self._format_position(int(self.leaders[document]))
        detail = f"the text of {first}" if rule == "exact" else f"{self.similarity[i]:.2f} like {first}"
        file, number, record = self.names.sources[position["source"]], int(position["line"]), json.loads(raw)
        counts = self.tally.get_rule_tally(rule)
        counts.dropped.add_amount(DocumentAndByteCounts(1, int(position["size"])))
        counts.why["duplicate"] = counts.why.get("duplicate", 0) + 1
        text = str(lookup_record_value(record, self.names.json_key))
        counts.add_sample(RuleExample.from_document(file, number, "duplicate", detail, text), self.config.samples)
        return encode_json_line(
            {"rule": rule, "why": "duplicate", "detail": detail, "file": file, "line": number, "record": record}
        )

    def _format_position(self, document: int) -> str:
        position = self.positions[document]
        if position["source"] < 0:
            return f"document {position['line']} of {self.names.earlier[-1 - position['source']]}"
        return f"{self.names.sources[position['source']]}:{position['line']}"
