"""Bubble and in-flight micro-batches of a pipeline, at a cost independent of the number of micro-batches. No torch.

A full pipeline is periodic, so a few micro-batches are simulated and the rest is linear in their number.
"""

from __future__ import annotations

from functools import lru_cache

from mega_common.errors import ConfigError
from mega_trainer.pipeline.schedules import (
    PipelineOpCosts,
    PipelineSchedule,
    make_pipeline_schedule,
    simulate_pipeline_schedule,
)

IN_FLIGHT = 4  # messages of a rank in flight / pipeline ranks, as in `pipeline.executor`
MAX_SIMULATED = 60_000  # operations that are simulated one by one
MAX_OPERATIONS = 1_200_000  # operations of a schedule for planning memory


@lru_cache(maxsize=2)  # the search plans one layout several times, with more and more of its activations in host memory
def make_planning_schedule(
    name: str, *, pp: int, microbatches: int, virtual_stages: int, pairs_passes: bool = False
) -> PipelineSchedule:
    """Return a pipeline schedule with few micro-batches, but enough to fill the pipeline.
    `name` is the schedule, and `microbatches` the upper limit; gpipe, which holds all micro-batches in memory, gets
    all.

    Raises:
        ConfigError: for more operations than a plan can list, or as `make_pipeline_schedule`.
    """
    full = (4 * virtual_stages + 2 * IN_FLIGHT) * pp
    count = microbatches if name == "gpipe" else min(microbatches, full)
    check_operation_count(count, pp * virtual_stages, f"parallel.schedule = {name}")
    return make_pipeline_schedule(
        name, pp=pp, microbatches=count, virtual_stages=virtual_stages, pairs_passes=pairs_passes
    )


def check_operation_count(microbatches: int, stages: int, subject: str) -> None:
    """Raise `ConfigError` for a pipeline schedule of more operations than can be listed in reasonable time.
    `subject` begins the message.

    Raises:
        ConfigError: with the number of micro-batches and stages.
    """
    if 2 * microbatches * stages > MAX_OPERATIONS:
        raise ConfigError(
            f"{subject} requires a list of {microbatches:,} micro-batches x {stages:,} pipeline stages, "
            f"and mega plan supports at most {MAX_OPERATIONS // 2:,} entries",
            hint="use a smaller batch.global, a larger batch.micro, or fewer parallel.pp and parallel.virtual_stages",
        )


def estimate_pipeline_makespan(
    name: str,
    *,
    pp: int,
    microbatches: int,
    virtual_stages: int,
    pairs_passes: bool = False,
    costs: PipelineOpCosts | None = None,
) -> float:
    """Return the time of all micro-batches of a step under the pipeline schedule `name`, in the unit of `costs`."""

    def simulate_makespan(count: int) -> float:
        schedule = make_pipeline_schedule(
            name, pp=pp, microbatches=count, virtual_stages=virtual_stages, pairs_passes=pairs_passes
        )
        return simulate_pipeline_schedule(schedule, costs).makespan

    rounds = max(0, (microbatches - 3 * pp) // pp)
    first = simulate_makespan(microbatches - rounds * pp)
    if rounds == 0:
        return first
    return first + rounds * (simulate_makespan(microbatches - (rounds - 1) * pp) - first)


def estimate_pipeline_bubble(
    name: str, *, pp: int, microbatches: int, virtual_stages: int, pairs_passes: bool = False
) -> float:
    """Return the pipeline bubble: the mean idle share of the ranks, 0 to 1, for equal stages.
    It is exact if a step has few operations.
    """
    if 3 * microbatches * pp * virtual_stages <= MAX_SIMULATED:
        schedule = make_pipeline_schedule(
            name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages, pairs_passes=pairs_passes
        )
        return simulate_pipeline_schedule(schedule).mean_bubble_share
    check_operation_count(min(microbatches, 5 * pp), pp * virtual_stages, f"parallel.schedule = {name}")
    makespan = estimate_pipeline_makespan(
        name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages, pairs_passes=pairs_passes
    )
    costs = PipelineOpCosts()
    busy = (costs.forward + costs.input_grad + costs.weight_grad) * virtual_stages * microbatches
    return max(0.0, 1 - busy / makespan)
