"""`mega plan`: predicted memory and pipeline utilisation of a run, without a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.plan.machine import MachineSpec
    from mega_trainer.plan.other_trainers import OtherTrainer

EXAMPLES = """Examples:

  mega plan run.yaml --ranks 64

  mega plan run.yaml --ranks 16 --set parallel.pp=4 --draw schedule.svg

  mega plan run.yaml --machine h100-ib --ranks 1024 --tokens 15T

  mega plan run.yaml --machine h100 --ranks 512 --search --precision fp8 --write run-512.yaml

  mega plan run.yaml --machine h100 --ranks 512 --search --why "tp 8 pp 4 micro 2"

  mega plan run.yaml --machine h100 --ranks 512 --search --like megatron

  mega plan run.yaml --machine h100 --price 2.5 --tokens 2T --within 30d --under 3M

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
    within: Annotated[
        str | None,
        typer.Option(
            help="With --tokens: the most time, e.g. 30d or 12h. Without --ranks, find the fewest ranks that meet it."
        ),
    ] = None,
    under: Annotated[
        str | None,
        typer.Option(help="With --tokens and a price: the most cost, e.g. 500k. Without --ranks, as --within."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --machine: price of one GPU per hour, in any currency, e.g. 2.5."),
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
    why: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help='With --search: explain why this layout is not the fastest one, e.g. "tp 8 pp 4 micro 2".',
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
        typer.Option(
            help="Plan for another trainer: megatron, nanotron or fsdp2 (torchtitan). Its memory, its time with --machine, and with --search only layouts that it can run."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict parameters, memory per pipeline rank, FLOPs per step and the pipeline bubble of a run, without a GPU.

    With --machine also the step time, its parts, and the changes of the layout that would make it faster.
    """
    from mega_common.errors import ConfigError
    from mega_trainer.config.run_config import load_plan_config

    _check_options(
        machine, search, tokens=tokens, fit=fit, within=within, under=under, why=why, precision=precision, write=write
    )
    config = load_plan_config(run, set_ or [])
    if config.model.transformers is not None:
        raise ConfigError(
            f"{run}: mega plan is not supported with model.implementation = transformers: neither memory, time nor FLOPs of "
            "its module are predicted",
            hint="measure: mega train --find-micro-batch, or a few steps with train.steps=20",
        )
    name = machine or ""
    spec, limits = _load_machine(config, machine, price, like), None
    if tokens is not None:
        from mega_trainer.plan.run_budget import BudgetLimits

        limits = BudgetLimits.parse(tokens, within, under)
        if under is not None and spec is not None and spec.price is None:
            raise ConfigError(
                "--under requires a price of the machine", hint="add --price, the price of a GPU per hour"
            )
    trainer, layouts = _load_trainer(like, html), None
    if spec is not None and limits is not None and ranks is None and (within or under):
        from mega_cli.plan_search import find_ranks_for_budget

        ranks, layouts = find_ranks_for_budget(config, spec, limits, precision or [], trainer)
    ranks = ranks or config.parallel_rules.minimum_ranks
    if spec is not None and (search or layouts is not None):
        from mega_cli.plan_search import report_layouts

        text = report_layouts(
            config, ranks, spec, name, layouts, run=run, precisions=precision or [], limits=limits, why=why, html=html,
            write=write, as_json=as_json, like=trainer,
        )  # fmt: skip
        print(text)
        return
    config.check_world_size(ranks)
    if spec is not None and fit is not None:
        from mega_cli.plan_prediction import calibrate_machine_spec

        print(calibrate_machine_spec(config, ranks, spec, name, fit))
        return
    from mega_cli.plan_prediction import describe_plan

    plan = describe_plan(config, ranks, draw)
    if trainer is not None:
        plan |= {"like": like, "memory_bytes": _memory_like(config, ranks, trainer)}
    if spec is not None:
        from mega_cli.plan_prediction import predict_run_speed_and_cost

        plan["time"] = predict_run_speed_and_cost(config, ranks, spec, name, limits, plan["memory_bytes"], trainer)
    if html is not None:
        from mega_cli.plan_prediction import write_plan_html

        write_plan_html(html, run, config, ranks, spec, plan)
    print(json.dumps(plan, indent=1) if as_json else _format_plan(plan))


def _load_machine(config: RunConfig, name: str | None, price: float | None, like: str | None) -> MachineSpec | None:
    """Return the machine of `--machine`, with the price of `--price` if given, or None without one.

    Raises:
        ConfigError: for an unknown machine, or one that lacks the run's FP8 recipe unless the plan is for the trainer `like`.
    """
    if name is None:
        return None
    from mega_trainer.plan.layout_search import check_machine_recipe
    from mega_trainer.plan.machine import load_machine

    machine = load_machine(name)
    if like is None:
        check_machine_recipe(config, machine)
    return machine if price is None else machine.model_copy(update={"price": price})


def _load_trainer(name: str | None, html: Path | None) -> OtherTrainer | None:
    """Return the trainer of `--like`, or None without one."""
    if name is None:
        return None
    from mega_common.errors import ConfigError
    from mega_trainer.plan.other_trainers import get_other_trainer

    if html is not None:
        raise ConfigError("--html is not supported with --like", hint="leave out --html or --like")
    return get_other_trainer(name)


def _check_options(machine: str | None, search: bool, **given: object) -> None:
    """Raise ConfigError for an option without the other options that it requires."""
    from mega_common.errors import ConfigError

    named = ["--search"] if search else []
    named += [f"--{option}" for option in ("fit", "tokens", "within", "under") if given[option] is not None]
    if machine is None and named:
        raise ConfigError(
            f"{named[0]} requires --machine, because times depend on the machine",
            hint="add --machine, e.g. --machine h100",
        )
    for option in ("within", "under"):
        if given[option] is not None and given["tokens"] is None:
            raise ConfigError(f"--{option} {given[option]} requires --tokens", hint="add --tokens, e.g. --tokens 2T")
    budget = given["within"] is not None or given["under"] is not None
    precision, write = given["precision"], given["write"]
    if precision and not (search or budget):
        first = precision[0] if isinstance(precision, list) else precision
        raise ConfigError(
            f"--precision {first} requires --search",
            hint=f"add --search; to plan the run in this precision, use --set precision={first}",
        )
    for option in ("write", "why"):
        if given[option] is not None and not (search or budget):
            raise ConfigError(f"--{option} {given[option]} requires --search", hint="add --search")
    if isinstance(write, Path) and write.exists():
        raise ConfigError(f"--write {write}: the file exists already", hint="choose a new file name")


def _memory_like(config: RunConfig, ranks: int, trainer: OtherTrainer) -> list[dict[str, int]]:
    from mega_trainer.plan.device_memory import add_non_tensor_memory
    from mega_trainer.plan.memory_advice import make_training_layout

    shape = make_training_layout(config, ranks)
    return [add_non_tensor_memory(shape, kinds) for kinds in trainer.predict_memory(config.model, shape)]


def _format_rampup(plan: dict[str, Any]) -> list[str]:
    """Return the line about a batch size ramp-up; all other lines are about the full batch."""
    growing = plan.get("rampup", [])
    steps = sum(plateau["steps"] for plateau in growing)
    return [f"batch ramp-up    from {growing[0]['global']} samples, over {steps} steps"] if growing else []


def _format_plan(plan: dict[str, Any]) -> str:
    from mega_common.progress_logging import format_with_decimal_unit

    formula = plan["bubble_by_formula"]
    degrees = ", ".join(f"{name} {size}" for name, size in plan["ranks"].items() if name != "world")
    lines = [
        f"parameters       {format_with_decimal_unit(plan['parameters'])}",
        f"ranks            {plan['ranks']['world']} ({degrees})",
        f"per step         {format_with_decimal_unit(plan['tokens_per_step'])} tokens in {plan['microbatches']} micro-batches per rank, "
        f"{format_with_decimal_unit(plan['flops_per_step'])}FLOP",
        "per token        "
        + ", ".join(
            f"{format_with_decimal_unit(plan['flops_per_token'][kind])}FLOP {how}"
            for kind, how in _FLOPS_CONVENTIONS.items()
        ),
        *(
            [f"per image        {format_with_decimal_unit(plan['flops_per_image'])}FLOP more"]
            if "flops_per_image" in plan
            else []
        ),
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
        from mega_cli.plan_prediction import format_speed_prediction

        lines += format_speed_prediction(plan["time"])
    if plan["drawing"]:
        lines.append(f"schedule drawn to {plan['drawing']}")
    return "\n".join(lines)
