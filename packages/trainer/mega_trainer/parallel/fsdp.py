"""ZeRO-3 (arXiv:1910.02054, arXiv:2304.11277): weights sharded over the data ranks as well, by PyTorch's FSDP2.

Each rank holds some rows of every (tensor-parallel) weight, in fp32 (fp64 in an fp64 run). A unit's weights are gathered
in the run's precision just before its forward and again before its backward; its gradients are reduce-scattered in fp32
after each micro-batch. The units are the layers (several per unit with many ranks, where one layer's all-gather is bound by
latency), the MTP layers, and the rest of the model.

With several `shard` groups (hybrid sharding), each group holds a copy of the weights: all-gathers and reduce-scatters stay
inside the group, and in the step's last backward each unit's gradients are all-reduced over the `replicate` groups, whose
ranks then make the same update.

Experts are separate units, sharded over all ranks that hold the same experts, regardless of the size of `shard`.

FSDP calls this project's collectives, so that they are counted and can sum in rank order. FSDP's own hybrid mesh would not
allow that: its all-reduce over copies cannot be replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.comm import (
    CollectiveWork,
    CommGroup,
    PendingCollective,
    all_gather_into,
    all_reduce,
    reduce_scatter_into,
)
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.mixture_of_experts import GroupedExperts
from mega_trainer.parallel.parameter_info import (
    ModuleWithSavedBuffers,
    NonTrainableBuffer,
    get_local_values,
    get_parameter_info,
    is_trainable,
)
from mega_trainer.parallel.parameter_shards import (
    GatheredShardLayout,
    LrFactor,
    ParameterBuffer,
    ParameterShard,
    ParameterShardPart,
    ParamGroupKey,
    make_param_groups,
)


def fully_shard_stage(
    model: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    reduce_dtype: torch.dtype | None = None,
    layers: int = 1,
    gather: Literal["micro_batch", "step"] = "micro_batch",
) -> None:
    """Shard a pipeline stage over its `shard` group by torch's FSDP2, in place; the values of its parameters are lost.
    Each parameter becomes a `DTensor` of which a rank has some rows; `layers` layers' weights are gathered together.

    Args:
        model: parameters are in the dtype of the main weights, fp32 or fp64, and may be on the meta device, since no rank
            needs to hold them all. Their values are lost.
        dtype: compute dtype.
        device: device of the shards.
        reduce_dtype: dtype in which gradients are reduced over the ranks; default: that of the main weights.
        layers: layers per unit.
        gather: gather weights in each forward and again in its backward, or once a step: then they are kept until
            `FullyShardedStage.finish_gradients`.
    """
    group, expert_group, copies = model.groups.shard, model.groups.expert_data, model.groups.replicate
    meshes = {sharers: DeviceMesh.from_group(_process_group(sharers), device.type) for sharers in (group, expert_group)}
    infos = {name: get_parameter_info(parameter) for name, parameter in model.named_parameters()}
    main_dtype = next(model.parameters()).dtype
    for modules in list_fsdp_units(model, layers):
        unit, sharers = modules[0], expert_group if isinstance(modules[0], GroupedExperts) else group
        sent_dtype = reduce_dtype if sharers.size > 1 else None  # no rounding in a group of one
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == main_dtype else dtype,
            reduce_dtype=sent_dtype or main_dtype,
            cast_forward_inputs=False,
        )
        lent = unit is model and model.stage.has_embedding_used_by_other_stage(model.config)
        once = gather == "step" or lent  # the borrowed embedding is the gathered one
        # the last stage's backward follows its forward at once
        reshard = not once and not (unit is model and model.stage.heads)
        fully_shard(modules, mesh=meshes[sharers], mp_policy=policy, reshard_after_forward=reshard)
        assert isinstance(unit, FSDPModule)
        unit.set_reshard_after_backward(not once, recurse=False)
        unit.set_gradient_divide_factor(1.0)  # the loss is already divided by the tokens of all ranks
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(_AllGather(sharers))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_ReduceScatter(sharers))  # type: ignore[arg-type]
    for method in ("run_stage", *model.other_forwards):
        register_fsdp_forward_method(model, method)
    model.materialize(device)
    _pad_uneven_shards(model)
    _reset_saved_buffers(model)
    for name, parameter in model.named_parameters():
        info = infos[name]
        sharers = expert_group if info.data is expert_group else group
        rows = -(-parameter.shape[0] // sharers.size)
        pieces = tuple(slice_piece_rows(info.pieces, rows * sharers.rank, rows * (sharers.rank + 1)))
        sync = (*info.grad_sync, copies) if sharers is group and copies.size > 1 else info.grad_sync
        parameter.mega = replace(  # type: ignore[attr-defined]
            info, pieces=pieces, all_pieces=info.pieces, data=sharers, grad_sync=sync
        )


def _reset_saved_buffers(model: nn.Module) -> None:
    """Give the non-trainable tensors that checkpoints contain their initial values, in new memory."""
    for module in model.modules():
        if isinstance(module, NonTrainableBuffer):
            module.reset_values()
        elif isinstance(module, ModuleWithSavedBuffers) and not getattr(module, "keeps_buffers", False):
            for values, _ in module.saved_buffers():
                values.zero_()


def _pad_uneven_shards(model: nn.Module) -> None:
    """Pad the shards of parameters whose rows the ranks do not divide, in new memory.

    FSDP would do it in the first forward, after the optimizer has taken the shards' memory.
    """
    for group in _param_groups(model.modules()):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()  # type: ignore[no-untyped-call]


def list_fsdp_units(model: Decoder, layers: int) -> list[list[nn.Module]]:
    """Return lists of modules that FSDP gathers together, inner ones first.
    Each list has the parameters of its modules that no earlier one has.

    Recomputed and other layers are in different units: FSDP waits until the forward of all modules of a unit has run.
    """
    recompute = model.saved.recompute
    parts = [
        [layer for index, layer in enumerate(model.layers) if recompute.recomputes_layer(index) is recomputed]
        for recomputed in (True, False)
    ]
    experts: list[list[nn.Module]] = [[module] for module in model.modules() if isinstance(module, GroupedExperts)]
    blocks = [part[start : start + layers] for part in parts for start in range(0, len(part), layers)]
    vision: list[list[nn.Module]] = [] if model.vision is None else [[model.vision]]
    return [*experts, *blocks, *([predictor] for predictor in model.predictors), *vision, [model]]


def list_autograd_leaves(stage: nn.Module) -> list[Tensor]:
    """Return the trainable parameters of a stage as its autograd graph has them: under ZeRO-3 the gathered ones."""
    if not isinstance(stage, FSDPModule):
        return list(filter(is_trainable, stage.parameters()))
    return [leaf for group in _param_groups(stage.modules()) for leaf in _gathered_leaves(group)]


def _param_groups(modules: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """Return FSDP's records of the units that begin at one of the modules; none for a unit without parameters."""
    units = (module for module in modules if isinstance(module, FSDPModule))
    found = (group for unit in units for group in fully_shard.state(unit)._fsdp_param_groups)  # type: ignore[attr-defined]
    return list(dict.fromkeys(found))


def _gathered_leaves(group: FSDPParamGroup) -> list[Tensor]:
    """Return the trainable parameters of a unit, gathered; they stay the same objects, without values in between."""
    return [shard.unsharded_param for shard in group.fsdp_params if is_trainable(shard.sharded_param)]


def _process_group(group: CommGroup) -> dist.ProcessGroup:
    """Return the process group of a group; a group of one rank gets one, as FSDP requires it."""
    if group.process_group is not None:
        return group.process_group
    made: dist.ProcessGroup = dist.new_group(list(group.ranks), use_local_synchronization=True)
    return made


def slice_piece_rows(pieces: Sequence[TensorPiece], first: int, stop: int) -> Iterator[TensorPiece]:
    """Yield the positions in global tensors of rows [first, stop) of a local tensor.
    `pieces` are the positions (`TensorPiece`) of the whole local tensor.
    """
    for piece in pieces:
        low, high = max(first, piece.local_start[0]), min(stop, piece.local_start[0] + piece.shape[0])
        if low < high:
            offset = piece.global_offset[0] + low - piece.local_start[0]
            yield replace(
                piece,
                global_offset=(offset, *piece.global_offset[1:]),
                local_start=(low - first, *piece.local_start[1:]),
                shape=(high - low, *piece.shape[1:]),
            )


class RowShardBuffer(ParameterBuffer):
    """Parameters of one parameter group under FSDP, where the shard of each parameter is this rank's rows."""

    def __init__(self, parameters: Sequence[nn.Parameter], kind: ParamGroupKey) -> None:
        self.kind, self.sharded = kind, True
        self.shards = [_row_shard(parameter) for parameter in parameters]


def _row_shard(parameter: nn.Parameter) -> ParameterShard:
    weights = get_local_values(parameter)
    assert parameter.grad is not None
    info = get_parameter_info(parameter)
    part = ParameterShardPart(info.pieces, tuple(weights.shape), 0, slice(0, weights.numel()))
    rank_elements = -(-parameter.shape[0] // info.data.size) * parameter.shape[1:].numel()
    gathered = GatheredShardLayout(rank_elements, {parameter: slice(0, parameter.numel())})
    return ParameterShard(weights.view(-1), get_local_values(parameter.grad).view(-1), [part], gathered)


class FsdpUnitGradients:
    """Gradients of the modules that FSDP gathers together, in one flat tensor `values`, to which FSDP adds.

    With several copies of the weights, they are all-reduced over the copies as soon as the step's last backward has
    finished the unit, while the backward of earlier units still runs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], copies: CommGroup, reduce_dtype: torch.dtype | None) -> None:
        own = [get_local_values(parameter) for parameter in parameters]
        self.values = own[0].new_zeros(sum(part.numel() for part in own))
        self._copies, self._parameters, self._reduce_dtype = copies, list(parameters), reduce_dtype
        self._missing: set[nn.Parameter] = set()
        self._flight: tuple[CollectiveWork | None, Tensor] | None = None
        for parameter, part in zip(parameters, torch.split(self.values, [part.numel() for part in own]), strict=True):
            assert isinstance(parameter, DTensor)
            parameter.grad = DTensor.from_local(
                part.view_as(get_local_values(parameter)), parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            if copies.size > 1:
                parameter.register_post_accumulate_grad_hook(self._grad_completed)  # type: ignore[no-untyped-call]

    def expect_last_backward(self) -> None:
        """Prepare for the step's last backward, after which gradients are all-reduced over copies of the weights."""
        self._missing = set(self._parameters) if self._copies.size > 1 else set()

    def _grad_completed(self, parameter: Tensor) -> None:
        if parameter in self._missing:
            self._missing.discard(parameter)
            if not self._missing:
                self._start_sum()

    def _start_sum(self) -> None:
        sent = self.values if self._reduce_dtype is None else self.values.to(self._reduce_dtype)
        self._flight = all_reduce(sent, self._copies, async_op=True), sent

    def wait_for_reduce(self) -> None:
        """Wait for the all-reduce over the copies of the weights; start it first if a parameter got no gradient."""
        if self._missing:
            self._start_sum()
        if self._flight is not None:
            work, sent = self._flight
            if work is not None:
                work.wait()
            if sent is not self.values:
                self.values.copy_(sent)
        self._missing, self._flight = set(), None


class _SplitBackwardReduction:
    """Reduction of gradients in the weight half of a split backward, which runs none of FSDP's hooks: each unit's as soon
    as it and those before it are complete, the last layer's first, so that all ranks reduce in one order.
    """

    def __init__(self, units: Sequence[Sequence[nn.Module]]) -> None:
        *inner, root = units
        places = {module: place for place, module in enumerate(root[0].modules())}
        self._units = [root, *sorted(inner, key=lambda unit: -places[unit[0]])]
        self._waiting: deque[FSDPParamGroup] = deque()
        self._has_hooks = False

    def expect_gradients(self) -> None:
        """Prepare for a weight half; a forward must have run before."""
        groups = _param_groups(unit[0] for unit in self._units)
        self._waiting.extend(group for group in groups if _gathered_leaves(group))
        for leaf in () if self._has_hooks else (leaf for group in self._waiting for leaf in _gathered_leaves(group)):
            leaf.register_post_accumulate_grad_hook(self._reduce_completed)  # type: ignore[no-untyped-call]
        self._has_hooks = True

    def _reduce_completed(self, _: Tensor) -> None:
        while self._waiting and all(leaf.grad is not None for leaf in _gathered_leaves(self._waiting[0])):
            self._waiting.popleft().post_backward()

    def finish(self) -> None:
        """Reduce the gradients that are left, of units of which a parameter got none."""
        self._waiting.clear()
        fully_shard.state(self._units[0][0])._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _trainable_parameters(units: Sequence[Sequence[nn.Module]]) -> Iterator[list[nn.Parameter]]:
    """Yield the trainable parameters of each unit of `list_fsdp_units`."""
    seen: set[nn.Parameter] = set()
    for unit in units:
        own = [parameter for module in unit for parameter in module.parameters() if parameter not in seen]
        seen.update(own)
        if trainable := list(filter(is_trainable, own)):
            yield trainable


class FullyShardedStage:
    """Weights and gradients of a pipeline stage that FSDP2 has sharded (ZeRO-3)."""

    def __init__(
        self,
        model: Decoder,
        *,
        separate: Callable[[nn.Parameter], bool] | None = None,
        decoupled: bool = False,
        lr_factor: LrFactor = lambda name: 1.0,
        reduce_dtype: torch.dtype | None = None,
        layers: int = 1,
    ) -> None:
        self._copies = model.groups.replicate
        self._gradients = []
        self._units = list_fsdp_units(model, layers)
        self._split = None if model.deferred is None else _SplitBackwardReduction(self._units)
        for parameters in _trainable_parameters(self._units):
            shared = self._copies in get_parameter_info(parameters[0]).grad_sync
            self._gradients.append(
                FsdpUnitGradients(parameters, self._copies if shared else CommGroup("copies"), reduce_dtype)
            )
        kinds = make_param_groups(model, model.dtype, separate, decoupled=decoupled, lr_factor=lr_factor)
        self.buffers = [RowShardBuffer(parameters, kind) for kind, parameters in kinds.items()]

    def begin_step(self) -> None:
        """Zero this pipeline stage's gradients of the previous step."""
        if self._gradients:  # none in a frozen stage
            torch._foreach_zero_([gradients.values for gradients in self._gradients])

    @contextmanager
    def backward_context(self, last: bool) -> Iterator[None]:
        """Wrap one micro-batch's backward, in which FSDP reduces gradients; the step's last also reduces over copies.

        With a split backward it is the weight half alone that this wraps.
        """
        if last:
            for gradients in self._gradients:
                gradients.expect_last_backward()
        if self._split is not None:
            self._split.expect_gradients()
        yield
        if self._split is not None:
            self._split.finish()

    def finish_gradients(self) -> None:
        """Complete the step's gradients over all ranks with the same parameters, and free the gathered weights.
        Wait for the HSDP all-reduces between weight replicas, then all-reduce over the other groups of such ranks. The
        weights are those that were gathered for the whole step.
        """
        self._free_gathered_params()
        for gradients in self._gradients:
            gradients.wait_for_reduce()
        for buffer in self.buffers:
            for group in (group for group in buffer.kind.grad_sync if group is not self._copies):
                grads = [shard.grads for shard in buffer.shards]
                joined = torch.cat(grads)
                all_reduce(joined, group)
                torch._foreach_copy_(grads, torch.split(joined, [len(part) for part in grads]))

    def all_gather_params(self) -> None:
        """Do nothing: FSDP gathers weights when they are needed."""

    def wait_for_params(self) -> None:
        """Free gathered weights that an evaluation has left, so that parameters are shards again."""
        self._free_gathered_params()

    def _free_gathered_params(self) -> None:
        for unit, *_ in self._units:
            assert isinstance(unit, FSDPModule)
            unit.reshard()


class _Comm:
    def __init__(self, group: CommGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> CollectiveWork | None:
        return _torch_work(all_gather_into(output_tensor, input_tensor, self.group, async_op=async_op))


class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> CollectiveWork | None:
        return _torch_work(reduce_scatter_into(output_tensor, input_tensor, self.group, async_op=async_op))


def _torch_work(work: CollectiveWork | None) -> CollectiveWork | None:
    """Return torch's own work handle: FSDP waits for no other type."""
    return work.work if isinstance(work, PendingCollective) else work
