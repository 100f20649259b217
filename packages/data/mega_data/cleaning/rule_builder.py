"""Rules of a configuration, in the order of their application, with decontamination and the user-defined rule."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import logger
from mega_data.cleaning.clean_config import CleanConfig, DecontaminationRule, LengthRule
from mega_data.cleaning.language_detection import build_language_rule
from mega_data.cleaning.quality_rules import (
    BoundedMeasure,
    CleaningRule,
    DropDocumentVerdict,
    TextRecord,
    apply_c4_rule,
    apply_gopher_quality_rule,
    apply_gopher_repetition_rule,
    apply_pii_rule,
    check_measure_bounds,
    load_bad_words,
)
from mega_data.cleaning.text_words import AnalyzedText, Hashes
from mega_data.reading.source_readers import iterate_document_texts


def build_custom_rule(name: str, folder: Path) -> CleaningRule:
    """Return the rule that calls the user's function `name` (`module:function`) with a record; False or a reason drops it.
    The module is in `folder` or installed.

    Raises:
        ConfigError: if the function cannot be imported.
    """
    judge_record = _import_function(name, folder)

    def judge(_: AnalyzedText, record: TextRecord) -> DropDocumentVerdict | None:
        try:
            answer = judge_record(dict(record))
        except Exception as error:
            raise DataError(f"filter {name} fails with {type(error).__name__}: {error}") from error
        if isinstance(answer, str):
            return DropDocumentVerdict(answer)
        if not isinstance(answer, bool):
            raise DataError(f"filter {name}: must return True, False or a reason, not {answer!r}")
        return None if answer else DropDocumentVerdict(name)

    return judge


def _import_function(name: str, folder: Path) -> Callable[[TextRecord], Any]:
    module_name, _, function_name = name.partition(":")
    try:
        module = _import_from_path(folder / f"{module_name}.py", module_name) or importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"filter {name}: {error}", hint=f"put {module_name}.py into {folder}, or install the module"
        ) from error
    if not callable(function):
        raise ConfigError(f"filter {name}: must be a function")
    return function  # type: ignore[no-any-return]


def _import_from_path(path: Path, name: str) -> ModuleType | None:
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hash_evaluation_ngrams(limits: DecontaminationRule) -> Hashes:
    """Return the hashes of all runs of `limits.ngram` words in the evaluation sets, sorted and unique, uint64.

    Raises:
        DataError: if a set cannot be read, or all texts are shorter than `ngram` words.
    """
    count, short, found = 0, 0, [np.zeros(0, np.uint64)]
    for text in _iterate_evaluation_texts(limits):
        ngrams = text.hash_word_ngrams(limits.ngram)
        count, short = count + 1, short + (not ngrams.size)
        found.append(ngrams)
    if short == count:
        raise DataError(
            f"{', '.join(limits.against)}: none of {count} texts has at least {limits.ngram} words",
            hint="reduce decontaminate.ngram, or set decontaminate.json_keys to the keys of the texts",
        )
    if short:
        logger.warning("decontaminate: %d of %d texts are shorter than %d words and are ignored",
                       short, count, limits.ngram)  # fmt: skip
    return np.unique(np.concatenate(found))


def _iterate_evaluation_texts(limits: DecontaminationRule) -> Iterator[AnalyzedText]:
    for key in limits.json_keys:
        yield from map(AnalyzedText, iterate_document_texts(limits.against, key))


def build_decontamination_rule(limits: DecontaminationRule, file: Path) -> CleaningRule:
    """Return the rule that drops documents with a run of words whose hash is in `file` (`hash_evaluation_ngrams`, .npy).
    Processes share the file by memory map.
    """
    evaluated = np.load(file, mmap_mode="r")

    def judge(text: AnalyzedText, _: TextRecord) -> DropDocumentVerdict | None:
        ngrams = text.hash_word_ngrams(limits.ngram)
        positions = np.searchsorted(evaluated, ngrams)
        hits = np.flatnonzero(evaluated[np.minimum(positions, evaluated.size - 1)] == ngrams)
        if not hits.size:
            return None
        words = " ".join(text.words[hits[0] : hits[0] + limits.ngram])
        return DropDocumentVerdict(f"{limits.ngram} words of an evaluation set", f"{hits.size} times, first: {words}")

    return judge


def build_cleaning_rules(config: CleanConfig, folder: Path, ngrams: Path) -> dict[str, CleaningRule]:
    """Return {name: rule} of every enabled cleaning rule except deduplication.

    `folder` may have the module of `filter`; `ngrams` is the file with the hashes of the evaluation sets.

    Raises:
        MegaError: if a package, a model, a file or a function of a rule is missing.
    """
    if config.c4 is not None and config.c4.bad_words is not None:
        load_bad_words(config.c4.bad_words)
    return dict(_build_rules(config, folder, ngrams))


def _build_rules(config: CleanConfig, folder: Path, ngrams: Path) -> Iterator[tuple[str, CleaningRule]]:
    if (lengths := config.length) is not None:
        yield "length", lambda text, _: check_measure_bounds(_measure_length(text, lengths))
    if config.language is not None:
        yield "language", build_language_rule(config.language)
    if (qualities := config.gopher_quality) is not None:
        yield "gopher_quality", lambda text, _: apply_gopher_quality_rule(text, qualities)
    if (repetitions := config.gopher_repetition) is not None:
        yield "gopher_repetition", lambda text, _: apply_gopher_repetition_rule(text, repetitions)
    if (lines := config.c4) is not None:
        yield "c4", lambda text, _: apply_c4_rule(text, lines)
    if (kinds := config.pii) is not None:
        yield "pii", lambda text, _: apply_pii_rule(text, kinds)
    if config.decontaminate is not None:
        yield "decontaminate", build_decontamination_rule(config.decontaminate, ngrams)
    if config.filter is not None:
        yield "filter", build_custom_rule(config.filter, folder)


def _measure_length(text: AnalyzedText, limits: LengthRule) -> Iterator[BoundedMeasure]:
    yield BoundedMeasure("characters", len(text.text), limits.min_chars, limits.max_chars or math.inf)
    if limits.min_words or limits.max_words:
        yield BoundedMeasure("words", len(text.words), limits.min_words, limits.max_words or math.inf)
