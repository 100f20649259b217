"""Calibrated quantization: codes are the published algorithm's, and outputs on other texts change less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BASE, MOE, save_tiny
from torch import Tensor

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_ckpt.formats.calibrated_rounding import DAMPING, InputSecondMoments
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.weight_quantization import make_quantizer
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_eval.model_loading import load_inference_model
from mega_eval.weight_calibration import TextCalibration

SIZES = {**BASE, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 2}
SEQUENCES = torch.randint(61, (24, 32), generator=torch.Generator().manual_seed(0))


def save_model(folder: Path, **settings: object) -> Path:
    torch.manual_seed(1)
    save_tiny(
        folder,
        find_family_by_name("mixtral" if "moe" in settings else "llama"),
        ModelConfig.parse({**SIZES, **settings}),
    )
    return folder


def calibrate(model: Path) -> TextCalibration:
    return TextCalibration(model, tuple(SEQUENCES[:16]), "calibration.txt")


def round_one_by_one(weights: Tensor, moments: Tensor) -> Tensor:
    """Round the columns of `weights` to integers by the published equations, with an inverse for each column."""
    weights, left = weights.double().clone(), moments.double()
    left = left + DAMPING * left.diagonal().mean() * torch.eye(len(left), dtype=torch.float64)
    order = left.diagonal().argsort(descending=True).tolist()
    while order:
        column = order.pop(0)
        inverse = torch.linalg.inv(left[[column, *order]][:, [column, *order]])
        error = (weights[:, column] - weights[:, column].round()) / inverse[0, 0]
        weights[:, order] -= error[:, None] * inverse[0, 1:]
    return weights.round()


def test_codes_are_those_of_one_column_after_the_other() -> None:
    rng = torch.Generator().manual_seed(2)
    inputs = torch.randn(400, 150, generator=rng) @ torch.randn(150, 150, generator=rng)  # more than one block
    weights, moments = 2 * torch.randn(5, 150, generator=rng), inputs.T @ inputs
    found = InputSecondMoments.prepare(moments).compensate_rounding_error(
        weights, torch.ones(5, 150), lambda rows, scale: rows.round()
    )
    torch.testing.assert_close(found.round().double(), round_one_by_one(weights, moments))
    nearest, calibrated = ((((each - weights) @ inputs.T) ** 2).sum() for each in (weights.round(), found.round()))
    assert calibrated < 0.5 * nearest


@pytest.mark.parametrize(
    "name", ["hf fp8", "hf fp8-block", "hf int8", "hf int4", "hf int4-asym", "hf mxfp4", "mlx int4"]
)
def test_logits_change_less_than_by_rounding_to_the_nearest(name: str, tmp_path: Path) -> None:
    to, quantize = name.split()
    model = save_model(tmp_path / "model", **({"hidden_size": 128} if "block" in name else {}))
    exact, errors = _compute_logits(model), []
    for calibration in (None, calibrate(model)):
        out = tmp_path / f"{calibration}"
        options = ConvertOptions(quantize=quantize, calibration=calibration)
        convert_checkpoint(model, out, to, options=options)
        errors.append(float((_compute_logits(out) - exact).square().mean()))
        card = (out / "README.md").read_text()
        assert ("calibrated on 512 tokens of calibration.txt (GPTQ)." in card) == (calibration is not None)
        assert ("rounded to the nearest without calibration data" in card) == (calibration is None)
    assert errors[1] < 0.8 * errors[0]


def test_calibration_changes_codes_of_int4_and_no_zero_points() -> None:
    rng = torch.Generator().manual_seed(5)
    inputs, weights = torch.randn(300, 64, generator=rng) + 1, torch.randn(24, 64, generator=rng) + 0.5
    quantizer = make_quantizer("int4-asym", {"weight": (24, 64)})
    nearest, calibrated = (
        quantizer.encode(weights, torch.bfloat16, moments)
        for moments in (None, InputSecondMoments.prepare(inputs.T @ inputs))
    )
    low, high = weights.unflatten(1, (-1, 32)).aminmax(dim=-1)
    expected = (-15 * low / (high - low)).round().int()
    for parts in (nearest, calibrated):
        found = torch.stack([parts["weight_zero_point"] >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1)
        assert torch.equal(found, expected)
    assert not torch.equal(nearest["weight_packed"], calibrated["weight_packed"])


def _compute_logits(folder: Path) -> Tensor:
    """Return the logits of sequences that are not calibrated on."""
    model, positions = load_inference_model(folder), torch.arange(SEQUENCES.shape[1])[None]
    with torch.no_grad():
        x = model(model.embed_inputs(SEQUENCES[16:], positions), model.make_forward_context(positions))
        return model.compute_logits(x)


def test_experts_are_rounded_to_the_nearest_and_the_card_says_so(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", moe={**MOE, "ffn_hidden_size": 32})
    for calibration in (None, calibrate(model)):
        options = ConvertOptions(quantize="int8", calibration=calibration)
        convert_checkpoint(model, tmp_path / f"{calibration}", "hf", options=options)
    nearest, calibrated = (HfSource(tmp_path / name) for name in ("None", str(calibrate(model))))
    assert "weights are rounded to the nearest" in (tmp_path / str(calibrate(model)) / "README.md").read_text()
    for name in nearest.tensor_names():
        equal = torch.equal(nearest.read_tensor(name), calibrated.read_tensor(name))
        assert equal == ("self_attn" not in name), name


def test_other_texts_are_another_conversion() -> None:
    one, other = (TextCalibration("model", tuple(rows), "calibration.txt") for rows in (SEQUENCES[:16], SEQUENCES[8:]))
    assert str(one) != str(other)
    assert one.description == other.description


@pytest.mark.parametrize(
    ("to", "options", "expected"),
    [
        ("gguf", {"quantize": "q8_0"}, "--calibrate is not supported with --to gguf"),
        ("hf", {}, "--calibrate is not supported with --to hf without --quantize"),
        ("hf", {"quantize": "int4", "averaged": True}, "--calibrate is not supported with --ema"),
    ],
)
def test_calibration_requires_a_quantization_of_the_same_weights(
    to: str, options: dict[str, object], expected: str, tmp_path: Path
) -> None:
    calibrated = ConvertOptions(calibration=calibrate(tmp_path), **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=expected):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to, options=calibrated)


def test_activations_that_are_not_finite_are_refused() -> None:
    with pytest.raises(CheckpointError, match="activations that are not finite"):
        InputSecondMoments.prepare(torch.full((2, 2), torch.inf))
