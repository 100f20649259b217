"""`mega top`: a run as it goes, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  mega top runs/llama3-8b

  mega top runs/llama3-8b --once
"""


def top_command(
    run: Annotated[Path, typer.Argument(help="The run's folder: what run.yaml calls `output`.")],
    once: Annotated[bool, typer.Option("--once", help="Print it as it is now, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
) -> None:
    """Show a live run: step, losses, speed, phases of a step, goodput, the last checkpoint, time left. Ctrl-C ends only
    the view.

    It reads what the run writes, and can run on any machine that sees the folder.
    """
    import time
    from contextlib import suppress

    from rich.console import Console, RenderableType
    from rich.live import Live

    from mega_trainer.pages.run_log import RunLog
    from mega_trainer.pages.terminal_view import TAIL, render_run_view

    def current_time() -> RenderableType:
        return render_run_view(RunLog.read_folder(run, tail=TAIL), time.time())

    console = Console()
    if once or not console.is_terminal:
        console.print(current_time())
        return
    with suppress(KeyboardInterrupt), Live(current_time(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(current_time(), refresh=True)
