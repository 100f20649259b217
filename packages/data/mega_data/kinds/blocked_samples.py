"""Samples in order `blocks`: block after block of the documents, each block in the order of its dataset kind."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_data.data_config import StreamPosition
from mega_data.kinds.dataset_kind import DatasetContext, DatasetFactory, DatasetSamples
from mega_data.preprocessing.token_stream import BlockPosition
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.sampling.token_blocks import DataBlockSource, FileBlocks, StreamBlocks
from mega_data.token_files.image_references import has_images

OPEN_BLOCKS = 4  # a step and the ones that are read ahead may be in several blocks


@dataclass(frozen=True)
class BlockStart:
    """Start of a block of documents: its number, its first sample in an epoch, and its position in the data."""

    number: int
    first: int
    start: BlockPosition


class LoadedSampleBlock(NamedTuple):
    """Samples of one open block of documents, and their number in an epoch (`size`)."""

    samples: DatasetSamples[Any]
    size: int


class BlockedSamples:
    """Samples of one data set's share of a split in order `blocks`: epoch after epoch, block after block.

    Sample k is a function of (seed, content of its block, epoch) and of the number of samples in the blocks before, which
    are known once those blocks were read, or from the position in a checkpoint.

    Args:
        build: builder of the samples of a block, by dataset kind.
        position: position in streamed data from which a run resumes, or None.

    Raises:
        ConfigError: for data with images.
    """

    def __init__(
        self, part: DatasetPart, setting: DatasetContext, build: DatasetFactory, position: StreamPosition | None = None
    ) -> None:
        if has_images(part.reader.prefix):
            raise ConfigError(
                f"{part.name}: data.order = blocks is not supported with images", hint="set data.order: shuffled"
            )
        self._part, self._setting, self._build = part, setting, build
        tokens = setting.config.block_tokens
        self._blocks: DataBlockSource = (
            FileBlocks(part.reader, part.first, part.last, tokens) if part.stream is None else StreamBlocks(part.stream)
        )
        self._starts = [BlockStart(0, 0, self._blocks.first)]  # known starts, in order
        self._total: int | None = None  # samples of an epoch
        self._open: OrderedDict[BlockStart, LoadedSampleBlock] = OrderedDict()
        self._lock = RLock()  # the loader's thread reads, the main thread reports
        if position is not None:
            self._continue_from(position)

    @property
    def content_key(self) -> str:
        """Text that names everything the samples depend on."""
        config = self._setting.config
        return (
            f"blocks {self._part.kind} seed={self._setting.seed} seq={config.seq_length} long={config.long_documents}"
            f" {self._blocks.content_key}"
        )

    def _continue_from(self, position: StreamPosition) -> None:
        if position.key != self._blocks.content_key:
            logger.warning(
                "%s: the input or its settings changed since the checkpoint; it is read from its beginning up to the "
                "sample of the checkpoint, and samples may differ",
                self._part.name,
            )
            return
        self._total = position.total
        if position.block:
            self._starts.append(BlockStart(position.block, position.first, tuple(position.start)))

    def __getitem__(self, k: int, /) -> Any:
        samples, offset, _ = self._locate_sample(k)
        return samples[k + offset]

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        """Return the approximate number of attended (query, key) token pairs of each sample in the increasing `numbers`.
        The result is int64 [len(numbers)].
        """
        work = np.empty(numbers.size, np.int64)
        done = 0
        while done < numbers.size:
            samples, offset, end = self._locate_sample(int(numbers[done]))
            run = slice(done, int(np.searchsorted(numbers, end)))
            work[run] = samples.estimate_attention_work(numbers[run] + offset)
            done = run.stop
        return work

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the data set; for streamed data an estimate until the first pass is over."""
        with self._lock:
            last = self._starts[-1]
            estimate = self._blocks.estimate_epoch(last.first, last.start) if self._total is None else None
            while self._total is None and estimate is None:
                self._read_block(self._starts[-1])
            return estimate or self._total or 0

    def find_stream_position(self, k: int) -> StreamPosition:
        """Return the position in the raw data from which a resumed run reads sample `k`, skipping earlier blocks."""
        with self._lock:
            known = self._find_start(k if self._total is None else k % self._total)
            return StreamPosition(
                key=self._blocks.content_key,
                block=known.number,
                first=known.first,
                start=list(known.start),
                total=self._total,
            )

    def _find_start(self, number: int) -> BlockStart:
        """Return the last known block that starts at sample `number` of an epoch or before."""
        return self._starts[bisect_right(self._starts, number, key=lambda start: start.first) - 1]

    def _locate_sample(self, k: int) -> tuple[DatasetSamples[Any], int, int]:
        """Return the samples of the block that has sample `k`, the offset from `k` to the number in them, and the first
        sample after the block.
        """
        with self._lock:
            while True:
                epoch, number = (0, k) if self._total is None else divmod(k, self._total)
                start = self._find_start(number)
                block = self._read_block(start)
                if block is not None and number < start.first + block.size:
                    within = number - start.first
                    return block.samples, epoch * block.size + within - k, k - within + block.size

    def _read_block(self, start: BlockStart) -> LoadedSampleBlock | None:
        """Return the samples of a block, and record the start of the next one, or the number of samples of an epoch.
        The result is None if no document is left at `start`.
        """
        if start in self._open:
            self._open.move_to_end(start)
            return self._open[start]
        block = self._blocks.open_block(start.start)
        if block is None:
            self._starts.remove(start)
            self._total = start.first
            return None
        part = replace(self._part, reader=block.reader, first=0, last=len(block.reader))
        setting = self._setting if block.cache is None else replace(self._setting, cache=block.cache)
        samples = self._build(part, setting, 0)
        opened = self._open[start] = LoadedSampleBlock(samples, max(1, int(samples.samples_per_epoch)))
        self._record_end(start, start.first + opened.size, block.end)
        if len(self._open) > OPEN_BLOCKS:
            oldest, _ = self._open.popitem(last=False)
            self._blocks.remove_block(oldest.start)
        return opened

    def _record_end(self, start: BlockStart, first: int, end: BlockPosition | None) -> None:
        """Record that a block ends before sample `first` of an epoch, where the data continues at `end`."""
        if end is None:
            self._total = first
        elif self._find_start(first).first != first:
            self._starts.append(BlockStart(start.number + 1, first, end))
            self._starts.sort(key=lambda each: each.first)
