"""`mega plan`: predicted memory and pipeline utilisation of a run, without a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig

PICTURED = 16  # layouts of a search in a page
EXAMPLES = """Examples:

  mega plan run.yaml --ranks 64

  mega plan run.yaml --ranks 16 --set parallel.pp=4 --draw schedule.svg

  mega plan run.yaml --machine h100-ib --ranks 1024 --tokens 15T

  mega plan run.yaml --machine h100 --ranks 512 --search --precision fp8 --write run-512.yaml

  mega plan runs/mine/run.yaml --machine h100 --ranks 64 --fit runs/mine/metrics.jsonl > our-h100.yaml

  mega plan run.yaml --machine h100 --ranks 512 --html plan.html

  mega plan models/Qwen2.5-7B/config.json --set parallel.tp=8 --set data.seq_length=8192
"""


_COUNTED = {
    "exact": "(products of matrices, of attention what is not masked)", "megatron": "as Megatron counts",
    "full": "as NeMo (all of attention)", "palm": "by PaLM's rule (6 N + 12 L H Q S)",
}  # fmt: skip


def plan_command(
    run: Annotated[
        Path, typer.Argument(help="The run's configuration, run.yaml; or a model alone, its folder or config.json.")
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the whole job. Default: what the layout needs at least.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: a.b=value. Repeatable.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Draw the pipeline's schedule into this SVG file.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict the time of a step on this machine: a name such as h100, a100-40-ethernet, or a YAML file."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="With --machine: hours, and cost where it has a price, to so many tokens: 300B, 15T."),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="With --machine: the fastest layouts that fit, and the first of them as sections of a run.yaml.",
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(help="With --search: write the run in the fastest layout into this new file.", show_default=False),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="With --search: look at this precision too, which changes what is computed: fp8. Repeatable."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="METRICS",
            help="With --machine: print it as this metrics.jsonl of the run, on so many --ranks, measured it.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write all of it into this file, as a page that needs no other; with --search that too."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="Memory as another trainer keeps things: megatron, nanotron or fsdp2 (torchtitan)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show parameters, memory of each pipeline rank, FLOPs of a step, and the pipeline bubble beside the closed
    formula.

    With --machine also the predicted time of a step, where it goes, and which change would gain most.
    """
    from mega_common.errors import ConfigError
    from mega_trainer.config.run_config import load_plan_config

    if machine is None and (tokens is not None or search or fit is not None):
        given = "--search" if search else "--fit" if fit is not None else "--tokens"
        raise ConfigError(
            f"{given} predicts times, which depend on the machine", hint=f"add --machine, as in {given} --machine h100"
        )
    if precision and not search:
        raise ConfigError(
            f"--precision {precision[0]}: is for what --search looks at",
            hint=f"add --search, or --set precision={precision[0]}",
        )
    if write is not None and (not search or write.exists()):
        rule = "is there already" if search else "is for the layout that --search finds"
        raise ConfigError(f"--write {write}: {rule}", hint="a new file's name" if search else "add --search")
    config = load_plan_config(run, set_ or [])
    ranks = ranks or config.parallel_rules.minimum_ranks
    if machine is not None and search:
        from mega_cli.plan_prediction import SHOWN, describe_layouts, search_layouts, write_layout_yaml

        layouts = search_layouts(config, ranks, machine, SHOWN if html is None else PICTURED, precision or [])
        if html is not None:
            from mega_cli.plan_prediction import write_search_html

            write_search_html(html, run, config, ranks, machine, tokens, layouts)
        if write is not None:
            write_layout_yaml(config, layouts[0], write)
        print(describe_layouts(config, ranks, machine, layouts[:SHOWN], as_json=as_json))
        return
    config.check_world_size(ranks)
    if machine is not None and fit is not None:
        from mega_cli.plan_prediction import fit_machine as fit_machine

        print(fit_machine(config, ranks, machine, fit))
        return
    told = describe_plan(config, ranks, draw)
    if like is not None:
        told |= {"like": like, "memory_bytes": _memory_like(config, ranks, like)}
    if machine is not None:
        from mega_cli.plan_prediction import predict_run

        told["time"] = predict_run(config, ranks, machine, tokens, told["memory_bytes"])
    if html is not None:
        from mega_cli.plan_prediction import write_plan_html

        write_plan_html(html, run, config, ranks, told)
    print(json.dumps(told, indent=1) if as_json else _table(told))


def describe_plan(config: RunConfig, ranks: int, draw: Path | None = None) -> dict[str, Any]:
    """Return the plan as --json prints it, without times; its schedule is drawn into `draw`."""
    from mega_trainer.pipeline.schedule_svg import draw_schedule_svg as drawing
    from mega_trainer.pipeline.schedules import bubble_formula, make_schedule, peak_activations, simulate_schedule
    from mega_trainer.plan.flops import CONVENTIONS, count_parameters_by_layer, published_flops
    from mega_trainer.plan.layer_flops import image_flops
    from mega_trainer.plan.memory_advice import make_run_shape
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
        draw.write_text(drawing(schedule, simulate_schedule(schedule)), encoding="utf-8")
    tokens = config.batch.global_ * config.tokens_per_sample
    flops = {
        kind: published_flops(config.model, config.data.seq_length, kind, config.sequence_lengths[1])
        for kind in CONVENTIONS
    }
    seen = config.model, tuple(config.train.freeze), config.lora
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
        **({"flops_per_image": sum(image_flops(*seen).values())} if config.model.vision else {}),
        "memory_bytes": predict_memory(config.model, make_run_shape(config, ranks)),
        "microbatches_in_flight": peak_activations(filled),
        "bubble": bubble,
        "bubble_by_formula": bubble_formula(replace(filled, microbatches=micro)),
        "drawing": None if draw is None else str(draw),
    }


def _memory_like(config: RunConfig, ranks: int, like: str) -> list[dict[str, int]]:
    from mega_common.errors import ConfigError
    from mega_trainer.plan.memory_advice import make_run_shape
    from mega_trainer.plan.other_trainer_memory import TRAINERS, predict_other_trainer_memory

    known = next((name for name in TRAINERS if name == like), None)
    if known is None:
        raise ConfigError(f"--like {like}: no trainer whose memory is known", hint=f"one of {', '.join(TRAINERS)}")
    return predict_other_trainer_memory(config.model, make_run_shape(config, ranks), known)


def _format_rampup(told: dict[str, Any]) -> list[str]:
    """Return the line of a batch size ramp-up; the other lines are for the full batch."""
    growing = told.get("rampup", [])
    steps = sum(plateau["steps"] for plateau in growing)
    return [f"batch ramp-up    from {growing[0]['global']} samples, in {steps} steps"] if growing else []


def _table(told: dict[str, Any]) -> str:
    from mega_common.progress_logging import format_number

    formula = told["bubble_by_formula"]
    degrees = ", ".join(f"{name} {size}" for name, size in told["ranks"].items() if name != "world")
    lines = [
        f"parameters       {format_number(told['parameters'])}",
        f"ranks            {told['ranks']['world']} ({degrees})",
        f"a step           {format_number(told['tokens_per_step'])} tokens in {told['microbatches']} micro-batches a rank, "
        f"{format_number(told['flops_per_step'])}FLOP",
        "a token          "
        + ", ".join(f"{format_number(told['flops_per_token'][kind])}FLOP {how}" for kind, how in _COUNTED.items()),
        *(
            [f"an image         {format_number(told['flops_per_image'])}FLOP besides"]
            if "flops_per_image" in told
            else []
        ),
        *_format_rampup(told),
        f"pipeline bubble  {100 * told['bubble']:.1f} %"
        + ("" if formula is None else f" (formula {100 * formula:.1f} %)"),
        f"estimated bytes a rank{' as ' + told['like'] + ' keeps them' if 'like' in told else ''}, by pipeline rank:",
    ]
    large = max(sum(kinds.values()) for kinds in told["memory_bytes"]) >= 2**30
    scale, unit = (2**30, "GiB") if large else (2**20, "MiB")
    for rank, (kinds, flight) in enumerate(zip(told["memory_bytes"], told["microbatches_in_flight"], strict=True)):
        parts = ", ".join(f"{kind} {size / scale:.2f}" for kind, size in kinds.items())
        lines.append(f"  {rank}: {sum(kinds.values()) / scale:.2f} {unit} = {parts}; {flight} activations in flight")
    if "time" in told:
        from mega_cli.plan_prediction import format_prediction

        lines += format_prediction(told["time"])
    if told["drawing"]:
        lines.append(f"drawn into {told['drawing']}")
    return "\n".join(lines)
