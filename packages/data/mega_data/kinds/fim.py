"""Running text with middles to fill in (Bavarian et al., "Efficient training of language models to fill in the middle", 2022).

Windows of running text, as of the kind `text`; then, with the probability `rate`, what a window has of a document is cut
in prefix, middle and suffix at two random places, and becomes `<PRE> prefix <SUF> suffix <MID> middle` (PSM) or
`<PRE> <SUF> suffix <MID> prefix middle` (SPM, the paper's second variant). This is the paper's context level. The window
keeps its length: what is too much at its end is left out, and what is too little is filled up, without loss.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_data.kinds.base import Sample, Setting
from mega_data.kinds.masking import Random, drawn_random
from mega_data.kinds.text import DocumentRules, windows
from mega_data.objectives import FimConfig
from mega_data.parts import Part
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


class FimSamples:
    """Samples of one data set."""

    def __init__(self, part: Part, setting: Setting, wanted: int) -> None:
        self._config, self._tokenizer = setting.config, setting.text_tokenizer
        self._rules = DocumentRules.of(setting)
        self._fim = FillInTheMiddle(self._config.fim, self._tokenizer, setting.eod)
        self._windows = windows(part, setting, wanted, self._config.seq_length)

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        fim, tokens, tokenizer = self._config.fim, self._fim.tokens, self._tokenizer.fingerprint
        return (
            f"fim rate={fim.rate} spm={fim.spm_rate} cut={fim.cut} tokens={tokens} tokenizer={tokenizer}"
            f" {self._windows.identity}"
        )

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""
        return self._windows.samples_per_epoch

    def work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Samples`."""
        return np.full(numbers.size, self._config.seq_length**2)

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


def fim(part: Part, setting: Setting, wanted: int) -> FimSamples:
    """The kind `fim`, in the order of the run."""
    return FimSamples(part, setting, wanted)
