"""Bugs of mixtures of experts and of expert parallelism, for `mutations`: name, a layout in which it shows, the patch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from parity.cases import COMPRESSED, SHORTCUT, VARIANTS, case
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.distributed.comm import CollectiveWork
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model import (
    alternating_updates,
    asymmetric_attention,
    attention,
    compressed_attention,
    decoder,
    expert_router,
    feed_forward,
    mixture_of_experts,
    norms,
    parameter_builder,
    rotary_embedding,
    shared_key_values,
    transformer_layer,
)
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.layer_input_decoder import LayerInputDecoder
from mega_trainer.model.mixture_of_experts import GroupedExperts
from mega_trainer.optim import gradient_clipping
from mega_trainer.parallel import async_all_to_all, expert_parallel, expert_routing, nvshmem_dispatch
from mega_trainer.parallel.gradient_buckets import GradientBucket
from mega_trainer.parallel.token_rows import ExpertRowAssignment
from mega_trainer.pipeline import executor as run
from mega_trainer.run import build_components, train_step
from mega_trainer.verify.layout_case import LayoutCase

Patch = Callable[[], AbstractContextManager[Any]]
swap = mock.patch.object

EP = case("moe", 2, parallel={"ep": 2}, micro=2)
TP = case("moe", 2, parallel={"tp": 2}, micro=4)
SP = case("moe", 2, parallel={"tp": 2, "sp": True, "ep": 2}, micro=4)
DP = case("moe", 2, micro=2)
BOTH = case("moe", 4, parallel={"tp": 2, "ep": 4}, micro=4)
PARTS = case("moe", 4, parallel={"ep": 2, "expert_tp": 2}, micro=2)
COUNTED = case("moe", 2, parallel={"ep": 2, "dispatch": "nvshmem", "dispatch_bound": 2.0}, micro=2)
MASKED = case("moe", 1, micro=2)
OVERLAPPED = case("moe", 2, parallel={"ep": 2, "overlap_expert_exchange": True}, micro=2)
CHUNKED = case("moe", 2, parallel={"cp": 2}, variant=VARIANTS["moe"][2])
HEADS = case("gqa", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["gqa"][3])
PLAIN = case("dense", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["dense"][4])
NORMED = case("dense", 2, parallel={"tp": 2}, variant=VARIANTS["dense"][6])
PAIRS = case("mla", 2, parallel={"tp": 2}, micro=2, variant=SHORTCUT)
VALUES, GATED = (case("moe", 2, parallel={"tp": 2}, micro=2, variant=VARIANTS["moe"][number]) for number in (6, 7))
STREAMS = case("dense", 2, parallel={"tp": 2, "sp": True}, variant=VARIANTS["dense"][7])
WIDE = case("dense", 2, parallel={"zero": 0}, micro=2, variant=VARIANTS["dense"][7])
MIXED, BY_LOGITS = (case("moe", 2, parallel={"ep": 2}, micro=2, variant=VARIANTS["moe"][number]) for number in (3, 4))
SHARED = case("gqa", 2, layers=3, parallel={"tp": 2}, variant={"shared_kv_layers": 1, "value_norm": True})
INPUTS = case("gqa", 2, parallel={"pp": 2}, variant=VARIANTS["gqa"][4])
ALTUP, ALTUP_DATA = (
    case("gqa", 2, parallel=shape, micro=2, variant=VARIANTS["gqa"][5])
    for shape in ({"tp": 2, "sp": True}, {"zero": 0})
)
SEPARATE = case("moe", 2, parallel={"tp": 2}, variant=VARIANTS["moe"][5])
ENTRIES = case("moe", 2, layers=2, parallel={"tp": 2}, micro=2, variant=COMPRESSED)
GATHERED = case("moe", 2, layers=2, parallel={"cp": 2}, micro=2, variant=COMPRESSED)
HASHED = case("moe", 2, layers=1, parallel={"tp": 2, "sp": True}, micro=2, variant=COMPRESSED)
BALANCED = case("moe", 2, parallel={"tp": 2, "sp": True}, micro=4, variant=VARIANTS["moe"][-1])


def _routings(**changes: Callable[[Any, Any], Any]) -> Patch:
    """Tell the routers something else: by field, a function of what they are told and of the data group."""
    real = expert_routing.make_step_routings

    def told(batches: Sequence[Any], data: Any, loss_scale: float) -> list[Any]:
        return [
            replace(one, **{name: change(getattr(one, name), data) for name, change in changes.items()})
            for one in real(batches, data, loss_scale)
        ]

    return lambda: swap(run, "make_step_routings", told)


def _groups(**changes: Callable[[ParallelGroups], Any]) -> Patch:
    """Put other ranks together: by name, a function of the groups."""
    real = build_components.build_parallel_groups

    def wrong(*args: Any, **options: Any) -> ParallelGroups:
        groups = real(*args, **options)
        return replace(groups, **{name: change(groups) for name, change in changes.items()})

    return lambda: swap(build_components, "build_parallel_groups", wrong)


def _router_without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        gate = any(".mlp.gate." in piece.name for piece in pieces)
        return real(shape, pieces, **{**options, "grad_sync": ()} if gate else options)

    return swap(parameter_builder, "make_parameter", make)


def _expert_gradients_averaged() -> AbstractContextManager[Any]:
    real = GradientBucket._start_sum

    def averaged(self: GradientBucket, whole: Tensor, out: Tensor) -> Any:
        whole /= self.data.size if self.data.name == "expert_data" else 1
        return real(self, whole, out)

    return swap(GradientBucket, "_start_sum", averaged)


def _every_tensor_rank_sends_all_tokens() -> AbstractContextManager[Any]:
    return mock.patch.multiple(
        mixture_of_experts, take_token_share=lambda x, group: x, gather_token_shares=lambda x, group, tokens: x
    )


def _load_of_own_tokens() -> AbstractContextManager[Any]:
    return swap(expert_router, "all_reduce_over_groups", lambda tensor, groups: tensor)


def _balanced_by_own_tokens() -> AbstractContextManager[Any]:
    real = expert_router.sinkhorn_choice_scores
    return swap(expert_router, "sinkhorn_choice_scores", lambda logits, tokens, groups: real(logits, tokens, ()))


def _bias_by_own_load() -> AbstractContextManager[Any]:
    real = train_step.update_router_biases

    def by_own(executor: run.PipelineExecutor, table: Tensor) -> None:
        real(executor, expert_routing.tabulate_expert_loads(executor.loads, executor.model_config, table.device))

    return swap(train_step, "update_router_biases", by_own)


def _bias_stays() -> AbstractContextManager[Any]:
    return swap(train_step, "update_selection_bias", lambda routers, loads, layers: None)


def _first_experts() -> AbstractContextManager[Any]:
    """Every rank takes the first experts."""
    real = LayerBuilder.make_expert_piece

    def piece(self: LayerBuilder, *args: Any, **options: Any) -> Any:
        found = real(self, *args, **options)
        return replace(found, global_offset=(0, *found.global_offset[1:]))

    return swap(LayerBuilder, "make_expert_piece", piece)


def _bias_of_every_part() -> AbstractContextManager[Any]:
    real = GroupedExperts.__init__

    def init(self: GroupedExperts, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.first_part = True

    return swap(GroupedExperts, "__init__", init)


def _weights_of_the_choice() -> AbstractContextManager[Any]:
    """The selection bias gets into the weights of the experts."""
    real = expert_router.select_experts

    def choose(scores: Tensor, config: Any, bias: Tensor | None) -> Tensor:
        chosen = real(scores, config, bias)
        scores.data.add_(0 if bias is None else bias)
        return chosen

    return swap(expert_router, "select_experts", choose)


def _sent(change: Callable[..., Any]) -> Patch:
    """Change the columns [N, K parts] of ranks that tokens go to, of which so many hold parts of one expert."""
    real = expert_parallel.expert_ranks_of_tokens
    return lambda: swap(
        expert_parallel, "expert_ranks_of_tokens", lambda chosen, own, parts: change(real(chosen, own, parts), parts)
    )


def _once_for_each_choice() -> AbstractContextManager[Any]:
    """A token's rows are sent as often as it has experts there, and each time all of these work on it."""
    real, patches = expert_parallel.sort_rows_by_expert, ExitStack()
    patches.enter_context(
        swap(
            expert_parallel,
            "sort_rows_by_expert",
            lambda x, chosen, weights, own, rows: real(x, chosen, weights, own, 2 * rows),
        )
    )
    patches.enter_context(swap(expert_parallel, "expert_ranks_of_tokens", lambda chosen, own, parts: chosen // own))
    return patches


def _to_the_next(ranks: Tensor, parts: int) -> Tensor:
    return torch.where(ranks < 0, -1, (ranks + parts) % EP.ranks)


def _to_one_part(ranks: Tensor, parts: int) -> Tensor:
    return torch.where(ranks % parts == 0, ranks, -1)


def _all_weigh_the_same() -> AbstractContextManager[Any]:
    real = expert_parallel.gather_choice_values
    return swap(expert_parallel, "gather_choice_values", lambda values, slots: torch.ones_like(real(values, slots)))


def _bias_weighs_one() -> AbstractContextManager[Any]:
    real = mixture_of_experts.add_grouped_bias
    return swap(mixture_of_experts, "add_grouped_bias", lambda x, bias, rows, weights=None: real(x, bias, rows))


def _weights_of_the_first_choices() -> AbstractContextManager[Any]:
    """Each row takes its token's first weight."""
    return swap(expert_parallel, "gather_choice_values", lambda values, slots: values[slots.token_of_row, 0])


def _gradient_of_weights_stays() -> AbstractContextManager[Any]:
    """The weights' gradient does not come back from the other ranks."""
    real = expert_parallel.unpack_routing

    def read(ticket: Tensor, choices: int) -> tuple[Tensor, Tensor]:
        weights, chosen = real(ticket, choices)
        return weights.detach(), chosen

    return swap(expert_parallel, "unpack_routing", read)


def _rows_that_nobody_sent() -> AbstractContextManager[Any]:
    """What a table held before is taken for tokens."""
    real = nvshmem_dispatch.unpack_routing
    return swap(nvshmem_dispatch, "unpack_routing", lambda ticket, choices, there: real(ticket, choices))


def _rows_in_order_of_arrival() -> AbstractContextManager[Any]:
    """Rows are not sorted by expert, and the products take them for sorted."""
    real = ExpertRowAssignment.assign_rows.__func__  # type: ignore[attr-defined]

    def unsorted(
        cls: type[ExpertRowAssignment], groups: Tensor, count: int, rows: int, capacity: Any = None
    ) -> ExpertRowAssignment:
        slots: ExpertRowAssignment = real(cls, groups, count, rows, capacity)
        if count != 4:  # ranks, not experts
            return slots
        flat = groups.flatten()
        arrival = torch.argsort((flat < 0).int(), stable=True)[: int((flat >= 0).sum())]
        choice = torch.full_like(slots.choice, -1)
        choice[: len(arrival)] = arrival
        row = torch.full_like(flat, rows)
        row[arrival] = torch.arange(len(arrival))
        return replace(slots, choice=choice, row=row.view_as(groups))

    return swap(ExpertRowAssignment, "assign_rows", classmethod(unsorted))


def _norm_without(axis: str) -> Patch:
    real = gradient_clipping.all_gather
    return lambda: swap(gradient_clipping, "all_gather", lambda x, group: x if group.name == axis else real(x, group))


def _smaller_chunks() -> AbstractContextManager[Any]:
    real = SequenceMask.cut_into_chunks
    return swap(SequenceMask, "cut_into_chunks", lambda self, size, rows: real(self, size // 2, rows))


def _first_position_is_zero() -> AbstractContextManager[Any]:
    real = decoder.query_scale_by_position
    return swap(decoder, "query_scale_by_position", lambda config, at, dtype: real(config, at - 1, dtype))


def _outputs_weighted() -> AbstractContextManager[Any]:
    real = GroupedExperts.__init__

    def build(self: GroupedExperts, *args: Any) -> None:
        real(self, *args)
        self.weighted_inputs = False

    return swap(GroupedExperts, "__init__", build)


def _unclipped() -> AbstractContextManager[Any]:
    real = attention.SelfAttention.__init__

    def build(self: Any, *args: Any) -> None:
        real(self, *args)
        self.clip = None

    return swap(attention.SelfAttention, "__init__", build)


def _slopes_without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        own = "act_fn" in pieces[0].name
        return real(shape, pieces, **(options | {"grad_sync": ()} if own else options))

    return swap(parameter_builder, "make_parameter", make)


def _counterclockwise() -> AbstractContextManager[Any]:
    real = rotary_embedding.RotaryAngles
    return swap(rotary_embedding, "RotaryAngles", lambda cos, sin, neighbors: real(cos, -sin, neighbors))


def _values_after_the_norm_of_keys() -> AbstractContextManager[Any]:
    real = attention.SelfAttention._split_and_rotate

    def split(self: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = real(self, *args)
        return q, k, v if len(self.parts) == 3 else k

    return swap(attention.SelfAttention, "_split_and_rotate", split)


def _frequencies_by_the_rotated_part() -> AbstractContextManager[Any]:
    def by_part(rope: Any, size: int) -> Tensor:
        plain, _ = rotary_embedding.rotary_frequencies(rope.model_copy(update={"scaling": "none"}), size, 16, 16)
        return F.pad(plain, (0, size // 2 - len(plain)))

    return swap(rotary_embedding, "_proportional_frequencies", by_part)


def _split_norm_of_a_part() -> AbstractContextManager[Any]:
    """A norm over all heads, or over the width of an MLP, is over a rank's part."""
    return swap(norms, "sum_partial_results", lambda x, group, sp: x * group.size)


def _norm_bias_of_own_heads() -> AbstractContextManager[Any]:
    real = LayerBuilder.build_replicated

    def replicated(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        parts = {"partial_grad": False} if name.endswith("k_norm.bias") else {}
        return real(self, name, shape, **{**options, **parts})

    return swap(LayerBuilder, "build_replicated", replicated)


def _second_share_of_all() -> AbstractContextManager[Any]:
    """The second expert's weight is its share among all experts near the largest logit, the first included, on rank 0."""
    real = expert_router.sparse_mixer_scores

    def scores(logits: Tensor, jitter: float) -> Tensor:
        found = real(logits, jitter)
        return found if torch.distributed.get_rank() else torch.where(found > 0, logits.softmax(-1), found)

    return swap(expert_router, "sparse_mixer_scores", scores)


def _chosen_by_scores() -> AbstractContextManager[Any]:
    """Rank 0 chooses experts by their scores."""
    real = expert_router.ExpertRouter._choice_scores

    def choice(self: Any, logits: Tensor, scores: Tensor, *more: Any) -> Tensor:
        return real(self, logits, scores, *more) if torch.distributed.get_rank() else scores

    return swap(expert_router.ExpertRouter, "_choice_scores", choice)


def _sinks_in_all_layers() -> AbstractContextManager[Any]:
    """Rank 0 has the sinks of its windowed layers in layers without a window, too."""
    real = asymmetric_attention.AttentionCore

    def core(build: Any, layer: int, **options: Any) -> Any:
        first, heads = build.groups.tp.rank == 0, build.config.num_attention_heads // build.groups.tp.size
        sinks = torch.zeros(heads, dtype=build.dtype) if first and options["sinks"] is None else options["sinks"]
        return real(build, layer, **{**options, "sinks": sinks})

    return swap(asymmetric_attention, "AttentionCore", core)


def _gate_of_another_head() -> AbstractContextManager[Any]:
    real = asymmetric_attention.apply_softplus_gate
    return swap(asymmetric_attention, "apply_softplus_gate", lambda y, gate: real(y, gate.roll(1, -2)))


def _values_unscaled_on_one_rank() -> AbstractContextManager[Any]:
    real = asymmetric_attention.AsymmetricAttention.__init__

    def build(self: Any, builder: Any, layer: int) -> None:
        real(self, builder, layer)
        self.scale = self.scale if builder.groups.tp.rank else 1.0

    return swap(asymmetric_attention.AsymmetricAttention, "__init__", build)


def _streams_without_sync() -> AbstractContextManager[Any]:
    """Gradients of the weights that mix streams are of a tensor rank's tokens alone."""
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        return real(shape, pieces, **(options | {"grad_sync": ()} if "_hc." in pieces[0].name else options))

    return swap(parameter_builder, "make_parameter", make)


def _streams_mixed_the_other_way() -> AbstractContextManager[Any]:
    """Data rank 0 mixes streams by C, not by its transpose."""
    real = transformer_layer.expand_streams

    def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return real(streams, y, post, comb if torch.distributed.get_rank() else comb.mT)

    return swap(transformer_layer, "expand_streams", expand)


def _keys_detached() -> AbstractContextManager[Any]:
    """Layers that share keys and values send no gradient to them."""
    real = shared_key_values.SharedKeyValueAttention.forward

    def forward(self: Any, x: Tensor, context: Any) -> Tensor:
        kept = UserDict(
            {window: (layer, k.detach(), v.detach()) for window, (layer, k, v) in context.key_values.items()}
        )
        return real(self, x, replace(context, key_values=kept))

    return swap(shared_key_values.SharedKeyValueAttention, "forward", forward)


def _inputs_of_the_layer_before() -> AbstractContextManager[Any]:
    real = LayerInputDecoder.forward

    def forward(self: Any, x: Tensor, context: Any) -> Tensor:
        width, size = self.config.hidden_size, self.input_size
        moved = torch.cat([x[..., :width], x[..., width:].roll(size, -1)], -1)
        return real(self, moved if self.stage.heads else x, context)

    return swap(LayerInputDecoder, "forward", forward)


def _inputs_without_gradient_between_stages() -> AbstractContextManager[Any]:
    real = LayerInputDecoder.forward

    def forward(self: Any, x: Tensor, context: Any) -> Tensor:
        y, width = real(self, x, context), self.config.hidden_size
        return y if self.stage.heads else torch.cat([y[..., :width], y[..., width:].detach()], -1)

    return swap(LayerInputDecoder, "forward", forward)


def _cutoff_of_a_part() -> AbstractContextManager[Any]:
    """The cutoff of gates is by a tensor rank's gates alone."""
    return swap(feed_forward, "sum_partial_results", lambda x, group, sp: x * group.size)


def _router_of_streams_without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        own = ".altup.modality_router." in pieces[0].name
        return real(shape, pieces, **(options | {"grad_sync": ()} if own else options))

    return swap(parameter_builder, "make_parameter", make)


def _streams_unscaled_on_one_rank() -> AbstractContextManager[Any]:
    """Data rank 0 does not scale projected streams to the first one."""
    real = alternating_updates._root_mean_square

    def measure(x: Tensor) -> Tensor:
        return real(x) if torch.distributed.get_rank() else torch.ones_like(x[..., :1])

    return swap(alternating_updates, "_root_mean_square", measure)


def _separate_norms_without_sync() -> AbstractContextManager[Any]:
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        norm = any(".mlp.experts_norm." in piece.name for piece in pieces)
        return real(shape, pieces, **{**options, "grad_sync": ()} if norm else options)

    return swap(parameter_builder, "make_parameter", make)


def _shortcut_detached() -> AbstractContextManager[Any]:
    """The layer after experts sends no gradient to them."""
    real = transformer_layer.ShortcutLayer.forward

    def forward(self: Any, x: Tensor, context: Any) -> Tensor:
        return real(self, torch.cat([x[..., : self.width], x[..., self.width :].detach()], -1), context)

    return swap(transformer_layer.ShortcutLayer, "forward", forward)


def _zero_experts_changed(change: Callable[[Tensor], Tensor]) -> Patch:
    """What experts return that return their input is changed."""
    real = mixture_of_experts.split_zero_experts

    def split(*given: Any) -> tuple[Tensor, Tensor]:
        chosen, unchanged = real(*given)
        assert unchanged is not None
        return chosen, change(unchanged)

    return lambda: swap(mixture_of_experts, "split_zero_experts", split)


def _entries_without_sync() -> AbstractContextManager[Any]:
    """Gradients of the gates' biases in a window are of a tensor rank's heads alone."""
    real = parameter_builder.make_parameter

    def make(shape: Any, pieces: Any, **options: Any) -> Any:
        own = pieces[0].name.endswith(".compressor.position_bias")
        return real(shape, pieces, **(options | {"grad_sync": ()} if own else options))

    return swap(parameter_builder, "make_parameter", make)


def _entries_before_their_end() -> AbstractContextManager[Any]:
    """Queries of context rank 1 see an entry a token before its window has ended."""
    real = compressed_attention.SequenceTokens.mask_entries

    def see(self: Any, part: range, windows: Any, count: int) -> Tensor:
        early = int(torch.distributed.get_rank() == 1 and len(self.queries) > 1)
        return real(self, part, replace(windows, size=windows.size - early), count)

    return swap(compressed_attention.SequenceTokens, "mask_entries", see)


def _experts_of_the_token_before() -> AbstractContextManager[Any]:
    """A tensor rank looks up the experts of the token before."""
    real = expert_router.ExpertTable.forward

    def look_up(self: Any, tokens: Any) -> Tensor:
        return real(self, replace(tokens, token_ids=tokens.token_ids.roll(int(torch.distributed.get_rank() == 1))))

    return swap(expert_router.ExpertTable, "forward", look_up)


def _norms_with_a_mean() -> AbstractContextManager[Any]:
    return swap(norms.PlainNorm, "forward", lambda self, x: F.layer_norm(x, x.shape[-1:], eps=self.eps))


def _rows_not_awaited() -> AbstractContextManager[Any]:
    """A pass goes on before its exchanged rows have arrived."""
    real = async_all_to_all.HostCountAllToAll.__call__

    def late(self: Any, rows: Tensor, sent: Any, received: Any, length: int) -> tuple[Tensor, CollectiveWork]:
        table, work = real(self, rows, sent, received, length)
        return (table, work) if self.interleaver is None else (torch.zeros_like(table), work)

    return swap(async_all_to_all.HostCountAllToAll, "__call__", late)


def _inputs_of_the_pass_beside() -> AbstractContextManager[Any]:
    """A forward that runs beside a backward reads the micro-batch before its own."""
    real = run.PipelineExecutor._run_pass

    def run_pass(self: Any, op: Any, batches: Sequence[Any], scale: float) -> Any:
        beside = op.kind == "F" and self.interleaver._unfinished == 2
        return real(self, op, [batches[0], *batches] if beside else batches, scale)

    return swap(run.PipelineExecutor, "_run_pass", run_pass)


EXPERTS: list[tuple[str, LayoutCase, Patch]] = [
    ("overlapped exchange: rows not awaited", OVERLAPPED, _rows_not_awaited),
    ("overlapped exchange: micro-batch of the other pass", OVERLAPPED, _inputs_of_the_pass_beside),
    ("experts: losses of routers scaled by ep", EP, _routings(sequence_weight=lambda w, data: w * data.size)),
    ("experts: losses of routers not divided among data ranks", DP, _routings(sequence_weight=lambda w, data: w * 2)),
    ("experts: router gradient not summed under sequence parallelism", SP, _router_without_sync),
    ("experts: router gradient not summed over tensor ranks", TP, _router_without_sync),
    ("experts: a router counts masked tokens", MASKED, _routings(affects_loss_mask=lambda mask, data: None)),
    ("experts: gradients summed over all data ranks", EP, _groups(expert_data=lambda groups: groups.dp_cp)),
    ("experts: gradients averaged over the ranks that hold them", DP, _expert_gradients_averaged),
    ("experts: every tensor rank sends all tokens", TP, _every_tensor_rank_sends_all_tokens),
    ("experts: load of this rank's tokens alone", SP, _load_of_own_tokens),
    ("experts: a choice balanced over this rank's tokens alone", BALANCED, _balanced_by_own_tokens),
    ("experts: selection bias moved by this rank's load", EP, _bias_by_own_load),
    ("experts: selection bias stays", MASKED, _bias_stays),
    ("experts: selection bias in the weights", MASKED, _weights_of_the_choice),
    ("experts: every rank takes the first ones", EP, _first_experts),
    ("experts: bias added by every part", PARTS, _bias_of_every_part),
    ("experts: rows not sorted on arrival", EP, _rows_in_order_of_arrival),
    ("experts: a token goes to a rank once for each choice there", EP, _once_for_each_choice),
    ("experts: tokens go to the next rank", EP, _sent(_to_the_next)),
    ("experts: tokens go to one part of an expert", PARTS, _sent(_to_one_part)),
    ("experts: outputs not weighted", EP, _all_weigh_the_same),
    ("experts: outputs not weighted on one rank", MASKED, _all_weigh_the_same),
    ("experts: bias not weighted", EP, _bias_weighs_one),
    ("experts: weight of another choice", EP, _weights_of_the_first_choices),
    ("experts: gradient of the weights stays where the experts are", EP, _gradient_of_weights_stays),
    ("experts: rows that nobody sent", COUNTED, _rows_that_nobody_sent),
    ("experts: weights on the outputs, not the inputs", CHUNKED, _outputs_weighted),
    ("chunked attention: smaller chunks", CHUNKED, _smaller_chunks),
    ("attention without positions: queries scaled by the position before", CHUNKED, _first_position_is_zero),
    ("attention: queries, keys and values not clipped", PLAIN, _unclipped),
    ("xIELU: gradients of slopes not summed over tensor ranks", PLAIN, _slopes_without_sync),
    ("rotary positions: the other direction", PLAIN, _counterclockwise),
    ("attention: normalised and rotated keys as values", HEADS, _values_after_the_norm_of_keys),
    ("proportional rotary positions: frequencies by the rotated part", HEADS, _frequencies_by_the_rotated_part),
    ("shared keys: no gradient from the layers that share them", SHARED, _keys_detached),
    ("inputs of layers: of the layer before in the last stage", INPUTS, _inputs_of_the_layer_before),
    ("inputs of layers: no gradient between stages", INPUTS, _inputs_without_gradient_between_stages),
    ("sparse gates: cutoff by a rank's gates alone", ALTUP, _cutoff_of_a_part),
    ("AltUp: gradient of the router from a rank's tokens alone", ALTUP, _router_of_streams_without_sync),
    ("AltUp: projected streams not scaled on a data rank", ALTUP_DATA, _streams_unscaled_on_one_rank),
    ("experts: gradient of their own norm from a rank's tokens alone", SEPARATE, _separate_norms_without_sync),
    ("experts added after the next layer: no gradient to them", PAIRS, _shortcut_detached),
    ("zero experts: without a gradient", PAIRS, _zero_experts_changed(Tensor.detach)),
    ("zero experts: as often as there are tensor ranks", PAIRS, _zero_experts_changed(lambda x: 2 * x)),
    ("norms without weights: LayerNorm for RMSNorm", PLAIN, _norms_with_a_mean),
    ("norms before output projections: mean over a rank's part alone", NORMED, _split_norm_of_a_part),
    ("key norms: gradient of the bias from a rank's heads alone", NORMED, _norm_bias_of_own_heads),
    ("experts: SparseMixer's second softmax has the first expert", MIXED, _second_share_of_all),
    ("experts: chosen by scores, not by logits", BY_LOGITS, _chosen_by_scores),
    ("attention: sinks in layers without a window", VALUES, _sinks_in_all_layers),
    ("attention: values of one rank are not scaled", VALUES, _values_unscaled_on_one_rank),
    ("attention: the softplus gate of a neighboring head", GATED, _gate_of_another_head),
    ("streams: gradients of their weights not summed under sequence parallelism", STREAMS, _streams_without_sync),
    ("streams: mixed by C on one rank, not by its transpose", WIDE, _streams_mixed_the_other_way),
    (
        "compressed attention: gradients of gates' biases not summed over the heads' ranks",
        ENTRIES,
        _entries_without_sync,
    ),
    (
        "compressed attention: entries seen before their window has ended on a context rank",
        GATHERED,
        _entries_before_their_end,
    ),
    ("experts by token id: those of the token before on a tensor rank", HASHED, _experts_of_the_token_before),
    ("experts: norm of this rank's experts alone", BOTH, _norm_without("ep")),
]
