"""Conversations about images to a data set: LLaVA's JSON and a folder, webdataset shards, tables with images in them.

    [{"image": "coco/1.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, ...]}, ...]

`image` or `images` are paths, or as Parquet and `datasets` have them {"bytes", "path"}; messages in parts may have
{"type": "image"} where the placeholder belongs. A sample of a shard is an image with such a record (.json), or with its
caption (.txt). Bytes of images that are in a table are put into `PREFIX.images.tar`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.files import sha256_file
from mega_common.log import ProgressBar, human, logger
from mega_common.parsing import parse_json
from mega_common.vision import VisionConfig
from mega_data.chat.encode import ChatEncoder
from mega_data.chat.prepare import ChatOptions, Chats, log_notes
from mega_data.files.indexed import best_dtype, data_prefix, images_prefix
from mega_data.files.indexed_writer import IndexedWriter
from mega_data.files.info import (
    DataInfo,
    ImagesInfo,
    Skipped,
    TokenizerInfo,
    little_endian,
    prepare_output,
    quarantine_path,
    write_info,
)
from mega_data.images.references import Reference, encoded, read_image, shard_samples, write_shard_member
from mega_data.making.commit import commit
from mega_data.reading.documents import Document, Rejected
from mega_data.reading.readers import read
from mega_data.reading.sources import LeftOut, find_sources
from mega_data.tokenizer import Tokenizer

BATCH = 256  # conversations that are encoded at once
IMAGE = "<image>"  # what stands for one in texts of LLaVA
CAPTION = "Describe the image."


@dataclass(frozen=True)
class ImageOptions:
    """Where images are, and what stands for one.

    Attributes:
        folder: what paths begin at.
        placeholder: a text that is one token; `tokens` of it stand for each image. Empty: the model's, or <image>.
        vision: of a model that cuts images in tiles or keeps their shape, which then say how many; else None.
        text: what <image> becomes in a text, a placeholder and what a model wants around it; empty: as `vision` has it, or the
            placeholder alone.
    """

    folder: Path
    tokens: int
    placeholder: str = ""
    text: str = ""
    vision: VisionConfig | None = None


@dataclass(frozen=True)
class Record:
    """A conversation as it is read: JSON, its images, and where it stands."""

    raw: dict[str, Any]
    images: list[Reference | bytes]
    file: str
    line: int


def prepare_images(
    inputs: Sequence[str | Path],
    tokenizer_path: Path,
    output_prefix: Path,
    chat: ChatOptions,
    images: ImageOptions,
    *,
    on_bad_line: Literal["error", "skip"] = "error",
    overwrite: bool = False,
) -> DataInfo:
    """Tokenize conversations with images: `PREFIX.bin` and what else `preprocess` makes of conversations, and `PREFIX.images`.

    Each placeholder of a text becomes as many as an image has features. An image that is not there is a bad line, as is a
    text with another number of placeholders than images. What is cut by `max_length` may be an image, too.

    Raises:
        DataError: naming file and line of a bad record, or what cannot be read or written.
    """
    prefix, folder = data_prefix(Path(output_prefix)), images.folder.resolve()
    prepare_output(prefix, overwrite)
    tokenizer = Tokenizer(Path(tokenizer_path))
    images = _with_marks(images, tokenizer)
    token = tokenizer.backend.token_to_id(images.placeholder)
    if token is None:
        raise DataError(
            f"{tokenizer.path}: {images.placeholder!r} is no token of it", hint="--image-token names the placeholder"
        )
    if images.vision is not None and images.vision.image_token != token:
        raise DataError(
            f"{tokenizer.path}: {images.placeholder!r} is token {token}, and the model's placeholder {images.vision.image_token}",
            hint="--image-token names the placeholder",
        )
    if images.text and images.text.count(images.placeholder) != 1:
        raise DataError(f"{images.text!r} has not one {images.placeholder}", hint="--image-text: with one placeholder")
    with ExitStack() as stack:
        made = stack.enter_context(_Made(prefix, tokenizer, Chats(chat, tokenizer), images, token))
        left_out, bar = LeftOut(), stack.enter_context(ProgressBar("reading conversations", unit="conversations"))
        items = records(inputs, left_out)
        while batch := list(islice(items, BATCH)):
            for item in made.add(batch, folder):
                if on_bad_line == "error":
                    hint = f"--on-bad-line skip goes on, and puts such lines into {quarantine_path(prefix)}"
                    raise DataError(f"{item.file}:{item.line}: {item.reason}", hint=hint)
                made.bad.append(item)
            bar.advance(len(batch))
        left_out.tell()
        told = {"pinpoints": images.vision.pinpoints, "sizes": images.vision.sizes} if images.vision else {}
        return made.finish(ImagesInfo(folder=str(folder), token=token, tokens=images.tokens, **told))


def _with_marks(images: ImageOptions, tokenizer: Tokenizer) -> ImageOptions:
    """With what the model has in a text for an image, where nothing else is asked for."""
    vision, read = images.vision, tokenizer.backend.id_to_token
    if vision is None:
        return replace(images, placeholder=images.placeholder or IMAGE)
    placeholder = images.placeholder or read(vision.image_token) or IMAGE
    text, begin, end = images.text, vision.begin_token, vision.end_token
    if not text and begin is not None and end is not None:
        text = vision.framed(read(begin) or "", placeholder, read(end) or "")
    return replace(images, placeholder=placeholder, text=text)


class _Made:
    """The data set under way."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer, chats: Chats, images: ImageOptions, token: int) -> None:
        self.prefix, self.tokenizer, self.chats, self.images, self.token = prefix, tokenizer, chats, images, token
        self.dtype = best_dtype(tokenizer.vocab_size)
        self.encoder = ChatEncoder(tokenizer, chats.info.one, None)  # the limit is of what placeholders become
        self.bad: list[Rejected] = []
        self.documents = self.tokens = self.bytes = self.empty = self.cut = 0
        self.notes: Counter[str] = Counter()

    def __enter__(self) -> _Made:
        self.writer = IndexedWriter(self.prefix, self.dtype, masked=True)
        self.beside = IndexedWriter(images_prefix(self.prefix), np.uint8)
        self._shard: tarfile.TarFile | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._shard is not None:
            self._shard.close()
        self.beside.abort()
        self.writer.abort()

    def add(self, batch: Sequence[Record | Rejected], folder: Path) -> Iterator[Rejected]:
        """Write what can be of some records; what cannot is handed back."""
        good: list[tuple[Record, Document]] = []
        for item in batch:
            made = item if isinstance(item, Rejected) else self._prepared(item, folder)
            if isinstance(made, Rejected):
                yield made
            else:
                assert isinstance(item, Record)
                good.append((item, made))
        texts, _, notes = self.encoder.encode([document.chats for _, document in good], self.dtype)
        self.notes += notes + Counter(note for _, document in good for note in document.notes)
        for (record, document), arrays in zip(good, texts, strict=True):
            counts = self._placeholders(record, folder)
            expanded = counts if isinstance(counts, Rejected) else self._expanded(record, document, arrays, counts)
            if isinstance(expanded, Rejected):
                yield expanded
            elif expanded is not None:
                assert not isinstance(counts, Rejected)
                self._write(record, expanded, counts)
                self.bytes += document.size

    def _placeholders(self, record: Record, folder: Path) -> list[int] | Rejected:
        """How many each image of a record has."""
        if self.images.vision is None or not self.images.vision.varies:
            return [self.images.tokens] * len(record.images)
        from mega_data.images.pixels import placeholders_of  # here: paths alone want no Pillow

        found: list[int] = []
        for image in record.images:
            try:
                content = image if isinstance(image, bytes) else read_image(image, folder)
                found.append(placeholders_of(content, self.images.vision))
            except DataError as error:
                what = "an image" if isinstance(image, bytes) else str(image)
                return Rejected(
                    f"{what}: {error.message}", json.dumps(record.raw, default=str), record.file, record.line
                )
        return found

    def _prepared(self, record: Record, folder: Path) -> Document | Rejected:
        """The rendered conversation of a record whose images are there."""
        written = json.dumps(self.images.text or self.images.placeholder)[1:-1]
        text = json.dumps(in_words(record.raw)).replace(IMAGE, written)
        for image in record.images:
            if not isinstance(image, bytes):
                try:
                    read_image((image if isinstance(image, str) else image[0], 0, 1), folder)
                except DataError as error:
                    return Rejected(error.message, text, record.file, record.line)
        return self.chats.prepare(Document(text, len(text), record.file, record.line))

    def _expanded(
        self, record: Record, document: Document, arrays: list[npt.NDArray[Any]], counts: list[int]
    ) -> npt.NDArray[Any] | Rejected | None:
        """The tokens of a conversation, as many placeholders for each image as it has features; None where nothing counts."""
        if not arrays:
            self.empty += 1
            return None
        (array,) = arrays
        here = array["token"] == self.token
        if int(here.sum()) != len(record.images):
            reason = f"{len(record.images)} image(s), and {int(here.sum())} times {self.images.placeholder} in the text"
            return Rejected(reason, document.text or json.dumps(record.raw, default=str), record.file, record.line)
        times = np.ones(array.size, np.int64)
        times[here] = counts
        whole = np.repeat(array, times)
        kept = whole[: self.chats.info.max_length]
        self.cut += bool(whole["mask"][kept.size :].any())
        if not kept["mask"][1:].any():
            self.empty += 1
            return None
        return kept

    def _write(self, record: Record, array: npt.NDArray[Any], counts: list[int]) -> None:
        references = [self._kept(image) if isinstance(image, bytes) else image for image in record.images]
        self.writer.add_documents(
            np.ascontiguousarray(array["token"]), [array.size], np.ascontiguousarray(array["mask"])
        )
        varies = self.images.vision is not None and self.images.vision.varies
        self.beside.add_document(encoded(references, counts if varies else None))
        self.documents += 1
        self.tokens += array.size

    def _kept(self, content: bytes) -> Reference:
        """Where the bytes of an image that is in a table are put."""
        path = self.prefix.with_name(self.prefix.name + ".images.tar")
        if self._shard is None:
            self._shard = tarfile.open(path, "w")  # noqa: SIM115 - closed on leaving
        offset = self._shard.offset + tarfile.BLOCKSIZE
        write_shard_member(self._shard, f"{self.documents:09d}.{hashlib.sha256(content).hexdigest()[:8]}", content)
        return str(path.resolve()), offset, len(content)

    def finish(self, images: ImagesInfo) -> DataInfo:
        """Make the data set appear, all its files together."""
        if not self.documents:
            raise DataError(f"{self.prefix}: not one conversation", hint=f"{len(self.bad)} bad, {self.empty} empty")
        self.writer.finish()
        self.beside.finish()
        folder = self.writer.folder
        for name in ("bin", "idx"):
            os.replace(self.beside.folder / name, folder / f"images.{name}")
        if self.bad:
            lines = [{"file": i.file, "line": i.line, "reason": i.reason, "content": i.content} for i in self.bad]
            (folder / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sums = {name: sha256_file(folder / name) for name in ("bin", "mask.bin")}
        info = write_info(
            self.prefix, folder=folder, tokenizer=TokenizerInfo.of(self.tokenizer), append_eod=False,
            dtype=little_endian(self.dtype), documents=self.documents, tokens=self.tokens, text_bytes=self.bytes,
            skipped=Skipped(bad=len(self.bad), empty=self.empty), bin_sha256=sums["bin"],
            chat=self.chats.info.model_copy(
                update={"cut": self.cut, "notes": dict(self.notes), "mask_sha256": sums["mask.bin"]}
            ), images=images,
        )  # fmt: skip
        commit(self.writer, "images")
        logger.info("%s: %s conversations, %s tokens", self.prefix, human(self.documents), human(self.tokens))
        if self.cut:
            logger.warning("%d answers were cut by the limit of %s tokens", self.cut, self.chats.info.max_length)
        log_notes(self.notes)
        return info


def records(inputs: Sequence[str | Path], left_out: LeftOut) -> Iterator[Record | Rejected]:
    """The records of all inputs, in order."""
    for name in inputs:
        if str(name).endswith(".tar"):
            yield from _of_shard(Path(name))
            continue
        for source in find_sources([name], "", left_out):
            for item in read(source, "", whole=True):
                if isinstance(item, Rejected):
                    yield item
                else:
                    assert item.record is not None
                    yield _of_record(item.record, item.file, item.line)


def _of_shard(path: Path) -> Iterator[Record | Rejected]:
    for number, (name, texts, others) in enumerate(shard_samples(path), 1):
        where = str(path), number
        if "json" in texts:
            try:
                raw = parse_json(texts["json"])
            except ValueError as error:
                yield Rejected(f"{name}.json: not JSON ({error})", "", *where)
                continue
        elif "txt" in texts:
            said = [{"from": "human", "value": f"{IMAGE}\n{CAPTION}"}]
            raw = {"conversations": [*said, {"from": "gpt", "value": texts["txt"].decode(errors="replace").strip()}]}
        else:
            yield Rejected(f"{name}: has no .json and no .txt", "", *where)
            continue
        yield Record(raw, list(others.values()), *where)


def _of_record(raw: dict[str, Any], file: str, line: int) -> Record | Rejected:
    if raw.get("video") or raw.get("videos") or any(part.get("type") == "video" for part in _parts(raw)):
        return Rejected("a video, which is not read here: images of it may be", "", file, line)
    given = raw.get("images", raw.get("image"))
    listed = given if isinstance(given, list) else [] if given is None else [given]
    images: list[Reference | bytes] = []
    for one in listed:
        found = one.get("bytes") or one.get("path") if isinstance(one, dict) else one
        if hasattr(found, "save"):  # an image of Pillow's, as `datasets` decodes it
            found = _png(found)
        if not isinstance(found, str | bytes):
            return Rejected(f"an image is {type(one).__name__}, not a path", "", file, line)
        images.append(found)
    return Record({key: value for key, value in raw.items() if key not in ("image", "images")}, images, file, line)


def _parts(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of all messages that come in parts."""
    messages = raw.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()


def _png(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


def in_words(raw: dict[str, Any]) -> dict[str, Any]:
    """A record whose messages have LLaVA's placeholder where they had a part that is an image."""
    messages = raw.get("messages")
    if not isinstance(messages, list):
        return raw
    return {**raw, "messages": [{**one, "content": _worded(one.get("content"))} for one in messages]}


def _worded(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    word = {"type": "text", "text": IMAGE + "\n"}
    return [word if isinstance(part, dict) and part.get("type") == "image" else part for part in content]
