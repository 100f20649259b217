"""The null GPU suite: `make test-null-gpu` runs it; elsewhere its tests are not collected."""

from __future__ import annotations

import ctypes

import torch

if hasattr(ctypes.CDLL(None), "null_gpu_count"):
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans its attention by asking a real driver
else:
    collect_ignore_glob = ["test_*.py"]
