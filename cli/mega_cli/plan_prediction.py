"""Parts of `mega plan` for one layout: memory, predicted step time, advice, and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_common.progress_logging import format_with_decimal_unit, logger
from mega_trainer.plan.held_out_error import describe_prediction_error, format_prediction_error

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.pages.plan_page import LayoutCandidate
    from mega_trainer.plan.layout_search import PlannedLayout
    from mega_trainer.plan.machine import MachineSpec
    from mega_trainer.plan.other_trainers import OtherTrainer
    from mega_trainer.plan.run_budget import BudgetLimits


def describe_plan(config: RunConfig, ranks: int, draw: Path | None = None) -> dict[str, Any]:
    """Return parameters, ranks, FLOPs, memory and pipeline bubble of a run, without times.
    The result is as `mega plan --json` prints it. The pipeline schedule is drawn to the SVG file `draw`.
    """
    from mega_trainer.pipeline.schedule_svg import draw_schedule_svg
    from mega_trainer.pipeline.schedules import (
        compute_closed_form_bubble,
        make_pipeline_schedule,
        peak_in_flight_microbatches,
        simulate_pipeline_schedule,
    )
    from mega_trainer.plan.device_memory import add_non_tensor_memory
    from mega_trainer.plan.flops import CONVENTIONS, compute_flops_by_convention, count_parameters_by_layer
    from mega_trainer.plan.layer_flops import image_flops
    from mega_trainer.plan.memory_advice import make_training_layout
    from mega_trainer.plan.memory_prediction import predict_memory
    from mega_trainer.plan.pipeline_fill import check_operation_count, estimate_pipeline_bubble, make_planning_schedule

    parallel, dp, run = config.parallel, config.data_parallel_size(ranks), make_training_layout(config, ranks)
    micro = config.micro_batches_per_step(dp)
    shape: dict[str, Any] = {
        "pp": parallel.pp, "microbatches": micro, "virtual_stages": parallel.virtual_stages,
        "pairs_passes": parallel.overlap_expert_exchange,
    }  # fmt: skip
    filled = make_planning_schedule(parallel.schedule, **shape)
    bubble = estimate_pipeline_bubble(parallel.schedule, **shape)
    if draw is not None:
        check_operation_count(micro, parallel.pp * parallel.virtual_stages, "--draw")
        schedule = make_pipeline_schedule(parallel.schedule, **shape)
        draw.write_text(draw_schedule_svg(schedule, simulate_pipeline_schedule(schedule)), encoding="utf-8")
    tokens = config.batch.global_ * config.tokens_per_sample
    flops = {
        kind: compute_flops_by_convention(config.model, config.data.seq_length, kind, config.sequence_lengths[1])
        for kind in CONVENTIONS
    }
    growing = [{"global": size, "steps": steps} for size, steps in config.batch.iterate_rampup_sizes()]
    return {
        "parameters": count_parameters_by_layer(config.model).total,
        "ranks": {
            "world": ranks,
            "tp": parallel.tp,
            "pp": parallel.pp,
            "cp": parallel.cp,
            "dp": dp,
            **({"ep": parallel.ep, "expert_tp": parallel.expert_tp} if config.model.moe else {}),
        },
        "microbatches": micro,
        **({"rampup": growing} if growing else {}),
        "tokens_per_step": tokens,
        "flops_per_step": tokens * flops["exact"],
        "flops_per_token": flops,
        **(
            {"flops_per_image": sum(image_flops(config.model, tuple(config.train.freeze), config.lora).values())}
            if config.model.vision
            else {}
        ),
        "memory_bytes": [add_non_tensor_memory(run, kinds) for kinds in predict_memory(config.model, run)],
        "microbatches_in_flight": peak_in_flight_microbatches(filled),
        "bubble": bubble,
        "bubble_by_formula": compute_closed_form_bubble(replace(filled, microbatches=micro)),
        "drawing": None if draw is None else str(draw),
    }


def predict_run_speed_and_cost(
    config: RunConfig, ranks: int, machine: MachineSpec, name: str, limits: BudgetLimits | None,
    memory: Sequence[Mapping[str, int]], like: OtherTrainer | None = None
) -> dict[str, Any]:  # fmt: skip
    """Predict the step time, MFU and cost of a run on a machine, in mega or in another trainer (`like`).
    For mega, the prediction has faster layouts, and layouts that fit if the given one does not. The error of the
    prediction on published runs is included. Times are in seconds, memory in bytes, as `mega plan --json` prints them.
    """
    from mega_trainer.plan.flops import compute_model_flops_per_token, compute_palm_flops_per_token
    from mega_trainer.plan.layout_changes import find_faster_layout_changes, find_fitting_layout_changes
    from mega_trainer.plan.layout_search import make_planned_run
    from mega_trainer.plan.run_budget import estimate_training_budget, find_exceeded_limits

    planned = make_planned_run(config, ranks, machine, like=like)
    step, other = planned.predict_step_time(), planned.trained.extra_flops(config.model, planned.count)
    rate = config.batch.global_ * config.tokens_per_sample / step.seconds
    kind = "bf16" if config.precision == "fp8" else config.precision  # the convention of other trainers for fp8
    length, peak = config.data.seq_length, machine.get_peak_flops(kind)
    prediction: dict[str, Any] = {
        "machine": name,
        "seconds_per_step": step.seconds,
        "error": describe_prediction_error(config.model, machine, config.gemm_precision),
        "tokens_per_second_per_gpu": rate / ranks,
        "peak_of": kind,
        "mfu_causal": rate / ranks * (compute_model_flops_per_token(config.model, length) + other) / peak,
        "mfu_palm": rate / ranks * (compute_palm_flops_per_token(config.model, length) + other) / peak,
        "seconds": dict(sorted(step.parts.items(), key=lambda part: -part[1])),
        **({"hidden_exchange_seconds": step.hidden_exchange} if step.hidden_exchange else {}),
        "memory_limit_bytes": round(machine.usable_memory_bytes),
        "fits": max(sum(kinds.values()) for kinds in memory) <= machine.usable_memory_bytes,
    }
    if limits is not None:
        prediction |= estimate_training_budget(limits.tokens, rate, ranks, machine)
        prediction["exceeds"] = find_exceeded_limits(prediction, limits)
    if like is not None:
        return {**prediction, "like": like.name, "faster": []}
    if not prediction["fits"]:
        prediction["fitting"] = [
            {
                "settings": _layout_overrides(layout, config),
                "slower": layout.time.seconds / step.seconds - 1,
                "memory_bytes": layout.memory,
            }
            for layout in find_fitting_layout_changes(config, ranks, machine)
        ]
    prediction["faster"] = [
        {
            "settings": _layout_overrides(layout, config),
            "gain": 1 - layout.time.seconds / step.seconds,
            "memory_bytes": layout.memory,
        }
        for layout in find_faster_layout_changes(config, ranks, machine)
    ]
    return prediction


def format_speed_prediction(prediction: Mapping[str, Any]) -> list[str]:
    """Return the result of `predict_run_speed_and_cost` (step time, MFU, cost, faster layouts) as lines of text."""
    seconds = prediction["seconds_per_step"]
    parts = ", ".join(f"{kind} {100 * part / seconds:.1f} %" for kind, part in prediction["seconds"].items())
    limit, hidden = prediction["memory_limit_bytes"] / 2**30, prediction.get("hidden_exchange_seconds", 0.0)
    exchange = hidden + prediction["seconds"].get("expert", 0.0)
    trainer = f", in {prediction['like']}" if "like" in prediction else ""
    lines = [
        f"on {prediction['machine']}{trainer}, predicted:",
        f"  step time      {seconds:.3f} s, {prediction['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU",
        f"  error          {format_prediction_error(prediction['error'])}",
        f"  MFU            {100 * prediction['mfu_causal']:.1f} % (unmasked attention), {100 * prediction['mfu_palm']:.1f} % "
        f"(PaLM's formula, 6 N + 12 L H Q S) of the {prediction['peak_of']} peak",
        f"  time by part   {parts}",
        *(
            [f"  hidden         {hidden:.3f} of {exchange:.3f} s of expert exchange, under other micro-batches"]
            if hidden
            else []
        ),
        f"  memory         {'fits' if prediction['fits'] else 'does not fit'} {limit:.1f} GiB",
        *_format_fitting(prediction),
    ]
    if "hours" in prediction:
        amount = f"{format_with_decimal_unit(prediction['tokens'])} tokens"
        lines.append(f"  {amount:<15}{format_training_budget(prediction)}")
        lines += [f"  over budget    {text}" for text in prediction["exceeds"]]
    for change in prediction["faster"]:
        settings = " ".join(f"--set {setting}" for setting in change["settings"])
        lines.append(f"  {100 * change['gain']:.1f} % faster: {settings} ({change['memory_bytes'] / 2**30:.1f} GiB)")
    return lines


def _format_fitting(prediction: Mapping[str, Any]) -> list[str]:
    """Return lines about the settings with which a run that does not fit would fit."""
    if prediction["fits"] or "like" in prediction:
        return []
    if not prediction["fitting"]:
        return ["  would fit with no change of recompute, offload, ZeRO or micro-batch; try --search or more ranks"]
    return [
        f"  would fit with {' '.join(f'--set {setting}' for setting in change['settings'])} "
        f"({change['memory_bytes'] / 2**30:.1f} GiB, {100 * change['slower']:+.1f} % step time)"
        for change in prediction["fitting"]
    ]


def format_training_budget(budget: Mapping[str, Any]) -> str:
    """Return the hours, days, cost and energy of a training run from `estimate_training_budget` as text."""
    cost = f", costs {budget['cost']:,.0f}" if "cost" in budget else ""
    energy = f", {budget['energy_mwh']:,.1f} MWh at the GPUs' power limit" if "energy_mwh" in budget else ""
    return f"{budget['hours']:,.1f} hours, {budget['hours'] / 24:,.1f} days{cost}{energy}"


def calibrate_machine_spec(config: RunConfig, ranks: int, machine: MachineSpec, name: str, metrics: Path) -> str:
    """Return a machine calibrated with the metrics file of a run, as YAML.
    The machine is `name`; predicted and measured times are comments.

    Raises:
        ConfigError: for metrics without times, or a run that was faster than the machine's peak.
    """
    import yaml

    from mega_trainer.plan.layout_search import make_planned_run
    from mega_trainer.plan.machine_calibration import (
        fit_machine_efficiency,
        format_calibration_comparison,
        read_measured_times,
    )

    measured = read_measured_times(metrics)
    before = make_planned_run(config, ranks, machine)
    calibrated = fit_machine_efficiency(before, machine, measured)
    lines = [f"# {name}, calibrated with {metrics} on {ranks} rank(s)"]
    lines += [
        f"# {line}"
        for line in format_calibration_comparison(before, make_planned_run(config, ranks, calibrated), measured)
    ]
    return "\n".join(
        [*lines, yaml.safe_dump(calibrated.model_dump(mode="json", exclude_none=True), sort_keys=False).rstrip()]
    )


def _layout_overrides(layout: PlannedLayout, config: RunConfig) -> list[str]:
    """Return the overrides of a layout, as `--set` takes them."""
    changed = []
    for path, value in layout.settings.items():
        section, _, key = path.partition(".")
        if value is not None or getattr(getattr(config, section), key) is not None:
            text = value["kind"] if isinstance(value, dict) else json.dumps(value).strip('"')
            changed.append(f"{path}={text}")
    return changed


def write_plan_html(
    html: Path, run: Path, config: RunConfig, ranks: int, machine: MachineSpec | None, plan: dict[str, Any],
    found: Sequence[LayoutCandidate] = ()
) -> None:  # fmt: skip
    """Write the HTML page of a run's plan, with predicted times if the plan has them.
    The plan is as `mega plan --json` prints it; predicted times are its `time`.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from mega_trainer.pages.page_elements import write_html_page
    from mega_trainer.pages.plan_page import PipelineShape, render_plan_page
    from mega_trainer.plan.layout_search import make_planned_run
    from mega_trainer.plan.memory_advice import make_training_layout
    from mega_trainer.plan.memory_prediction import predict_peak_memory

    shape, costs = make_training_layout(config, ranks), None
    if machine is not None:
        timed = make_planned_run(config, ranks, machine)
        costs = timed.make_stage_costs(timed.predict_stage_seconds())
    message = shape.micro_batch * (shape.seq_length // shape.cp) * config.model.hidden_size * shape.weight_bytes
    text = render_plan_page(
        f"Plan of {run}", plan, [rank.moment for rank in predict_peak_memory(config.model, shape)],
        PipelineShape(
            shape.schedule, shape.pp, shape.virtual_stages, shape.microbatches, shape.overlap_expert_exchange
        ),
        message // (shape.tp if shape.sp else 1), costs, found,
    )  # fmt: skip
    write_html_page(html, text, "--html")
    logger.info("wrote %s", html)
