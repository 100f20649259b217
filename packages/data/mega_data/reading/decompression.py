"""Opening of files with decompression (gzip, zstd, bzip2, xz and lzma), detected by their first bytes.

Names are ignored: downloads may lose their suffix, and some programs decompress a file and keep it.
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
from mega_common.object_store import RemotePath, convert_object_store_errors

ReportBytes = Callable[[int], None]

STDIN = "-"
HEAD = 1 << 16  # bytes at the start of a file for the detection of its format
LZMA_MEMORY = 512 << 20  # bytes; `xz -9` requires 65 MiB, and a header can ask for 4 GiB

# Errors of reading a damaged file of any format; pyarrow's errors for .zst are OSErrors.
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class DecompressionMemoryError(OSError):
    """Error for a compressed file whose header asks for a dictionary or window beyond the memory limit."""


def open_decompressed(name: str, advance: ReportBytes) -> io.BufferedReader[Any]:
    """Open a file or URL, or standard input for `-`, and decompress it.
    Formats are gzip, bzip2, xz, lzma and zstd, by content. `advance` is called with the number of compressed bytes
    read.

    Raises:
        DataError: if it cannot be opened.
        ObjectStoreError: if an object store fails, also from every read, as opposed to a damaged file.
        MissingPackageError: if decompression requires a package that is not installed.
    """
    try:
        raw = _CountedObject(RemotePath(name), advance) if "://" in name else _CountedFile(name, advance)
        plain: io.BufferedReader[Any] = io.BufferedReader(raw, 1 << 20)
        decompressed = _decompress(plain)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
    return plain if decompressed is None else io.BufferedReader(decompressed, 1 << 20)


def peek_first_bytes(stream: io.BufferedReader[Any]) -> bytes:
    """Return the first decompressed bytes of an opened file, at most `HEAD` (64 KiB), without moving the read position.

    Raises:
        one of DAMAGE: if these cannot be decompressed.
    """
    return stream.peek(HEAD)[:HEAD]


def is_uncompressed(stream: io.BufferedReader[Any]) -> bool:
    """Return whether a stream from `open_decompressed` is of an uncompressed file, and so supports random access."""
    return isinstance(stream.raw, (_CountedFile, _CountedObject))


def _decompress(plain: io.BufferedReader[Any]) -> io.RawIOBase | None:
    begin = plain.peek(8)
    if begin.startswith(b"\x1f\x8b"):
        return _DecompressedStream(gzip.GzipFile(fileobj=plain))
    if begin.startswith(b"BZh"):
        return _DecompressedStream(bz2.BZ2File(plain))
    if begin.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return _DecompressedStream(_LzmaStream(plain))
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        return _DecompressedStream(
            import_optional_package("pyarrow", "reading .zst files").input_stream(plain, compression="zstd")
        )
    return None


class _DecompressedStream(io.RawIOBase):
    """Stream of decompressed data; for a truncated file, of everything before the damage."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self.stream.read1(min(len(buffer), HEAD))
        except OSError as error:
            if "requires too much memory" in str(error):  # window above libzstd's default limit
                raise _memory_error("128 MiB", "zstd -d --long=31") from None
            raise
        buffer[: len(block)] = block
        return len(block)


class _LzmaStream:
    """Decompressor of .xz and .lzma with a memory limit, which `lzma.LZMAFile` does not have."""

    def __init__(self, plain: io.BufferedReader[Any]) -> None:
        self.plain, self.decoder = plain, lzma.LZMADecompressor(memlimit=LZMA_MEMORY)

    def read1(self, size: int) -> bytes:
        """Return up to `size` decompressed bytes; none at the end of the last stream.

        Raises:
            DecompressionMemoryError: if the dictionary exceeds `LZMA_MEMORY`.
            EOFError: if the file is truncated.
        """
        found = b""
        while not found and (block := self._next_block()) is not None:
            try:
                found = self.decoder.decompress(block, size)
            except lzma.LZMAError as error:
                if "Memory usage limit" in str(error):
                    raise _memory_error(f"{LZMA_MEMORY >> 20} MiB", "xz -d") from None
                raise
        return found

    def _next_block(self) -> bytes | None:
        """Return compressed bytes, none if the decoder has enough, or None at the end of the last stream."""
        ended = self.decoder.eof
        if not ended and not self.decoder.needs_input:
            return b""
        block = self.decoder.unused_data or self.plain.read1(HEAD)
        if not ended and not block:
            raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        while ended and block and not block.strip(b"\0"):  # padding between streams
            block = self.plain.read1(HEAD)
        if ended and block:
            self.decoder, block = lzma.LZMADecompressor(memlimit=LZMA_MEMORY), block.lstrip(b"\0")
        return block or None


def _memory_error(limit: str, command: str) -> DecompressionMemoryError:
    return DecompressionMemoryError(
        f"decompressing the file requires more than {limit} of memory; decompress it first with {command}"
    )


def import_optional_package(module: str, purpose: str) -> Any:
    """Import and return an optional package that `purpose`, such as "reading Parquet files", requires.

    Raises:
        MissingPackageError: if it is missing, naming purpose and package.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise MissingPackageError(f"{purpose} requires the package {name}", hint=f"pip install {name}") from None


class _CountedFile(io.FileIO):
    """File that reports the number of bytes read, below any decompression."""

    def __init__(self, name: str, advance: ReportBytes) -> None:
        super().__init__(sys.stdin.fileno() if name == STDIN else name, closefd=name != STDIN)
        self.advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.advance(count or 0)
        return count


class _CountedObject(io.RawIOBase):
    """Object of a store that reports the number of bytes read, with read-ahead in blocks."""

    def __init__(self, path: RemotePath, advance: ReportBytes) -> None:
        self.path, self.advance, self.stream = path, advance, path.open()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with convert_object_store_errors(self.path):
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
