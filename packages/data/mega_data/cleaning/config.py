"""The configuration of `mega data clean`: a rule is on where its key is there, with the published numbers unless said otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from mega_common.config import Config, Problem

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Shares = dict[PositiveInt, Share]


class Section(Config):
    """A rule: `rule:` and `rule: true` are the rule as it is, `rule: {key: value}` with changes."""

    @model_validator(mode="before")
    @classmethod
    def _as_it_is(cls, raw: Any) -> Any:
        return {} if raw is True else raw


class Length(Section):
    """Characters and words (of `words.WORD`) that a document may have."""

    min_chars: NonNegativeInt = 1
    max_chars: PositiveInt | None = None
    min_words: NonNegativeInt = 0
    max_words: PositiveInt | None = None


class Language(Section):
    """Which languages stay, by ISO 639-1 code, and who tells them."""

    keep: list[str] = Field(description="codes such as en, de, zh", min_length=1)
    detector: Literal["lingua", "fasttext"] = "lingua"
    model: Path | None = Field(None, description="fasttext's model file, such as lid.176.ftz")
    min_confidence: Share = Field(0.65, description="below it a document goes; 0.65 as FineWeb")

    def problems(self) -> Iterator[Problem]:
        """fasttext brings no model; lingua has its own."""
        if (self.detector == "fasttext") != (self.model is not None):
            rule = "fasttext needs a model file" if self.model is None else "only the detector fasttext reads one"
            yield Problem("model", rule, self.model)
        for code in self.keep:
            if not re.fullmatch("[a-z]{2,3}", code):
                yield Problem("keep", "is no ISO 639 code", code, "en, de, zh")


class GopherQuality(Section):
    """Rae et al. 2021 (arXiv:2112.11446), A1.1, "Quality Filtering"; the numbers are those of the paper, for English."""

    min_words: NonNegativeInt = 50
    max_words: PositiveInt = 100_000
    min_mean_word_length: float = 3
    max_mean_word_length: float = 10
    max_symbols_per_word: float = Field(0.1, description="of # and of the ellipsis, each")
    max_bullet_lines: Share = 0.9
    max_ellipsis_lines: Share = 0.3
    min_alphabetic_words: Share = Field(0.8, description="words with a letter in them")
    min_stop_words: NonNegativeInt = Field(2, description="how many different ones of the stop words")
    stop_words: list[str] = ["the", "be", "to", "of", "and", "that", "have", "with"]


class GopherRepetition(Section):
    """Rae et al. 2021, table A1: shares of a document that repeat what stood in it before; the paper's numbers."""

    max_duplicate_lines: Share = 0.30
    max_duplicate_paragraphs: Share = 0.30
    max_duplicate_line_chars: Share = 0.20
    max_duplicate_paragraph_chars: Share = 0.20
    max_top_ngram_chars: Shares = {2: 0.20, 3: 0.18, 4: 0.16}
    max_duplicate_ngram_chars: Shares = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


class C4(Section):
    """Raffel et al. 2020 (arXiv:1910.10683), 2.2, which drops lines and documents; the numbers are those of the paper.

    `bad_words` is a file with a word a line; documents with one of them go. The paper's list is not part of mega.
    """

    end_marks: bool = Field(True, description="drop lines that do not end in . ! ? or a quotation mark")
    min_words_per_line: NonNegativeInt = 5
    max_word_length: PositiveInt = Field(1000, description="drop lines with a longer word, as the paper's code does")
    min_sentences: NonNegativeInt = 3
    javascript: bool = Field(True, description="drop lines with the word Javascript")
    policies: bool = Field(True, description="drop lines on terms of use, privacy and cookies")
    citations: bool = Field(True, description="take [1], [edit] and [citation needed] out of lines")
    lorem_ipsum: bool = Field(True, description="drop documents with the words")
    curly_brackets: bool = Field(True, description="drop documents with one")
    bad_words: Path | None = None


class Pii(Section):
    """Personal data, found by patterns: replaced by its kind in angle brackets, or a reason to drop the document."""

    kinds: list[Literal["email", "ip", "phone", "card", "iban"]] = Field(["email", "ip"], min_length=1)
    patterns: dict[str, str] = Field({}, description="further kinds: a name, and a regular expression")
    action: Literal["mask", "drop"] = "mask"

    def problems(self) -> Iterator[Problem]:
        """Patterns must be regular expressions."""
        for name, pattern in self.patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                yield Problem(f"patterns.{name}", f"is no regular expression ({error})", pattern)


class Decontaminate(Section):
    """Documents that share a run of words with an evaluation set go; 13 words as Brown et al. 2020 (arXiv:2005.14165), C."""

    against: list[str] = Field(description="evaluation sets: files, globs, folders, hf:NAME", min_length=1)
    json_keys: list[str] = Field(["text"], description="their keys or columns with text", min_length=1)
    ngram: PositiveInt = 13


class MinHash(Section):
    """Near duplicates by MinHash and banding; the defaults are FineWeb's (Penedo et al. 2024, arXiv:2406.17557).

    Two documents are compared if one of `bands` bands of `rows` hashes is the same in both, which those with a Jaccard
    similarity s are with the chance 1 - (1 - s^rows)^bands, and are duplicates if `threshold` of all hashes are.
    """

    ngram: PositiveInt = Field(5, description="words of a shingle")
    bands: PositiveInt = 14
    rows: PositiveInt = 8
    threshold: Share = 0.7
    seed: NonNegativeInt = 1


def _optional(raw: Any) -> Any:
    return None if raw is False else raw


class Duplicates(Section):
    """Of documents with one text, or nearly one, the first stays. Likeness spreads: like A, like B, like each other."""

    exact: bool = True
    minhash: Annotated[MinHash | None, BeforeValidator(_optional)] = None
    between_inputs: bool = Field(True, description="false: only within each --input")
    against: list[Path] = Field([], description="folders that `mega data clean` wrote: what they keep goes here")

    @model_validator(mode="before")
    @classmethod
    def _bare_minhash(cls, raw: Any) -> Any:
        return _bare(raw, ("minhash",))

    def problems(self) -> Iterator[Problem]:
        """Something must be looked for."""
        if not self.exact and self.minhash is None:
            yield Problem("", "looks for nothing: neither `exact` nor `minhash`")
        if self.against and not self.between_inputs:
            yield Problem("between_inputs", "must be true where `against` names other data sets", False)


def _bare(raw: Any, names: tuple[str, ...]) -> Any:
    """A key without a value means the rule as it is; YAML has it as null, which would be the rule switched off."""
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


class CleanConfig(Config):
    """What goes and what is changed. The rules are asked in this order, and the first that drops a document counts."""

    length: Annotated[Length | None, BeforeValidator(_optional)] = None
    language: Annotated[Language | None, BeforeValidator(_optional)] = None
    gopher_quality: Annotated[GopherQuality | None, BeforeValidator(_optional)] = None
    gopher_repetition: Annotated[GopherRepetition | None, BeforeValidator(_optional)] = None
    c4: Annotated[C4 | None, BeforeValidator(_optional)] = None
    pii: Annotated[Pii | None, BeforeValidator(_optional)] = None
    decontaminate: Annotated[Decontaminate | None, BeforeValidator(_optional)] = None
    filter: str | None = Field(
        None,
        description="module:function, given a record, that returns True to keep it, or False or a reason to drop it",
    )
    duplicates: Annotated[Duplicates | None, BeforeValidator(_optional)] = None
    compression: Literal["gz", "zst", "none"] = "gz"
    samples: NonNegativeInt = Field(5, description="documents to show of each rule in summary.json")

    @model_validator(mode="before")
    @classmethod
    def _bare_rules(cls, raw: Any) -> Any:
        return _bare(raw, tuple(name for name in RULES if name != "filter"))

    def problems(self) -> Iterator[Problem]:
        """One rule at least, and a filter that can be found."""
        if not any(getattr(self, name) is not None for name in RULES):
            yield Problem("", "no rule is on", hint=f"name one of {', '.join(RULES)}")
        if self.filter is not None and not re.fullmatch(r"[\w.]+:\w+", self.filter):
            yield Problem("filter", "is not of the form module:function", self.filter)
