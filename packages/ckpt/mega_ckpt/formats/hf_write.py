"""Writing a HuggingFace folder: as the folder was that the weights came from, or laid out anew.

A checkpoint that was made from a HuggingFace folder carries that folder's files and the headers of its safetensors
files. As long as names, shapes and dtypes are still the same, what is written is the same to the byte.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.families import Family, family_for, family_named, family_of, image_processor, same_model
from mega_ckpt.families.base import CARRIED
from mega_ckpt.families.layouts import PLAIN, DiskTensor, Slab
from mega_ckpt.formats.hf import CONFIG, LAYOUT, checked_table, decode_layout, with_images
from mega_ckpt.formats.hf_files import INDEX, SINGLE, decode_json, encode_json
from mega_ckpt.formats.safetensors import Header, write_file
from mega_ckpt.journal import Finished, Once, always
from mega_ckpt.pieces import Shape
from mega_ckpt.source import VISION, Source, cast_dtype, put_file, uncomputed_parts
from mega_ckpt.stream import blocks
from mega_common.errors import CheckpointError
from mega_common.log import logger
from mega_common.model_config import ModelConfig

MAX_SHARD = 5 * 10**9  # bytes
_METADATA = {"format": "pt"}
_OF_IMAGES = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "image_processor.json"}
)
_OWN_KEYS = frozenset({"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"})


@dataclass(frozen=True)
class Origin:
    """What a source's assets tell of the HuggingFace folder it came from; empty when it came from none."""

    config: bytes | None
    index: bytes | None
    headers: Mapping[str, Header]
    others: Mapping[str, Path | bytes]

    @classmethod
    def of(cls, source: Source) -> Origin:
        """Sort a source's assets."""
        others = dict(source.assets())
        config, index, layout = (_content(others.pop(name, None)) for name in (CONFIG, INDEX, LAYOUT))
        return cls(config, index, decode_layout(layout) if layout else {}, others)

    def other(self, name: str) -> dict[str, Any]:
        """The mapping in one of the other files; empty where there is none.

        Raises:
            CheckpointError: when the file is no mapping.
        """
        content = _content(self.others.get(name))
        return {} if content is None else decode_json(content, name)

    @property
    def raw(self) -> dict[str, Any]:
        """The mapping in its config.json; empty when there is none."""
        try:
            raw = json.loads(self.config or b"{}")
        except (ValueError, RecursionError):
            return {}
        return raw if isinstance(raw, dict) else {}

    def without_vision(self, family: Family) -> Origin:
        """Return the origin of the language model alone: its part of config.json, and no files of weights or images."""
        others = {name: content for name, content in self.others.items() if name not in _OF_IMAGES}
        return Origin(encode_json(family.part(self.raw)), None, {}, others)

    def described(self, model: ModelConfig) -> tuple[Family, ModelConfig] | None:
        """The model that its config.json describes; None where it describes none that is known.

        That is no error: the file may have come with a tokenizer. Further predictors count where files or `model` have any.
        """
        try:
            family = family_of(self.raw)
            held = [name for header in self.headers.values() for name in header.entries]
            read = with_images(family.read_config(self.raw), self.other)
            return family, family.as_held(read, held) if held or not model.mtp_layers else read
        except CheckpointError:
            return None


@dataclass(frozen=True)
class Plan:
    """Everything about a HuggingFace folder but the tensors' bytes.

    Attributes:
        table: {disk name: where its elements come from}; a disk tensor that is not in it is a buffer.
        files: {file name: header}; the headers tell names, dtypes and the order of bytes.
        others: {path inside the folder: file or its content}, config.json and index among them.
    """

    table: Mapping[str, DiskTensor]
    files: Mapping[str, Header]
    others: Mapping[str, Path | bytes]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(header.size for header in self.files.values())


def plan_folder(
    source: Source, *, family: str | None = None, dtype: torch.dtype | None = None, max_shard: int | None = None
) -> Plan:
    """Decide on a folder before anything is written.

    Args:
        source: the weights.
        family: `model_type` to write; by default that of the folder they came from, or the first that fits.
        dtype: to cast floating-point weights to.
        max_shard: most bytes of tensors in a file; by default the files of the folder they came from, or `MAX_SHARD`.

    Raises:
        CheckpointError: when the family, or every family, lacks something of the model, with the settings.
    """
    origin = Origin.of(source)
    described = origin.described(source.model)
    chosen = _choose(source.model, family, described)
    if described is not None and described[0] == chosen and _lacks_vision(source, origin.raw, chosen):
        logger.warning(
            "the origin of this model (%s) has a vision encoder, whose weights are not in this checkpoint: the output is the "
            "language model alone (%s)", chosen.whole, chosen.architecture,
        )  # fmt: skip
        origin = origin.without_vision(chosen)
        described = None
    same = described is not None and described[0] == chosen and same_model(described[1], source.model)
    headers = origin.headers if same else {}
    held = {name: entry.shape for header in headers.values() for name, entry in header.entries.items()}
    table = checked_table(chosen, source.model, held, LAYOUT) if held else chosen.table(source.model)
    tensors = {name: (cast_dtype(source, disk.slabs[0].name, dtype), disk.shape) for name, disk in table.items()}
    buffers = {name: (source.read_buffer(name).dtype, held[name]) for name in source.buffers() if name in held}
    if headers and max_shard is None:
        files = _regrouped(headers, tensors | buffers)
    else:
        files = _grouped(tensors, max_shard or MAX_SHARD)
    others = {name: content for name, content in origin.others.items() if not name.endswith(".safetensors")}
    if files == headers:
        config, index = origin.config, origin.index
    else:
        raw = _with_dtype(origin.raw if same else _new_config(origin.raw, chosen, source.model), tensors)
        config, index = origin.config if raw == origin.raw else encode_json(raw), _index(files)
    own = {name: content for name, content in ((CONFIG, config), (INDEX, index)) if content is not None}
    return Plan(table, files, {**others, **({} if same else _images(origin, source.model)), **own})


def write_folder(
    source: Source, plan: Plan, folder: Path, advance: Callable[[int], object], once: Once = always
) -> None:
    """Write the files of `plan` into an existing folder, one tensor in memory at a time; durable on return.

    `once` passes over safetensors files that are there already; nothing else is.
    """
    for name, header in plan.files.items():
        once(name, header.start, partial(_write, source, plan, header, folder / name, advance))
    for name, content in plan.others.items():
        put_file(folder / name, content)


def _write(source: Source, plan: Plan, header: Header, path: Path, advance: Callable[[int], object]) -> Finished:
    return write_file(path, header, _tensors(source, plan, header), advance)


def _tensors(source: Source, plan: Plan, header: Header) -> Iterator[Tensor]:
    for name, entry in header.entries.items():
        if name in plan.table:
            yield from _parts(source, plan.table[name], entry.dtype)
        else:
            yield source.read_buffer(name)


def fillers(
    plan: Plan, copy: Callable[[Slab, Tensor], None]
) -> Iterator[tuple[str, torch.dtype, Shape, Callable[[Tensor], None]]]:
    """Each tensor of a folder's files in their order: its name, dtype and shape, and what fills one with it.

    `copy` puts a slab of a canonical tensor into a tensor of its shape, which may have another dtype.
    """

    def fill(disk: DiskTensor, out: Tensor) -> None:
        portions = list(disk.portions())
        places = torch.split(out.view(-1), [math.prod(portion.shape) for portion in portions])
        for portion, place in zip(portions, places, strict=True):
            for slab, view in portion.views(place.view(portion.shape)):
                copy(slab, view)

    for header in plan.files.values():
        for name, entry in header.entries.items():
            if name in plan.table:
                yield name, entry.dtype, entry.shape, partial(fill, plan.table[name])


def _parts(source: Source, disk: DiskTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A disk tensor from the canonical tensors that it holds: in blocks of rows where it is one of them, else by expert."""
    if disk.layout == PLAIN and len(disk.slabs) == 1:
        for offset, shape in blocks(disk.shape, dtype):
            yield source.read_slice(disk.slabs[0].name, offset, shape).to(dtype)
        return
    for portion in disk.portions():
        out = torch.empty(portion.shape, dtype=dtype)
        for slab, view in portion.views(out):
            view.copy_(source.read_slice(slab.name, slab.offset, slab.shape))
        yield out


def _choose(model: ModelConfig, family: str | None, described: tuple[Family, ModelConfig] | None) -> Family:
    """The family asked for, else that of the origin where it still fits, else the first that fits."""
    if family is not None:
        chosen = family_named(family)
        problems = chosen.problems(model)
        if problems:
            raise CheckpointError(f"a {chosen.name} config.json cannot express this model: {'; '.join(problems)}")
        return chosen
    if described is not None and not described[0].problems(model):
        return described[0]
    return family_for(model)


def _lacks_vision(source: Source, raw: Mapping[str, Any], family: Family) -> bool:
    """Check whether config.json describes a model with a vision encoder whose weights the source does not have."""
    whole = bool(family.whole) and raw.get("model_type") == family.whole and bool(raw.get("vision_config"))
    return whole and VISION not in uncomputed_parts(source.buffers())


def _regrouped(headers: Mapping[str, Header], tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> dict[str, Header]:
    """The same tensors in the same files; a header stays to the byte where dtypes and shapes did."""
    out = {}
    for file, header in headers.items():
        held = {name: tensors[name] for name in header.entries if name in tensors}
        same = held == {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}
        if held:
            out[file] = header if same else Header.make(held, header.metadata)
    return out


def _grouped(tensors: Mapping[str, tuple[torch.dtype, Shape]], max_shard: int) -> dict[str, Header]:
    """Fill files in the order of the forward pass, each up to `max_shard` bytes of tensors, at least one in each."""
    groups: list[dict[str, tuple[torch.dtype, Shape]]] = [{}]
    room = max_shard
    for name, (dtype, shape) in tensors.items():
        size = dtype.itemsize * math.prod(shape)
        if size > room and groups[-1]:
            groups.append({})
            room = max_shard
        groups[-1][name] = (dtype, shape)
        room -= size
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    return {name: Header.make(group, _METADATA) for name, group in zip(names, groups, strict=True)}


def _index(files: Mapping[str, Header]) -> bytes | None:
    if len(files) == 1:
        return None
    total = sum(header.size for header in files.values())
    weight_map = {name: file for file, header in files.items() for name in header.entries}
    return encode_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _new_config(raw: Mapping[str, Any], family: Family, model: ModelConfig) -> dict[str, Any]:
    """The family's config.json, with what the origin's says beside the architecture, such as special tokens."""
    carried = {key: value for key, value in raw.items() if key in CARRIED - _OWN_KEYS}
    unsaid = dict.fromkeys(family.tokens if raw.get("model_type") != family.name else ())
    return unsaid | carried | family.write_config(model)


def _images(origin: Origin, model: ModelConfig) -> dict[str, bytes]:
    """How the model's images are made ready, where the origin's files do not say it already."""
    if model.vision is None:
        return {}
    said = image_processor.section(origin.other)
    if said and image_processor.prepared(model.vision, said) == model.vision:
        return {}
    files = {image_processor.FILE: image_processor.described(model.vision)}
    whole = origin.other(image_processor.WHOLE)
    if image_processor.SECTION in whole:
        files[image_processor.WHOLE] = whole | {image_processor.SECTION: files[image_processor.FILE]}
    return {name: encode_json(raw) for name, raw in files.items()}


def _with_dtype(raw: Mapping[str, Any], tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> dict[str, Any]:
    """With the dtype that most of the model has, under the key that is there, or that of transformers 5."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, shape in tensors.values():
        sizes[dtype] += math.prod(shape)
    name = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]
    return {**raw, **dict.fromkeys(keys, name)}


def _content(value: Path | bytes | None) -> bytes | None:
    return value.read_bytes() if isinstance(value, Path) else value
