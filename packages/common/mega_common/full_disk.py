"""Full disks: the one place that recognises them, in whatever error a library raises, and names the way out."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from mega_common.errors import MegaError

HINT = (
    "free space there, or choose another folder, and give the same command again: it goes on with what is finished, or "
    "starts again"
)
_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Libraries in Rust and C++ raise errors of their own, with the text of the system's.
_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|StorageFull|QuotaExceeded|\d+ requested and \d+ written"
)


class DiskFullError(MegaError):
    """A file that does not fit: a full disk, a quota or a limit of file sizes."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, or while they were handled."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def full_disk(error: BaseException, place: Path | str | None = None) -> DiskFullError | None:
    """Return the error to report when `error` comes of a full disk, else None.

    Args:
        error: what was raised.
        place: the file or folder that was written, where the error does not name it.
    """
    found = next((one for one in chain(error) if _is_full(one)), None)
    if found is None:
        return None
    named = [one.filename2 or one.filename for one in chain(error) if isinstance(one, OSError)]
    where = next(filter(None, named), None) or place or "the output"
    reason = _TEXT.search(_text(found))
    said = (
        found.strerror if isinstance(found, OSError) and found.strerror else reason[0] if reason else "the disk is full"
    )
    return DiskFullError(f"{where}: cannot be written ({said})", hint=HINT)


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _CODES
    return not isinstance(error, MegaError) and _TEXT.search(_text(error)) is not None


def _text(error: BaseException) -> str:
    """Return the text of an error; `str` leaves it out of an OSError without a number that has a file name."""
    return " ".join(str(one) for one in error.args)
