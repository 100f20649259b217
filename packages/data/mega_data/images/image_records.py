"""Records of conversations with images: LLaVA's JSON, webdataset shards, and tables that contain images.

    [{"image": "coco/1.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, ...]}, ...]

`image` or `images` are paths, or {"bytes", "path"} as in Parquet and `datasets`; messages in parts may have
{"type": "image"} at the position of the placeholder. A sample of a shard is an image with such a record (.json), or
with its caption (.txt). Image bytes of a table are stored in `PREFIX.images.tar`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_common.bounded_parsing import describe_json_type, parse_json_text
from mega_data.reading.corpus_sources import SkippedFiles, find_corpus_sources
from mega_data.reading.documents import RejectedItem
from mega_data.reading.source_readers import read_documents
from mega_data.token_files.image_references import ImageReference, iterate_webdataset_samples

IMAGE = "<image>"  # placeholder in LLaVA's texts
CAPTION = "Describe the image."


@dataclass(frozen=True)
class ImageChatRecord:
    """Conversation record with images: JSON object, image references or bytes, and source position."""

    raw: dict[str, Any]
    images: list[ImageReference | bytes]
    file: str
    line: int


def iterate_image_records(
    inputs: Sequence[str | Path], skipped_files: SkippedFiles
) -> Iterator[ImageChatRecord | RejectedItem]:
    """Yield the conversation records with images of all inputs, in order, with rejected items among them.
    Inputs are webdataset shards (.tar) and the formats of `find_corpus_sources`.
    """
    for name in inputs:
        if str(name).endswith(".tar"):
            yield from _read_shard_records(Path(name))
            continue
        for source in find_corpus_sources([name], "", skipped_files):
            for item in read_documents(source, "", whole=True):
                if isinstance(item, RejectedItem):
                    yield item
                else:
                    assert item.record is not None
                    yield _parse_record(item.record, item.file, item.line)


def _read_shard_records(path: Path) -> Iterator[ImageChatRecord | RejectedItem]:
    for number, (name, texts, others) in enumerate(iterate_webdataset_samples(path), 1):
        position = str(path), number
        if "json" in texts:
            try:
                raw = parse_json_text(texts["json"])
            except ValueError as error:
                yield RejectedItem(f"{name}.json: not JSON ({error})", "", *position)
                continue
        elif "txt" in texts:
            prompt = {"from": "human", "value": f"{IMAGE}\n{CAPTION}"}
            raw = {"conversations": [prompt, {"from": "gpt", "value": texts["txt"].decode(errors="replace").strip()}]}
        else:
            yield RejectedItem(f"{name}: has neither a .json nor a .txt file", "", *position)
            continue
        yield ImageChatRecord(raw, list(others.values()), *position)


def _parse_record(raw: dict[str, Any], file: str, line: int) -> ImageChatRecord | RejectedItem:
    if (
        raw.get("video")
        or raw.get("videos")
        or any(part.get("type") == "video" for part in _iterate_message_parts(raw))
    ):
        return RejectedItem("videos are not supported; use images of the frames", "", file, line)
    value = raw.get("images", raw.get("image"))
    entries = value if isinstance(value, list) else [] if value is None else [value]
    images: list[ImageReference | bytes] = []
    for entry in entries:
        image = entry.get("bytes") or entry.get("path") if isinstance(entry, dict) else entry
        if hasattr(image, "save"):  # a Pillow image, decoded by `datasets`
            image = _encode_png(image)
        if not isinstance(image, str | bytes):
            return RejectedItem(f"an image is {describe_json_type(entry)}, not a path", "", file, line)
        images.append(image)
    return ImageChatRecord(
        {key: value for key, value in raw.items() if key not in ("image", "images")}, images, file, line
    )


def _iterate_message_parts(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages that have parts."""
    messages = raw.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()


def _encode_png(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "png")
    return out.getvalue()


def replace_images_with_placeholders(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a chat record in which each image part of a message is replaced by LLaVA's placeholder text `<image>`."""
    messages = raw.get("messages")
    if not isinstance(messages, list):
        return raw
    return {
        **raw, "messages": [{**message, "content": _replace_image_parts(message.get("content"))} for message in messages]
    }  # fmt: skip


def _replace_image_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    placeholder = {"type": "text", "text": IMAGE + "\n"}
    return [placeholder if isinstance(part, dict) and part.get("type") == "image" else part for part in content]
