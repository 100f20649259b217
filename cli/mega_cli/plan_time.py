"""`mega plan --machine`: the predicted time of a step, what would shorten it, and the search for the best layout."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_common.errors import ConfigError
from mega_common.log import human

if TYPE_CHECKING:
    from mega_trainer.config import RunConfig
    from mega_trainer.plan.search import Layout

SHOWN = 8  # layouts that are printed
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def timed(
    config: RunConfig, ranks: int, name: str, tokens: str | None, memory: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """What is predicted of a run on a machine; times in seconds, memory in bytes, as --json prints it.

    Raises:
        ConfigError: for a machine that is not known, or a number of tokens that is none.
    """
    from mega_trainer.plan.flops import model_flops, palm_flops
    from mega_trainer.plan.machine import load_machine
    from mega_trainer.plan.search import faster, planned

    machine = load_machine(name)
    wanted = None if tokens is None else _number(tokens)
    plan = planned(config, ranks, machine)
    step, other = plan.time(), plan.trained.flops(config.model, plan.count)
    rate = config.batch.global_ * config.sample_tokens / step.seconds
    kind = "bf16" if config.precision == "fp8" else config.precision  # MFU is told of what peers tell it of
    length, peak = config.data.seq_length, machine.peak(kind)
    told: dict[str, Any] = {
        "machine": name,
        "seconds_per_step": step.seconds,
        "tokens_per_second_per_gpu": rate / ranks,
        "peak_of": kind,
        "mfu_causal": rate / ranks * (model_flops(config.model, length) + other) / peak,
        "mfu_palm": rate / ranks * (palm_flops(config.model, length) + other) / peak,
        "seconds": dict(sorted(step.parts.items(), key=lambda part: -part[1])),
        "memory_limit_bytes": round(machine.room),
        "fits": max(sum(kinds.values()) for kinds in memory) <= machine.room,
    }
    if wanted is not None:
        hours = wanted / rate / 3600
        told |= {"tokens": wanted, "hours": hours}
        if machine.price is not None:
            told["cost"] = hours * ranks * machine.price
    told["faster"] = [
        {
            "settings": _settings(layout, config),
            "gain": 1 - layout.time.seconds / step.seconds,
            "memory_bytes": layout.memory,
        }
        for layout in faster(config, ranks, machine)
    ]
    return told


def table(told: Mapping[str, Any]) -> list[str]:
    """The same as lines."""
    seconds = told["seconds_per_step"]
    parts = ", ".join(f"{kind} {100 * part / seconds:.1f} %" for kind, part in told["seconds"].items())
    limit = told["memory_limit_bytes"] / 2**30
    lines = [
        f"on {told['machine']}, predicted:",
        f"  a step         {seconds:.3f} s, {told['tokens_per_second_per_gpu']:,.0f} tokens a second and GPU",
        f"  MFU            {100 * told['mfu_causal']:.1f} % (what is not masked), {100 * told['mfu_palm']:.1f} % "
        f"(6 N + 12 L H Q S, as PaLM counts) of the {told['peak_of']} peak",
        f"  time goes to   {parts}",
        f"  memory         {'fits' if told['fits'] else 'does not fit'} {limit:.1f} GiB, what CUDA and the allocator's slack leave",
    ]
    if "hours" in told:
        cost = f", costs {told['cost']:,.0f}" if "cost" in told else ""
        lines.append(
            f"  {human(told['tokens'])} tokens   {told['hours']:,.1f} hours, {told['hours'] / 24:,.1f} days{cost}"
        )
    for change in told["faster"]:
        settings = " ".join(f"--set {setting}" for setting in change["settings"])
        lines.append(f"  {100 * change['gain']:.1f} % faster: {settings} ({change['memory_bytes'] / 2**30:.1f} GiB)")
    return lines


def found(config: RunConfig, ranks: int, name: str, keep: int = SHOWN, precisions: Sequence[str] = ()) -> list[Layout]:
    """The fastest layouts that fit, at most `keep`, the best first, also in other `precisions`; how the search goes is told.

    Raises:
        ConfigError: for a machine or a precision that is not known, or when no layout fits.
    """
    from mega_trainer.plan.machine import load_machine
    from mega_trainer.plan.search import best_layouts

    machine = load_machine(name)
    for precision in precisions:
        if precision == "fp8" and not machine.has(precision):
            raise ConfigError(f"--precision fp8: {machine.gpu} has no products in fp8", hint="h100 and later have them")
    shown = [time.monotonic()]

    def tell(text: str) -> None:
        if time.monotonic() - shown[0] > 2:
            shown[0] = time.monotonic()
            print(text, file=sys.stderr)

    return best_layouts(config, ranks, machine, keep=keep, tell=tell, precisions=precisions)


def in_words(config: RunConfig, ranks: int, name: str, layouts: Sequence[Layout], *, as_json: bool) -> str:
    """These layouts, as comments of a YAML text that makes the first; or as JSON."""
    from mega_trainer.plan.search import reason, short, yaml_of

    best, tokens = layouts[0], config.batch.global_ * config.sample_tokens

    def slower(layout: Layout) -> float:
        return layout.time.seconds / best.time.seconds - 1

    if as_json:
        rows = [
            {
                "settings": layout.settings, "seconds_per_step": layout.time.seconds, "memory_bytes": layout.memory,
                "tokens_per_second_per_gpu": tokens / layout.time.seconds / ranks, "slower": slower(layout),
                "reason": reason(layout, best),
            }
            for layout in layouts
        ]  # fmt: skip
        return json.dumps(rows, indent=1)
    lines = [f"# {ranks} ranks on {name}, predicted; seconds a step, tokens a second and GPU, GiB of the fullest rank"]
    for layout in layouts:
        lines.append(
            f"# {layout.time.seconds:.3f} s  {tokens / layout.time.seconds / ranks:,.0f}  {layout.memory / 2**30:.1f} GiB  "
            f"+{100 * slower(layout):.1f} %  {short(layout.settings)}: {reason(layout, best)}"
        )
    return "\n".join([*lines, yaml_of(best).rstrip()])


def fit(config: RunConfig, ranks: int, name: str, metrics: Path) -> str:
    """The machine as that run measured it, as a YAML text with what was measured as comments.

    Raises:
        ConfigError: for a machine that is not known, metrics that tell nothing, or a run that was faster than can be.
    """
    import yaml

    from mega_trainer.plan.fit import compared, fitted, read_metrics
    from mega_trainer.plan.machine import load_machine
    from mega_trainer.plan.search import planned

    machine, measured = load_machine(name), read_metrics(metrics)
    before = planned(config, ranks, machine)
    own = fitted(before, machine, measured)
    lines = [f"# {name}, as {metrics} measured it on {ranks} rank(s)"]
    lines += [f"# {line}" for line in compared(before, planned(config, ranks, own), measured)]
    return "\n".join([*lines, yaml.safe_dump(own.model_dump(mode="json", exclude_none=True), sort_keys=False).rstrip()])


def write_layout(config: RunConfig, layout: Layout, path: Path) -> None:
    """A run.yaml of every setting of that run, in that layout."""
    import yaml

    from mega_common.files import atomic_file
    from mega_trainer.plan.search import with_settings

    chosen = with_settings(config, layout.settings).model_dump(mode="json", by_alias=True, exclude_none=True)
    with atomic_file(path, text=True) as stream:
        yaml.safe_dump(chosen, stream, sort_keys=False)


def _settings(layout: Layout, config: RunConfig) -> list[str]:
    """What a layout changes of a run, as `--set` takes it."""
    changed = []
    for path, value in layout.settings.items():
        section, _, key = path.partition(".")
        if value is not None or getattr(getattr(config, section), key) is not None:
            told = value["kind"] if isinstance(value, dict) else json.dumps(value).strip('"')
            changed.append(f"{path}={told}")
    return changed


def _number(text: str) -> float:
    """300B -> 3e11.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    try:
        number = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    except ValueError:
        number = 0.0
    if number <= 0:
        raise ConfigError(f"--tokens {text}: no number of tokens", hint="such as 300B or 15T")
    return number
