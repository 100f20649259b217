"""One thread per process: the tests' ranks and workers share the cores, and more threads than cores make each slower."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
