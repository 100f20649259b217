"""Configuration of `mega data clean`: a rule is enabled by its key, with the published numbers as defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from mega_common.strict_config import ConfigProblem, StrictConfig


def _wrap_in_list(raw: Any) -> Any:
    return [raw] if isinstance(raw, str | Path) else raw


AsList = BeforeValidator(_wrap_in_list)  # a single item needs no brackets
Strings = Annotated[list[str], AsList]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Shares = dict[PositiveInt, Share]


class CleaningRuleConfig(StrictConfig):
    """Base of the configuration sections of data cleaning rules.
    In the file, `rule:` and `rule: true` enable the defaults, and `rule: {key: value}` changes some.
    """

    @model_validator(mode="before")
    @classmethod
    def _accept_true(cls, raw: Any) -> Any:
        return {} if raw is True else raw


class LengthRule(CleaningRuleConfig):
    """Cleaning rule: limits on the number of characters and words of a document."""

    min_chars: NonNegativeInt = 1
    max_chars: PositiveInt | None = None
    min_words: NonNegativeInt = 0
    max_words: PositiveInt | None = None


class LanguageRule(CleaningRuleConfig):
    """Cleaning rule: languages to keep, by ISO 639-1 code, and the language detector."""

    keep: Strings = Field(description="codes such as en, de, zh", min_length=1)
    detector: Literal["lingua", "fasttext"] = "lingua"
    model: Path | None = Field(None, description="model file of fasttext, such as lid.176.ftz")
    min_confidence: Share = Field(0.65, description="drop documents with a lower confidence; 0.65 as in FineWeb")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield the problems in the settings of language detection.
        They are a missing model file for fasttext, one for another detector, and codes that are not ISO 639.
        """
        if (self.detector == "fasttext") != (self.model is not None):
            if self.model is None:
                yield ConfigProblem("model", "is required with detector: fasttext", hint="set it to lid.176.ftz")
            else:
                yield ConfigProblem("model", "requires detector: fasttext", self.model, "detector: fasttext")
        for code in self.keep:
            if not re.fullmatch("[a-z]{2,3}", code):
                yield ConfigProblem("keep", "must be ISO 639 codes", code, "such as en, de or zh")


class GopherQualityRule(CleaningRuleConfig):
    """Cleaning rule: quality filter for English of Gopher, with the paper's limits as defaults.
    The paper is Rae et al. 2021, arXiv:2112.11446, A1.1.
    """

    min_words: NonNegativeInt = 50
    max_words: PositiveInt = 100_000
    min_mean_word_length: float = 3
    max_mean_word_length: float = 10
    max_symbols_per_word: float = Field(0.1, description="limit for # and for the ellipsis, each")
    max_bullet_lines: Share = 0.9
    max_ellipsis_lines: Share = 0.3
    min_alphabetic_words: Share = Field(0.8, description="words with a letter in them")
    min_stop_words: NonNegativeInt = Field(2, description="number of different stop words")
    stop_words: Strings = ["the", "be", "to", "of", "and", "that", "have", "with"]


class GopherRepetitionRule(CleaningRuleConfig):
    """Cleaning rule: repetition filter of Gopher, with limits on repeated text in a document.
    The limits apply to the shares of a document that repeat earlier text (Rae et al. 2021, arXiv:2112.11446, table A1).
    """

    max_duplicate_lines: Share = 0.30
    max_duplicate_paragraphs: Share = 0.30
    max_duplicate_line_chars: Share = 0.20
    max_duplicate_paragraph_chars: Share = 0.20
    max_top_ngram_chars: Shares = {2: 0.20, 3: 0.18, 4: 0.16}
    max_duplicate_ngram_chars: Shares = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


class C4Rule(CleaningRuleConfig):
    """Cleaning rule: line and document filter of C4, with the paper's limits as defaults.
    The paper is Raffel et al. 2020, arXiv:1910.10683, section 2.2.

    `bad_words` is a file with one word per line; documents with one of them are dropped. The list of the paper is not
    part of mega.
    """

    end_marks: bool = Field(True, description="drop lines that do not end in . ! ? or a quotation mark")
    min_words_per_line: NonNegativeInt = 5
    max_word_length: PositiveInt = Field(1000, description="drop lines with a longer word, as the paper's code does")
    min_sentences: NonNegativeInt = 3
    javascript: bool = Field(True, description="drop lines with the word Javascript")
    policies: bool = Field(True, description="drop lines on terms of use, privacy and cookies")
    citations: bool = Field(True, description="remove [1], [edit] and [citation needed] from lines")
    lorem_ipsum: bool = Field(True, description="drop documents with the words lorem ipsum")
    curly_brackets: bool = Field(True, description="drop documents with a curly bracket")
    bad_words: Path | None = None


class PiiRule(CleaningRuleConfig):
    """Cleaning rule: mask personal data found by patterns, or drop the documents that have any.
    The kind in angle brackets (`<EMAIL>`) replaces the data.
    """

    kinds: Annotated[list[Literal["email", "ip", "phone", "card", "iban"]], AsList] = Field(
        ["email", "ip"], min_length=1
    )
    patterns: dict[str, str] = Field({}, description="additional kinds: a name, and a regular expression")
    action: Literal["mask", "drop"] = "mask"

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem for each pattern that is not a regular expression."""
        for name, pattern in self.patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                yield ConfigProblem(f"patterns.{name}", f"must be a regular expression ({error})", pattern)


class DecontaminationRule(CleaningRuleConfig):
    """Cleaning rule that drops documents which share a run of words with an evaluation set.
    The run has `ngram` words, as in GPT-3 (arXiv:2005.14165, appendix C).
    """

    against: Strings = Field(description="evaluation sets: files, globs, folders, hf:NAME", min_length=1)
    json_keys: Strings = Field(["text"], description="keys or columns of the evaluation sets with text", min_length=1)
    ngram: PositiveInt = 13


class MinHashConfig(CleaningRuleConfig):
    """Near-duplicate detection by MinHash and banding, with the defaults of FineWeb (arXiv:2406.17557).

    Two documents are compared if at least one of `bands` bands of `rows` hashes is equal in both, which has the
    probability 1 - (1 - s^rows)^bands for a Jaccard similarity s. They are duplicates if a share `threshold` of all
    hashes is equal.
    """

    ngram: PositiveInt = Field(5, description="words of a shingle")
    bands: PositiveInt = 14
    rows: PositiveInt = 8
    threshold: Share = 0.7
    seed: NonNegativeInt = 1


def _false_to_none(raw: Any) -> Any:
    return None if raw is False else raw


class DuplicatesRule(CleaningRuleConfig):
    """Deduplication rule: of documents with equal or nearly equal texts only the first is kept.
    Similarity is transitive.
    """

    exact: bool = True
    minhash: Annotated[MinHashConfig | None, BeforeValidator(_false_to_none)] = None
    between_inputs: bool = Field(True, description="false: only within each --input")
    against: Annotated[list[Path], AsList] = Field(
        [], description="outputs of earlier mega data clean runs; documents that they keep are dropped"
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_minhash(cls, raw: Any) -> Any:
        return _enable_bare_keys(raw, ("minhash",))

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield the problems in the settings of deduplication.
        They are that neither exact nor near duplicates are searched, and that `against` is set without comparison
        between inputs.
        """
        if not self.exact and self.minhash is None:
            yield ConfigProblem("", "requires exact or minhash", hint="exact: true")
        if self.against and not self.between_inputs:
            yield ConfigProblem("between_inputs", "must be true with against", False, "between_inputs: true")


def _enable_bare_keys(raw: Any, names: tuple[str, ...]) -> Any:
    """Return a section in which keys without a value (null in YAML) enable the default rule."""
    if not isinstance(raw, dict):
        return raw
    return {key: True if value is None and key in names else value for key, value in raw.items()}


RULES = (
    "length",
    "language",
    "gopher_quality",
    "gopher_repetition",
    "c4",
    "pii",
    "decontaminate",
    "filter",
    "duplicates",
)


class CleanConfig(StrictConfig):
    """Configuration of `mega data clean`, the cleaning of a text corpus.
    Rules are applied in the order of the fields; a document is counted under the first rule that drops it.
    """

    length: Annotated[LengthRule | None, BeforeValidator(_false_to_none)] = None
    language: Annotated[LanguageRule | None, BeforeValidator(_false_to_none)] = None
    gopher_quality: Annotated[GopherQualityRule | None, BeforeValidator(_false_to_none)] = None
    gopher_repetition: Annotated[GopherRepetitionRule | None, BeforeValidator(_false_to_none)] = None
    c4: Annotated[C4Rule | None, BeforeValidator(_false_to_none)] = None
    pii: Annotated[PiiRule | None, BeforeValidator(_false_to_none)] = None
    decontaminate: Annotated[DecontaminationRule | None, BeforeValidator(_false_to_none)] = None
    filter: str | None = Field(
        None,
        description="module:function, given a record, that returns True to keep it, or False or a reason to drop it",
    )
    duplicates: Annotated[DuplicatesRule | None, BeforeValidator(_false_to_none)] = None
    compression: Literal["gz", "zst", "none"] = "gz"
    samples: NonNegativeInt = Field(5, description="number of sample documents of each rule in summary.json")

    @model_validator(mode="before")
    @classmethod
    def _bare_rules(cls, raw: Any) -> Any:
        return _enable_bare_keys(raw, tuple(name for name in RULES if name != "filter"))

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem if no rule is enabled, or if `filter` is not of the form `module:function`."""
        if not any(getattr(self, name) is not None for name in RULES):
            yield ConfigProblem("", "at least one rule is required", hint=f"use one of {', '.join(RULES)}")
        if self.filter is not None and not re.fullmatch(r"[\w.]+:\w+", self.filter):
            yield ConfigProblem("filter", "must have the form module:function", self.filter)
