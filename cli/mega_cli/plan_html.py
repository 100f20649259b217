"""`mega plan --html`: the plan, and what a search found, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_common.log import logger

if TYPE_CHECKING:
    from mega_trainer.config import RunConfig
    from mega_trainer.pages.plan_page import Found
    from mega_trainer.plan.search import Layout


def write_plan(
    html: Path, run: Path, config: RunConfig, ranks: int, told: dict[str, Any], found: Sequence[Found] = ()
) -> None:
    """The page of a plan, `told` as `mega plan --json` prints it.

    Raises:
        ConfigError: when the file cannot be written.
    """
    from mega_trainer.pages.page import write_page
    from mega_trainer.pages.plan_page import Pipeline, plan_page
    from mega_trainer.plan.advice import run_shape
    from mega_trainer.plan.machine import load_machine
    from mega_trainer.plan.memory import peaks
    from mega_trainer.plan.search import planned

    shape, costs = run_shape(config, ranks), None
    if "time" in told:
        timed = planned(config, ranks, load_machine(told["time"]["machine"]))
        costs = timed.costs(timed.stages())
    message = shape.micro_batch * (shape.seq_length // shape.cp) * config.model.hidden_size * shape.element
    text = plan_page(
        f"Plan of {run}", told, [rank.moment for rank in peaks(config.model, shape)],
        Pipeline(shape.schedule, shape.pp, shape.virtual_stages, shape.microbatches),
        message // (shape.tp if shape.sp else 1), costs, found,
    )  # fmt: skip
    write_page(html, text, "--html")
    logger.info("the page is %s", html)


def write_search(
    html: Path, run: Path, config: RunConfig, ranks: int, machine: str, tokens: str | None, layouts: Sequence[Layout]
) -> None:
    """The page of these layouts, and of the plan of the first.

    Raises:
        ConfigError: when the file cannot be written.
    """
    from mega_cli.plan import planned
    from mega_cli.plan_time import timed
    from mega_trainer.pages.plan_page import Found
    from mega_trainer.plan.search import reason, short, with_settings

    best = layouts[0]
    each = config.batch.global_ * config.data.seq_length / ranks
    found = [
        Found(
            layout.time.seconds, each / layout.time.seconds, layout.memory, short(layout.settings), reason(layout, best)
        )
        for layout in layouts
    ]
    chosen = with_settings(config, best.settings)
    told = planned(chosen, ranks)
    told["time"] = timed(chosen, ranks, machine, tokens, told["memory_bytes"])
    write_plan(html, run, chosen, ranks, told, found)
