"""What a rank of the parity suite does: train a few steps in some layout and hold everything against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from parity.cases import STEPS, Case
from torch import Tensor

from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox, copy_overlap
from mega_common.progress_logging import ProgressBar
from mega_common.retro_config import RetroConfig
from mega_common.vision_config import VisionConfig
from mega_data.batch_loader import EncoderInput, StepBatch
from mega_data.images.image_pixels import compute_native_size, list_placeholder_features
from mega_data.kinds.dataset_kind import SampleImages
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.comm import CommLog
from mega_trainer.distributed.process_groups import (
    ParallelGroups,
    ProcessGroupCache,
    RankInfo,
    build_parallel_groups,
    device_only_backend,
)
from mega_trainer.job.step_result import StepResult
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.objectives import training_objective
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run import build_components, training_run
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.train_step import train_step

CPU = torch.device("cpu")
FLOOR = 1e-4  # a tensor smaller than this share of the largest of its kind is measured against that one
Held = Mapping[str, ShardedTensor]
# The batch of a step: configuration, number of the step, data rank, data ranks, whether attention is closed.
Batches = Callable[[RunConfig, int, int, int, bool], StepBatch]


@dataclass
class Outcome:
    """What some steps computed: numbers by step, and tensors by canonical name as this rank's boxes.

    `gradients` are those of the first step, as clipped; `tensors` are weights and optimizer state after the last.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Held = field(default_factory=dict)
    tensors: Held = field(default_factory=dict)

    def kinds(self) -> dict[str, Held]:
        """The tensors by what they are: gradients, weights, moments."""
        state = {name: held for name, held in self.tensors.items() if name.startswith("optimizer/")}
        weights = {name: held for name, held in self.tensors.items() if name not in state}
        return {"gradients": self.gradients, "weights": weights, "moments": state}


@dataclass
class Trainer:
    """The parts of a run that the trainer itself is made of, on synthetic batches or those of another function alike."""

    case: Case
    config: RunConfig
    groups: ParallelGroups
    executor: PipelineExecutor
    optimizer: ShardedOptimizer
    state: TrainState
    batches: Batches
    device: torch.device = CPU

    @classmethod
    def make(
        cls,
        case: Case,
        rank: int = 0,
        maker: ProcessGroupCache | None = None,
        log: CommLog | None = None,
        batches: Batches | None = None,
        device: torch.device = CPU,
    ) -> Trainer:
        """This rank's trainer. A collective call among the ranks of the case."""
        config = RunConfig.parse(case.raw, source=str(case))
        groups = build_components.connect_parallel_groups(config, RankInfo(rank, case.ranks), maker, log)
        dtype = torch.float64 if case.wide else build_components.compute_dtype(config)
        with mock.patch.object(build_components, "compute_dtype", return_value=dtype):
            state, executor = training_run.assemble_training(config, groups, device)
        for stage in state.stages.values():
            initialize_weights(stage, config.train.seed)
        state.optimizer.load_main_from_model()
        return cls(case, config, groups, executor, state.optimizer, state, batches or synthetic, device)

    def step(self, number: int | None = None) -> StepResult:
        """Train on the batch of the step at hand, or of another."""
        number = self.state.step if number is None else number
        batch = self.batches(self.config, number, self.groups.dp.rank, self.groups.dp.size, self.case.closed)
        micro = list(split_micro_batches(batch, self.config, self.device, self.groups.cp))
        settings = self.config.optimizer
        tokens = training_objective.count_step_tokens(batch, self.config.model.mtp_layers, self.groups)
        result = train_step(
            self.executor, self.optimizer, micro, tokens=tokens,
            lr=1e-2, decoupled_lr=settings.decoupled_lr, clip=settings.clip_grad,
            loss_scale=self.state.loss_scale,
        )  # fmt: skip
        self.state.advance_step(result)
        return result

    def run(self, steps: int = STEPS) -> Outcome:
        """Some steps; what they computed."""
        out = Outcome()
        for number in range(steps):
            result = self.step()
            out.losses += [loss for loss in (result.loss, result.mtp_loss, result.pair_loss) if loss is not None]
            out.norms.append(result.grad_norm)
            if number == 0:
                out.gradients = clone(self.optimizer.gradients_by_name())
        out.tensors = clone(self.state.checkpoint_tensors())
        return out


def synthetic(config: RunConfig, step: int, rank: int, ranks: int, closed: bool = True) -> StepBatch:
    """Samples that depend on the step alone: random tokens, documents of uneven length, uneven weights of the losses."""
    begin, length = config.batch.samples_after_steps(step), config.target_length
    count = config.batch.batch_size_at(begin)
    rng = np.random.default_rng([7, step])
    tokens = rng.integers(0, config.model.vocab_size, (count, length + 1))
    documents = np.cumsum(rng.random((count, length)) < 0.15, axis=1).astype(np.int32)
    keep = rng.random((count, 1)) * 0.9 + 0.05  # from nearly none to nearly all of a sample's tokens count
    weights = (rng.random((count, length)) < keep) * rng.choice([0.5, 1.0, 2.0], (count, length)).astype(np.float32)
    starts = np.array([[np.flatnonzero(row == row[i])[0] for i in range(length)] for row in documents])
    own = slice(rank * count // ranks, (rank + 1) * count // ranks)
    model = config.model
    types = rng.integers(0, model.token_types, (count, length))[own] if model.token_types else None
    pairs = rng.integers(0, 2, count)[own] if model.sentence_pairs else None
    vision = config.model.vision
    images = [] if vision is None else [drawn_images(rng, row, vision) for row in tokens[:, :-1]]
    return StepBatch(
        tokens=tokens[own, :-1],
        labels=tokens[own, 1:],
        loss_weights=weights[own],
        position_ids=(np.arange(length) - starts)[own],
        document_ids=documents[own] if closed else None,
        sample_ids=np.arange(begin, begin + count)[own],
        images=images[own],
        source=_source(config, step, own, count) if config.model.encoder else None,
        token_types=types,
        pair_labels=pairs,
        neighbors=None if model.retro is None else _neighbors(config, model.retro, step, count)[own],
    )


def drawn_images(rng: np.random.Generator, tokens: np.ndarray, vision: VisionConfig) -> SampleImages | None:
    """None to two images somewhere in a sample, the first one perhaps cut by its begin; `tokens` get the placeholders.

    Those in tiles are of several sizes, and so have other numbers of tiles and placeholders.
    """
    count, size = int(rng.integers(3)), vision.image_size
    if not count:
        return None
    cut = int(rng.integers(2))
    rows, features = 0, np.zeros(0, np.int64)
    shapes: list[tuple[int, int]] = []
    for _ in range(count):
        sides = rng.integers(1, 9, 2) if vision.has_variable_tokens else (size, size)
        found = list_placeholder_features(vision, int(sides[0]), int(sides[1]))
        features = np.append(features, rows + found)
        whole = [compute_native_size(vision, int(sides[0]), int(sides[1]))] if vision.native else []
        shapes += whole or [(size, size)] * (1 + found.max() // vision.features_per_square)
        rows = sum(vision.count_features(*one) for one in shapes)
    features = features[cut:][: len(tokens)]
    places = np.sort(rng.choice(len(tokens), len(features), replace=False))
    tokens[places] = vision.image_token
    return SampleImages([rng.standard_normal((3, *shape), np.float32) for shape in shapes], places, features)


def _source(config: RunConfig, step: int, own: slice, count: int) -> EncoderInput:
    """What the encoder reads: sequences of uneven length, padded."""
    rng = np.random.default_rng([8, step])
    length = config.data.seq_length
    tokens = rng.integers(0, config.model.vocab_size, (count, length))
    return EncoderInput(tokens[own], rng.integers(length // 4, length + 1, count)[own])


def _neighbors(config: RunConfig, retro: RetroConfig, step: int, count: int) -> np.ndarray:
    """What was retrieved: some chunks have nothing, and some neighbors are short."""
    rng = np.random.default_rng([9, step])
    shape = (count, config.data.seq_length // retro.chunk_length, retro.neighbors, retro.neighbor_length)
    tokens = rng.integers(0, config.model.vocab_size, shape)
    lengths = rng.integers(1, 2 * retro.neighbor_length, shape[:-1]) * (rng.random((*shape[:2], 1)) < 0.7)
    return np.where(np.arange(retro.neighbor_length) < lengths[..., None], tokens, -1)


def clone(tensors: Held) -> dict[str, ShardedTensor]:
    """Copies that later steps do not change."""
    return {
        name: ShardedTensor(held.shape, [TensorBox(box.offset, box.tensor.detach().clone()) for box in held.boxes])
        for name, held in tensors.items()
    }


def whole_tensor(held: ShardedTensor) -> Tensor:
    """One tensor from boxes that cover it; nan where none is."""
    first = held.boxes[0].tensor
    out = first.new_full(held.shape, float("nan"))
    for box in held.boxes:
        copy_overlap(TensorBox((0,) * out.dim(), out), box)
    return out


def part_of(tensor: Tensor, box: TensorBox) -> Tensor:
    """What of a whole tensor the box stands for."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]


def difference(mine: Held, reference: Held) -> float:
    """Largest error of any box against the reference's tensors, relative to each tensor's largest element."""
    wholes = {name: whole_tensor(held).double() for name, held in reference.items()}
    scales = {name: tensor.abs().max().item() for name, tensor in wholes.items()}
    largest: dict[str, float] = {}
    for name, scale in scales.items():
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), scale)
    errors = [
        (
            (box.tensor.double() - part_of(wholes[name], box)).abs().max()
            / max(scales[name], FLOOR * largest[_kind(name)])
        )
        for name, held in mine.items()
        for box in held.boxes
        if box.tensor.numel()
    ]
    return torch.stack(errors).max().item() if errors else 0.0  # torch's max of a nan is nan


def _kind(name: str) -> str:
    return name.rpartition("/")[0]


def compare(mine: Outcome, reference: Outcome) -> dict[str, float]:
    """Relative errors of losses, gradient norms, and each kind of tensor."""
    numbers = {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(mine.losses, reference.losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(mine.norms, reference.norms, strict=True)),
    }
    kinds = reference.kinds()
    return numbers | {kind: difference(held, kinds[kind]) for kind, held in mine.kinds().items()}


Places = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]  # name: (offset, shape) of each box


def places(outcome: Outcome) -> Places:
    """What of each tensor this rank holds."""
    held = {**outcome.tensors, **{f"gradients/{name}": held for name, held in outcome.gradients.items()}}
    return {name: [(box.offset, tuple(box.tensor.shape)) for box in it.boxes] for name, it in held.items()}


def missing(ranks: Iterable[Places], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Tensors that all ranks together do not hold whole, and those that should not be there."""
    held = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    strange = []
    for rank in ranks:
        for name, boxes in rank.items():
            if name not in held:
                strange.append(name)
                continue
            for offset, shape in boxes:
                held[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = True
    return strange + [name for name, there in held.items() if not there.all()]


class _Listing(ProcessGroupCache):
    """Lists the groups that would be made."""

    def get_process_group(self, ranks: Sequence[int]) -> None:
        if len(ranks) > 1:
            self.groups_by_ranks[tuple(ranks)] = None  # type: ignore[assignment]


def make_groups(cases: Iterable[Case]) -> ProcessGroupCache:
    """All process groups that the cases need. A collective call of the whole world.

    Torch names a group that its members alone ask for by how many groups each has made before, so that ranks which
    went through different layouts would wait for each other for ever; here everyone makes all groups in one order.
    """
    listing = _Listing()
    for case in cases:
        config = RunConfig.parse(case.raw, source=str(case))
        p = config.parallel
        layout = ParallelLayout(
            tp=p.tp, pp=p.pp, cp=p.cp, dp=config.data_parallel_size(case.ranks), ep=p.ep, expert_tp=p.expert_tp
        )
        for rank in range(case.ranks):
            build_parallel_groups(
                layout, rank, heads=config.model.shared_head_counts, shard=p.zero3_shard, maker=listing
            )
    maker = ProcessGroupCache()
    for ranks in sorted(listing.groups_by_ranks):
        if len(ranks) == dist.get_world_size():
            maker.groups_by_ranks[ranks] = dist.group.WORLD  # type: ignore[assignment]
        else:
            maker.groups_by_ranks[ranks] = dist.new_group(
                list(ranks), timeout=timedelta(seconds=60), backend=device_only_backend()
            )
    return maker


def alone(work: Sequence[tuple[Case, int]], batches: Batches | None = None) -> list[Outcome]:
    """What each case computes in one process, in so many steps. The ranks share the work: a collective call of all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone: list[list[Outcome]] = [[]] * ranks
    dist.all_gather_object(
        everyone, [Trainer.make(one, batches=batches).run(steps) for one, steps in work[rank::ranks]]
    )
    return [everyone[number % ranks][number // ranks] for number in range(len(work))]


class References:
    """What one process computes, each case once. A collective call of all ranks."""

    def __init__(
        self,
        cases: Iterable[tuple[Case, int]],
        single: Callable[[Case], Case] = lambda case: case.single,
        batches: Batches | None = None,
    ) -> None:
        work = {_key(one, steps): (single(one), steps) for one, steps in cases}
        self._made = dict(zip(work, alone(list(work.values()), batches), strict=True))

    def of(self, case: Case, steps: int = STEPS) -> Outcome:
        """The outcome of `case` in one process."""
        return self._made[_key(case, steps)]


def _key(case: Case, steps: int) -> str:
    return f"{case.single.raw} {case.closed} {steps}"


@dataclass(frozen=True)
class Found:
    """What one rank found of a case: errors of its part, what it holds of each tensor, what there is to hold."""

    errors: dict[str, float]
    places: Places
    shapes: dict[str, tuple[int, ...]]


def sweep(cases: Sequence[Case]) -> list[Found | None]:
    """On each of the ranks: every case in turn, by the first ranks it needs."""
    return sweep_against(cases, References((one, one.steps) for one in cases))


def sweep_against(cases: Sequence[Case], references: References, batches: Batches | None = None) -> list[Found | None]:
    """Every case in turn, by the first ranks it needs, held against what one process computed."""
    rank, maker = dist.get_rank(), make_groups(cases)
    out: list[Found | None] = []
    with ProgressBar("parity", total=len(cases), unit="layouts", every=5 if rank == 0 else float("inf")) as bar:
        for case in cases:
            try:
                out.append(_found(case, rank, maker, references, batches) if rank < case.ranks else None)
            except Exception as error:
                raise AssertionError(f"{case} on rank {rank}") from error
            bar.advance(1)
    return out


def _found(case: Case, rank: int, maker: ProcessGroupCache, references: References, batches: Batches | None) -> Found:
    mine = Trainer.make(case, rank, maker, batches=batches).run(case.steps)
    reference = references.of(case, case.steps)
    held = places(mine)
    shapes = {name: tuple(it.shape) for name, it in reference.tensors.items()}
    shapes |= {f"gradients/{name}": tuple(it.shape) for name, it in reference.gradients.items()}
    return Found(compare(mine, reference), held, shapes)


@dataclass(frozen=True)
class Verdict:
    """What all ranks found of a case: the worst error of each kind, and tensors that nobody holds."""

    case: Case
    errors: dict[str, float]
    missing: list[str]

    def problem(self, tolerance: float) -> str:
        """What is wrong, or nothing."""
        wrong = [f"{kind} {error:.1e}" for kind, error in self.errors.items() if not error <= tolerance]
        wrong += [f"not covered: {name}" for name in self.missing[:3]]
        return f"{self.case}: {', '.join(wrong)}" if wrong else ""


def verdict(case: Case, found: Iterable[Found | None]) -> Verdict:
    """Join what the ranks found."""
    parts = [one for one in found if one is not None]
    errors = {kind: max(_number(one.errors[kind]) for one in parts) for kind in parts[0].errors}
    return Verdict(case, errors, missing((one.places for one in parts), parts[0].shapes))


def _number(error: float) -> float:
    return error if error == error else float("inf")


def verdicts(cases: Sequence[Case], results: Sequence[Any]) -> list[Verdict]:
    """Of every case, from every rank's results."""
    return [verdict(case, found) for case, found in zip(cases, zip(*results, strict=True), strict=True)]
