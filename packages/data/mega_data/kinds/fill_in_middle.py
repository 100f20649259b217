"""Fill-in-the-middle samples (Bavarian et al., "Efficient training of language models to fill in the middle", 2022).

At the paper's context level, samples are windows of running text, as of the kind `text`. With the probability `rate`,
the part of a document within a window is cut into prefix, middle and suffix at two random positions, and becomes
`<PRE> prefix <SUF> suffix <MID> middle` (PSM) or `<PRE> <SUF> suffix <MID> prefix middle` (SPM, the paper's second
variant). The window keeps its length: a longer result is truncated, a shorter one padded, without loss.

At the paper's document level, whole documents are rearranged, and then packed as those of the kind `documents`. The
final length depends on the drawn cuts, so `ROOM` extra positions are reserved for each document when it is packed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_data.data_config import ROOM, FimConfig
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.masked_lm_samples import Random, make_sample_random_generator
from mega_data.kinds.packed_documents import (
    DocumentPieces,
    PackedSamples,
    find_document_bounds,
    reject_megatron_order,
    split_documents_into_segments,
)
from mega_data.kinds.running_text import EndOfDocumentRules, TextSamples, build_token_windows
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.indexed_reader import IndexedReader, Tokens
from mega_data.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]

# Tokens before the prefix, the middle and the suffix, and the padding token, by model: StarCoder and Granite;
# Qwen-Coder and CodeGemma; SantaCoder; DeepSeek-Coder; Code Llama; Codestral.
DEFAULT_TOKENS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>", ""),
    ("▁<PRE>", "▁<MID>", "▁<SUF>", ""),
    ("[PREFIX]", "[MIDDLE]", "[SUFFIX]", ""),
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded from a part of a character


class FillInTheMiddle:
    """Fill-in-the-middle transformation of documents: prefix, middle and suffix are reordered between marker tokens.

    Attributes:
        tokens: ids of the tokens before prefix, middle and suffix.
        pad: id of the padding token.

    Raises:
        ConfigError: if the tokenizer lacks these tokens.
    """

    def __init__(self, config: FimConfig, tokenizer: Tokenizer, eod: int | None) -> None:
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
        candidates = [(*config.tokens, "")] if config.tokens else DEFAULT_TOKENS
        names = next((names for names in candidates if all(name in vocab for name in names[:3])), None)
        if names is None:
            expected = ", ".join(config.tokens) if config.tokens else "such as <fim_prefix> or <|fim_prefix|>"
            raise ConfigError(
                f"{tokenizer.path}: the fill-in-the-middle tokens ({expected}) are missing, which data.kind = fim requires",
                hint="set data.fim.tokens to the three tokens before prefix, middle and suffix",
            )
        self.tokens = tuple(vocab[name] for name in names[:3])
        self.pad = vocab.get(names[3], 0 if eod is None else eod)
        self._config, self._tokenizer = config, tokenizer

    @property
    def content_key(self) -> str:
        """Text that names everything the fill-in-the-middle transformation depends on; equal texts mean equal results."""
        config = self._config
        return f"fim rate={config.rate} spm={config.spm_rate} cut={config.cut} tokens={self.tokens} tokenizer={self._tokenizer.fingerprint}"

    def rearrange_document(self, ids: Ints, random: Random) -> Ints:
        """Return a document's token ids, reordered for fill-in-the-middle (FIM) with probability `rate`.
        The order is prefix, suffix, middle (or suffix first). The ids may be those of the part of a document in a
        window.
        """
        if not random.binomial(1, self._config.rate):
            return ids
        prefix, middle, suffix = self._split_document(ids, random)
        before_prefix, before_middle, before_suffix = (np.array([token]) for token in self.tokens)
        if random.binomial(1, self._config.spm_rate):
            return np.concatenate([before_prefix, before_suffix, suffix, before_middle, prefix, middle])
        return np.concatenate([before_prefix, prefix, before_suffix, suffix, before_middle, middle])

    def _split_document(self, ids: Ints, random: Random) -> tuple[Ints, Ints, Ints]:
        """Return prefix, middle and suffix; text that begins or ends within a character is cut between tokens."""
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        if self._config.cut == "token" or REPLACEMENT in text:
            low, high = sorted(random.randint(0, ids.size + 1, 2).tolist())
            return ids[:low], ids[low:high], ids[high:]
        low, high = sorted(random.randint(0, len(text) + 1, 2).tolist())
        before, middle, after = (
            np.array(self._tokenizer.encode(part), np.int64) for part in (text[:low], text[low:high], text[high:])
        )
        return before, middle, after


class FimContextSamples(TextSamples):
    """Fill-in-the-middle samples of one data set, whose documents are rearranged within each token window."""

    def __init__(self, part: DatasetPart, setting: DatasetContext, num_samples: int) -> None:
        seq_length = setting.config.seq_length
        super().__init__(
            build_token_windows(part, setting, num_samples, seq_length),
            EndOfDocumentRules.from_context(setting),
            seq_length,
        )
        self._fim = FillInTheMiddle(setting.config.fim, setting.text_tokenizer, setting.eod)

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the fill-in-the-middle samples depend on; equal texts mean equal samples."""
        return f"{self._fim.content_key} {self._windows.content_key}"

    def __getitem__(self, k: int, /) -> TrainingSample:
        window = self._windows[k]
        tokens = self._rearrange_window(window, make_sample_random_generator(self.content_key, k))[: window.size]
        padded = np.pad(tokens, (0, window.size - tokens.size), constant_values=self._fim.pad)
        sample = self._rules.build_sample(padded)
        sample.loss_weights[max(tokens.size - 1, 0) :] = 0
        return sample

    def _rearrange_window(self, window: Ints, random: Random) -> Ints:
        ends = [] if self._rules.eod is None else np.flatnonzero(window == self._rules.eod).tolist()
        parts, begin = [], 0
        for end in [*ends, window.size]:
            if end > begin:
                parts.append(self._fim.rearrange_document(window[begin:end], random))
            parts.append(window[end : end + 1])
            begin = end + 1
        return np.concatenate(parts)


class FimDocumentSamples(PackedSamples):
    """Fill-in-the-middle samples at document level: whole documents, each rearranged or unchanged, packed into samples.

    The end-of-document token stays last.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext) -> None:
        super().__init__(part, setting)
        self._fim = FillInTheMiddle(setting.config.fim, setting.text_tokenizer, setting.eod)

    @property
    def _packing_rule(self) -> str:
        return f"{self._fim.content_key} packed"

    def _list_pieces(self, reader: IndexedReader) -> DocumentPieces:
        bounds, split = (
            find_document_bounds(reader, self._part.first, self._part.last),
            self._setting.config.long_documents,
        )
        pieces = split_documents_into_segments(reader, *bounds, self._seq_length - ROOM, split=split == "split")
        return replace(pieces, sizes=pieces.sizes + ROOM)

    def _read_documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        random, documents = make_sample_random_generator(self.content_key, k), []
        for tokens in super()._read_documents(k, starts, [size - ROOM for size in sizes]):
            end = tokens.size - int(tokens[-1] == self._setting.eod)
            rearranged = self._fim.rearrange_document(tokens[:end].astype(np.int64), random)
            documents.append(np.concatenate([rearranged[: end + ROOM], tokens[end:]]))
        return documents


def build_fim_samples(
    part: DatasetPart, setting: DatasetContext, num_samples: int
) -> FimContextSamples | FimDocumentSamples:
    """Return the fill-in-the-middle samples of one data set's share of a split (dataset kind `fim`).
    They are at context or document level as configured.

    Raises:
        ConfigError: if the tokenizer lacks the required tokens; at document level as `reject_megatron_order`.
    """
    if setting.config.fim.level == "context":
        return FimContextSamples(part, setting, num_samples)
    reject_megatron_order(part, setting)
    return FimDocumentSamples(part, setting)
