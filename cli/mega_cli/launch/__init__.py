"""`mega launch`: batch scripts and manifests that train or tokenize on a cluster. Nothing is submitted."""

from mega_cli.launch.command import app

__all__ = ["app"]
