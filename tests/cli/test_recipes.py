"""The recipes at the root: each is a legal run, and README.md tells what is predicted of it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "table.py"))


def test_each_recipe_runs_on_its_ranks_as_the_page_tells(table: dict[str, Any]) -> None:
    page = (FOLDER / "README.md").read_text()
    recipes = table["recipes"]()
    assert len(recipes) >= 12
    for name, (config, ranks) in recipes.items():
        config.check_world_size(ranks)
        assert table["begun"](name, config, ranks) in page, "python recipes/table.py"


@pytest.mark.long
def test_each_recipe_fits_an_h100(table: dict[str, Any]) -> None:
    for config, ranks in table["recipes"]().values():
        assert table["most_memory"](config, ranks) <= table["load_machine"]("h100").usable_memory_bytes
