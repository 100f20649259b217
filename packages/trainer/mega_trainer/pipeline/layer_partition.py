"""Layers of each stage of a pipeline. Pure Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from mega_common.errors import ConfigError


def split_stage_layers(
    num_layers: int,
    pp: int,
    virtual_stages: int = 1,
    layout: Sequence[int] | None = None,
    *,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
    layer_costs: Sequence[float] | None = None,
    first_stage_layers: int = 0,
    last_stage_layers: int = 0,
) -> list[range]:
    """Return each stage's range of layer numbers in stage order, by `layout` if given, else balanced by cost.

    Without `layout` the layers are split to minimise the work of the busiest stage. With `layout` the first and the last
    stage may have no layers.

    Args:
        layout: number of layers of each stage.
        embed_cost, head_cost: work of the embedding (first stage) and the output head (last stage), in layers.
        layer_costs: work of each layer; None if all are equal.
        first_stage_layers, last_stage_layers: least number of layers of the first and of the last stage, as in
            `ModelConfig`.

    Raises:
        ConfigError: when there are too few layers for the stages, or `layout` does not fit the model or the stages.
    """
    stages = pp * virtual_stages
    if layout is None:
        _check_enough_layers(num_layers, pp, virtual_stages)
        ends, subject = (first_stage_layers, last_stage_layers), f"{num_layers} layers in {stages} stages"
        others = [max(1, end) if stages > 1 else 0 for end in ends]  # layers of the stage at the other end
        _check_first_stage(num_layers - max(0, stages - 2) - others[1], ends[0], subject)
        _check_last_stage(num_layers - max(0, stages - 2) - others[0], ends[1], subject)
        if layer_costs is None:
            counts = _balance_by_count(num_layers, stages, embed_cost, head_cost, ends)
        else:
            counts = _balance_by_cost(layer_costs, stages, embed_cost, head_cost, ends)
    else:
        _check_layout(layout, num_layers, stages)
        _check_first_stage(layout[0], first_stage_layers, f"parallel.pipeline_layout = {list(layout)}")
        _check_last_stage(layout[-1], last_stage_layers, f"parallel.pipeline_layout = {list(layout)}")
        counts = list(layout)
    firsts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]


def _balance_by_count(
    num_layers: int, stages: int, embed_cost: float = 0.0, head_cost: float = 0.0, ends: tuple[int, int] = (0, 0)
) -> list[int]:
    """Return the number of layers of each stage: one each, the first and the last one at least `ends`, then one by one to
    the stage with the least work.

    Ties go to the later stage: earlier ones hold the activations of more micro-batches.
    """
    counts = [max(1, ends[0]), *[1] * (stages - 2), max(1, ends[1])] if stages > 1 else [max(1, *ends)]
    work = [float(count) for count in counts]
    work[0] += embed_cost
    work[-1] += head_cost
    queue = [(amount, -stage) for stage, amount in enumerate(work)]
    heapify(queue)
    for _ in range(num_layers - sum(counts)):
        amount, stage = queue[0]
        counts[-stage] += 1
        heapreplace(queue, (amount + 1.0, stage))
    return counts


def _balance_by_cost(
    costs: Sequence[float], stages: int, embed_cost: float, head_cost: float, ends: tuple[int, int] = (0, 0)
) -> list[int]:
    """Return the number of layers of each stage, at least one and of the first and the last one at least `ends`, that
    minimises the most work of a stage, then the sum of squares.
    """
    sums = [embed_cost + total for total in accumulate(costs, initial=0.0)]
    sums[0], sums[-1] = 0.0, sums[-1] + head_cost
    # by number of first layers: (most work of a stage, sum of squares, counts) of their best split in n stages
    best = {end: (work, work * work, [end]) for end, work in enumerate(sums) if end >= max(1, ends[0])}
    for stage in range(1, stages):
        latest = len(costs) - (ends[1] if stage == stages - 1 else 1)  # where the stage may begin
        best = {
            end: min(
                (max(most, work), squares + work * work, [*counts, end - start])
                for start, (most, squares, counts) in best.items()
                if start < end and start <= latest
                for work in [sums[end] - sums[start]]
            )
            for end in range(min(best) + 1, len(sums))
        }
    return best[len(costs)][2]


def _check_enough_layers(num_layers: int, pp: int, virtual_stages: int) -> None:
    if num_layers >= pp * virtual_stages:
        return
    fits = f"virtual_stages={num_layers // pp}" if num_layers >= pp else f"pp={num_layers}"
    if num_layers < pp and virtual_stages > 1:
        fits += " and parallel.virtual_stages=1"
    raise ConfigError(
        f"model.num_layers = {num_layers} is too few for parallel.pp = {pp} times parallel.virtual_stages = "
        f"{virtual_stages}: each of the {pp * virtual_stages} stages needs at least one layer",
        hint=f"set parallel.{fits}",
    )


def _check_first_stage(most: int, needed: int, subject: str) -> None:
    """Raise ConfigError if the first stage of `subject` has at most `most` layers, fewer than `needed`."""
    if most < needed:
        raise ConfigError(
            f"{subject}: the first stage has at most {most} layer(s), but image features are added to the outputs of the "
            f"first {needed} layers (model.vision.native.deepstack), which must be on the first pipeline stage",
            hint=f"use fewer stages, or a parallel.pipeline_layout that begins with {needed} or more",
        )


def _check_last_stage(most: int, needed: int, subject: str) -> None:
    """Raise ConfigError if the last stage of `subject` has at most `most` layers, fewer than `needed`."""
    if most < needed:
        raise ConfigError(
            f"{subject}: the last stage has at most {most} layer(s), but the last {needed} layers share keys and values "
            "(model.shared_kv_layers), and must be on one pipeline stage",
            hint=f"use fewer stages, or a parallel.pipeline_layout that ends with {needed} or more",
        )


def _check_layout(layout: Sequence[int], num_layers: int, stages: int) -> None:
    if len(layout) != stages:
        problem = f"has {len(layout)} stages, but parallel.pp x parallel.virtual_stages = {stages}"
    elif sum(layout) != num_layers:
        problem = f"has {sum(layout)} layers, but model.num_layers = {num_layers}"
    elif min(layout) < 0 or 0 in layout[1:-1]:
        problem = "only the first and the last stage may have 0 layers"
    else:
        return
    hint = f"for example {_balance_by_count(num_layers, stages)}" if num_layers >= stages else None
    raise ConfigError(f"parallel.pipeline_layout = {list(layout)}: {problem}", hint=hint)
