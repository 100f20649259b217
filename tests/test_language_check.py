"""The measures of tools/language_check.py count what they say."""

from __future__ import annotations

from pathlib import Path

import language_check
import pytest

NAMES = list(language_check.LIMITS)


@pytest.mark.parametrize(
    ("docstring", "measure"),
    [
        ("What a step returns.", NAMES[0]),
        ("Whether it is frozen.", NAMES[0]),
        ("Which rank holds it.", NAMES[0]),
        ("How many there are.", NAMES[0]),
        ("The same of a validation.", NAMES[1]),
        ("Of the next step.", NAMES[1]),
        ("Those with pieces.", NAMES[1]),
        ("Its family.", NAMES[1]),
        ("So many rows.", NAMES[1]),
        ("Return the rows\n    of a batch.", NAMES[2]),
        ("Return the rows.\n    They are sorted by", None),
        ("Return the rows (of a batch.)", None),
        ("Return the micro-batches.", None),
        ("Whatever-format reader.", None),
        ("Offset of a shard.", None),
    ],
)
def test_openings(tmp_path: Path, docstring: str, measure: str | None) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'def load_rows() -> None:\n    """{docstring}"""\n')
    values = language_check.measure([path], [])
    assert [name for name in NAMES[:3] if values[name][0] == 100] == ([measure] if measure else [])


def test_code_lines_leave_out_comments_docstrings_and_blank_lines() -> None:
    text = '"""Module."""\n\n# why\nTEXT = """two\nlines"""\n\n\ndef load() -> str:\n    """Return it.\n\n    Long.\n    """\n    return TEXT  # so\n'
    assert language_check.code_lines(text) == 4


def test_doubled_types_tells_and_name_lengths(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            "class Kind:\n    pass\n\n\n# told\ndef _private() -> None:\n    pass\n\n\n# ten\n"
        )
    values = language_check.measure(language_check.source_files([tmp_path]), [])
    assert values["type names defined in more than one module"] == (1, ["Kind in 2 modules"])
    assert values["tell/tells/told per 1,000 lines"][0] == 100
    assert values["mean length of a public function or class name"][0] == 4


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("# the run goes on", True),
        ("# so many ranks", True),
        ("# this is no tensor", True),
        ("# it is no longer used", False),
        ("# the run resumes", False),
    ],
)
def test_private_words(tmp_path: Path, line: str, counts: bool) -> None:
    (tmp_path / "one.py").write_text(line + "\n")
    measured = language_check.measure([tmp_path / "one.py"], [])
    assert bool(measured["private words per 1,000 lines"][1]) == counts


def test_code_blocks_of_pages_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```\nso many\n```\nso many\n")
    measured = language_check.measure([], [tmp_path / "page.md"])
    assert [place.rsplit(":", 1)[1] for place in measured["private words per 1,000 lines"][1]] == ["4 so many"]


def test_a_passed_limit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.py").write_text('def f() -> None:\n    """What it is."""\n')
    monkeypatch.setattr(language_check, "OURS", [tmp_path])
    assert language_check.main([]) == 1
    assert "FAILED docstrings that open with a wh-clause" in capsys.readouterr().out
