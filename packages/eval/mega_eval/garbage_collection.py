"""Short garbage collections for a serving process, since a collection stops all of its threads."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_startup_objects() -> Iterator[None]:
    """Context manager that excludes all objects that exist when it is entered from Python's garbage collection.

    These are some 300,000 of the imported libraries, over which a full collection takes 0.2 s of processor time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
