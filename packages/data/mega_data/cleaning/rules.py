"""The rules of a configuration, in the order in which they are asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from mega_data.cleaning.c4 import bad_words, c4
from mega_data.cleaning.config import CleanConfig, Length
from mega_data.cleaning.decontaminate import decontaminate
from mega_data.cleaning.gopher import quality, repetition
from mega_data.cleaning.language import language
from mega_data.cleaning.own import own
from mega_data.cleaning.pii import pii
from mega_data.cleaning.verdict import Measure, Rule, first_outside
from mega_data.cleaning.words import Text


def rules(config: CleanConfig, folder: Path, ngrams: Path) -> dict[str, Rule]:
    """Every rule that is on but the one for duplicates, by name.

    `folder`: where a module of the user's own may stand; `ngrams`: where those of the evaluation sets do.

    Raises:
        MegaError: when a rule cannot be had, for want of a package, a model, a file or a function.
    """
    if config.c4 is not None and config.c4.bad_words is not None:
        bad_words(config.c4.bad_words)
    return dict(_rules(config, folder, ngrams))


def _rules(config: CleanConfig, folder: Path, ngrams: Path) -> Iterator[tuple[str, Rule]]:
    if (lengths := config.length) is not None:
        yield "length", lambda text, _: first_outside(_lengths(text, lengths))
    if config.language is not None:
        yield "language", language(config.language)
    if (qualities := config.gopher_quality) is not None:
        yield "gopher_quality", lambda text, _: quality(text, qualities)
    if (repetitions := config.gopher_repetition) is not None:
        yield "gopher_repetition", lambda text, _: repetition(text, repetitions)
    if (lines := config.c4) is not None:
        yield "c4", lambda text, _: c4(text, lines)
    if (kinds := config.pii) is not None:
        yield "pii", lambda text, _: pii(text, kinds)
    if config.decontaminate is not None:
        yield "decontaminate", decontaminate(config.decontaminate, ngrams)
    if config.filter is not None:
        yield "filter", own(config.filter, folder)


def _lengths(text: Text, limits: Length) -> Iterator[Measure]:
    yield Measure("characters", len(text.text), limits.min_chars, limits.max_chars or math.inf)
    if limits.min_words or limits.max_words:
        yield Measure("words", len(text.words), limits.min_words, limits.max_words or math.inf)
