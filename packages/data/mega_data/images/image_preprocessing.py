"""Preprocessing of conversations with images to token files and `PREFIX.images`."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mega_common.atomic_files import compute_file_sha256
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, format_with_decimal_unit, logger
from mega_common.vision_config import VisionConfig
from mega_data.chat.chat_preparation import ChatEncoder, ChatOptions, ChatRecordConverter, log_chat_warnings
from mega_data.images.image_inputs import ImageText
from mega_data.images.image_records import (
    IMAGE,
    ImageChatRecord,
    iterate_image_records,
    replace_images_with_placeholders,
)
from mega_data.reading.corpus_sources import SkippedFiles
from mega_data.reading.documents import Document, RejectedItem
from mega_data.token_files.dataset_commit import commit_dataset
from mega_data.token_files.dataset_info import (
    DatasetInfo,
    ImagesInfo,
    SkippedCounts,
    TokenizerInfo,
    check_output_prefix,
    get_dtype_name,
    get_quarantine_path,
    write_dataset_info,
)
from mega_data.token_files.image_references import (
    ImageReference,
    encode_image_references,
    read_image_bytes,
    write_tar_member,
)
from mega_data.token_files.indexed_reader import get_images_prefix, select_token_dtype, strip_data_suffix
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer

BATCH = 256  # conversations that are encoded at once
T = TypeVar("T")
# A record, its rendered conversation, and the texts of its images that a processor of transformers writes, if any.
_RenderedRecord: TypeAlias = tuple[ImageChatRecord, Document, list[ImageText]]


@dataclass(frozen=True)
class ImageOptions:
    """Options for tokenizing images in conversations.
    They are the base folder of image paths, and the placeholder text and count per image.

    Attributes:
        folder: base folder of image paths.
        tokens: number of placeholders per image.
        placeholder: text of the placeholder token; empty for the model's, or <image>.
        text: replacement of <image> in a text: the placeholder with the tokens that the model requires around it; empty
            for that of `vision`, or the placeholder alone.
        vision: vision encoder of a model whose number of placeholders depends on the image; else None.
    """

    folder: Path
    tokens: int
    placeholder: str = ""
    text: str = ""
    vision: VisionConfig | None = None


def preprocess_image_chats(
    inputs: Sequence[str | Path],
    tokenizer_path: Path,
    output_prefix: Path,
    chat: ChatOptions,
    images: ImageOptions,
    *,
    on_bad_line: Literal["error", "skip"] = "error",
    overwrite: bool = False,
) -> DatasetInfo:
    """Tokenize conversations with images into the data set at `output_prefix`, and return its description.
    The data set is `PREFIX.bin`, `.idx`, `.info` and loss mask; the references to the images are written to
    `PREFIX.images`.

    Each placeholder of a text is repeated for each feature of its image. A missing image, and a text with another
    number of placeholders than images, are bad lines. Truncation to `max_length` may cut an image.

    Raises:
        DataError: naming file and line of a bad record, or a file that cannot be read or written.
    """
    prefix, folder = strip_data_suffix(Path(output_prefix)), images.folder.resolve()
    check_output_prefix(prefix, overwrite)
    tokenizer = Tokenizer(Path(tokenizer_path))
    images = _fill_placeholder_text(images, tokenizer)
    token = tokenizer.backend.token_to_id(images.placeholder)
    if token is None:
        raise DataError(
            f"{tokenizer.path}: has no token {images.placeholder!r}", hint="set --image-token to the placeholder token"
        )
    if images.vision is not None and images.vision.image_token != token:
        raise DataError(
            f"{tokenizer.path}: {images.placeholder!r} is token {token}, but the model's placeholder is"
            f" {images.vision.image_token}",
            hint="set --image-token to the placeholder token",
        )
    if images.text and images.text.count(images.placeholder) != 1:
        raise DataError(f"--image-text must contain {images.placeholder} exactly once, and is {images.text!r}")
    with ExitStack() as stack:
        writer = stack.enter_context(
            _ImageDatasetWriter(
                prefix, tokenizer, ChatRecordConverter(chat, tokenizer, _write_sample_image(images)), images, token
            )
        )
        skipped_files, bar = (
            SkippedFiles(),
            stack.enter_context(ProgressBar("reading conversations", unit="conversations")),
        )
        items = iterate_image_records(inputs, skipped_files)
        while batch := list(islice(items, BATCH)):
            for item in writer.add_records(batch, folder):
                if on_bad_line == "error":
                    hint = f"pass --on-bad-line skip to move bad lines to {get_quarantine_path(prefix)}"
                    raise DataError(f"{item.file}:{item.line}: {item.reason}", hint=hint)
                writer.bad.append(item)
            bar.advance(len(batch))
        skipped_files.log_reasons()
        sizes = (
            {"pinpoints": images.vision.pinpoints, "sizes": images.vision.native_size_limits} if images.vision else {}
        )
        return writer.commit_files(ImagesInfo(folder=str(folder), token=token, tokens=images.tokens, **sizes))


def _fill_placeholder_text(images: ImageOptions, tokenizer: Tokenizer) -> ImageOptions:
    """Return the options with the model's text for an image, unless another text is given."""
    vision, read = images.vision, tokenizer.backend.id_to_token
    if vision is None:
        return replace(images, placeholder=images.placeholder or IMAGE)
    placeholder = images.placeholder or read(vision.image_token) or IMAGE
    text, begin, end = images.text, vision.begin_token, vision.end_token
    if not text and begin is not None and end is not None:
        text = vision.wrap_image_tokens(read(begin) or "", placeholder, read(end) or "")
    return replace(images, placeholder=placeholder, text=text)


def _write_sample_image(images: ImageOptions) -> str:
    """Return the text of an image, with the special tokens that images may have."""
    if images.vision is None or images.vision.module is None:
        return images.text
    from PIL import Image

    from mega_data.images.module_images import ModuleImageProcessor

    return ModuleImageProcessor(images.vision.module).prepare(Image.new("RGB", (1536, 1024)))[1].text


def _apply_to_images(record: ImageChatRecord, folder: Path, function: Callable[[bytes], T]) -> list[T] | RejectedItem:
    """Return the result of a function of the file bytes of each image of a record; rejected if an image is unreadable."""
    results: list[T] = []
    for image in record.images:
        try:
            results.append(function(image if isinstance(image, bytes) else read_image_bytes(image, folder)))
        except DataError as error:
            name = "an image" if isinstance(image, bytes) else str(image)
            return RejectedItem(
                f"{name}: {error.message}", json.dumps(record.raw, default=str), record.file, record.line
            )
    return results


class _ImageDatasetWriter:
    """Writer of a data set of conversations with images."""

    def __init__(
        self, prefix: Path, tokenizer: Tokenizer, chats: ChatRecordConverter, images: ImageOptions, token: int
    ) -> None:
        self.prefix, self.tokenizer, self.chats, self.images, self.token = prefix, tokenizer, chats, images, token
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.encoder = ChatEncoder(tokenizer, chats.info.one, None)  # the limit applies after the expansion
        self.bad: list[RejectedItem] = []
        self.documents = self.tokens = self.bytes = self.empty = self.cut = 0
        self.notes: Counter[str] = Counter()

    def __enter__(self) -> _ImageDatasetWriter:
        self.writer = IndexedWriter(self.prefix, self.dtype, masked=True)
        self.references = IndexedWriter(get_images_prefix(self.prefix), np.uint8)
        self._shard: tarfile.TarFile | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._shard is not None:
            self._shard.close()
        self.references.abort()
        self.writer.abort()

    def add_records(self, batch: Sequence[ImageChatRecord | RejectedItem], folder: Path) -> Iterator[RejectedItem]:
        """Write the valid conversation records of a batch, and yield the rejected ones."""
        good: list[_RenderedRecord] = []
        for item in batch:
            rendered = item if isinstance(item, RejectedItem) else self._render_record(item, folder)
            if isinstance(rendered, RejectedItem):
                yield rendered
            else:
                good.append(rendered)
        texts, _, notes = self.encoder.encode_chats([document.chats for _, document, _ in good], self.dtype)
        self.notes += notes + Counter(note for _, document, _ in good for note in document.notes)
        for (record, document, images), arrays in zip(good, texts, strict=True):
            counts = [one.features for one in images] or self._count_record_placeholders(record, folder)
            expanded = (
                counts
                if isinstance(counts, RejectedItem)
                else self._expand_placeholders(record, document, arrays, counts)
            )
            if isinstance(expanded, RejectedItem):
                yield expanded
            elif expanded is not None:
                assert not isinstance(counts, RejectedItem)
                self._write_record(record, expanded, counts)
                self.bytes += document.size

    def _count_record_placeholders(self, record: ImageChatRecord, folder: Path) -> list[int] | RejectedItem:
        """Return the number of placeholders of each image of a record."""
        if self.images.vision is None or not self.images.vision.has_variable_tokens:
            return [self.images.tokens] * len(record.images)
        from mega_data.images.image_pixels import (
            count_image_placeholder_tokens,  # local: a fixed number does not require Pillow
        )

        return _apply_to_images(record, folder, partial(count_image_placeholder_tokens, vision=self.images.vision))

    def _render_record(self, record: ImageChatRecord, folder: Path) -> _RenderedRecord | RejectedItem:
        """Return a record with its rendered conversation, after checking that its images exist."""
        images = self._write_module_images(record, folder)
        if isinstance(images, RejectedItem):
            return images
        written = json.dumps(self.images.text or self.images.placeholder)[1:-1]
        text = json.dumps(replace_images_with_placeholders(record.raw))
        for image in record.images:
            if not isinstance(image, bytes):
                try:
                    read_image_bytes((image if isinstance(image, str) else image[0], 0, 1), folder)
                except DataError as error:
                    return RejectedItem(error.message, text, record.file, record.line)
        parts = text.split(IMAGE)
        texts = [json.dumps(one.text)[1:-1] for one in images]
        texts = texts if len(texts) == len(parts) - 1 else [written] * (len(parts) - 1)
        text = parts[0] + "".join(one + part for one, part in zip(texts, parts[1:], strict=True))
        document = self.chats.prepare_record(Document(text, len(text), record.file, record.line))
        return document if isinstance(document, RejectedItem) else (record, document, images)

    def _write_module_images(self, record: ImageChatRecord, folder: Path) -> list[ImageText] | RejectedItem:
        """Return the text of each image of a record that the processor of transformers writes; empty without a module."""
        vision = self.images.vision
        if vision is None or vision.module is None:
            return []
        from mega_data.images.image_pixels import prepare_image

        def write_image(content: bytes) -> ImageText:
            text = prepare_image(content, vision).text
            assert text is not None
            return text

        return _apply_to_images(record, folder, write_image)

    def _expand_placeholders(
        self, record: ImageChatRecord, document: Document, arrays: list[npt.NDArray[Any]], counts: list[int]
    ) -> npt.NDArray[Any] | RejectedItem | None:
        """Return the tokens of a conversation with one placeholder per feature; None if no token counts in the loss."""
        if not arrays:
            self.empty += 1
            return None
        (array,) = arrays
        here = array["token"] == self.token
        module = self.images.vision is not None and self.images.vision.module is not None
        if int(here.sum()) != (sum(counts) if module else len(record.images)):
            reason = (
                f"{len(record.images)} image(s), but the text has {self.images.placeholder} {int(here.sum())} times"
            )
            return RejectedItem(reason, document.text or json.dumps(record.raw, default=str), record.file, record.line)
        times = np.ones(array.size, np.int64)
        times[here] = 1 if module else counts
        whole = np.repeat(array, times)
        kept = whole[: self.chats.info.max_length]
        self.cut += bool(whole["mask"][kept.size :].any())
        if not kept["mask"][1:].any():
            self.empty += 1
            return None
        return kept

    def _write_record(self, record: ImageChatRecord, array: npt.NDArray[Any], counts: list[int]) -> None:
        references = [self._store_image(image) if isinstance(image, bytes) else image for image in record.images]
        self.writer.add_documents(
            np.ascontiguousarray(array["token"]), [array.size], np.ascontiguousarray(array["mask"])
        )
        varies = self.images.vision is not None and self.images.vision.has_variable_tokens
        self.references.add_document(encode_image_references(references, counts if varies else None))
        self.documents += 1
        self.tokens += array.size

    def _store_image(self, content: bytes) -> ImageReference:
        """Store the bytes of an image from a table in the tar file, and return its reference."""
        path = self.prefix.with_name(self.prefix.name + ".images.tar")
        if self._shard is None:
            self._shard = tarfile.open(path, "w")  # noqa: SIM115 - closed in __exit__
        offset = self._shard.offset + tarfile.BLOCKSIZE
        write_tar_member(self._shard, f"{self.documents:09d}.{hashlib.sha256(content).hexdigest()[:8]}", content)
        return str(path.resolve()), offset, len(content)

    def commit_files(self, images: ImagesInfo) -> DatasetInfo:
        """Commit all files of the image data set together."""
        if not self.documents:
            raise DataError(
                f"{self.prefix}: no conversation with an answer in the inputs",
                hint=f"{len(self.bad)} bad records, {self.empty} empty conversations",
            )
        self.writer.finish_files()
        self.references.finish_files()
        folder = self.writer.folder
        for name in ("bin", "idx"):
            os.replace(self.references.folder / name, folder / f"images.{name}")
        if self.bad:
            lines = [{"file": i.file, "line": i.line, "reason": i.reason, "content": i.content} for i in self.bad]
            (folder / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sums = {name: compute_file_sha256(folder / name) for name in ("bin", "mask.bin")}
        info = write_dataset_info(
            self.prefix, folder=folder, tokenizer=TokenizerInfo.from_tokenizer(self.tokenizer), append_eod=False,
            dtype=get_dtype_name(self.dtype), documents=self.documents, tokens=self.tokens, text_bytes=self.bytes,
            skipped=SkippedCounts(bad=len(self.bad), empty=self.empty), bin_sha256=sums["bin"],
            chat=self.chats.info.model_copy(
                update={"cut": self.cut, "notes": dict(self.notes), "mask_sha256": sums["mask.bin"]}
            ), images=images,
        )  # fmt: skip
        commit_dataset(self.writer, "images")
        logger.info(
            "%s: %s conversations, %s tokens",
            self.prefix,
            format_with_decimal_unit(self.documents),
            format_with_decimal_unit(self.tokens),
        )
        if self.cut:
            logger.warning("%d answers were truncated to %s tokens", self.cut, self.chats.info.max_length)
        log_chat_warnings(self.notes)
        return info
