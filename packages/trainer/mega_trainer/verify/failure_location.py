"""Location of a failure: the smallest layout that fails, and the first tensor and layer that differ in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.launch.function_ranks import run_ranks
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.transformer_layer import ResidualBranch, TransformerLayer
from mega_trainer.parallel.context_parallel import residual_stream_token_ranges
from mega_trainer.verify.case_comparison import (
    TOLERANCE,
    ContextFactory,
    assemble_tensor,
    compute_relative_tensor_errors,
    nan_as_infinity,
    select_tensor_slice,
)
from mega_trainer.verify.case_trainer import (
    CaseTrainer,
    NamedTensors,
    copy_sharded_tensors_to_host,
    make_case_process_groups,
)
from mega_trainer.verify.layout_case import LARGE_BUCKET, LayoutCase

PIPELINE_KEYS = ("pp", "virtual_stages", "schedule", "pipeline_layout")
ZERO_KEYS = ("zero", "zero3_shard", "zero3_layers", "zero3_gather")


@dataclass(frozen=True)
class ActivationSlice:
    """Part of an activation that a rank holds: `values` [samples, tokens, D], with the numbers of both."""

    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    values: Tensor


@dataclass
class StepRecord:
    """Results of the first step of a tested layout on one rank, in the order of the forward pass.

    Attributes:
        activations: outputs of embeddings, mixers, feed-forward blocks and layers by name.
        gradients: of parameters, not clipped.
        tensors: weights and optimizer state after the update.
    """

    activations: dict[str, list[ActivationSlice]] = field(default_factory=dict)
    loss: float = 0.0
    norm: float = 0.0
    gradients: NamedTensors = field(default_factory=dict)
    tensors: NamedTensors = field(default_factory=dict)


@dataclass(frozen=True)
class TensorDifference:
    """First tensor of a tested layout that differs from one process, at the element with the largest error.

    Attributes:
        kind: "activation", "loss", "gradient", "gradient norm", or "update" for weights and optimizer state.
        name: canonical name; of an activation, `model.layers.1.attention` for the output of a mixer.
        layer: number of the layer; None outside of layers.
        position: index of the element; of an activation [sample, token, channel].
        expected, found: values of the reference and of the layout.
        error: largest difference relative to the largest element.
        others: further differing tensors of the same kind and layer.
        reference: place of the expected value, for messages.
    """

    kind: str
    name: str
    layer: int | None
    position: tuple[int, ...]
    expected: float
    found: float
    error: float
    others: tuple[str, ...] = ()
    reference: str = "in one process"

    def __str__(self) -> str:
        where = f" at {list(self.position)}" if self.position else ""
        text = (
            f"{self.kind} {self.name}{where}: {self.found:.12g}, {self.reference} {self.expected:.12g}"
            f" (relative error {self.error:.1e})"
        )
        return text + (f"; also {', '.join(self.others)}" if self.others else "")


def find_smallest_failure(
    case: LayoutCase, find_failing: Callable[[Sequence[LayoutCase]], list[LayoutCase]]
) -> LayoutCase:
    """Return the failing case with the fewest ranks and settings, found by removing settings of a failing one.

    Args:
        find_failing: returns the cases that fail.
    """
    if found := find_failing(_list_single_settings(case)):
        return min(found, key=_case_size)
    while found := find_failing([one for one in _list_simpler(case) if _case_size(one) < _case_size(case)]):
        case = min(found, key=_case_size)
    return case


def _case_size(case: LayoutCase) -> tuple[int, int, int]:
    return case.ranks, len(case.layout_text.split()), case.batch // case.micro


def _list_single_settings(case: LayoutCase) -> list[LayoutCase]:
    """Return the legal layouts with one of the settings of a tested layout each."""
    layout, parallel = case.layout, case.parallel
    plain = replace(
        case, ranks=1, parallel={"zero": 0}, recompute={}, offload={}, bucket=LARGE_BUCKET, micro=case.batch
    )
    found = []

    def add(degree: int, settings: Mapping[str, Any], **fields: Any) -> None:
        fields = {"micro": plain.micro, **fields}
        found.append(replace(plain, ranks=degree, parallel={"zero": 0, **settings}, **fields))

    for degree in sorted({2, layout["tp"]} if layout["tp"] > 1 else ()):
        add(degree, {"tp": degree})
        if layout["sp"]:
            add(degree, {"tp": degree, "sp": True})
            add(degree, {"tp": degree, "sp": True, "tp_comm_overlap": layout["tp_comm_overlap"]})
    if layout["pp"] > 1:
        add(2, {"pp": 2}, micro=max(1, case.batch // 4))
        own = {key: parallel[key] for key in PIPELINE_KEYS if key in parallel}
        add(layout["pp"], own, micro=case.micro)
    if layout["cp"] > 1:
        add(2, {"cp": 2, "cp_kind": layout.get("cp_kind", "ring")})
    if layout["dp"] > 1:
        own = {key: parallel[key] for key in ZERO_KEYS if key in parallel and key != "zero3_shard"}
        add(2, {}, micro=case.batch // 2)
        add(2, own, micro=case.batch // 2)
    for key in ("ep", "expert_tp"):
        if layout[key] > 1:
            add(2, {key: 2}, micro=case.batch // 2)
            add(2, {key: 2, "tp": 2})
    for fields in (
        {"recompute": case.recompute},
        {"offload": case.offload},
        {"bucket": case.bucket},
        {"micro": case.micro},
    ):
        add(1, {}, **fields)
    return [one for one in found if one.is_legal and _case_size(one) <= _case_size(case)]


def _list_simpler(case: LayoutCase) -> Iterator[LayoutCase]:
    """Yield the legal layouts with one setting less than a tested layout."""
    parallel = dict(case.parallel)
    without: list[Mapping[str, Any]] = [
        {"sp": False}, {"tp_comm_overlap": False}, dict.fromkeys(ZERO_KEYS) | {"zero": 0}, {"pipeline_layout": None}, {"cp_kind": "ring"},
        {"virtual_stages": 1, "schedule": "1f1b", "pipeline_layout": None},
        *({"tp": degree, "sp": parallel.get("sp", False) and degree > 1} for degree in (1, 2)),
        *({"pp": degree, "virtual_stages": 1, "schedule": "1f1b", "pipeline_layout": None} for degree in (1, 2)),
        *({"cp": degree} for degree in (1, 2)), *({"ep": degree} for degree in (1, 2)), {"expert_tp": 1},
    ]  # fmt: skip
    layout = case.layout
    for settings in without:
        changed = {key: value for key, value in {**parallel, **settings}.items() if value is not None}
        if not changed.get("sp"):
            changed.pop("tp_comm_overlap", None)
        for dp in {layout["dp"], 1}:
            ranks = changed.get("tp", 1) * changed.get("pp", 1) * changed.get("cp", 1) * dp
            micro = next(
                size for size in range(min(case.micro, case.batch // dp), 0, -1) if case.batch % (size * dp) == 0
            )
            yield from _if_legal(replace(case, parallel=changed, ranks=ranks, micro=micro))
    for other in (replace(case, recompute={}), replace(case, offload={}), replace(case, bucket=LARGE_BUCKET)):
        yield from _if_legal(other)


def _if_legal(case: LayoutCase) -> Iterator[LayoutCase]:
    if case.is_legal:
        yield case


def find_first_differing_tensor(case: LayoutCase, context: ContextFactory = nullcontext) -> TensorDifference | None:
    """Return the first tensor of the first step of a tested layout that differs from one process; None if none does.

    Activations come first, in the order of the forward pass; then the loss, gradients in the order of the backward pass,
    the gradient norm, and the update.
    """
    plain = replace(case, clip=0.0)
    (reference,) = run_ranks(record_first_step_tensors, 1, plain.single, nullcontext)
    ranks = run_ranks(record_first_step_tensors, case.ranks, plain, context)
    order = list(canonical_tensors(case.config.model))
    return (
        compare_activations(reference, ranks)
        or _compare_numbers("loss", reference.loss, [rank.loss for rank in ranks])
        or _compare_tensors("gradient", [rank.gradients for rank in ranks], reference.gradients, order)
        or _compare_numbers("gradient norm", reference.norm, [rank.norm for rank in ranks])
        or _compare_tensors("update", [rank.tensors for rank in ranks], reference.tensors, order)
    )


def record_first_step_tensors(case: LayoutCase, context: ContextFactory) -> StepRecord:
    """Train one step in a layout under test, and return this rank's activations and gradients. A collective call."""
    rank, record = dist.get_rank(), StepRecord()
    maker: ProcessGroupCache = make_case_process_groups([case])
    with context():
        trainer = CaseTrainer.build(case, rank, maker)
        batches, _ = trainer.make_micro_batches(0)
        handles = [
            module.register_forward_hook(_ActivationRecorder(name, layer, stage, batches, record))
            for stage in trainer.executor.stages.values()
            for name, layer, module in list_recorded_modules(stage)
        ]
        result = trainer.step()
        for handle in handles:
            handle.remove()
        record.loss, record.norm = result.loss, result.grad_norm
        record.gradients = copy_sharded_tensors_to_host(trainer.optimizer.gradients_by_name())
        record.tensors = copy_sharded_tensors_to_host(trainer.state.checkpoint_tensors())
    return record


def list_recorded_modules(stage: Decoder) -> Iterator[tuple[str, int | None, nn.Module]]:
    """Yield (name, layer, module) of the modules whose outputs are residual streams or what is added to them."""
    if stage.stage.embeds and stage.config.encoder is None:
        yield "model.embeddings", None, stage.inputs
    for number, layer in enumerate(stage.layers, start=stage.stage.first):
        if not isinstance(layer, TransformerLayer):
            continue
        for branch in (layer.mixer, layer.cross, layer.feed):
            if isinstance(branch, ResidualBranch):
                kind = stage.config.get_mixer_kind(number) if branch is layer.mixer else branch.name
                yield f"model.layers.{number}.{kind}", number, branch
        yield f"model.layers.{number}", number, layer
    if stage.stage.heads:
        yield "model.norm", None, stage.head.norm


@dataclass
class _ActivationRecorder:
    """Forward hook that records the output of one module for each micro-batch."""

    name: str
    layer: int | None
    stage: Decoder
    batches: Sequence[MicroBatch]
    record: StepRecord

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        slices = self.record.activations.setdefault(self.name, [])
        in_backward = torch._C._current_graph_task_id() != -1  # a recomputation
        if in_backward or len(slices) == len(self.batches) or not isinstance(output, Tensor):
            return
        batch, groups = self.batches[len(slices)], self.stage.groups
        source = batch.source if self.layer is not None and self.stage.config.is_encoder_layer(self.layer) else None
        length = (batch.tokens if source is None else source.tokens).shape[1] * groups.cp.size
        ranges = residual_stream_token_ranges(length, groups.cp, groups.tp, sp=self.stage.sp)
        tokens = tuple(token for part in ranges for token in part)
        if output.dim() == 3 and output.shape[:2] == (len(batch.samples), len(tokens)):
            slices.append(ActivationSlice(tuple(batch.samples), tokens, output.detach().clone()))


def compare_activations(reference: StepRecord, ranks: Sequence[StepRecord]) -> TensorDifference | None:
    """Return the first activation in the order of the forward pass that differs from the reference, or None."""
    for name, whole in reference.activations.items():
        if not whole:
            continue
        full = torch.cat([part.values for part in whole])
        rows = {sample: row for row, sample in enumerate(sample for part in whole for sample in part.samples)}
        scale = full.abs().max().item() or 1.0
        worst: TensorDifference | None = None
        for part in (part for rank in ranks for part in rank.activations.get(name, [])):
            own = [rows[sample] for sample in part.samples]
            wanted = full[own][:, list(part.tokens)]
            error, index = _largest_difference(part.values, wanted)
            if error / scale > max(TOLERANCE, worst.error if worst else 0.0):
                position = (part.samples[index[0]], part.tokens[index[1]], index[2])
                worst = TensorDifference(
                    "activation", name, _layer_number(name), position,
                    wanted[index].item(), part.values[index].item(), error / scale,
                )  # fmt: skip
        if worst is not None:
            return worst
    return None


def _largest_difference(mine: Tensor, wanted: Tensor) -> tuple[float, tuple[int, ...]]:
    difference = (mine.double() - wanted.double()).abs().nan_to_num(nan=torch.inf)
    index = tuple(int(one) for one in torch.unravel_index(difference.argmax(), difference.shape))
    return difference[index].item(), index


def _compare_numbers(kind: str, expected: float, found: Sequence[float]) -> TensorDifference | None:
    errors = [nan_as_infinity(abs(one - expected) / abs(expected)) for one in found]
    worst = max(range(len(found)), key=errors.__getitem__)
    if errors[worst] <= TOLERANCE:
        return None
    return TensorDifference(kind, f"of rank {worst}", None, (), expected, found[worst], errors[worst])


def _compare_tensors(
    kind: str, ranks: Sequence[NamedTensors], reference: NamedTensors, order: Sequence[str]
) -> TensorDifference | None:
    """Return the first differing tensor in the order of the backward pass, the reverse of `order`."""
    errors: dict[str, float] = {}
    for held in ranks:
        known = {name: boxes for name, boxes in held.items() if name in reference}
        for name, error in compute_relative_tensor_errors(known, reference).items():
            errors[name] = max(error, errors.get(name, 0.0))
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
    if not wrong:
        return None
    index = {name: number for number, name in enumerate(order)}
    wrong.sort(key=lambda name: (-index.get(_canonical_name(name), -1), name))
    first, whole = wrong[0], assemble_tensor(reference[wrong[0]])
    boxes = [box for held in ranks if first in held for box in held[first].boxes if box.tensor.numel()]
    found = [(*_largest_difference(box.tensor, select_tensor_slice(whole, box)), box) for box in boxes]
    _, inner, box = max(found, key=lambda one: one[0])
    position = tuple(start + offset for start, offset in zip(box.offset, inner, strict=True))
    layer = _layer_number(first)
    others = [name for name in wrong[1:] if _layer_number(name) == layer and layer is not None]
    return TensorDifference(
        kind, first, layer, position, whole[position].item(), box.tensor[inner].item(), errors[first], tuple(others[:5])
    )


def _canonical_name(name: str) -> str:
    """Return the name of the parameter that a tensor of a checkpoint belongs to."""
    return name[name.index("model.") :] if "model." in name else name.rpartition("/")[2]


def _layer_number(name: str) -> int | None:
    _, found, rest = name.partition("model.layers.")
    return int(rest.partition(".")[0]) if found else None
