"""Parts of `mega plan --search`: the fastest layouts with hours and cost, why they are faster than another, and their page."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_common.errors import ConfigError

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.plan.layout_search import PlannedLayout
    from mega_trainer.plan.machine import MachineSpec
    from mega_trainer.plan.other_trainers import OtherTrainer
    from mega_trainer.plan.run_budget import BudgetLimits

SHOWN = 8  # layouts that are printed
HTML_LAYOUTS = 16  # layouts of a search in the HTML page
MOST_RANKS = 16_384  # largest job that a budget is searched for
# Words of a layout as it is printed, by settings of run.yaml.
WORDS = {
    "micro": "batch.micro", "offloaded_layers": "offload.activations", "recompute": "recompute.kind", "precision": "precision",
    **{name: f"parallel.{name}" for name in ("tp", "sp", "pp", "virtual_stages", "schedule", "cp", "cp_kind", "ep", "expert_tp",
                                             "dp", "zero", "zero3_shard", "zero3_gather")},
}  # fmt: skip


def report_layouts(
    config: RunConfig, ranks: int, machine: MachineSpec, name: str, layouts: Sequence[PlannedLayout] | None, *,
    run: Path, precisions: Sequence[str], limits: BudgetLimits | None, why: str | None, html: Path | None,
    write: Path | None, as_json: bool, like: OtherTrainer | None = None
) -> str:  # fmt: skip
    """Return the text or JSON of a run's fastest layouts, searched for unless given; write the files `html` and `write`.
    `html` is a page, `write` a run.yaml.
    """
    keep = SHOWN if html is None else HTML_LAYOUTS
    layouts = layouts or search_parallel_layouts(config, ranks, machine, keep, precisions, like)
    if html is not None:
        write_search_html(html, run, config, ranks, machine, name, limits, layouts)
    if write is not None:
        write_layout_yaml(config, layouts[0], write)
    rows = describe_layouts(config, ranks, machine, name, layouts[:SHOWN], limits, why, like)
    return json.dumps(rows, indent=1) if as_json else format_parallel_layouts(rows, ranks, layouts[0])


def search_parallel_layouts(
    config: RunConfig, ranks: int, machine: MachineSpec, keep: int = SHOWN, precisions: Sequence[str] = (),
    like: OtherTrainer | None = None
) -> list[PlannedLayout]:  # fmt: skip
    """Return the parallel layouts of a run that fit in the machine's memory, the fastest first.
    At most `keep` layouts are returned, also in other `precisions`; with `like` those of another trainer. Progress is
    printed on standard error.

    Raises:
        ConfigError: for an unknown precision, or if no layout fits.
    """
    from mega_trainer.plan.layout_search import find_best_layouts

    shown = [time.monotonic()]

    def report_progress(text: str) -> None:
        if time.monotonic() - shown[0] > 2:
            shown[0] = time.monotonic()
            print(text, file=sys.stderr)

    return find_best_layouts(
        config, ranks, machine, keep=keep, report=report_progress, precisions=precisions, like=like
    )


def describe_layouts(
    config: RunConfig, ranks: int, machine: MachineSpec, name: str, layouts: Sequence[PlannedLayout],
    limits: BudgetLimits | None = None, why: str | None = None, like: OtherTrainer | None = None
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the layouts that a search found as rows of `mega plan --search --json`, fastest first.
    Rows have hours and cost for the tokens of `limits`. A last row is for the layout `why`, as users write one.

    Raises:
        ConfigError: for a layout `why` with an unknown word.
    """
    from mega_trainer.plan.held_out_error import describe_prediction_error
    from mega_trainer.plan.layout_search import explain_layout_time
    from mega_trainer.plan.run_budget import estimate_training_budget, find_exceeded_limits

    best, tokens = layouts[0], config.batch.global_ * config.tokens_per_sample

    def describe(layout: PlannedLayout) -> dict[str, Any]:
        rate = tokens / layout.time.seconds
        budget = {} if limits is None else estimate_training_budget(limits.tokens, rate, ranks, machine)
        exceeds = {} if limits is None else {"exceeds": find_exceeded_limits(budget, limits)}
        precision = layout.settings.get("precision", config.precision)
        return {
            "settings": layout.settings, "seconds_per_step": layout.time.seconds, "memory_bytes": layout.memory,
            "tokens_per_second_per_gpu": rate / ranks, "slower": layout.time.seconds / best.time.seconds - 1,
            "reason": explain_layout_time(layout, best), "machine": name,
            "error": describe_prediction_error(config.model, machine, precision), **budget, **exceeds,
            **({} if like is None else {"like": like.name}),
        }  # fmt: skip

    rows = [describe(layout) for layout in layouts]
    return rows if why is None else [*rows, _explain_layout(config, ranks, machine, best, why, like)]


def _explain_layout(
    config: RunConfig, ranks: int, machine: MachineSpec, best: PlannedLayout, why: str, like: OtherTrainer | None
) -> dict[str, Any]:  # fmt: skip
    """Return a row about a layout that a user names: why it is not the best one."""
    from mega_trainer.plan.layout_search import explain_layout_time, plan_layout
    from mega_trainer.plan.memory_advice import apply_settings, make_training_layout
    from mega_trainer.plan.other_trainers import SEARCH_MARGIN

    settings = parse_layout(why)
    try:
        changed = apply_settings(config, settings)
        changed.check_world_size(ranks)
    except ConfigError as error:
        return {"why": why, "settings": settings, "reason": f"is not valid for this run: {error.message}"}
    if like is not None and not like.supports_layout(config.model, make_training_layout(changed, ranks)):
        return {"why": why, "settings": settings, "reason": f"is not a layout that {like.name} is known to run"}
    layout = plan_layout(config, settings, ranks, machine, like=like)
    assert layout is not None
    usable = machine.usable_memory_bytes
    fits = layout.memory <= usable
    memory = f"{layout.memory / 2**30:.1f} of {usable / 2**30:.1f} GiB; "
    if not fits:
        cause = f"does not fit: {memory}"
    elif like is not None and SEARCH_MARGIN * layout.memory > usable:
        cause = f"is within the margin of memory that a search with --like keeps, {SEARCH_MARGIN - 1:.1%}: {memory}"
    else:
        cause = ""
    return {
        "why": why, "settings": settings, "seconds_per_step": layout.time.seconds, "memory_bytes": layout.memory, "fits": fits,
        "slower": layout.time.seconds / best.time.seconds - 1,
        "reason": cause + explain_layout_time(layout, best),
    }  # fmt: skip


def parse_layout(text: str) -> dict[str, Any]:
    """Return the settings {path: value} of a parallel layout from text such as `tp 8 pp 4 micro 2` or `tp=8,pp=4`.
    Sequence parallelism follows from tp unless it is written, and all other parallel settings are the defaults.

    Raises:
        ConfigError: for an unknown word, or a word without value.
    """
    words = [word for word in re.split(r"[\s,=]+", text.strip()) if word]
    settings: dict[str, Any] = {"parallel": {}}
    while words:
        word = words.pop(0)
        if word not in WORDS or (not words and word != "sp"):
            raise ConfigError(
                f"--why {text!r}: {word!r} is not a setting of a layout with a value", hint=f"use {', '.join(WORDS)}"
            )
        flag = word == "sp" and (not words or words[0] in WORDS)
        value = "true" if flag else words.pop(0)
        settings[WORDS[word]] = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
    settings.setdefault("parallel.sp", settings.get("parallel.tp", 1) != 1)
    return settings


def format_parallel_layouts(rows: Sequence[Mapping[str, Any]], ranks: int, best: PlannedLayout) -> str:
    """Return the rows of `describe_layouts` as text: YAML of the fastest layout, with all of them as comments."""
    from mega_cli.plan_prediction import format_training_budget
    from mega_trainer.plan.held_out_error import format_prediction_error
    from mega_trainer.plan.layout_search import format_layout_settings, layout_to_yaml

    trainer = f", in {rows[0]['like']}" if "like" in rows[0] else ""
    lines = [
        f"# {ranks} ranks on {rows[0]['machine']}{trainer}, predicted: seconds per step, tokens/s/GPU, GiB of the rank with the most memory",
        f"# error of step time: {format_prediction_error(rows[0]['error'])}",
    ]
    for row in rows:
        if "why" in row:
            time = (
                f"{row['seconds_per_step']:.3f} s, {100 * row['slower']:+.1f} %, " if "seconds_per_step" in row else ""
            )
            lines.append(f"# --why {row['why']}: {time}{row['reason']}")
            continue
        budget = f"  {format_training_budget(row)}" if "hours" in row else ""
        lines.append(
            f"# {row['seconds_per_step']:.3f} s  {row['tokens_per_second_per_gpu']:,.0f}  {row['memory_bytes'] / 2**30:.1f} GiB  "
            f"+{100 * row['slower']:.1f} %{budget}  {format_layout_settings(row['settings'])}: {row['reason']}"
        )
        lines += [f"#   over budget: {text}" for text in row.get("exceeds", ())]
    return "\n".join([*lines, layout_to_yaml(best).rstrip()])


def find_ranks_for_budget(
    config: RunConfig, machine: MachineSpec, limits: BudgetLimits, precisions: Sequence[str] = (),
    like: OtherTrainer | None = None
) -> tuple[int, list[PlannedLayout]]:  # fmt: skip
    """Return (ranks, layouts): the least power of two from 2 whose fastest layout meets the limits; ConfigError if none does.

    Raises:
        ConfigError: when none does, with the nearest.
    """
    from mega_trainer.plan.flops import compute_model_flops_per_token
    from mega_trainer.plan.layout_search import NoLayoutFitsError
    from mega_trainer.plan.run_budget import estimate_training_budget, find_exceeded_limits

    tokens, nearest = config.batch.global_ * config.tokens_per_sample, "no layout fits"
    hours = limits.hours or float("inf")
    peak = max(machine.get_peak_flops(kind) for kind in {config.precision, *precisions})
    least = limits.tokens * compute_model_flops_per_token(config.model, config.data.seq_length) / peak / 3600 / hours
    ranks = 1
    while ranks <= MOST_RANKS:
        ranks *= 2
        if ranks < least or ranks > MOST_RANKS:
            continue
        try:
            layouts = search_parallel_layouts(config, ranks, machine, precisions=precisions, like=like)
        except NoLayoutFitsError:
            continue
        budget = estimate_training_budget(limits.tokens, tokens / layouts[0].time.seconds, ranks, machine)
        exceeded = find_exceeded_limits(budget, limits)
        if not exceeded:
            return ranks, layouts
        nearest = f"{ranks} GPUs: the fastest layout {' and '.join(exceeded)}"
        if limits.cost is not None and budget["cost"] > limits.cost:
            break  # more GPUs cost no less
    raise ConfigError(
        f"no number of GPUs up to {MOST_RANKS:,} meets the limits; {nearest}",
        hint="use a longer --within, a larger --under, fewer --tokens, or --precision fp8",
    )


def write_layout_yaml(config: RunConfig, layout: PlannedLayout, path: Path) -> None:
    """Write a run.yaml with all settings of the run, changed to a parallel layout that a search found."""
    import yaml

    from mega_common.atomic_files import open_atomic_file
    from mega_trainer.plan.memory_advice import apply_settings

    chosen = apply_settings(config, layout.settings).model_dump(mode="json", by_alias=True, exclude_none=True)
    with open_atomic_file(path, text=True) as stream:
        yaml.safe_dump(chosen, stream, sort_keys=False)


def write_search_html(
    html: Path, run: Path, config: RunConfig, ranks: int, machine: MachineSpec, name: str,
    limits: BudgetLimits | None, layouts: Sequence[PlannedLayout]
) -> None:  # fmt: skip
    """Write the HTML page of the parallel layouts that a search found, and of the plan of the first.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from mega_cli.plan_prediction import describe_plan, predict_run_speed_and_cost, write_plan_html
    from mega_trainer.pages.plan_page import LayoutCandidate
    from mega_trainer.plan.layout_search import explain_layout_time, format_layout_settings
    from mega_trainer.plan.memory_advice import apply_settings

    best = layouts[0]
    each = config.batch.global_ * config.data.seq_length / ranks
    found = [
        LayoutCandidate(
            layout.time.seconds,
            each / layout.time.seconds,
            layout.memory,
            format_layout_settings(layout.settings),
            explain_layout_time(layout, best),
        )
        for layout in layouts
    ]
    chosen = apply_settings(config, best.settings)
    plan = describe_plan(chosen, ranks)
    plan["time"] = predict_run_speed_and_cost(chosen, ranks, machine, name, limits, plan["memory_bytes"])
    write_plan_html(html, run, chosen, ranks, machine, plan, found)
