"""`mega report`: runs as a page."""

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
            metavar="RUN [RUN…]", help="Folders of runs: what run.yaml calls `output`. They may be running."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one page on a run, or on several side by side: losses, speed, memory, where time went, starts, settings.

    The page is one file that needs no other and no network. What a run has not logged is left out.
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
