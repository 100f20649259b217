from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mega_common.errors import DataError, MissingPackageError
from mega_data.cleaning.config import Language
from mega_data.cleaning.language import language
from mega_data.cleaning.verdict import Drop
from mega_data.cleaning.words import Text

ENGLISH = "The dog ran over the street and barked until it was tired."
GERMAN = "Der Hund lief über die Straße und bellte, bis er müde war."


def test_other_languages_and_none_go() -> None:
    pytest.importorskip("lingua", reason="tells languages")
    judge = language(Language(keep=["en", "fr"]))
    assert judge(Text(ENGLISH), {}) is None
    for value, code in ((GERMAN, "de"), ("123", "und"), ("", "und")):
        text = Text(value)
        found = judge(text, {})
        assert isinstance(found, Drop)
        assert (found.why, text.language) == (code, code)


def test_what_is_not_sure_goes() -> None:
    pytest.importorskip("lingua", reason="tells languages")
    found = language(Language(keep=["en", "de"], min_confidence=1.0))(Text("in"), {})
    assert isinstance(found, Drop)


def test_a_detector_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lingua", None)
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(MissingPackageError, match="pip install lingua-language-detector"):
        language(Language(keep=["en"]))
    with pytest.raises(MissingPackageError, match="pip install fasttext-predict"):
        language(Language(keep=["en"], detector="fasttext", model=Path("m.ftz")))


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("fasttext", reason="reads its models")
    (tmp_path / "m.ftz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"m\.ftz: is no model"):
        language(Language(keep=["en"], detector="fasttext", model=tmp_path / "m.ftz"))
