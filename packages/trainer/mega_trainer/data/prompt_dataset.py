"""Prompts of a reinforcement-learning run, from JSON lines: sample k is one answer to prompt k // group size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.blended_dataset import BlendedDataset
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.tokenizer import Tokenizer


class PromptDataset(BlendedDataset):
    """Prompts in an order drawn by (seed, epoch), each for `group_size` samples in a row.

    Args:
        path: JSON lines, each an object with the text `prompt`, and further fields for the rewards.
        longest: largest number of tokens of a prompt.

    Attributes:
        records: the objects of the file.
        prompts: token ids of each prompt.

    Raises:
        DataError: for a file without records, a line that is not such an object, or a prompt that is empty or too long.
    """

    def __init__(
        self, path: Path, tokenizer: Tokenizer, *, seed: int, group_size: int, seq_length: int, longest: int
    ) -> None:
        content = path.read_bytes() if path.is_file() else b""
        self._path, self._seed, self._group_size, self._seq_length = path, seed, group_size, seq_length
        self.records: list[Mapping[str, Any]] = [
            self._parse_line(number, line) for number, line in enumerate(content.splitlines()) if line.strip()
        ]
        if not self.records:
            raise DataError(f"data.train = {path} must be a file of JSON lines, found no record")
        self.prompts = [tokenizer.encode(record["prompt"], add_special_tokens=True) for record in self.records]
        for record, tokens in zip(self.records, self.prompts, strict=True):
            if not 1 <= len(tokens) <= longest:
                raise DataError(
                    f"{path}: each prompt must have from 1 to {longest} tokens, found {len(tokens)} in {record['prompt']!r:.60}",
                    hint="raise data.seq_length, or lower objective.max_new_tokens",
                )
        self._digest = xxhash.xxh3_128_hexdigest(content + f" {seed} {group_size} {tokenizer.fingerprint}".encode())
        self._order = lru_cache(maxsize=4)(self._draw_order)

    def _parse_line(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise DataError(f"{self._path}: line {number + 1} must be a JSON object with the text `prompt`")
        return record

    def _draw_order(self, epoch: int, number: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch, number]).permutation(len(self.records))

    def locate_prompt(self, k: int, number: int = 0) -> int:
        """Return the index of the prompt of sample k; each round `number` of resampling has an order of its own."""
        epoch, position = divmod(k // self._group_size, len(self.records))
        return int(self._order(epoch, number)[position])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that the prompts of samples depend on: file, tokenizer, seed and group size."""
        return self._digest

    def __getitem__(self, k: int) -> TrainingSample:
        """Return the prompt of sample k, padded with token 0, without loss."""
        tokens, prompt = np.zeros(self._seq_length, np.int64), self.prompts[self.locate_prompt(k)]
        tokens[: len(prompt)] = prompt
        none = np.zeros(self._seq_length, np.float32)
        return TrainingSample(tokens, tokens, none, np.arange(self._seq_length), None)

    def estimate_attention_work(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return equal work for each sample in `numbers`, as the lengths of the answers are not known."""
        return np.full(len(numbers), self._seq_length**2)

    @property
    def samples_per_epoch(self) -> float:
        """Number of samples in one pass over the prompts."""
        return float(len(self.records) * self._group_size)

    def count_samples_by_path(self, k: int) -> dict[str, int]:
        """Return the number of samples before sample k, by the path of the prompts."""
        return {str(self._path): k}

    def find_stream_positions(self, k: int) -> dict[str, dict[str, Any]]:
        """Return {}, as prompts are not streamed and no stream has a position."""
        return {}

    def count_epochs_by_path(self, k: int) -> dict[str, float]:
        """Return the number of passes over the prompts before sample k, by their path."""
        return {str(self._path): k / self.samples_per_epoch}
