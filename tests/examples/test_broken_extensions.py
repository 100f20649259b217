"""Examples of extensions, each broken in one line: verification names the layer and the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from extension_cases import EXAMPLES, SIZES

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.verify.failure_location import find_first_differing_tensor
from mega_trainer.verify.tiny_model import TinyModelRun
from mega_trainer.verify.verification import Verification, parse_layout

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


def make_broken_run(folder: Path, file: str, line: str, broken: str, **sections: Any) -> TinyModelRun:
    """The tiny run of an example in which `line` is replaced."""
    source = (EXAMPLES / file).read_text()
    assert source.count(line) == 1
    (folder / file).write_text(source.replace(line, broken))
    raw = {"extensions": [str(folder / file)], "data": {"train": "none", "seq_length": 32}, **sections}
    model = {**SIZES, "num_layers": 2, **sections["model"]}
    return TinyModelRun.from_run(RunConfig.parse(resolve_run_config({**raw, "model": model})))


@pytest.mark.parametrize("name", BROKEN)
def test_verification_names_the_layer_and_the_tensor(name: str, tmp_path: Path) -> None:
    file, model, line, broken, layout, first = BROKEN[name]
    verification = Verification(make_broken_run(tmp_path, file, line, broken, model=model), only=layout)
    assert [row.problem for row in verification.run_checks()] != [""]
    report = verification.explain_failure()
    assert report.ranks == 2
    assert report.difference is not None
    assert (report.difference.kind, report.difference.name) == first


def test_a_state_that_chunks_do_not_pass_on_is_found_in_one_process(tmp_path: Path) -> None:
    line, broken = (
        "        q, k, v = parts\n",
        "        q, k, v, states = *parts, lambda maps, added: torch.zeros_like(added)\n",
    )
    model = {**RETENTION, "mixers": {"retention": {"chunk_size": 4}}}
    rows = Verification(make_broken_run(tmp_path, "retention.py", line, broken, model=model)).run_checks()
    assert "gradients" in next(row.problem for row in rows if row.check == "chunk size")


def test_an_error_of_one_process_names_the_line_of_the_extension(tmp_path: Path) -> None:
    line = "self.retain, conv_input, (), context).to(x.dtype)).flatten(-2)"
    tiny = make_broken_run(tmp_path, "retention.py", line, line.replace(".to(x.dtype)", ""), model=RETENTION)
    with pytest.raises(ConfigError, match=r"bf16 against fp32\): .*, called from .*/retention\.py:\d+"):
        list(Verification(tiny).run_checks())


DEPTHS: dict[str, Any] = {"layers": ["attention+depths"] * 2, "feed_forwards": {"depths": {}}}
DENSE: dict[str, Any] = {"layers": ["attention+mlp"] * 2}
FUNCTIONS = {**DENSE, "norm": "mean_size", "activation": "relu_gate", "position": "neighbors"}
Z_LOSS, SCHEDULE_FREE = {"objective": {"kind": "z_loss"}}, {"optimizer": {"name": "schedule_free_adamw"}}
# File, model, further sections of run.yaml, line, what it becomes, layout, and the kind and name of the first tensor that differs.
FURTHER: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str, str, tuple[str, str]]] = {
    "differential attention: a mean over the heads of this rank": (
        "differential_attention.py", DIFFERENTIAL, {}, "self.out(y.flatten(-2)", "self.out((y - y.mean(-2, True)).flatten(-2)",
        "tp=2", ("activation", "model.layers.0.differential"),
    ),
    "retention: a forgotten reduction": (
        "retention.py", RETENTION, {}, "fill=1.0, partial_grad=True)", "fill=1.0)",
        "tp=2", ("gradient", "model.layers.1.retention.norm.weight"),
    ),
    "retention: heads numbered from 0 on each rank": (
        "retention.py", RETENTION, {}, "range(tp.rank * heads // tp.size, (tp.rank + 1) * heads // tp.size)", "range(heads // tp.size)",
        "tp=2", ("activation", "model.layers.1.retention"),
    ),
    "mixture of depths: a gradient counted twice": (
        "mixture_of_depths.py", DEPTHS, {}, "fill=options.bias)", "fill=options.bias, partial_grad=True)",
        "tp=2", ("gradient", "model.layers.1.mlp.router.bias"),
    ),
    "mixture of depths: a mean over the tokens of this rank": (
        "mixture_of_depths.py", DEPTHS, {}, "self.linear(x, self.weight", "self.linear(x - x.mean(1, True), self.weight",
        "cp=2", ("activation", "model.layers.0.mlp"),
    ),
    "mixture of depths: a router that differs between ranks": (
        "mixture_of_depths.py", DEPTHS, {}, "self.threshold = options.threshold", "self.threshold = options.threshold + 0.2 * build.groups.tp.rank",
        "tp=2", ("activation", "model.layers.0.mlp"),
    ),
    "z-loss: a mean over the tokens of a micro-batch": (
        "z_loss.py", DENSE, Z_LOSS, "log_normalizers.square()", "log_normalizers.mean().square()", "dp=2", ("loss", "of rank 0"),
    ),
    "z-loss: the first token counted with each": (
        "z_loss.py", DENSE, Z_LOSS, "-log_probs + ", "-log_probs - log_probs[:1] + ", "dp=2", ("loss", "of rank 0"),
    ),
    "z-loss: a sum over the tokens before": (
        "z_loss.py", DENSE, Z_LOSS, "log_normalizers.square()", "log_normalizers.cumsum(0).square()", "cp=2", ("loss", "of rank 0"),
    ),
    "schedule-free: a mean over this rank's slice": (
        "schedule_free.py", DENSE, SCHEDULE_FREE, "(second / (1 - beta2**step))", "(second.mean() / (1 - beta2**step))",
        "dp=2 zero=1", ("update", "optimizer/z/lm_head.weight"),
    ),
    "schedule-free: a gradient divided by the norm of its slice": (
        "schedule_free.py", DENSE, SCHEDULE_FREE, "addcmul_(grad, grad,", "addcmul_(grad, grad / grad.norm(),", "dp=2 zero=1", ("update", "optimizer/exp_avg_sq/lm_head.weight"),
    ),
    "schedule-free: a state reset on its first element": (
        "schedule_free.py", DENSE, SCHEDULE_FREE, "        mean.lerp_(z, 1 / step)\n", "        mean.lerp_(z, 1 / step)\n        z[0] = 0\n",
        "dp=2 zero=1", ("update", "optimizer/z/model.layers.0.mlp.gate_proj.weight"),
    ),
    "norm: a mean over the tokens of this rank": (
        "model_functions.py", FUNCTIONS, {}, "x.abs().mean(-1, keepdim=True)", "x.abs().mean(1, keepdim=True)",
        "tp=2 sp=True", ("activation", "model.layers.0.attention"),
    ),
    "activation: a mean over the channels of this rank": (
        "model_functions.py", FUNCTIONS, {}, "options.power) * up", "options.power) * (up - up.mean(-1, keepdim=True))",
        "tp=2", ("activation", "model.layers.0.mlp"),
    ),
    "position encoding: tokens numbered from 0 on each rank": (
        "model_functions.py", FUNCTIONS, {}, "angles = positions[..., None, None]", "angles = torch.arange(x.shape[1])[:, None, None]",
        "cp=2", ("activation", "model.layers.0.attention"),
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER)
def test_the_first_tensor_that_differs_is_named(name: str, tmp_path: Path) -> None:
    file, model, sections, line, broken, layout, first = FURTHER[name]
    tiny = make_broken_run(tmp_path, file, line, broken, model=model, **sections)
    difference = find_first_differing_tensor(parse_layout(tiny, layout))
    assert difference is not None
    assert (difference.kind, difference.name) == first
