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
    """Show a run: step, losses, speed, phases of a step, goodput, the last checkpoint, time left. Ctrl-C ends the view alone.

    It reads what the run writes, and can run on any machine that sees the folder.
    """
    import time
    from contextlib import suppress

    from rich.console import Console, RenderableType
    from rich.live import Live

    from mega_trainer.pages.run_log import RunLog
    from mega_trainer.pages.top import TAIL, view

    def now() -> RenderableType:
        return view(RunLog.read(run, tail=TAIL), time.time())

    console = Console()
    if once or not console.is_terminal:
        console.print(now())
        return
    with suppress(KeyboardInterrupt), Live(now(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(now(), refresh=True)
