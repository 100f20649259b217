"""Image references of a data set: `PREFIX.images`, a data set of bytes with one document per document of text.

A document is a JSON list with one entry per image, in the order of their placeholders: a path, or the position in a tar
shard as [path, offset, size]. Paths are absolute, or relative to a folder named in `PREFIX.info`. If images have
different numbers of placeholders, it is {"images": that list, "tokens": these numbers}.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from mega_common.bounded_parsing import explain_read_error
from mega_common.errors import DataError
from mega_data.token_files.indexed_reader import IndexedReader, get_idx_path, get_images_prefix

ImageReference = str | tuple[str, int, int]


def has_images(prefix: Path) -> bool:
    """Return whether the data set at `prefix` has images, which means a file `PREFIX.images.idx`."""
    return get_idx_path(get_images_prefix(prefix)).exists()


def reject_images(readers: Iterable[IndexedReader], verb: str, hint: str) -> None:
    """Raise DataError if one of the data sets has images, which the operation named by `verb` would lose.

    `verb` completes the message "has images, and cannot be ...".
    """
    for reader in readers:
        if has_images(reader.prefix):
            raise DataError(f"{reader.prefix}: has images, and cannot be {verb}", hint=hint)


def encode_image_references(references: Sequence[ImageReference], tokens: Sequence[int] | None = None) -> np.ndarray:
    """Return the image references of one document as the JSON bytes, uint8 [bytes], that `PREFIX.images` stores.
    `tokens` are the numbers of placeholders per image if they differ.
    """
    whole = list(references) if tokens is None else {"images": list(references), "tokens": list(tokens)}
    return np.frombuffer(json.dumps(whole).encode(), np.uint8)


class ImageReferences:
    """References to the images of a data set's documents, from `PREFIX.images`, opened on first access.
    A reference is a file path, or path, offset and size in a shard.

    Raises:
        DataError: on opening, if they belong to another data set.
    """

    def __init__(self, reader: IndexedReader, folder: Path) -> None:
        self._reader, self.folder = reader, folder

    @cached_property
    def _open_reader(self) -> IndexedReader:
        opened = IndexedReader(get_images_prefix(self._reader.prefix))
        if len(opened.document_index) != len(self._reader.document_index):
            raise DataError(
                f"{opened.prefix}: has another number of documents than {self._reader.prefix}",
                hint="build both again with mega data preprocess --images",
            )
        return opened

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the image references, without the contents of the image files."""
        return self._open_reader.fingerprint

    def get_image_references(self, document: int) -> tuple[list[ImageReference], list[int] | None]:
        """Return the image references of a document, and the placeholders per image, or None if all images have equally many."""
        value = json.loads(self._open_reader.read_sequence(document).tobytes())
        entries, tokens = (value["images"], value["tokens"]) if isinstance(value, dict) else (value, None)
        return [entry if isinstance(entry, str) else tuple(entry) for entry in entries], tokens

    def read_image_file(self, reference: ImageReference) -> bytes:
        """Return the file bytes of the referenced image.

        Raises:
            DataError: if it cannot be read.
        """
        return read_image_bytes(reference, self.folder)


def read_image_bytes(reference: ImageReference, folder: Path) -> bytes:
    """Return the bytes of a referenced image: of a file below `folder`, or of its range (path, offset, size).

    Raises:
        DataError: if it cannot be read.
    """
    path, offset, size = reference if isinstance(reference, tuple) else (reference, 0, -1)
    try:
        with open(folder / path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except OSError as error:
        raise DataError(f"{folder / path}: cannot be read ({error.strerror})") from None


def iterate_webdataset_samples(path: Path) -> Iterator[tuple[str, dict[str, bytes], dict[str, ImageReference]]]:
    """Yield (name, texts, other files) of each sample of a webdataset shard, an uncompressed tar archive.

    A sample is adjacent tar members that share a name up to its first dot. The texts are the contents of its json and
    txt members, and the other files references to them, both by extension.

    Raises:
        DataError: if it is not a tar archive.
    """
    name, texts, others = "", dict[str, bytes](), dict[str, ImageReference]()
    try:
        with tarfile.open(path, "r:") as shard:
            for member in filter(tarfile.TarInfo.isfile, shard):
                folder, _, file = member.name.rpartition("/")
                stem, _, ending = file.partition(".")
                key = f"{folder}/{stem}"
                if key != name and (texts or others):
                    yield name, texts, others
                    texts, others = {}, {}
                name = key
                if ending.lower() in ("json", "txt"):
                    stream = shard.extractfile(member)
                    assert stream is not None
                    texts[ending.lower()] = stream.read()
                else:
                    others[ending.lower()] = (str(path.resolve()), member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path}: is not a tar archive, or is damaged ({explain_read_error(error)})") from None
    if texts or others:
        yield name, texts, others


def write_tar_member(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file `name` with `content` to a tar archive that is being written."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
