from __future__ import annotations

from dataclasses import replace

import pytest

from mega_common.model_config import ModelConfig
from mega_common.presets import preset
from mega_trainer.plan.flops import count_parameters
from mega_trainer.plan.like import Keeping, memory_like
from mega_trainer.plan.shape import RunShape

LLAMA = ModelConfig.parse(preset("llama3-8b"))
MIXTRAL = ModelConfig.parse(preset("mixtral-8x7b"))


@pytest.mark.parametrize(
    ("like", "run", "keeping", "published"),
    [  # torchtitan 2024-12 and dgxc-benchmarking v25.04.01; the first two tell what the allocator holds, and compile no loss
        ("fsdp2", RunShape(8192, 2, dp=8, zero=3, recompute="selective"), Keeping(logits=14), 77.0 * 2**30 / 1.04),
        ("fsdp2", RunShape(32_768, 1, dp=8, zero=3, recompute="full"), Keeping(logits=14, again=frozenset({"full"})), 83.9 * 2**30 / 1.04),
        ("megatron", RunShape(8192, 1, 32, cp=2, dp=4, zero=1), Keeping(gradients=2), 70_833_405_952),
    ],
)  # fmt: skip
def test_published_peaks(like, run, keeping, published) -> None:
    (told,) = memory_like(LLAMA, run, like, keeping)
    assert sum(told.values()) == pytest.approx(published, rel=0.05)


def test_states_are_all_parameters_and_stages_share_the_layers() -> None:
    run = RunShape(4096, 1, 8, tp=2, sp=True, pp=4, virtual_stages=2, ep=2, dp=4, zero=1)
    told = memory_like(MIXTRAL, run, "megatron")
    count = count_parameters(MIXTRAL)
    whole = sum(layer.whole for layer in count.layers)
    dense = (count.total - count.experts - whole - count.final_norm) / 2 + whole
    assert sum(rank["weights"] for rank in told) == pytest.approx(2 * (dense + count.experts / 2))
    assert sum(rank["optimizer"] for rank in told) == pytest.approx(12 * (dense / 4 + count.experts / 2 / 4))
    assert [rank["work"] > 0 for rank in told] == [False, False, False, True]
    assert told[0]["activations"] > told[-1]["activations"]


@pytest.mark.parametrize("part", ["norm", "activation", "mlp", "full"])
def test_what_is_computed_again_is_not_kept(part: str) -> None:
    run = RunShape(4096, 1, 8, dp=8, zero=1)
    all_kept, less = (
        memory_like(LLAMA, run, "megatron", Keeping(again=frozenset(again)))[0]["activations"]
        for again in ((), (part,))
    )
    assert less < 0.95 * all_kept
    shape = replace(run, recompute="full" if part == "full" else "selective", modules=(part,))
    assert memory_like(LLAMA, shape, "megatron")[0]["activations"] == less
