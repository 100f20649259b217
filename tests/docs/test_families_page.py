"""docs/families.md agrees with the families in the code."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from doc_pages import ROOT

from mega_ckpt.canonical_tensors import count_model_parameters
from mega_ckpt.families import detect_model_family


def load_script() -> Any:
    """Return the module that writes the page."""
    spec = importlib.util.spec_from_file_location("families_page", ROOT / "tools" / "families_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_families_page_is_up_to_date() -> None:
    script = load_script()
    assert script.PAGE.read_text(encoding="utf-8") == script.families_page(), "run python tools/families_page.py"


def test_current_models_are_taken_as_the_page_says() -> None:
    """A model that is taken natively is one whose config.json is read; of others the page says what is missing."""
    script = load_script()
    listed = {
        entry["name"]: entry for entry in map(json.loads, script.CONFIGS.read_text(encoding="utf-8").splitlines())
    }
    types = [model_type for _, model_type, _ in script.CURRENT]
    assert len(types) == len(set(types)) >= 56
    for (_, model_type, config), (_, _, support, count) in zip(script.CURRENT, script.current_models(), strict=True):
        if config:
            entry = listed[config]
            assert entry["config"]["model_type"].removesuffix("_text") == model_type
            family = detect_model_family(entry["config"], images=False)
            assert (
                count_model_parameters(family.restrict_to_stored(family.read_config_json(entry["config"]), ()))
                == entry["parameters"]
            )
            assert count.startswith(f"{entry['parameters'] / 1e9:,.2f} B")
            assert "natively" in support
        elif "natively" not in support.partition(";")[0]:
            assert "lacks: " in support or "has no such model" in support
    assert script.describe_support("gpt2") == "natively"
    assert "lacks: " in script.describe_support("ctrl")
