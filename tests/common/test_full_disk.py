"""Full disks are recognised in every error that a library makes of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mega_common.atomic_files import HINT, add_path_to_errors, convert_full_disk_error
from mega_common.errors import DataError


def os_error(code: int, *names: str) -> OSError:
    return OSError(code, os.strerror(code), *names)


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FULL: list[tuple[Exception, str]] = [
    (os_error(errno.ENOSPC), "out: cannot be written (No space left on device)"),
    (os_error(errno.EDQUOT), "out: cannot be written (Disk quota exceeded)"),
    (os_error(errno.EFBIG), "out: cannot be written (File too large)"),
    (os_error(errno.ENOSPC, "a/b"), "a/b: cannot be written (No space left on device)"),
    (OSError(errno.ENOSPC, "No space left on device", "source", None, "copy"), "copy: cannot be written"),
    (chained(RuntimeError("unexpected pos 64 vs 0"), os_error(errno.ENOSPC, "x.pt")), "x.pt: cannot be written"),
    (Exception("No space left on device (os error 28)"), "out: cannot be written (No space left on device)"),
    (RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'), "out: cannot"),
    (OSError("524288 requested and 0 written"), "out: cannot be written (524288 requested and 0 written)"),
    (
        chained(DataError("data: cannot be written"), os_error(errno.EDQUOT)),
        "out: cannot be written (Disk quota exceeded)",
    ),
]
OTHERS = [
    os_error(errno.ENOENT, "x"),
    os_error(errno.EACCES),
    ValueError("a value"),
    DataError("the text says No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize(("error", "said"), FULL)
def test_a_full_disk_names_the_file_and_the_way_out(error: Exception, said: str) -> None:
    found = convert_full_disk_error(error, "out")
    assert found is not None
    assert found.message.startswith(said)
    assert (found.hint, found.exit_status) == (HINT, 2)


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_left_alone(error: BaseException) -> None:
    assert convert_full_disk_error(error) is None


def test_naming_reaches_an_error_behind_another() -> None:
    with pytest.raises(RuntimeError) as caught, add_path_to_errors(Path("x.pt")):
        raise RuntimeError("unexpected pos") from os_error(errno.ENOSPC)
    found = convert_full_disk_error(caught.value)
    assert found is not None
    assert found.message.startswith("x.pt: ")
