"""`mega launch`: the batch script or manifest that trains, or tokenizes, on a cluster. It submits nothing."""

from mega_cli.launch.command import app

__all__ = ["app"]
