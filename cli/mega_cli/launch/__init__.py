"""`mega launch`: the batch script or the manifest that starts one training run on a cluster. It submits nothing."""

from mega_cli.launch.command import app

__all__ = ["app"]
