"""Language detection by lingua (models included) or by fasttext with a given model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mega_common.errors import DataError, MissingPackageError
from mega_data.cleaning.clean_config import LanguageRule
from mega_data.cleaning.quality_rules import CleaningRule, DropDocumentVerdict, TextRecord
from mega_data.cleaning.text_words import AnalyzedText
from mega_data.reading.decompression import import_optional_package

HEAD = 1000  # characters used for detection; more change little and cost time

Detector = Callable[[str], tuple[str, float]]


def build_language_rule(limits: LanguageRule) -> CleaningRule:
    """Return the rule that drops documents whose language is not in `limits.keep` or has too low a confidence.

    Raises:
        MissingPackageError: if the detector is not installed.
        DataError: if its model cannot be read.
    """
    detect = load_fasttext_detector(limits.model) if limits.model else load_lingua_detector()
    keep = frozenset(limits.keep)

    def judge(text: AnalyzedText, _: TextRecord) -> DropDocumentVerdict | None:
        text.language, confidence = detect(text.text)
        if text.language not in keep:
            return DropDocumentVerdict(text.language, f"confidence {confidence:.2f}")
        if confidence < limits.min_confidence:
            return DropDocumentVerdict(
                f"confidence below {limits.min_confidence:g}", f"{text.language} {confidence:.2f}"
            )
        return None

    return judge


def load_lingua_detector() -> Detector:
    """Return a function that detects a text's language by the package lingua: (ISO 639-1 code or `und`, confidence).

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        module = import_optional_package("lingua", "language detection")
    except MissingPackageError as error:
        raise MissingPackageError(error.message, hint="pip install lingua-language-detector") from None
    detector = module.LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()

    def detect(text: str) -> tuple[str, float]:
        values = detector.compute_language_confidence_values(text[:HEAD])
        if not values or not values[0].value:
            return "und", 0.0
        return values[0].language.iso_code_639_1.name.lower(), values[0].value

    return detect


def load_fasttext_detector(model: Path) -> Detector:
    """Return a function that detects a text's language by a fastText model file: (code or `und`, confidence).
    The labels of the model must be `__label__CODE`.

    Raises:
        MissingPackageError: if fasttext is not installed.
        DataError: if the model cannot be read.
    """
    try:
        module = import_optional_package("fasttext", "language.detector: fasttext")
    except MissingPackageError as error:
        raise MissingPackageError(error.message, hint="pip install fasttext-predict") from None
    try:
        loaded = module.load_model(str(model))
    except ValueError as error:
        raise DataError(
            f"{model}: is not a fasttext model ({error})", hint="use a model such as lid.176.ftz"
        ) from error

    def detect(text: str) -> tuple[str, float]:
        labels, confidences = loaded.predict(" ".join(text[:HEAD].split()))
        if not labels:
            return "und", 0.0
        return labels[0].removeprefix("__label__"), min(1.0, float(confidences[0]))

    return detect
