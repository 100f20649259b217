"""`mega top`: live view of a training run in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  mega top runs/llama3-8b

  mega top runs/llama3-8b --once
"""


def top_command(
    run: Annotated[Path, typer.Argument(help="Output folder of the run (`output` in run.yaml), e.g. runs/llama3-8b.")],
    once: Annotated[bool, typer.Option("--once", help="Print the current state once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
) -> None:
    """Show the progress of a run: step, losses, speed, time per phase, goodput, last checkpoint, time left.

    It reads the run's log files, so it works on any machine that can read the folder. Ctrl-C stops only the view.
    """
    import time
    from contextlib import suppress

    from rich.console import Console, RenderableType
    from rich.live import Live

    from mega_trainer.pages.run_log import RunLog
    from mega_trainer.pages.terminal_view import TAIL, render_run_view

    def render_view() -> RenderableType:
        return render_run_view(RunLog.read_folder(run, tail=TAIL), time.time())

    console = Console()
    if once or not console.is_terminal:
        console.print(render_view())
        return
    with suppress(KeyboardInterrupt), Live(render_view(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(render_view(), refresh=True)
