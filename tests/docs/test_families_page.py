"""docs/families.md agrees with the families in the code."""

from __future__ import annotations

import importlib.util

from doc_pages import ROOT


def test_families_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("families_page", ROOT / "tools" / "families_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.families_page(), "run python tools/families_page.py"
