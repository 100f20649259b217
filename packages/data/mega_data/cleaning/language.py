"""Which language a text is in, told by lingua (its models come with it) or by fasttext and a model of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mega_common.errors import DataError, MissingPackageError
from mega_data.cleaning.config import Language
from mega_data.cleaning.verdict import Drop, Record, Rule
from mega_data.cleaning.words import Text
from mega_data.reading.unpack import package

HEAD = 1000  # characters by which a text's language is told; more changes little and costs time

Detector = Callable[[str], tuple[str, float]]


def language(limits: Language) -> Rule:
    """The rule for documents in other languages, or in none that can be told.

    Raises:
        MissingPackageError: when the detector is not installed.
        DataError: when its model cannot be read.
    """
    detect = fasttext(limits.model) if limits.model else lingua()
    keep = frozenset(limits.keep)

    def judge(text: Text, _: Record) -> Drop | None:
        text.language, confidence = detect(text.text)
        if text.language not in keep:
            return Drop(text.language, f"confidence {confidence:.2f}")
        if confidence < limits.min_confidence:
            return Drop(f"confidence below {limits.min_confidence:g}", f"{text.language} {confidence:.2f}")
        return None

    return judge


def lingua() -> Detector:
    """Lingua's detector for all of its languages: ISO 639-1 code (`und` for none) and confidence.

    Raises:
        MissingPackageError: when it is not installed.
    """
    try:
        module = package("lingua", "languages")
    except MissingPackageError as error:
        raise MissingPackageError(error.message, hint="pip install lingua-language-detector") from None
    detector = module.LanguageDetectorBuilder.from_all_languages().with_low_accuracy_mode().build()

    def detect(text: str) -> tuple[str, float]:
        values = detector.compute_language_confidence_values(text[:HEAD])
        if not values or not values[0].value:
            return "und", 0.0
        return values[0].language.iso_code_639_1.name.lower(), values[0].value

    return detect


def fasttext(model: Path) -> Detector:
    """The detector of a fastText model whose labels are `__label__CODE`.

    Raises:
        MissingPackageError: when fasttext is not installed.
        DataError: when the model cannot be read.
    """
    try:
        module = package("fasttext", "languages by fasttext")
    except MissingPackageError as error:
        raise MissingPackageError(error.message, hint="pip install fasttext-predict") from None
    try:
        loaded = module.load_model(str(model))
    except ValueError as error:
        raise DataError(f"{model}: is no model that fasttext reads ({error})") from error

    def detect(text: str) -> tuple[str, float]:
        labels, confidences = loaded.predict(" ".join(text[:HEAD].split()))
        if not labels:
            return "und", 0.0
        return labels[0].removeprefix("__label__"), min(1.0, float(confidences[0]))

    return detect
