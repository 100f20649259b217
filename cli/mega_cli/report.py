"""`mega report`: an HTML page about training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  mega report runs/llama3-8b

  mega report runs/small runs/small-muon --out compared.html
"""


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN…]",
            help="Output folders of runs (`output` in run.yaml), e.g. runs/llama3-8b. The runs may still be training.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page about one run, or about several side by side.
    It shows losses, speed, memory, time per phase, restarts and settings.

    The page is self-contained and works offline. Values that a run has not logged are left out.
    """
    from mega_common.progress_logging import ProgressBar
    from mega_trainer.pages.page_elements import write_html_page
    from mega_trainer.pages.run_log import METRICS, RunLog
    from mega_trainer.pages.run_page import render_run_page

    total = sum(file.stat().st_size for path in runs for file in path.glob(METRICS))
    with ProgressBar("reading", total=total, unit="bytes", every=2.0) as bar:
        read = [RunLog.read_folder(path, advance=bar.advance) for path in runs]
    write_html_page(out, render_run_page(read), "--out")
    print(out)
