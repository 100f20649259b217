"""`mega plan`: predicted memory and pipeline utilisation of a run, without a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig

HTML_LAYOUTS = 16  # layouts of a search in the HTML page
EXAMPLES = """Examples:

  mega plan run.yaml --ranks 64

  mega plan run.yaml --ranks 16 --set parallel.pp=4 --draw schedule.svg

  mega plan run.yaml --machine h100-ib --ranks 1024 --tokens 15T

  mega plan run.yaml --machine h100 --ranks 512 --search --precision fp8 --write run-512.yaml

  mega plan runs/mine/run.yaml --machine h100 --ranks 64 --fit runs/mine/metrics.jsonl > our-h100.yaml

  mega plan run.yaml --machine h100 --ranks 512 --html plan.html

  mega plan models/Qwen2.5-7B/config.json --set parallel.tp=8 --set data.seq_length=8192
"""


_FLOPS_CONVENTIONS = {
    "exact": "(GEMMs, and the unmasked part of attention)", "megatron": "by Megatron's formula",
    "full": "by NeMo's formula (full attention)", "palm": "by PaLM's formula (6 N + 12 L H Q S)",
}  # fmt: skip


def plan_command(
    run: Annotated[
        Path,
        typer.Argument(help="Configuration of the run, e.g. run.yaml; or only a model: its folder or config.json."),
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the whole job, e.g. 64. Default: the minimum of the layout.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set parallel.tp=8. Repeatable."),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw the pipeline schedule to this SVG file, e.g. schedule.svg.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Predict the step time on this machine: a name, e.g. h100-ib or a100-40-ethernet, or a YAML file."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="With --machine: also predict hours, and the cost if the machine has a price, for this number of tokens, e.g. 300B or 15T."
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="With --machine: search for the fastest layouts that fit in memory; print the best one as sections of a run.yaml.",
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="With --search: write a run.yaml with the fastest layout to this new file.", show_default=False
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="With --search: also search layouts in this precision, e.g. fp8 (this changes the numerics). Repeatable."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="METRICS",
            help="With --machine: calibrate the machine with the metrics.jsonl of this run on --ranks ranks, and print it as YAML.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the plan, with --search also the layouts, to this self-contained HTML file."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="Predict the memory of another trainer: megatron, nanotron or fsdp2 (torchtitan)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict parameters, memory per pipeline rank, FLOPs per step and the pipeline bubble of a run, without a GPU.

    With --machine also the step time, its parts, and the changes of the layout that would make it faster.
    """
    from mega_common.errors import ConfigError
    from mega_trainer.config.run_config import load_plan_config

    if machine is None and (tokens is not None or search or fit is not None):
        given = "--search" if search else "--fit" if fit is not None else "--tokens"
        raise ConfigError(
            f"{given} requires --machine, because times depend on the machine",
            hint="add --machine, e.g. --machine h100",
        )
    if precision and not search:
        raise ConfigError(
            f"--precision {precision[0]} requires --search",
            hint=f"add --search; to plan the run in this precision, use --set precision={precision[0]}",
        )
    if write is not None and not search:
        raise ConfigError(f"--write {write} requires --search", hint="add --search")
    if write is not None and write.exists():
        raise ConfigError(f"--write {write}: the file exists already", hint="choose a new file name")
    config = load_plan_config(run, set_ or [])
    if config.model.transformers is not None:
        raise ConfigError(
            f"{run}: mega plan is not supported with model.implementation = transformers: neither memory, time nor FLOPs of "
            "its module are predicted",
            hint="measure: mega train --find-micro-batch, or a few steps with train.steps=20",
        )
    ranks = ranks or config.parallel_rules.minimum_ranks
    if machine is not None and search:
        from mega_cli.plan_prediction import SHOWN, describe_layouts, search_layouts, write_layout_yaml

        layouts = search_layouts(config, ranks, machine, SHOWN if html is None else HTML_LAYOUTS, precision or [])
        if html is not None:
            from mega_cli.plan_prediction import write_search_html

            write_search_html(html, run, config, ranks, machine, tokens, layouts)
        if write is not None:
            write_layout_yaml(config, layouts[0], write)
        print(describe_layouts(config, ranks, machine, layouts[:SHOWN], as_json=as_json))
        return
    config.check_world_size(ranks)
    if machine is not None and fit is not None:
        from mega_cli.plan_prediction import fit_machine

        print(fit_machine(config, ranks, machine, fit))
        return
    from mega_cli.plan_prediction import describe_plan

    plan = describe_plan(config, ranks, draw)
    if like is not None:
        plan |= {"like": like, "memory_bytes": _memory_like(config, ranks, like)}
    if machine is not None:
        from mega_cli.plan_prediction import predict_run

        plan["time"] = predict_run(config, ranks, machine, tokens, plan["memory_bytes"])
    if html is not None:
        from mega_cli.plan_prediction import write_plan_html

        write_plan_html(html, run, config, ranks, plan)
    print(json.dumps(plan, indent=1) if as_json else _format_plan(plan))


def _memory_like(config: RunConfig, ranks: int, like: str) -> list[dict[str, int]]:
    from mega_common.errors import ConfigError
    from mega_trainer.plan.memory_advice import make_training_layout
    from mega_trainer.plan.other_trainer_memory import TRAINERS, predict_other_trainer_memory

    known = next((name for name in TRAINERS if name == like), None)
    if known is None:
        raise ConfigError(
            f"--like must be one of {', '.join(TRAINERS)}, found {like!r}", hint=f"--like {next(iter(TRAINERS))}"
        )
    return predict_other_trainer_memory(config.model, make_training_layout(config, ranks), known)


def _format_rampup(plan: dict[str, Any]) -> list[str]:
    """Return the line about a batch size ramp-up; all other lines are about the full batch."""
    growing = plan.get("rampup", [])
    steps = sum(plateau["steps"] for plateau in growing)
    return [f"batch ramp-up    from {growing[0]['global']} samples, over {steps} steps"] if growing else []


def _format_plan(plan: dict[str, Any]) -> str:
    from mega_common.progress_logging import format_number

    formula = plan["bubble_by_formula"]
    degrees = ", ".join(f"{name} {size}" for name, size in plan["ranks"].items() if name != "world")
    lines = [
        f"parameters       {format_number(plan['parameters'])}",
        f"ranks            {plan['ranks']['world']} ({degrees})",
        f"per step         {format_number(plan['tokens_per_step'])} tokens in {plan['microbatches']} micro-batches per rank, "
        f"{format_number(plan['flops_per_step'])}FLOP",
        "per token        "
        + ", ".join(
            f"{format_number(plan['flops_per_token'][kind])}FLOP {how}" for kind, how in _FLOPS_CONVENTIONS.items()
        ),
        *([f"per image        {format_number(plan['flops_per_image'])}FLOP more"] if "flops_per_image" in plan else []),
        *_format_rampup(plan),
        f"pipeline bubble  {100 * plan['bubble']:.1f} %"
        + ("" if formula is None else f" (formula {100 * formula:.1f} %)"),
        f"estimated memory{' of ' + plan['like'] if 'like' in plan else ''} by pipeline rank:",
    ]
    large = max(sum(kinds.values()) for kinds in plan["memory_bytes"]) >= 2**30
    scale, unit = (2**30, "GiB") if large else (2**20, "MiB")
    for rank, (kinds, flight) in enumerate(zip(plan["memory_bytes"], plan["microbatches_in_flight"], strict=True)):
        parts = ", ".join(f"{kind} {size / scale:.2f}" for kind, size in kinds.items())
        lines.append(f"  {rank}: {sum(kinds.values()) / scale:.2f} {unit} = {parts}; {flight} activations in flight")
    if "time" in plan:
        from mega_cli.plan_prediction import format_prediction

        lines += format_prediction(plan["time"])
    if plan["drawing"]:
        lines.append(f"schedule drawn to {plan['drawing']}")
    return "\n".join(lines)
