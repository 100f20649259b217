"""Files opened for reading, unpacked where they are packed: gzip, zstd, bzip2 and xz, known by their first bytes.

A name does not decide: downloads lose their suffix, and some programs unpack on the way and keep it.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from typing import Any

from mega_common.errors import DataError, MissingPackageError
from mega_common.remote import Remote, in_words

Advance = Callable[[int], None]

STDIN = "-"
HEAD = 1 << 16  # bytes of a file's begin by which it is known

# What reading a damaged file raises, whichever the format; pyarrow's errors for .zst are OSErrors.
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def opened(name: str, advance: Advance) -> io.BufferedReader[Any]:
    """Open a file or URL, or standard input for `-`, to read what is in it; `advance` is told the bytes read of it.

    Raises:
        DataError: when it cannot be opened.
        RemoteError: when an object store refuses, also from every reading: then nothing is wrong with the file.
        MissingPackageError: when unpacking needs a package that is not installed.
    """
    try:
        raw = _Remote(Remote(name), advance) if "://" in name else _Counted(name, advance)
        plain: io.BufferedReader[Any] = io.BufferedReader(raw, 1 << 20)
        unpacked = _unpacked(plain)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
    return plain if unpacked is None else io.BufferedReader(unpacked, 1 << 20)


def head(stream: io.BufferedReader[Any]) -> bytes:
    """The first bytes of what is in a file, at most `HEAD`; the stream stays where it is.

    Raises:
        one of DAMAGE: when not even these can be unpacked.
    """
    return stream.peek(HEAD)[:HEAD]


def is_plain(stream: io.BufferedReader[Any]) -> bool:
    """Whether an opened file is read as it is, and so from any place in it."""
    return isinstance(stream.raw, (_Counted, _Remote))


def _unpacked(plain: io.BufferedReader[Any]) -> io.RawIOBase | None:
    begin = plain.peek(8)
    if begin.startswith(b"\x1f\x8b"):
        return _Unpacked(gzip.GzipFile(fileobj=plain))
    if begin.startswith(b"BZh"):
        return _Unpacked(bz2.BZ2File(plain))
    if begin.startswith(b"\xfd7zXZ\0"):
        return _Unpacked(lzma.LZMAFile(plain))
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        return _Unpacked(package("pyarrow", ".zst files").input_stream(plain, compression="zstd"))
    return None


class _Unpacked(io.RawIOBase):
    """Gives what is unpacked as it comes: of a truncated file, everything before the damage."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.stream.read1(min(len(buffer), HEAD))
        buffer[: len(block)] = block
        return len(block)


def package(module: str, purpose: str) -> Any:
    """Import what only some inputs need.

    Raises:
        MissingPackageError: naming the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise MissingPackageError(f"{purpose} need the package {name}", hint=f"pip install {name}") from None


class _Counted(io.FileIO):
    """A file that tells how many bytes were read of it, beneath any unpacking."""

    def __init__(self, name: str, advance: Advance) -> None:
        super().__init__(sys.stdin.fileno() if name == STDIN else name, closefd=name != STDIN)
        self.advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


class _Remote(io.RawIOBase):
    """Likewise an object of a store, read ahead in blocks."""

    def __init__(self, place: Remote, advance: Advance) -> None:
        self.place, self.advance, self.stream = place, advance, place.open()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with in_words(self.place):
            block = self.stream.read(len(buffer))
        buffer[: len(block)] = block
        self.advance(len(block))
        return len(block)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()

    def close(self) -> None:
        if not self.closed:
            self.stream.close()
        super().close()
