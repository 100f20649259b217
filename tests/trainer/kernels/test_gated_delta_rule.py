"""The gated delta rule in chunks against its recurrence and against transformers', for any cut of a sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.parallel.recurrent_state import pass_recurrent_states, scan_affine_maps

B, G, H, K, V = 2, 2, 4, 6, 5


def random_inputs(
    length: int, dtype: torch.dtype = torch.float64, *, per_channel: bool = False
) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v, g and beta; how far into its document each token is; a state before the first."""
    groups, widths = (H, (K,)) if per_channel else (G, ())
    stream = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream, dtype=torch.float64)

    operands = [draw(B, length, groups, K), draw(B, length, groups, K), draw(B, length, H, V)]
    operands += [-draw(B, length, H, *widths).exp(), draw(B, length, H).sigmoid()]
    new = torch.rand(B, length, generator=stream) < 0.2
    new[0, 0], new[1, 0] = True, False  # a row whose first document began before, and one whose did not
    reach = torch.zeros(B, length, dtype=torch.long)
    for t in range(length):
        reach[:, t] = torch.where(new[:, t], 0, (reach[:, t - 1] if t else 6) + 1)
    return [x.to(dtype) for x in operands], reach, draw(B, H, K, V)


def in_chunks(operands: list[Tensor], reach: Tensor | None, state: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """y, and the state behind the last token."""
    last = []

    def passed(maps: Tensor, added: Tensor) -> Tensor:
        before, behind = pass_recurrent_states(maps, added, state, CommGroup("cp"))
        last.append(behind)
        return before

    return gated_delta_rule(DeltaRuleInputs(*operands), SequenceChunks(1, size, reach), passed), last[0]


def recurrence(operands: list[Tensor], reach: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token."""
    q, k, v, g, beta = operands
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(H // q.shape[2], 2) for x in (q / K**0.5, k))
    out = []
    for t in range(v.shape[1]):
        if reach is not None:
            state = state * (reach[:, t] > 0)[:, None, None, None]
        state = g[:, t].reshape(B, H, -1, 1).exp() * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv,bh->bhkv", k[:, t], error, beta[:, t])
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


@given(st.integers(1, 24), st.integers(1, 9), st.booleans(), st.booleans())
def test_chunks_are_the_recurrence(length: int, chunk: int, closed: bool, per_channel: bool) -> None:
    operands, reach, state = random_inputs(length, per_channel=per_channel)
    seen = reach if closed else None
    mine = in_chunks(operands, seen, state, chunk)
    torch.testing.assert_close(mine, recurrence(operands, seen, state), rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(0, 24), max_size=3), st.integers(1, 9))
def test_a_sequence_in_parts_is_the_sequence(cuts: list[int], chunk: int) -> None:
    operands, reach, state = random_inputs(24)
    whole, parts = in_chunks(operands, reach, state, 8), []
    for start, stop in pairwise([0, *sorted(set(cuts) - {0, 24}), 24]):
        y, state = in_chunks([x[:, start:stop] for x in operands], reach[:, start:stop], state, chunk)
        parts.append(y)
    torch.testing.assert_close((torch.cat(parts, 1), state), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "chunk"), [(24, 17), (70, 37), (70, 64)])
def test_chunks_that_are_split_for_decays_per_channel(length: int, chunk: int) -> None:
    operands, reach, state = random_inputs(length, per_channel=True)
    mine = in_chunks(operands, reach, state, chunk)
    torch.testing.assert_close(mine, recurrence(operands, reach, state), rtol=1e-12, atol=1e-12)


def test_equal_decays_of_all_channels_are_a_decay_of_the_head() -> None:
    operands, reach, state = random_inputs(50, per_channel=True)
    operands[3] = operands[3][..., :1].expand_as(operands[3])
    head = [*operands[:3], operands[3][..., 0], operands[4]]
    torch.testing.assert_close(
        in_chunks(operands, reach, state, 40), in_chunks(head, reach, state, 40), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("length", "chunk", "per_channel"), [(11, 4, False), (11, 4, True), (40, 40, True)])
def test_gradients(length: int, chunk: int, per_channel: bool) -> None:
    operands, reach, state = random_inputs(length, per_channel=per_channel)
    leaves = [x.requires_grad_() for x in (*operands, state)]
    found = []
    for y, last in (in_chunks(operands, reach, state, chunk), recurrence(operands, reach, state)):
        found.append(torch.autograd.grad(y.sin().sum() + last.sin().sum(), leaves))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_stretch_of_tokens_is_an_affine_map_of_the_state(per_channel: bool) -> None:
    """The maps of its chunks one after another: what a rank needs to know of another's tokens."""
    operands, reach, state = random_inputs(11, per_channel=per_channel)
    whole: list[Tensor] = []

    def passed(maps: Tensor, added: Tensor) -> Tensor:
        unit = torch.eye(K, dtype=maps.dtype).expand(B, H, K, K)
        nothing = torch.zeros_like(state)
        whole.extend(
            [scan_affine_maps(maps, torch.zeros_like(maps), unit)[:, -1], scan_affine_maps(maps, added, nothing)[:, -1]]
        )
        return scan_affine_maps(maps, added, nothing)[:, :-1]

    gated_delta_rule(DeltaRuleInputs(*operands), SequenceChunks(1, 4, reach), passed)
    matrix, added = whole
    expected = recurrence(operands, reach, state)[1]
    torch.testing.assert_close(matrix @ state + added, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_it_is_transformers(name: str) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    operands, _, state = random_inputs(70, torch.float32)
    y, last = getattr(theirs, name)(
        *operands, initial_state=state.float(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    mine, mine_last = in_chunks(operands, None, state.float(), 64)
    torch.testing.assert_close((mine, mine_last), (y, last), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
def test_decays_per_channel_are_those_of_transformers(name: str) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    operands, _, state = random_inputs(70, torch.float32, per_channel=True)
    q, k, v, g, beta = operands
    expected = getattr(theirs, name)(
        q, k, v, g=g, beta=beta, initial_state=state.float(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(in_chunks(operands, None, state.float(), 64), expected, rtol=2e-6, atol=2e-6)


def test_low_precision_is_rounded_before_the_rule_and_not_within() -> None:
    operands, reach, state = random_inputs(40)
    low = [x.bfloat16() for x in operands[:3]] + [x.float() for x in operands[3:]]
    y, last = in_chunks(low, reach, state.float(), 16)
    exact = in_chunks([x.double() for x in low], reach, state, 16)
    assert (y.dtype, last.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last.double(), exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per_channel", [False, True])
def test_strong_decays_do_not_overflow(per_channel: bool) -> None:
    operands, reach, state = random_inputs(40, torch.float32, per_channel=per_channel)
    operands[3] = operands[3] * 100
    for x in operands:
        x.requires_grad_()
    y, _ = in_chunks(operands, reach, state.float(), 40)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), operands))
