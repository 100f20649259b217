from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mega_common.errors import DataError, MissingPackageError
from mega_data.cleaning.clean_config import LanguageRule
from mega_data.cleaning.language_detection import build_language_rule
from mega_data.cleaning.quality_rules import DropDocumentVerdict
from mega_data.cleaning.text_words import AnalyzedText

ENGLISH = "The dog ran over the street and barked until it was tired."
GERMAN = "Der Hund lief über die Straße und bellte, bis er müde war."


def test_other_languages_and_none_go() -> None:
    pytest.importorskip("lingua", reason="tells languages")
    judge = build_language_rule(LanguageRule(keep=["en", "fr"]))
    assert judge(AnalyzedText(ENGLISH), {}) is None
    for value, code in ((GERMAN, "de"), ("123", "und"), ("", "und")):
        text = AnalyzedText(value)
        found = judge(text, {})
        assert isinstance(found, DropDocumentVerdict)
        assert (found.why, text.language) == (code, code)


def test_what_is_not_sure_goes() -> None:
    pytest.importorskip("lingua", reason="tells languages")
    found = build_language_rule(LanguageRule(keep=["en", "de"], min_confidence=1.0))(AnalyzedText("in"), {})
    assert isinstance(found, DropDocumentVerdict)


def test_a_detector_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lingua", None)
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(MissingPackageError, match="pip install lingua-language-detector"):
        build_language_rule(LanguageRule(keep=["en"]))
    with pytest.raises(MissingPackageError, match="pip install fasttext-predict"):
        build_language_rule(LanguageRule(keep=["en"], detector="fasttext", model=Path("m.ftz")))


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="reads its models")
    (tmp_path / "m.ftz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"m\.ftz: is not a fasttext model"):
        build_language_rule(LanguageRule(keep=["en"], detector="fasttext", model=tmp_path / "m.ftz"))
