from __future__ import annotations

from pathlib import Path

import pytest
from workflows import Flow


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow(tmp_path)
