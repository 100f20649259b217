"""`mega report`: what runs did, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mega_trainer.pages.run_log import RunLog
    from mega_trainer.plan.machine import Machine

EXAMPLES = """Examples:

  mega report runs/llama3-8b

  mega report runs/small runs/small-muon --out compared.html
"""


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN…]", help="Folders of runs: what run.yaml calls `output`. They may be running."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one page on a run, or on several beside each other: losses, speed, memory, where time went, starts, settings.

    The page is one file that needs no other and no network. What a run has not logged is left out.
    """
    from mega_common.log import ProgressBar
    from mega_trainer.pages.page import write_page
    from mega_trainer.pages.run_log import METRICS, RunLog
    from mega_trainer.pages.run_page import run_page

    total = sum(file.stat().st_size for path in runs for file in path.glob(METRICS))
    with ProgressBar("reading", total=total, unit="bytes", every=2.0) as bar:
        read = [RunLog.read(path, advance=bar.advance) for path in runs]
    write_page(out, run_page(read, _predicted), "--out")
    print(out)


def _predicted(run: RunLog) -> dict[str, float]:
    """What `mega plan` would say of a run on the GPUs that it has, if they are known; by key of metrics.jsonl."""
    from mega_common.errors import MegaError

    try:
        from mega_trainer.config import RunConfig
        from mega_trainer.plan.flops import model_flops
        from mega_trainer.plan.search import planned

        machine = _machine(run.starts[-1]["machine"])
        if machine is None:
            return {}
        config, ranks = RunConfig.parse(run.settings), run.starts[-1]["layout"]["ranks"]
        seconds = planned(config, ranks, machine).time().seconds
        rate = config.batch.global_ * config.data.seq_length / seconds
        used = rate * model_flops(config.model, config.data.seq_length) / ranks
        return {"seconds": seconds, "tokens_per_second": rate, "mfu": used / machine.peak(config.precision)}
    except (MegaError, LookupError):  # settings of another version, say: the run is reported without
        return {}


def _machine(gpu: str) -> Machine | None:
    """The machine of these GPUs, `NVIDIA A100-SXM4-40GB`; of those that share a chip that with as much memory."""
    from mega_trainer.plan.machine import load_machine, machine_names

    known = [machine for machine in map(load_machine, machine_names()) if machine.gpu in gpu]
    return max(known, key=lambda m: (len(m.gpu), f"{m.memory_gb:g}GB" in gpu), default=None)
