"""Mamba-2 against transformers' mixer, its documents and starts, and a sequence split over context ranks in both ways."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F
from trainer.fake import builders

from mega_ckpt.tensor_pieces import TensorBox, boxes_by_name, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import CommTrafficCounter
from mega_trainer.distributed.process_groups import ProcessGroupCache, build_parallel_groups
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.mamba import MambaMixer
from mega_trainer.model.recurrent_mixer import RecurrentMixer
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.parallel.parameter_info import get_parameter_info

B, S, D, H, P, G, K = 2, 48, 12, 8, 3, 2, 5


def config(**mamba: Any) -> ModelConfig:
    sizes = {"num_heads": H, "head_dim": P, "state_size": K, "num_groups": G, "chunk_size": 7, **mamba}
    return ModelConfig.parse({
        "layers": ["mamba"], "hidden_size": D, "ffn_hidden_size": 8, "num_attention_heads": 4, "vocab_size": 8,
        "init_std": 0.5, "mamba": sizes,
    })  # fmt: skip


def build_mixer(build: LayerBuilder) -> MambaMixer:
    layer = MambaMixer(build, 0)
    initialize_weights(layer, 3)
    return layer


def load(layer: MambaMixer, weights: dict[str, Tensor]) -> None:
    """Take weights by their names behind `model.layers.0.mamba.`; all of them."""
    boxes = boxes_by_name(
        (parameter.detach(), get_parameter_info(parameter).pieces) for parameter in layer.parameters()
    )
    assert {name.removeprefix("model.layers.0.mamba.") for name in boxes} == weights.keys()
    for name, held in boxes.items():
        for box in held.boxes:
            copy_overlap(box, TensorBox((0,) * len(held.shape), weights[name.removeprefix("model.layers.0.mamba.")]))


def sequences(tokens: int = S, documents: np.ndarray | None = None) -> ForwardContext:
    outline = (
        None
        if documents is None
        else DocumentBounds.from_positions(np.tile(np.arange(tokens), (len(documents), 1)), documents)
    )
    return ForwardContext(
        SequenceMask(tokens, torch.device("cpu"), None if outline is None else outline.document_starts)
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("limit", [(0.0, None), (0.3, 0.6)])
def test_outputs_and_gradients_are_those_of_transformers(limit: tuple[float, float | None], bias: bool) -> None:
    """Its mixer takes another limit for that of the steps (huggingface/transformers#48989), so it is told the right one."""
    theirs = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h", reason="the oracle")
    settings = theirs.NemotronHConfig(
        hidden_size=D, mamba_num_heads=H, mamba_head_dim=P, ssm_state_size=K, n_groups=G, conv_kernel=3, chunk_size=8,
        use_bias=bias, use_conv_bias=not bias, layer_norm_epsilon=1e-5, layers_block_type=["mamba"],
    )  # fmt: skip
    torch.manual_seed(0)
    oracle = theirs.NemotronHMamba2Mixer(settings, 0)
    oracle.time_step_limit = (limit[0], float("inf") if limit[1] is None else limit[1])
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    layer = build_mixer(LayerBuilder(config(conv_kernel=3, bias=bias, conv_bias=not bias, dt_limit=limit)))
    rows, taps, names = [H * P, H * P, G * K, G * K, H], [H * P, G * K, G * K], ["z", "x", "B", "C", "dt"]
    weights = {name: getattr(oracle, name).detach() for name in ("A_log", "D", "dt_bias")}
    weights |= {f"{name}.weight": getattr(oracle, name).weight.detach() for name in ("norm", "out_proj")}
    for part, split in (
        ("in_proj", dict(zip(names, rows, strict=True))),
        ("conv1d", dict(zip("xBC", taps, strict=True))),
    ):
        fused = getattr(oracle, part)
        for which, tensor in (("weight", fused.weight.detach().squeeze(1)), ("bias", fused.bias)):
            if tensor is not None:
                pieces = zip(split, tensor.detach().split(list(split.values())), strict=True)
                weights |= {f"{part}.{name}.{which}": piece for name, piece in pieces}
    weights |= {"out_proj.bias": oracle.out_proj.bias.detach()} if bias else {}
    load(layer, weights)
    x = torch.randn(B, S, D, requires_grad=True)
    expected, y = oracle(x), layer(x, sequences())
    assert (y - expected).abs().max() <= 2e-6 * expected.abs().max()
    theirs_dx, dx = (torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, y))
    assert (dx - theirs_dx).abs().max() <= 5e-6 * theirs_dx.abs().max()


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    layer = build_mixer(LayerBuilder(config(), dtype=torch.float64))
    x, starts = torch.randn(B, S, D, dtype=torch.float64), [0, 1, 2, 9, 14, 30, S]
    documents = np.tile(np.repeat(np.arange(6), np.diff(starts)), (B, 1))
    y = layer(x, sequences(documents=documents))
    for begin, end in pairwise(starts):
        alone = layer(x[:, begin:end], sequences(end - begin))
        torch.testing.assert_close(y[:, begin:end], alone, rtol=1e-12, atol=1e-13)


def test_starts() -> None:
    """Of steps within bounds but for the floor, and of decays; the residual is one sum of one layer."""
    layer = build_mixer(LayerBuilder(config(num_heads=4096, head_dim=1, dt_init=[0.001, 0.1], dt_init_floor=0.002)))
    steps, decays = F.softplus(layer.dt_bias), layer.a_log.exp()
    assert steps.min().item() == pytest.approx(0.002, rel=1e-3)
    assert 0.09 < steps.max() < 0.1001
    assert steps.log().mean().item() == pytest.approx(np.log(0.01), abs=0.15)  # the floor is above 15 % of them
    assert 1 <= decays.min() < 1.1
    assert 15.9 < decays.max() <= 16.001
    assert (layer.skip == 1).all()
    assert layer.out.weight.std().item() == pytest.approx(0.5, rel=0.05)


def spread(states: bool, cp: int, maker: ProcessGroupCache) -> tuple[list[float], int, int]:
    """A layer on `cp` ranks against one process: errors of the output and of gradients, bytes of the
    forward, and the same by the formula."""
    torch.manual_seed(1)
    x, weights = torch.randn(B, S, D, dtype=torch.float64), torch.randn(B, S, D, dtype=torch.float64)
    documents = (torch.rand(B, S) < 0.15).cumsum(1).numpy()
    whole = build_mixer(LayerBuilder(config(), dtype=torch.float64))
    x.requires_grad_()
    expected = whole(x, sequences(documents=documents))
    gradients = torch.autograd.grad((expected * weights).sum(), [x, *whole.parameters()])
    log = CommTrafficCounter()
    groups = build_parallel_groups(ParallelLayout(cp=cp), dist.get_rank(), heads=[], maker=maker, log=log)
    layer = build_mixer(LayerBuilder(config(), groups, dtype=torch.float64, cp_kind="ring"))
    places = get_context_rank_token_indices(S, groups.cp)
    mine = x.detach()[:, places].requires_grad_()
    with mock.patch.object(RecurrentMixer, "_should_exchange_heads", return_value=not states):
        y = layer(mine, sequences(documents=documents))
    moved = sum(total for _, total in log.counts.values())
    own = list(torch.autograd.grad((y * weights[:, places]).sum(), [mine, *layer.parameters()]))
    for gradient in own[1:]:
        dist.all_reduce(gradient, group=groups.cp.process_group)
    wanted = [expected[:, places], gradients[0][:, places], *gradients[1:]]
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip([y, *own], wanted, strict=True)]
    seen, recurrence = torch.empty(B, S // cp, layer.widths[-1], dtype=torch.float64), layer.recurrence
    return errors, moved, recurrence.state_passing_bytes(seen) if states else recurrence.head_exchange_bytes(seen, 1)


def everywhere() -> list[tuple[list[float], int, int]]:
    maker, found = ProcessGroupCache(), []
    for cp in (2, 4, 8):
        mine = list(range(dist.get_rank() // cp * cp, dist.get_rank() // cp * cp + cp))
        groups = [dist.new_group(list(range(first, first + cp))) for first in range(0, 8, cp)]
        maker.groups_by_ranks[tuple(range(cp))] = groups[0]
        if mine[0] == 0:
            found += [spread(states, cp, maker) for states in (True, False)]
    return found


def test_states_passed_and_heads_exchanged_are_one_process_and_move_the_bytes_of_the_formulas() -> None:
    results = run_ranks(everywhere, 8)
    for errors, moved, formula in (one for rank in results for one in rank):
        assert max(errors) < 1e-12
        assert moved == formula
    assert [len(found) for found in results] == [6, 6, 4, 4, 2, 2, 2, 2]


@pytest.mark.parametrize(("tokens", "heads", "less"), [(4096, H, False), (64, H, True), (64, 6, False)])
def test_the_cheaper_way_is_taken_where_heads_can_be_shared(tokens: int, heads: int, less: bool) -> None:
    build = next(
        iter(builders(config(num_heads=heads, head_dim=64, state_size=64), ParallelLayout(cp=4), cp_kind="ring"))
    )
    recurrence = MambaMixer(build, 0).recurrence
    seen = torch.empty(1, tokens // 4, recurrence.convolved_channels)
    assert (recurrence.head_exchange_bytes(seen, 1) < recurrence.state_passing_bytes(seen)) == (tokens == 64)
    assert recurrence._should_exchange_heads(seen, 1) == less
