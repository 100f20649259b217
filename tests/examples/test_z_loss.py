"""The example of a z-loss: its gradient, and the same step in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from extension_cases import EXAMPLES, SIZES
from first_steps import in_layouts
from ranks import run_ranks

from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.model.vocab_parallel_loss import TokenLossTargets, fused_linear_cross_entropy


def test_the_fused_loss_has_the_gradient_of_autograd() -> None:
    torch.manual_seed(0)
    hidden, head = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (9, 13))
    labels, weights = torch.randint(11, (9,)), torch.rand(9, dtype=torch.float64)

    def loss(log_probs: torch.Tensor, log_normalizers: torch.Tensor) -> torch.Tensor:
        return log_probs.square() + 0.3 * log_normalizers.square() * -log_probs

    for cap in (None, 2.0):
        logits = (hidden @ head.T)[:, :11]
        logits = logits if cap is None else cap * (logits / cap).tanh()
        log_probs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        expected = (loss(log_probs, logits.logsumexp(-1)) * weights).sum()
        group = CommGroup("tp", (0,))
        targets = TokenLossTargets(loss, labels, 13, group, cap, FusibleFunctionCompiler())
        found, _ = fused_linear_cross_entropy(hidden, head, labels, weights, group, 11, cap, soft=targets)
        torch.testing.assert_close(found, expected)
        pairs = zip(*(torch.autograd.grad(each, (hidden, head)) for each in (found, expected)), strict=True)
        for mine, reference in pairs:
            torch.testing.assert_close(mine, reference)


def test_every_layout_computes_what_one_process_computes(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for document in np.random.default_rng(0).integers(0, 61, (12, 40)):
            writer.add_document(document)
    run: dict[str, Any] = {
        "extensions": [str(EXAMPLES / "z_loss.py")], "model": {**SIZES, "num_layers": 2},
        "objective": {"kind": "z_loss", "options": {"weight": 0.1}}, "precision": "fp64",
        "data": {"train": str(tmp_path / "data"), "seq_length": 16, "split": "1,0,0"},
        "batch": {"micro": 1, "global": 4}, "train": {"steps": 2}, "output": str(tmp_path / "run"), "compile": False,
    }  # fmt: skip
    layouts = [{"tp": 4}, {"tp": 2, "sp": True, "pp": 2}, {"cp": 2, "tp": 2}, {"zero": 3}]  # one for each rank
    assert run_ranks(in_layouts, 4, [{**run, "parallel": parallel} for parallel in layouts]) == [[]] * 4
