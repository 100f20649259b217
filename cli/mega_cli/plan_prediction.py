"""Parts of `mega plan`: the plan of a layout, predicted step time, advice, layout search, and their pages."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_common.errors import ConfigError
from mega_common.progress_logging import format_number, logger

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.pages.plan_page import LayoutCandidate
    from mega_trainer.plan.layout_search import PlannedLayout

SHOWN = 8  # layouts that are printed
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def describe_plan(config: RunConfig, ranks: int, draw: Path | None = None) -> dict[str, Any]:
    """Return parameters, ranks, FLOPs, memory and pipeline bubble of a run as `mega plan --json` prints them, without
    times; draw the pipeline schedule to the SVG file `draw`.
    """
    from mega_trainer.pipeline.schedule_svg import draw_schedule_svg
    from mega_trainer.pipeline.schedules import bubble_formula, make_schedule, peak_activations, simulate_schedule
    from mega_trainer.plan.flops import CONVENTIONS, count_parameters_by_layer, published_flops
    from mega_trainer.plan.layer_flops import image_flops
    from mega_trainer.plan.memory_advice import make_training_layout
    from mega_trainer.plan.memory_prediction import predict_memory
    from mega_trainer.plan.pipeline_fill import check_operation_count, estimate_bubble, make_planning_schedule

    parallel, dp = config.parallel, config.data_parallel_size(ranks)
    micro = config.micro_batches_per_step(dp)
    shape = {"pp": parallel.pp, "microbatches": micro, "virtual_stages": parallel.virtual_stages}
    filled = make_planning_schedule(parallel.schedule, **shape)
    bubble = estimate_bubble(parallel.schedule, **shape)
    if draw is not None:
        check_operation_count(micro, parallel.pp * parallel.virtual_stages, "--draw")
        schedule = make_schedule(parallel.schedule, **shape)
        draw.write_text(draw_schedule_svg(schedule, simulate_schedule(schedule)), encoding="utf-8")
    tokens = config.batch.global_ * config.tokens_per_sample
    flops = {
        kind: published_flops(config.model, config.data.seq_length, kind, config.sequence_lengths[1])
        for kind in CONVENTIONS
    }
    growing = [{"global": size, "steps": steps} for size, steps in config.batch.growth_plateaus()]
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
        "memory_bytes": predict_memory(config.model, make_training_layout(config, ranks)),
        "microbatches_in_flight": peak_activations(filled),
        "bubble": bubble,
        "bubble_by_formula": bubble_formula(replace(filled, microbatches=micro)),
        "drawing": None if draw is None else str(draw),
    }


def predict_run(
    config: RunConfig, ranks: int, name: str, tokens: str | None, memory: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Predict the step time of a run on machine `name`, MFU, cost and faster settings; times in seconds, memory in
    bytes, as `mega plan --json` prints them. `memory` has the bytes of each pipeline rank.

    Raises:
        ConfigError: for an unknown machine, or an invalid number of tokens.
    """
    from mega_trainer.plan.flops import model_flops, palm_flops
    from mega_trainer.plan.layout_search import find_faster_changes, make_planned_run
    from mega_trainer.plan.machine import load_machine

    machine = load_machine(name)
    wanted = None if tokens is None else _parse_token_count(tokens)
    planned = make_planned_run(config, ranks, machine)
    step, other = planned.predict_step_time(), planned.trained.extra_flops(config.model, planned.count)
    rate = config.batch.global_ * config.tokens_per_sample / step.seconds
    kind = "bf16" if config.precision == "fp8" else config.precision  # the convention of other trainers for fp8
    length, peak = config.data.seq_length, machine.get_peak_flops(kind)
    prediction: dict[str, Any] = {
        "machine": name,
        "seconds_per_step": step.seconds,
        "tokens_per_second_per_gpu": rate / ranks,
        "peak_of": kind,
        "mfu_causal": rate / ranks * (model_flops(config.model, length) + other) / peak,
        "mfu_palm": rate / ranks * (palm_flops(config.model, length) + other) / peak,
        "seconds": dict(sorted(step.parts.items(), key=lambda part: -part[1])),
        "memory_limit_bytes": round(machine.usable_memory_bytes),
        "fits": max(sum(kinds.values()) for kinds in memory) <= machine.usable_memory_bytes,
    }
    if wanted is not None:
        hours = wanted / rate / 3600
        prediction |= {"tokens": wanted, "hours": hours}
        if machine.price is not None:
            prediction["cost"] = hours * ranks * machine.price
    prediction["faster"] = [
        {
            "settings": _layout_overrides(layout, config),
            "gain": 1 - layout.time.seconds / step.seconds,
            "memory_bytes": layout.memory,
        }
        for layout in find_faster_changes(config, ranks, machine)
    ]
    return prediction


def format_prediction(prediction: Mapping[str, Any]) -> list[str]:
    """Return the prediction of a run's step time, MFU and cost (the result of `predict_run`) as lines of text."""
    seconds = prediction["seconds_per_step"]
    parts = ", ".join(f"{kind} {100 * part / seconds:.1f} %" for kind, part in prediction["seconds"].items())
    limit = prediction["memory_limit_bytes"] / 2**30
    lines = [
        f"on {prediction['machine']}, predicted:",
        f"  step time      {seconds:.3f} s, {prediction['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU",
        f"  MFU            {100 * prediction['mfu_causal']:.1f} % (unmasked attention), {100 * prediction['mfu_palm']:.1f} % "
        f"(PaLM's formula, 6 N + 12 L H Q S) of the {prediction['peak_of']} peak",
        f"  time by part   {parts}",
        f"  memory         {'fits' if prediction['fits'] else 'does not fit'} {limit:.1f} GiB, after CUDA and the allocator's overhead",
    ]
    if "hours" in prediction:
        cost = f", costs {prediction['cost']:,.0f}" if "cost" in prediction else ""
        lines.append(
            f"  {format_number(prediction['tokens'])} tokens   {prediction['hours']:,.1f} hours, {prediction['hours'] / 24:,.1f} days{cost}"
        )
    for change in prediction["faster"]:
        settings = " ".join(f"--set {setting}" for setting in change["settings"])
        lines.append(f"  {100 * change['gain']:.1f} % faster: {settings} ({change['memory_bytes'] / 2**30:.1f} GiB)")
    return lines


def search_layouts(
    config: RunConfig, ranks: int, name: str, keep: int = SHOWN, precisions: Sequence[str] = ()
) -> list[PlannedLayout]:
    """Return up to `keep` parallel layouts of a run that fit in the machine's memory, the fastest first, also in other
    `precisions`; print progress.

    Raises:
        ConfigError: for an unknown machine or precision, or if no layout fits.
    """
    from mega_trainer.plan.layout_search import find_best_layouts
    from mega_trainer.plan.machine import load_machine

    machine = load_machine(name)
    for precision in precisions:
        if precision == "fp8" and not machine.supports_precision(precision):
            raise ConfigError(
                f"--precision fp8 is not supported by the GPU {machine.gpu}", hint="use --machine h100 or a later GPU"
            )
    shown = [time.monotonic()]

    def report_progress(text: str) -> None:
        if time.monotonic() - shown[0] > 2:
            shown[0] = time.monotonic()
            print(text, file=sys.stderr)

    return find_best_layouts(config, ranks, machine, keep=keep, report=report_progress, precisions=precisions)


def describe_layouts(
    config: RunConfig, ranks: int, name: str, layouts: Sequence[PlannedLayout], *, as_json: bool
) -> str:
    """Return the parallel layouts that a search found as text: YAML of the first one with the others as comments, or
    JSON.
    """
    from mega_trainer.plan.layout_search import explain_layout_time, format_layout, layout_to_yaml

    best, tokens = layouts[0], config.batch.global_ * config.tokens_per_sample

    def relative_slowdown(layout: PlannedLayout) -> float:
        return layout.time.seconds / best.time.seconds - 1

    if as_json:
        rows = [
            {
                "settings": layout.settings, "seconds_per_step": layout.time.seconds, "memory_bytes": layout.memory,
                "tokens_per_second_per_gpu": tokens / layout.time.seconds / ranks, "slower": relative_slowdown(layout),
                "reason": explain_layout_time(layout, best),
            }
            for layout in layouts
        ]  # fmt: skip
        return json.dumps(rows, indent=1)
    lines = [
        f"# {ranks} ranks on {name}, predicted: seconds per step, tokens/s/GPU, GiB of the rank with the most memory"
    ]
    for layout in layouts:
        lines.append(
            f"# {layout.time.seconds:.3f} s  {tokens / layout.time.seconds / ranks:,.0f}  {layout.memory / 2**30:.1f} GiB  "
            f"+{100 * relative_slowdown(layout):.1f} %  {format_layout(layout.settings)}: {explain_layout_time(layout, best)}"
        )
    return "\n".join([*lines, layout_to_yaml(best).rstrip()])


def fit_machine(config: RunConfig, ranks: int, name: str, metrics: Path) -> str:
    """Return the description of machine `name`, calibrated with the metrics file of a run on `ranks` ranks, as YAML
    with predicted and measured times as comments.

    Raises:
        ConfigError: for an unknown machine, metrics without times, or a run that was faster than the machine's peak.
    """
    import yaml

    from mega_trainer.plan.layout_search import make_planned_run
    from mega_trainer.plan.machine import load_machine
    from mega_trainer.plan.machine_calibration import calibrate_machine, compare_predictions, read_measured_times

    machine, measured = load_machine(name), read_measured_times(metrics)
    before = make_planned_run(config, ranks, machine)
    calibrated = calibrate_machine(before, machine, measured)
    lines = [f"# {name}, calibrated with {metrics} on {ranks} rank(s)"]
    lines += [
        f"# {line}" for line in compare_predictions(before, make_planned_run(config, ranks, calibrated), measured)
    ]
    return "\n".join(
        [*lines, yaml.safe_dump(calibrated.model_dump(mode="json", exclude_none=True), sort_keys=False).rstrip()]
    )


def write_layout_yaml(config: RunConfig, layout: PlannedLayout, path: Path) -> None:
    """Write a run.yaml with all settings of the run, changed to a parallel layout that a search found."""
    import yaml

    from mega_common.atomic_files import open_atomic_file
    from mega_trainer.plan.memory_advice import apply_settings

    chosen = apply_settings(config, layout.settings).model_dump(mode="json", by_alias=True, exclude_none=True)
    with open_atomic_file(path, text=True) as stream:
        yaml.safe_dump(chosen, stream, sort_keys=False)


def _layout_overrides(layout: PlannedLayout, config: RunConfig) -> list[str]:
    """Return the overrides of a layout, as `--set` takes them."""
    changed = []
    for path, value in layout.settings.items():
        section, _, key = path.partition(".")
        if value is not None or getattr(getattr(config, section), key) is not None:
            text = value["kind"] if isinstance(value, dict) else json.dumps(value).strip('"')
            changed.append(f"{path}={text}")
    return changed


def _parse_token_count(text: str) -> float:
    """Parse a number such as 300B as 3e11.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        number = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    except ValueError:
        number = 0.0
    if number <= 0:
        raise ConfigError(
            f"--tokens must be a number with K, M, B or T, found {text!r}", hint="--tokens 300B or --tokens 15T"
        )
    return number


def write_plan_html(
    html: Path, run: Path, config: RunConfig, ranks: int, plan: dict[str, Any], found: Sequence[LayoutCandidate] = ()
) -> None:
    """Write the HTML page of a run's plan, given as `mega plan --json` prints it, and of the predicted times if `plan`
    has `time`.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from mega_trainer.pages.page_elements import write_html_page
    from mega_trainer.pages.plan_page import PipelineShape, render_plan_page
    from mega_trainer.plan.layout_search import make_planned_run
    from mega_trainer.plan.machine import load_machine
    from mega_trainer.plan.memory_advice import make_training_layout
    from mega_trainer.plan.memory_prediction import predict_peak_memory

    shape, costs = make_training_layout(config, ranks), None
    if "time" in plan:
        timed = make_planned_run(config, ranks, load_machine(plan["time"]["machine"]))
        costs = timed.make_stage_costs(timed.compute_stage_work())
    message = shape.micro_batch * (shape.seq_length // shape.cp) * config.model.hidden_size * shape.weight_bytes
    text = render_plan_page(
        f"Plan of {run}", plan, [rank.moment for rank in predict_peak_memory(config.model, shape)],
        PipelineShape(shape.schedule, shape.pp, shape.virtual_stages, shape.microbatches),
        message // (shape.tp if shape.sp else 1), costs, found,
    )  # fmt: skip
    write_html_page(html, text, "--html")
    logger.info("wrote %s", html)


def write_search_html(
    html: Path,
    run: Path,
    config: RunConfig,
    ranks: int,
    machine: str,
    tokens: str | None,
    layouts: Sequence[PlannedLayout],
) -> None:
    """Write the HTML page of the parallel layouts that a search found, and of the plan of the first.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from mega_trainer.pages.plan_page import LayoutCandidate
    from mega_trainer.plan.layout_search import explain_layout_time, format_layout
    from mega_trainer.plan.memory_advice import apply_settings

    best = layouts[0]
    each = config.batch.global_ * config.data.seq_length / ranks
    found = [
        LayoutCandidate(
            layout.time.seconds,
            each / layout.time.seconds,
            layout.memory,
            format_layout(layout.settings),
            explain_layout_time(layout, best),
        )
        for layout in layouts
    ]
    chosen = apply_settings(config, best.settings)
    plan = describe_plan(chosen, ranks)
    plan["time"] = predict_run(chosen, ranks, machine, tokens, plan["memory_bytes"])
    write_plan_html(html, run, chosen, ranks, plan, found)
