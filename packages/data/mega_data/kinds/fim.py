"""Running text with middles to fill in (Bavarian et al., "Efficient training of language models to fill in the middle", 2022).

Windows of running text, as of the kind `text`; then, with the probability `rate`, what a window has of a document is cut
in prefix, middle and suffix at two random places, and becomes `<PRE> prefix <SUF> suffix <MID> middle` (PSM) or
`<PRE> <SUF> suffix <MID> prefix middle` (SPM, the paper's second variant). This is the paper's context level. The window
keeps its length: what is too much at its end is left out, and what is too little is filled up, without loss.

At the paper's document level whole documents are rearranged, and packed then as those of the kind `documents`. How long one
becomes is known when its middle is drawn, so each has `ROOM` positions more when samples are laid out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_data.files.indexed import IndexedReader, Tokens
from mega_data.kinds.base import Sample, Setting
from mega_data.kinds.masking import Random, drawn_random
from mega_data.kinds.packed import PackedSamples, Pieces, check_order, document_bounds, pieces_of
from mega_data.kinds.text import DocumentRules, TextSamples, windows
from mega_data.objectives import ROOM, FimConfig
from mega_data.order.parts import Part
from mega_data.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]

# Tokens before the prefix, the middle and the suffix, and what fills up, as tokenizers name them: StarCoder and Granite;
# Qwen-Coder and CodeGemma; SantaCoder; DeepSeek-Coder; Code Llama; Codestral.
USUAL = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>", ""),
    ("▁<PRE>", "▁<MID>", "▁<SUF>", ""),
    ("[PREFIX]", "[MIDDLE]", "[SUFFIX]", ""),
)
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


class FillInTheMiddle:
    """Rearranges documents.

    Attributes:
        tokens: those before prefix, middle and suffix.
        pad: fills up.

    Raises:
        ConfigError: when the tokenizer has no tokens for it.
    """

    def __init__(self, config: FimConfig, tokenizer: Tokenizer, eod: int | None) -> None:
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
        named = [(*config.tokens, "")] if config.tokens else USUAL
        names = next((names for names in named if all(name in vocab for name in names[:3])), None)
        if names is None:
            looked = (
                ", ".join(config.tokens) if config.tokens else "those usual, such as <fim_prefix> or <|fim_prefix|>"
            )
            raise ConfigError(
                f"{tokenizer.path}: has no tokens for the kind fim (looked for {looked})",
                hint="data.fim.tokens names the three tokens before prefix, middle and suffix",
            )
        self.tokens = tuple(vocab[name] for name in names[:3])
        self.pad = vocab.get(names[3], 0 if eod is None else eod)
        self._config, self._tokenizer = config, tokenizer

    @property
    def identity(self) -> str:
        """All that decides about what it makes of a document."""
        config = self._config
        return f"fim rate={config.rate} spm={config.spm_rate} cut={config.cut} tokens={self.tokens} tokenizer={self._tokenizer.fingerprint}"

    def document(self, ids: Ints, random: Random) -> Ints:
        """One document, or what a window has of it, rearranged or as it is."""
        if not random.binomial(1, self._config.rate):
            return ids
        prefix, middle, suffix = self._parts(ids, random)
        before_prefix, before_middle, before_suffix = (np.array([token]) for token in self.tokens)
        if random.binomial(1, self._config.spm_rate):
            return np.concatenate([before_prefix, before_suffix, suffix, before_middle, prefix, middle])
        return np.concatenate([before_prefix, prefix, before_suffix, suffix, before_middle, middle])

    def _parts(self, ids: Ints, random: Random) -> tuple[Ints, Ints, Ints]:
        """Prefix, middle and suffix. A text that begins or ends within a character is cut between tokens."""
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        if self._config.cut == "token" or BROKEN in text:
            low, high = sorted(random.randint(0, ids.size + 1, 2).tolist())
            return ids[:low], ids[low:high], ids[high:]
        low, high = sorted(random.randint(0, len(text) + 1, 2).tolist())
        before, middle, after = (
            np.array(self._tokenizer.encode(part), np.int64) for part in (text[:low], text[low:high], text[high:])
        )
        return before, middle, after


class FimSamples(TextSamples):
    """Samples of one data set."""

    def __init__(self, part: Part, setting: Setting, wanted: int) -> None:
        seq_length = setting.config.seq_length
        super().__init__(windows(part, setting, wanted, seq_length), DocumentRules.of(setting), seq_length)
        self._fim = FillInTheMiddle(setting.config.fim, setting.text_tokenizer, setting.eod)

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        return f"{self._fim.identity} {self._windows.identity}"

    def __getitem__(self, k: int, /) -> Sample:
        window = self._windows[k]
        found = self._rearranged(window, drawn_random(self.identity, k))[: window.size]
        filled = np.pad(found, (0, window.size - found.size), constant_values=self._fim.pad)
        sample = self._rules.sample(filled)
        sample.loss_weights[max(found.size - 1, 0) :] = 0
        return sample

    def _rearranged(self, window: Ints, random: Random) -> Ints:
        ends = [] if self._rules.eod is None else np.flatnonzero(window == self._rules.eod).tolist()
        parts, begin = [], 0
        for end in [*ends, window.size]:
            if end > begin:
                parts.append(self._fim.document(window[begin:end], random))
            parts.append(window[end : end + 1])
            begin = end + 1
        return np.concatenate(parts)


class FimDocuments(PackedSamples):
    """Samples of whole documents of one data set, each rearranged or as it is; the token that ends one stays its last."""

    def __init__(self, part: Part, setting: Setting) -> None:
        super().__init__(part, setting)
        self._fim = FillInTheMiddle(setting.config.fim, setting.text_tokenizer, setting.eod)

    @property
    def _rule(self) -> str:
        return f"{self._fim.identity} packed"

    def _pieces(self, reader: IndexedReader) -> Pieces:
        bounds, split = document_bounds(reader, self._part.first, self._part.last), self._setting.config.long_documents
        pieces = pieces_of(reader, *bounds, self._seq_length - ROOM, split=split == "split")
        return replace(pieces, sizes=pieces.sizes + ROOM)

    def _documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        random, found = drawn_random(self.identity, k), []
        for read in super()._documents(k, starts, [size - ROOM for size in sizes]):
            end = read.size - int(read[-1] == self._setting.eod)
            made = self._fim.document(read[:end].astype(np.int64), random)
            found.append(np.concatenate([made[: end + ROOM], read[end:]]))
        return found


def fim(part: Part, setting: Setting, wanted: int) -> FimSamples | FimDocuments:
    """The kind `fim`, in the order of the run.

    Raises:
        ConfigError: when the tokenizer has no tokens for it; at the level of documents as `check_order`.
    """
    if setting.config.fim.level == "context":
        return FimSamples(part, setting, wanted)
    check_order(part, setting)
    return FimDocuments(part, setting)
