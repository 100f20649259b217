"""`precision: fp8`: what a run asks for and is refused, which layers multiply in eight bits, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.eight_bits import model as small

from mega_common.errors import ConfigError
from mega_trainer.config.fp8_config import check_fp8_device
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.kernels.fp8_kernels import E4M3, E5M2, Fp8Kernels, Nvfp4Kernels
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.run.build_components import (
    build_pipeline_stages,
    build_schedule,
    connect_parallel_groups,
    make_fp8_kernels,
)
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]
MODEL = {"num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2, "vocab_size": 40}


def parsed(**sections: Any) -> RunConfig:
    raw = {"model": small(128, 3), "data": {"train": ["none"], "seq_length": 512}, "precision": "fp8", "fp8": {}}
    return RunConfig.parse(raw | sections)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"fp8": {"recipe": "delayed"}}, r"'delayed': is not supported.* -> set fp8.recipe=tensorwise"),
        ({"fp8": {"recipe": "nvfp4"}}, r"fp8.recipe = 'nvfp4': is not supported for experts -> set fp8.recipe=tensorwise"),
        ({"fp8": {"recipe": "nvfp4", "format": "e4m3"}}, r"'e4m3': is not supported with fp8.recipe = nvfp4.* -> remove fp8.format"),
        ({"fp8": {"bf16_first": 2, "bf16_last": 1}}, r"bf16_first = 2: must leave layers in FP8.* covers all 3 layers"),
        ({"model": small(24), "parallel": {"tp": 4}}, r"multiples of 16 on a rank, found .*head_dim / tp 4 = 24.* -> set precision=bf16, or reduce parallel.tp"),
        (
            {"model": small(64), "fp8": {"recipe": "blockwise"}, "parallel": {"tp": 4}},
            r"of 128 on a rank, found .*= 64.* -> set fp8.recipe=mxfp8, or set fp8.recipe=rowwise, or set fp8.recipe=tensorwise",
        ),
        ({"fp8": {"recipe": "blockwise"}, "parallel": {"cp": 4}}, r"seq_length = 512: must be a multiple of 1024 .* -> set data.seq_length=1024"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_way_out(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parsed(**sections)


def test_what_fits_is_taken() -> None:
    assert parsed(fp8={"recipe": "blockwise"}, parallel={"tp": 4}).fp8.recipe == "blockwise"


def test_a_gpu_without_the_products_is_refused_with_a_recipe_it_has() -> None:
    for capability, recipe, experts in (
        ((8, 9), "rowwise", False),
        ((9, 0), "blockwise", False),
        ((10, 0), "rowwise", True),
        ((10, 0), "nvfp4", False),
    ):
        check_fp8_device(capability, recipe, experts=experts)
    for capability, recipe, experts, way in (
        ((8, 0), "tensorwise", False, "set precision=bf16"),
        (
            (9, 0),
            "mxfp8",
            False,
            "set fp8.recipe=tensorwise, or set fp8.recipe=rowwise, or set fp8.recipe=blockwise, or set precision=bf16",
        ),
        (
            (9, 0),
            "nvfp4",
            False,
            "set fp8.recipe=tensorwise, or set fp8.recipe=rowwise, or set fp8.recipe=blockwise, or set precision=bf16",
        ),
        ((10, 0), "mxfp8", True, "set fp8.recipe=tensorwise, or set fp8.recipe=rowwise, or set precision=bf16"),
    ):
        with pytest.raises(ConfigError, match=f"{recipe}.* compute capability {capability[0]}") as refused:
            check_fp8_device(capability, recipe, experts=experts)
        assert refused.value.hint == way


def test_four_bits_on_a_gpu_require_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = {name: value for name, value in small(32).items() if name != "moe"}
    config = parsed(model=dense, fp8={"recipe": "nvfp4"})
    assert {type(kernels) for kernels in make_fp8_kernels(config, torch.device("cpu")).values()} == {Nvfp4Kernels}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ConfigError, match="nvfp4 requires Transformer Engine on a GPU") as refused:
        make_fp8_kernels(config, torch.device("cuda"))
    assert refused.value.hint == "set kernels.linear=te"


def test_layers_between_the_first_and_the_last_multiply_in_fp8() -> None:
    config = parsed(fp8={"recipe": "rowwise", "bf16_first": 1, "bf16_last": 1})
    groups = connect_parallel_groups(config, RankInfo())
    stages = build_pipeline_stages(
        config, LayerBuilder(config.model, groups, device=torch.device("meta")), build_schedule(config, groups)
    )
    for index, layer in enumerate(stages[0].layers):
        found = {isinstance(part.linear.gemms, Fp8Kernels) for part in (layer.mixer.work.out, layer.mixer.work.qkv)}
        assert found == {index == 1}
    assert isinstance(stages[0].layers[1].feed.work.experts.linear.keywords["kernels"], Fp8Kernels)


def test_the_format_of_gradients_follows_the_recipe_unless_it_is_given() -> None:
    for fp8, expected in (
        ({}, E5M2), ({"format": "e4m3"}, E4M3), ({"recipe": "mxfp8"}, E4M3), ({"recipe": "mxfp8", "format": "hybrid"}, E5M2),
    ):  # fmt: skip
        (kernels,) = set(make_fp8_kernels(parsed(fp8=fp8), torch.device("cpu")).values())
        assert isinstance(kernels, Fp8Kernels)
        assert kernels.gradients == expected


def trained(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights at the end of a run, and its optimizer's state."""
    state = run_training(RunConfig.parse(raw), RankInfo())
    return {
        name: box.tensor.detach().clone() for name, held in state.checkpoint_tensors().items() for box in held.boxes
    }


def test_a_run_goes_on_bit_for_bit_and_in_bf16_and_back(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def of(folder: str, steps: int, precision: str = "fp8") -> dict[str, Any]:
        raw = settings(train={"steps": steps}, precision=precision, output=str(tmp_path / folder))
        return {**raw, "model": MODEL, "fp8": {"bf16_last": 1}, "lr_schedule": {"name": "constant"}}

    straight = trained(of("straight", 3))
    trained(of("stopped", 1))
    resumed = trained(of("stopped", 3))
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    with caplog.at_level("INFO", "mega"):
        changed = trained(of("stopped", 4, "bf16"))
        trained(of("stopped", 5))
    assert "precision: 'fp8' -> 'bf16'" in caplog.text
    assert "precision: 'bf16' -> 'fp8'" in caplog.text
    assert changed.keys() == straight.keys()
    plain = trained(of("plain", 3, "bf16"))
    assert not all(torch.equal(plain[name], straight[name]) for name in straight)
