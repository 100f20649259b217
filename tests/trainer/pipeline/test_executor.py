"""The executor: whatever the schedule, a step computes what its micro-batches compute one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.data.micro_batch import DocumentBounds, MicroBatch
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import build_parallel_groups
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.model.activation_checkpointing import RecomputePolicy
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.parallel_linear import DeferredWgradQueue
from mega_trainer.parallel.parameter_info import get_parameter_info
from mega_trainer.pipeline.executor import IN_FLIGHT, PipelineExecutor
from mega_trainer.pipeline.layer_partition import split_stage_layers
from mega_trainer.pipeline.schedules import PipelineSchedule, make_pipeline_schedule
from mega_trainer.plan.training_layout import RecomputeKind

MODEL = ModelConfig(
    num_layers=4, hidden_size=8, ffn_hidden_size=12, num_attention_heads=2, vocab_size=11, residual_dropout=0.2,
    init_std=0.3,
)  # fmt: skip
SCALE, SEED = 0.125, 9


def batches(count: int, rows: int = 2, length: int = 5) -> list[MicroBatch]:
    g = torch.Generator().manual_seed(3)
    return [
        MicroBatch(
            tokens=torch.randint(0, 11, (rows, length), generator=g),
            labels=torch.randint(0, 11, (rows, length), generator=g),
            weights=torch.rand(rows, length, generator=g).round(),
            positions=torch.arange(length).expand(rows, -1),
            sequence_bounds=DocumentBounds([length] * rows, np.array([[0, 0, 2, 2, 2]] * rows)),
            samples=range(rows * number, rows * (number + 1)),
        )
        for number in range(count)
    ]


def one_after_another(
    micro: Sequence[MicroBatch], seed: int | None = SEED, config: ModelConfig = MODEL
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients without an executor."""
    model = Decoder(LayerBuilder(config, dtype=torch.float64))
    initialize_weights(model, 1)
    total = 0.0
    for batch in micro:
        dropout = None if seed is None else SeededDropout(seed, batch.samples, [range(batch.tokens.shape[1])])
        context = model.make_forward_context(batch.positions, sequence_bounds=batch.sequence_bounds, dropout=dropout)
        x = model(model.embed_inputs(batch.tokens, batch.positions, dropout), context)
        loss, _ = model.compute_token_loss(x, batch.labels, batch.weights)
        (loss * SCALE).backward()
        total += loss.item()
    return total, gradients([model])


def gradients(stages: Sequence[Decoder]) -> dict[str, torch.Tensor]:
    return {
        get_parameter_info(p).pieces[0].name: p.grad
        for stage in stages
        for p in stage.parameters()
        if p.grad is not None
    }


def executor(
    schedule: PipelineSchedule,
    group: CommGroup | None = None,
    seed: int | None = SEED,
    model: ModelConfig = MODEL,
    recompute: RecomputePolicy | None = None,
    **options: Any,
) -> PipelineExecutor:
    group = group or CommGroup("pp")
    layers = split_stage_layers(model.num_layers, schedule.pp, schedule.virtual_stages)
    last, groups, stages = len(layers) - 1, build_parallel_groups(ParallelLayout(), 0, heads=[2]), {}
    for index in schedule.stages_of_rank(group.rank):
        ends_meet = schedule.owners[0] == schedule.owners[last]
        part = PipelineStageLayers(layers[index].start, layers[index].stop, index == 0, index == last, ends_meet)
        deferred = DeferredWgradQueue() if schedule.splits_backward else None
        stages[index] = Decoder(LayerBuilder(model, groups, dtype=torch.float64, deferred=deferred), part, recompute)
    for stage in stages.values():
        initialize_weights(stage, 1)
    return PipelineExecutor(schedule, stages, group, seed, **options)


def left_over(run: PipelineExecutor) -> list[Any]:
    put_off = [stage.deferred.take_all_wgrads() for stage in run.stages.values() if stage.deferred is not None]
    state = [run._inputs, run._outputs, run._edges, run._tied_weights, run._deferred_wgrads]
    return [*state, run._recvs, run._sends, run._contexts, *put_off]


ONE_RANK = [(name, chunks) for name in ("1f1b", "gpipe") for chunks in (1, 2, 4)] + [
    ("zb-h1", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize(("name", "chunks"), ONE_RANK)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_rank_runs_any_number_of_stages(
    name: str, chunks: int, count: int, tied: bool, recompute: RecomputeKind
) -> None:
    micro, model = batches(count), MODEL.model_copy(update={"tie_embeddings": tied})
    schedule = make_pipeline_schedule(name, pp=1, microbatches=count, virtual_stages=chunks)
    run = executor(schedule, model=model, recompute=RecomputePolicy(recompute))
    loss = run.run_operations(micro, SCALE)[0]
    expected, reference = one_after_another(micro, config=model)
    assert loss.item() == expected
    found = gradients(list(run.stages.values()))
    assert found.keys() == reference.keys()
    assert all(torch.equal(found[name], reference[name]) for name in reference)
    assert not any(left_over(run))


def test_evaluation_computes_the_loss_without_dropout_and_keeps_nothing() -> None:
    micro = batches(3)
    run = executor(make_pipeline_schedule("1f1b", pp=1, microbatches=3, virtual_stages=2))
    for stage in run.stages.values():
        stage.eval()
    with torch.no_grad():
        loss = run.run_operations(micro, 1.0)[0]
    assert loss.item() == one_after_another(micro, seed=None)[0]
    assert not gradients(list(run.stages.values()))
    assert not any(left_over(run))


def test_a_run_that_failed_leaves_neither_evaluation_mode_nor_contexts() -> None:
    run = executor(make_pipeline_schedule("1f1b", pp=1, microbatches=1))

    def fail(*_: object) -> None:
        raise MemoryError

    hook = run.first_local_stage.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError), torch.no_grad(), run.evaluation_mode():
        run.run_operations(batches(1), 1.0)
    hook.remove()
    assert run.run_operations(batches(1), SCALE)[0].item() == one_after_another(batches(1))[0]  # with dropout again


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_each_backward_is_told_its_stage_and_whether_it_is_the_last(name: str) -> None:
    told: list[tuple[int, bool]] = []

    @contextmanager
    def around(stage: int, last: bool) -> Iterator[None]:
        told.append((stage, last))
        yield

    run = executor(make_pipeline_schedule(name, pp=1, microbatches=3, virtual_stages=2), around_backward=around)
    for _ in range(2):
        told.clear()
        run.run_operations(batches(3), SCALE)
        for stage in (0, 1):
            assert [last for which, last in told if which == stage] == [False, False, True]


def test_activations_of_a_micro_batch_are_dropped_with_its_backward() -> None:
    """1F1B on one rank holds one micro-batch, GPipe all."""
    held: dict[str, int] = {}
    for name in ("1f1b", "gpipe"):
        run = executor(make_pipeline_schedule(name, pp=1, microbatches=4))
        peak = [0]

        @contextmanager
        def around(stage: int, last: bool, run: PipelineExecutor = run, peak: list[int] = peak) -> Iterator[None]:
            peak[0] = max(peak[0], len(run._edges))
            yield

        run.around_backward = around
        run.run_operations(batches(4), SCALE)
        held[name] = peak[0]
    assert held == {"1f1b": 1, "gpipe": 4}


SHAPES = [
    ("1f1b", 1, 4), ("1f1b", 2, 4), ("1f1b", 2, 3), ("1f1b", 2, 1), ("gpipe", 1, 3), ("gpipe", 2, 2),
    ("zb-h1", 1, 4), ("zb-h1", 1, 3), ("zb-h1", 1, 1), ("zbv", 2, 5), ("zbv", 2, 2), ("zbv", 2, 1),
    ("dualpipev", 2, 5), ("dualpipev", 2, 4), ("dualpipev", 2, 1),
]  # fmt: skip


def two_ranks() -> list[tuple[float, float, dict[str, torch.Tensor], bool]]:
    out = []
    group = CommGroup("pp", (0, 1), dist.get_rank(), dist.group.WORLD)
    for name, chunks, count in SHAPES:
        run = executor(make_pipeline_schedule(name, pp=2, microbatches=count, virtual_stages=chunks), group)
        loss = run.run_operations(batches(count), SCALE)[0].item()
        kept = any(left_over(run))
        with torch.no_grad():
            evaluated = run.run_operations(batches(count), 1.0)[0].item()
        out.append((loss, evaluated, gradients(list(run.stages.values())), kept or any(left_over(run))))
    return out


def most_leaving() -> list[int]:
    peak, group = [0], CommGroup("pp", (0, 1), dist.get_rank(), dist.group.WORLD)

    @contextmanager
    def around(stage: int, last: bool) -> Iterator[None]:
        peak[0] = max(peak[0], len(run._sends))
        yield

    run = executor(make_pipeline_schedule("1f1b", pp=2, microbatches=20), group, around_backward=around)
    run.run_operations(batches(20), SCALE)
    return peak


def test_what_was_sent_is_dropped_during_the_step() -> None:
    assert max(peak for (peak,) in run_ranks(most_leaving, 2)) == IN_FLIGHT * 2


def test_stages_on_two_ranks() -> None:
    ranks = run_ranks(two_ranks, 2)
    for (_, _, count), *found in zip(SHAPES, *ranks, strict=True):
        loss, reference = one_after_another(batches(count))
        assert sorted(one[0] for one in found) == [0.0, loss]  # only the last stage has any
        assert sorted(one[1] for one in found) == [0.0, loss]
        assert not any(one[3] for one in found)
        together = found[0][2] | found[1][2]
        assert together.keys() == reference.keys()
        assert all(torch.equal(together[name], reference[name]) for name in reference)
