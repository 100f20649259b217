"""`mega launch`: write batch scripts and manifests that train or tokenize on a cluster, without submitting them."""

from mega_cli.launch.command import app

__all__ = ["app"]
