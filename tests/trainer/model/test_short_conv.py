"""The short convolution against torch's own, document by document, on one rank and on several."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

from mega_ckpt.tensor_pieces import TensorBox, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.process_groups import ParallelGroups, ProcessGroupCache, build_parallel_groups
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.recurrent_mixer import ShortConvolution
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.optim.muon import is_hidden_matrix
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.parallel.parameter_info import get_parameter_info
from mega_trainer.parallel.tensor_parallel import SplitHeads

CONFIG = ModelConfig(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=8, vocab_size=8)
BLOCKS, TAPS, ROWS = [SplitHeads("x", 4, 3), SplitHeads("B", 1, 5), SplitHeads("C", 2, 2)], 4, 2
CHANNELS = sum(block.count * block.size for block in BLOCKS)


def build_convolution(groups: ParallelGroups, *, bias: bool = True) -> ShortConvolution:
    conv = ShortConvolution(LayerBuilder(CONFIG, groups, dtype=torch.float64), "conv1d", BLOCKS, TAPS, bias=bias)
    initialize_weights(conv, 3)
    return conv


def tensors(length: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """x, the gradient of y, and which document each token is of."""
    g = torch.Generator().manual_seed(length)
    x, dy = torch.randn(2, ROWS, length, CHANNELS, generator=g, dtype=torch.float64)
    return x, dy, (torch.rand(ROWS, length, generator=g) < 0.3).cumsum(-1).numpy()


def context(length: int, documents: np.ndarray | None) -> ForwardContext:
    begins = None if documents is None else DocumentBounds.from_positions(documents, documents).document_starts
    return ForwardContext(SequenceMask(length, torch.device("cpu"), begins))


def torchs(x: Tensor, weight: Tensor, bias: Tensor | None, documents: np.ndarray | None) -> Tensor:
    """Each document's tokens by themselves through torch's convolution of groups of one channel."""
    rows = []
    for row, numbers in zip(x, np.zeros(x.shape[:2]) if documents is None else documents, strict=True):
        lengths = [len(list(run)) for _, run in itertools.groupby(numbers.tolist())]
        parts = [F.pad(part.T[None], (TAPS - 1, 0)) for part in row.split(lengths)]
        rows.append(torch.cat([F.conv1d(part, weight[:, None], bias, groups=CHANNELS)[0].T for part in parts]))
    return F.silu(torch.stack(rows))


@pytest.mark.parametrize(("closed", "bias"), [(True, True), (False, False)])
def test_it_is_torchs_convolution_of_each_document(closed: bool, bias: bool) -> None:
    conv, (x, dy, documents) = build_convolution(ParallelGroups(), bias=bias), tensors(11)
    parameters = list(conv.parameters())
    seen = documents if closed else None
    x.requires_grad_()
    mine = conv(x, context(11, seen))
    expected = torchs(x, *parameters, *([] if bias else [None]), seen)
    torch.testing.assert_close(mine, expected)
    for one, other in zip(*(torch.autograd.grad(y, [x, *parameters], dy) for y in (mine, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_document_in_steps_is_the_document_at_once() -> None:
    conv, (x, _, _) = build_convolution(ParallelGroups()), tensors(11)
    with torch.no_grad():
        whole, tail, parts = conv(x, context(11, None)), x.new_zeros(ROWS, TAPS - 1, CHANNELS), []
        for part in x.split([1, 4, 1, 2, 3], 1):
            y, tail = conv.convolve_step(part, tail)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert tail.equal(x[:, -TAPS + 1 :])


def test_low_precision() -> None:
    """Sums are made in fp32, so that bf16 is off by the rounding of its inputs and its result alone."""
    conv, (x, _, documents) = build_convolution(ParallelGroups()), tensors(11)
    exact = conv(x, context(11, documents))
    low = conv.bfloat16()(x.bfloat16(), context(11, documents))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=2e-2, atol=2e-2)


def test_it_starts_even_within_a_bound_and_is_nothing_for_muon() -> None:
    weight, bias = build_convolution(ParallelGroups()).parameters()
    assert weight.abs().max() <= TAPS**-0.5
    assert weight.abs().max() > 0.9 * TAPS**-0.5
    assert abs(weight.mean()) < 0.1
    assert bias.std() > 0.1
    assert not is_hidden_matrix(weight)


Part = tuple[Tensor, Tensor, list[tuple[str, tuple[int, ...], Tensor]]]


def together(cases: list[tuple[ParallelLayout, int, bool]]) -> list[Part]:
    """y, the gradient of x, and those of the parameters with their names and places, of this rank."""
    maker, out = ProcessGroupCache(), []
    for layout, length, closed in cases:
        groups = build_parallel_groups(layout, dist.get_rank(), heads=[1, 2], maker=maker)
        conv, (x, dy, documents) = build_convolution(groups), tensors(length)
        places, channels = get_context_rank_token_indices(length, groups.cp), own(layout, groups.tp.rank)
        x, dy = x[:, places][..., channels].requires_grad_(), dy[:, places][..., channels]
        y = conv(x, context(length, documents if closed else None))
        y.backward(dy)
        grads = []
        for parameter in conv.parameters():
            assert parameter.grad is not None
            info = get_parameter_info(parameter)
            for group in (info.data, *info.grad_sync):
                all_reduce(parameter.grad, group)
            grads += [(piece.name, piece.global_offset, piece.local_view(parameter.grad)) for piece in info.pieces]
        assert x.grad is not None
        out.append((y.detach(), x.grad, grads))
    return out


def own(layout: ParallelLayout, rank: int) -> list[int]:
    """The channels of a tensor rank."""
    held, first = [], 0
    for block in BLOCKS:
        start = first + rank * block.count // layout.tp * block.size
        held += list(range(start, start + max(1, block.count // layout.tp) * block.size))
        first += block.count * block.size
    return held


# the chunks of the last are shorter than what is seen of the tokens before them
CASES = [
    (ParallelLayout(tp=2, cp=2), 16, True), (ParallelLayout(tp=4), 6, True), (ParallelLayout(cp=4), 32, False), (ParallelLayout(cp=4), 32, True),
    (ParallelLayout(cp=4), 8, False), (ParallelLayout(cp=4), 16, True),
]  # fmt: skip


def test_all_ranks_compute_what_one_does() -> None:
    ranks = run_ranks(together, 4, CASES)
    for number, (layout, length, closed) in enumerate(CASES):
        conv, (x, dy, documents) = build_convolution(ParallelGroups()), tensors(length)
        x.requires_grad_()
        y = conv(x, context(length, documents if closed else None))
        # channels that several ranks hold are used by each
        copies = [own(layout, rank) for rank in range(layout.tp)]
        uses = torch.tensor([sum(channel in held for held in copies) for channel in range(CHANNELS)])
        y.backward(dy * uses)
        wholes = {
            p.name: p.local_view(q.grad)
            for q in conv.parameters()
            for p in get_parameter_info(q).pieces
            if q.grad is not None
        }
        for rank, results in enumerate(ranks):
            groups = build_parallel_groups(layout, rank, heads=[1, 2], maker=Nobody())
            places, channels = get_context_rank_token_indices(length, groups.cp), own(layout, groups.tp.rank)
            mine, dx, grads = results[number]
            assert x.grad is not None
            torch.testing.assert_close(mine, y.detach()[:, places][..., channels], rtol=1e-12, atol=1e-12)
            expected = (x.grad / uses)[:, places][..., channels]
            torch.testing.assert_close(dx, expected, rtol=1e-12, atol=1e-12)
            for name, offset, grad in grads:
                part = torch.empty_like(grad)
                copy_overlap(TensorBox(offset, part), TensorBox((0,) * part.dim(), wholes[name]))
                torch.testing.assert_close(grad, part, rtol=1e-12, atol=1e-12)


class Nobody(ProcessGroupCache):
    def get_process_group(self, ranks: object) -> None:
        """No process group."""
