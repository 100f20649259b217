"""The one Function under all linear layers: a back end multiplies whatever the layout, and all of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.kernels.grouped import Rows
from mega_trainer.kernels.torch import TorchKernels
from mega_trainer.layout import Layout
from mega_trainer.mesh import build_groups
from mega_trainer.model.block import Block
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.rope import Rotary
from mega_trainer.parallel.deferred import Deferred
from mega_trainer.parallel.linear import Linear, grouped_linear

LENGTH = 8
DENSE = {
    "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 32,
    "max_position": LENGTH,
}  # fmt: skip
MLA = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "shared_ffn_hidden_size": 8}
MODELS = {  # with the number of products each way: a block's layers, those of experts apart
    "dense": (DENSE, 4, 0),
    "latent": ({**DENSE, "mla": MLA, "rope": {"interleaved": True}}, 7, 0),
    "experts": ({**DENSE, "moe": MOE}, 4, 2),
    "shared heads": ({**DENSE, "num_kv_heads": 1, "qkv_bias": True}, 4, 0),
}


class Counting(TorchKernels):
    """Counts its products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("linear", "grouped")):
            self.calls[name] += 1
        return super().__getattribute__(name)


def products_of_blocks() -> dict[str, list[dict[str, int]]]:
    """What the back end multiplies in a block's forward and backward, by model and layout."""
    out: dict[str, list[dict[str, int]]] = {}
    for name, (raw, *_) in MODELS.items():
        config, out[name] = ModelConfig.model_validate(raw), []
        for tp, sp in [(1, False), (2, False), (2, True)]:
            groups = build_groups(Layout(tp=tp, dp=2 // tp), dist.get_rank(), kv_heads=config.kv_heads)
            kernels = Counting()
            block = Block(Builder(config, groups, kernels, sp=sp), 0)
            turned = Rotary.of(config, config.rope).at(torch.arange(LENGTH)[None], torch.float32)
            x = torch.randn(1, LENGTH // 2 if sp else LENGTH, 16, requires_grad=True)
            block(x, Context(Sequences(LENGTH, x.device), turned)).sum().backward()
            out[name].append(dict(kernels.calls))
    return out


def test_a_back_end_multiplies_in_every_layout() -> None:
    for found in run_ranks(products_of_blocks, 2):
        for name, (_, plain, grouped) in MODELS.items():
            kinds = {"linear": plain, "linear_dx": plain, "linear_dw": plain}
            kinds |= {"grouped_linear": grouped, "grouped_dx": grouped, "grouped_dw": grouped} if grouped else {}
            assert found[name] == [kinds] * 3, name


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_only_gradients_that_are_wanted_are_computed(wanted: tuple[bool, bool]) -> None:
    x, weight = (torch.randn(3, 5, requires_grad=there) for there in wanted)
    kernels = Counting()
    Linear(kernels)(x, weight).sum().backward()
    expected = {"linear": 1, **({"linear_dx": 1} if wanted[0] else {}), **({"linear_dw": 1} if wanted[1] else {})}
    assert kernels.calls == expected


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5]])
def test_each_group_has_its_gradients(counts: list[int]) -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(5, 4), (3, 6, 4)])
    dy = torch.randn(5, 6, dtype=torch.float64)
    y = grouped_linear(x, weight, Rows.of(counts, x.device), TorchKernels())
    group = [g for g, count in enumerate(counts) for _ in range(count)]
    reference = torch.stack([F.linear(row, weight[g]) for row, g in zip(x, group, strict=True)])
    torch.testing.assert_close(y, reference)
    mine, theirs = (torch.autograd.grad([out], [x, weight], [dy]) for out in (y, reference))
    torch.testing.assert_close(mine, theirs)


def test_a_deferred_product_is_the_back_ends() -> None:
    kernels, later, weight = Counting(), Deferred(), torch.randn(5, 4, requires_grad=True)
    y = Linear(kernels, later)(torch.randn(3, 4), weight)
    torch.autograd.grad([y], [weight], [torch.ones_like(y)], allow_unused=True)
    assert kernels.calls["linear_dw"] == 0
    (product,) = later.take()
    gradient: Tensor = product.gradient()
    assert gradient.shape == weight.shape
    assert kernels.calls["linear_dw"] == 1
