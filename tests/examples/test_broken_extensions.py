"""Examples of extensions, each broken in one line: verification names the layer and the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extension_cases import EXAMPLES, SIZES

from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.verify.tiny_model import TinyRun
from mega_trainer.verify.verification import Verification

DIFFERENTIAL: dict[str, Any] = {"layers": ["differential+mlp"] * 2, "mixers": {"differential": {}}}
RETENTION: dict[str, Any] = {"layers": ["attention+mlp", "retention+mlp"], "mixers": {"retention": {}}}
# File, model, line, what it becomes, layout, and the kind and name of the first tensor that differs.
BROKEN: dict[str, tuple[str, dict[str, Any], str, str, str, tuple[str, str]]] = {
    "a forgotten reduction": (
        "differential_attention.py", DIFFERENTIAL, "(2 * self.size,), fill=1.0, partial_grad=True)",
        "(2 * self.size,), fill=1.0)", "tp=2 pp=2", ("gradient", "model.layers.1.self_attn.norm.weight"),
    ),
    "a head counted twice": (
        "differential_attention.py", DIFFERENTIAL, "self.norm(first - weight * second)",
        "self.norm(first - weight * second + first[..., -1:, :])", "tp=2 pp=2", ("activation", "model.layers.0.differential"),
    ),
    "a state not passed on": (
        "retention.py", RETENTION, "        q, k, v = parts\n",
        "        q, k, v = parts\n        states = states if chunks.spans == 1 else lambda maps, added: torch.zeros_like(added)\n",
        "cp=2 dp=2", ("activation", "model.layers.1.retention"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_verification_names_the_layer_and_the_tensor(name: str, tmp_path: Path) -> None:
    file, model, line, broken, layout, first = BROKEN[name]
    source = (EXAMPLES / file).read_text()
    assert source.count(line) == 1
    (tmp_path / file).write_text(source.replace(line, broken))
    raw = {
        "extensions": [str(tmp_path / file)], "model": {**SIZES, "num_layers": 2, **model}, "data": {"train": "none", "seq_length": 32},
    }  # fmt: skip
    tiny = TinyRun.from_run(RunConfig.parse(resolve_run_config(raw)))
    verification = Verification(tiny, only=layout)
    assert [row.problem for row in verification.run_checks()] != [""]
    report = verification.explain_failure()
    assert report.ranks == 2
    assert report.difference is not None
    assert (report.difference.kind, report.difference.name) == first
