"""The null GPU suite: `make test-null-gpu` runs it; elsewhere its tests are not collected."""

from __future__ import annotations

import ctypes

if not hasattr(ctypes.CDLL(None), "null_gpu_count"):
    collect_ignore_glob = ["test_*.py"]
