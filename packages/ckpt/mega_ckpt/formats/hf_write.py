"""Writer of HuggingFace folders: in the layout of the folder that the weights came from, or in a new one.

A checkpoint converted from a HuggingFace folder carries that folder's other files and the headers of its safetensors
files. If names, shapes and dtypes are unchanged, the written folder is identical byte for byte.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.families import (
    ModelFamily,
    detect_model_family,
    find_family_by_name,
    find_family_expressing_model,
    image_processor,
    is_equivalent_config,
)
from mega_ckpt.families.disk_layouts import PLAIN, DiskTensor, TensorSlice
from mega_ckpt.families.family import CARRIED
from mega_ckpt.formats.hf_source import (
    CONFIG,
    LAYOUT,
    add_image_settings,
    build_checked_tensor_table,
    decode_hf_headers,
)
from mega_ckpt.formats.hf_weight_files import INDEX, SINGLE, decode_json_mapping, encode_json_mapping, set_config_dtype
from mega_ckpt.formats.quantized_parts import (
    Calibration,
    QuantizedWeightPart,
    TensorTypes,
    describe_rounding,
    find_unquantized_layers,
    list_quantized_parts,
    quantize_calibrated_weights,
    replace_quantized_weights,
    select_quantizer,
)
from mega_ckpt.formats.safetensors_file import SafetensorsHeader, write_safetensors
from mega_ckpt.formats.weight_quantization import EncodedParts, LinearQuantizer
from mega_ckpt.resumable_folder import FinishedFile, RunOnce, write_without_journal
from mega_ckpt.stream_checkpoint import split_into_contiguous_slices
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.weight_source import VISION, WeightSource, choose_cast_dtype, find_unsupported_parts, write_file_durably
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.progress_logging import logger

MAX_SHARD = 5 * 10**9  # bytes
_CACHED = 1 << 18  # elements that are quantized at once
_CALIBRATED = 1 << 24  # the same with calibration, whose work for a column is shared by more rows
METADATA = {"format": "pt"}
_IMAGE_FILES = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "image_processor.json"}
)
_OWN_KEYS = frozenset({"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"})


@dataclass(frozen=True)
class OriginalHfFolder:
    """Settings and weight-file headers of the HuggingFace folder that a weight source was converted from.
    They are taken from the files that accompany the source's weights, and empty for other sources.
    """

    config: bytes | None
    index: bytes | None
    headers: Mapping[str, SafetensorsHeader]
    others: Mapping[str, Path | bytes]

    @classmethod
    def from_source(cls, source: WeightSource) -> OriginalHfFolder:
        """Return settings and weight-file headers of the HuggingFace folder that weights were converted from.
        They are taken from the files that accompany the weights of `source`.
        """
        others = dict(source.asset_files())
        config, index, layout = (_read_content(others.pop(name, None)) for name in (CONFIG, INDEX, LAYOUT))
        return cls(config, index, decode_hf_headers(layout) if layout else {}, others)

    def read_other_json(self, name: str) -> dict[str, Any]:
        """Return the content of the JSON file `name` of the original HuggingFace folder; empty if the file is missing.

        Raises:
            CheckpointError: when the file is not a mapping.
        """
        content = _read_content(self.others.get(name))
        return {} if content is None else decode_json_mapping(content, name)

    @property
    def config_json(self) -> dict[str, Any]:
        """The content of the original HuggingFace folder's config.json; empty if it is missing or not a JSON object."""
        try:
            raw = json.loads(self.config or b"{}")
        except (ValueError, RecursionError):
            return {}
        return raw if isinstance(raw, dict) else {}

    def without_vision(self, family: ModelFamily) -> OriginalHfFolder:
        """Return settings of a vision-language folder reduced to the language model.
        Config.json is cut to the text model's section; weight-file headers and image files are dropped.
        """
        others = {name: content for name, content in self.others.items() if name not in _IMAGE_FILES}
        return OriginalHfFolder(encode_json_mapping(family.select_text_config(self.config_json)), None, {}, others)

    def describe_model(
        self, model: ModelConfig, families: Sequence[ModelFamily] = ()
    ) -> tuple[ModelFamily, ModelConfig] | None:
        """Return the family and the model configuration that the folder's config.json describes; None for an unsupported model.

        An unsupported one is not an error: the file may have come with a tokenizer. MTP layers are kept if the files or
        `model` have them. `families` come from extensions.
        """
        try:
            family = detect_model_family(self.config_json, added=families, images=model.vision is not None)
            names = [name for header in self.headers.values() for name in header.entries]
            read = add_image_settings(family.read_config_json(self.config_json), self.read_other_json)
            return family, family.restrict_to_stored(read, names) if names or not model.mtp_layers else read
        except CheckpointError:
            return None


@dataclass(frozen=True)
class HfFolderPlan:
    """Contents of a HuggingFace folder to write, except the bytes of the tensors.

    Attributes:
        table: {disk name: canonical tensors in it}; disk tensors that are in neither mapping are buffers.
        files: {file name: header}; the headers have names, dtypes and the order of bytes.
        others: {path inside the folder: file or its content}, including config.json and index.
        quantized: {disk name: part of a quantized weight}; the weight itself is in `table` only.
        encoded: {disk name: parts} of the quantized weights that are calibrated; others are encoded when written.
        quantization: description of the quantization; None without it.
        constants: {disk name: scalar} of tensors that are not in the source.
    """

    table: Mapping[str, DiskTensor]
    files: Mapping[str, SafetensorsHeader]
    others: Mapping[str, Path | bytes]
    quantized: Mapping[str, QuantizedWeightPart] = field(default_factory=dict)
    encoded: Mapping[str, EncodedParts] = field(default_factory=dict)
    quantization: str | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Total size in bytes of the folder's tensors."""
        return sum(header.total_bytes for header in self.files.values())


def plan_hf_folder(
    source: WeightSource,
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard: int | None = None,
    families: Sequence[ModelFamily] = (),
    quantize: str | None = None,
    calibration: Calibration | None = None,
    metadata: Mapping[str, str] = METADATA,
) -> HfFolderPlan:
    """Plan the HuggingFace folder to write for `source`: family, tensor names, files and dtypes; nothing is written.

    Args:
        source: the weights.
        family: `model_type` to write; by default that of the origin, or the first family that fits.
        dtype: dtype to cast floating-point weights to; None: unchanged.
        max_shard: maximum bytes of tensors per file; by default the files of the origin, or `MAX_SHARD`.
        families: families that extensions add.
        quantize: quantization of the linear layers, by its name in `weight_quantization`; None: unquantized.
        calibration: data by which the quantized weights are rounded; None: to the nearest.
        metadata: metadata of new safetensors files.

    Raises:
        CheckpointError: when the family, or every family, cannot express settings of the model, or the quantization
            does not support its layers.
    """
    origin = OriginalHfFolder.from_source(source)
    described = origin.describe_model(source.model, families)
    chosen = _choose_family(source.model, family, described, families)
    if described is not None and described[0] == chosen and _lacks_vision(source, origin.config_json, chosen):
        origin, described = _leave_out_vision(origin, chosen), None
    same = described is not None and described[0] == chosen and is_equivalent_config(described[1], source.model)
    headers = origin.headers if same else {}
    shapes = {name: entry.shape for header in headers.values() for name, entry in header.entries.items()}
    checked = build_checked_tensor_table(chosen, source.model, shapes, LAYOUT) if shapes else None
    table = chosen.disk_tensor_table(source.model) if checked is None else checked
    tensors = {name: (choose_cast_dtype(source, disk.slabs[0].name, dtype), disk.shape) for name, disk in table.items()}
    buffers = {name: (source.read_buffer(name).dtype, shapes[name]) for name in source.buffer_names() if name in shapes}
    quantizer = select_quantizer(quantize, table) if quantize else None
    quantized = list_quantized_parts(quantizer, table, tensors) if quantizer else {}
    kept = headers if max_shard is None and not quantized and metadata == METADATA else {}
    constants = _list_constants(chosen, source.model, next(iter(tensors.values()))[0], buffers, shapes)
    buffers |= {name: (value.dtype, ()) for name, value in constants.items()}
    written = replace_quantized_weights(tensors, table, quantized) | buffers
    files = _keep_files(kept, written) if kept else _split_into_files(written, max_shard or MAX_SHARD, metadata)
    others = {name: content for name, content in origin.others.items() if not name.endswith(".safetensors")}
    if files == headers:
        config, index = origin.config, origin.index
    else:
        raw = origin.config_json if same else _new_config(origin.config_json, chosen, source.model)
        settings = quantizer.settings(find_unquantized_layers(table, {**tensors, **buffers})) if quantizer else {}
        raw = _with_dtype(raw, tensors) | settings
        config, index = origin.config if raw == origin.config_json else encode_json_mapping(raw), _encode_index(files)
    others |= {} if same else _image_files(origin, source.model)
    others |= {**_embedding_files(source.model), **({} if config is None else {CONFIG: config})}
    others |= {} if index is None else {INDEX: index}
    plan = HfFolderPlan(table, files, others, quantized, constants=constants)
    return plan if quantizer is None else _add_rounding(plan, source, quantizer, tensors, calibration)


def _leave_out_vision(origin: OriginalHfFolder, chosen: ModelFamily) -> OriginalHfFolder:
    """Return the origin without its vision encoder, and warn that only the language model is written."""
    logger.warning(
        "the original model (%s) has a vision encoder whose weights are not in this checkpoint; only the language model is "
        "written (%s)", chosen.outer_model_type, chosen.architecture,
    )  # fmt: skip
    return origin.without_vision(chosen)


def _list_constants(
    family: ModelFamily, model: ModelConfig, dtype: torch.dtype, present: Container[str], wanted: Collection[str]
) -> dict[str, Tensor]:
    """Return the scalars that transformers stores for the family, by disk name: those of the origin, or all without one."""
    return {
        name: torch.tensor(value, dtype=dtype)
        for name, value in family.constant_tensors(model).items()
        if name not in present and name in (wanted or (name,))
    }


def _add_rounding(
    plan: HfFolderPlan, source: WeightSource, quantizer: LinearQuantizer,
    tensors: Mapping[str, tuple[torch.dtype, TensorShape]], calibration: Calibration | None,
) -> HfFolderPlan:  # fmt: skip
    """Return the plan with the quantized weights that calibration data rounds, and with the description of the rounding."""
    encoded: Mapping[str, EncodedParts] = {}
    if calibration is not None:
        read_rows = partial(_iter_rows, source, together=quantizer.rows, elements=_CALIBRATED)
        encoded = quantize_calibrated_weights(quantizer, plan.table, tensors, calibration, read_rows)
    description = describe_rounding(plan.quantized, len(encoded), calibration)
    logger.info("%d weights are quantized: %s", len({part.weight for part in plan.quantized.values()}), description)
    return replace(plan, encoded=encoded, quantization=description)


def write_hf_folder(
    source: WeightSource,
    plan: HfFolderPlan,
    folder: Path,
    advance: Callable[[int], object],
    once: RunOnce = write_without_journal,
) -> None:
    """Write the files of `plan` into an existing folder, one tensor in memory at a time; durable on return.

    `once` skips safetensors files that are already complete; all other files are written.
    """
    for name, header in plan.files.items():
        once(name, header.encoded_header, partial(_write_safetensors, source, plan, header, folder / name, advance))
    for name, content in plan.others.items():
        write_file_durably(folder / name, content)


def _write_safetensors(
    source: WeightSource, plan: HfFolderPlan, header: SafetensorsHeader, path: Path, advance: Callable[[int], object]
) -> FinishedFile:
    return write_safetensors(path, header, _iter_tensors(source, plan, header), advance)


def _iter_tensors(source: WeightSource, plan: HfFolderPlan, header: SafetensorsHeader) -> Iterator[Tensor]:
    scales: dict[str, Tensor] = {}  # of the codes that are written already
    for name, entry in header.entries.items():
        if name in scales:
            yield scales.pop(name)
        elif name in plan.quantized:
            part = plan.quantized[name]
            disk, encoded = plan.table[part.weight], plan.encoded.get(part.weight, {})
            if part.part in encoded:
                yield encoded[part.part]
                continue
            yield from part.encode_row_blocks(disk.shape, _iter_rows(source, disk, part.quantizer.rows), scales)
        elif name in plan.table:
            yield from _iter_blocks(source, plan.table[name], entry.dtype)
        else:
            yield plan.constants[name] if name in plan.constants else source.read_buffer(name)


def iterate_tensor_fillers(
    plan: HfFolderPlan, copy: Callable[[TensorSlice, Tensor], None]
) -> Iterator[tuple[str, torch.dtype, TensorShape, Callable[[Tensor], None]]]:
    """Yield each tensor of a planned HuggingFace folder, in file order, with a function that fills it.
    Items are the tensor's name, dtype and shape, and a function that fills a tensor of that shape.

    `copy` copies a slice of a canonical tensor into a tensor of its shape, which may have another dtype.
    """

    def fill_tensor(disk: DiskTensor, out: Tensor) -> None:
        portions = list(disk.split_portions())
        targets = torch.split(out.view(-1), [math.prod(portion.shape) for portion in portions])
        for portion, target in zip(portions, targets, strict=True):
            for slab, view in portion.slice_views(target.view(portion.shape)):
                copy(slab, view)

    for header in plan.files.values():
        for name, entry in header.entries.items():
            if name in plan.table:
                yield name, entry.dtype, entry.shape, partial(fill_tensor, plan.table[name])


def _iter_blocks(source: WeightSource, disk: DiskTensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a disk tensor in blocks of rows if it is one canonical tensor, else by expert."""
    if disk.layout == PLAIN and len(disk.slabs) == 1:
        for offset, shape in split_into_contiguous_slices(disk.shape, dtype):
            yield source.read_tensor_slice(disk.slabs[0].name, offset, shape).to(dtype)
        return
    for portion in disk.split_portions():
        out = torch.empty(portion.shape, dtype=dtype)
        for slab, view in portion.slice_views(out):
            view.copy_(source.read_tensor_slice(slab.name, slab.offset, slab.shape))
        yield out


def _iter_rows(source: WeightSource, disk: DiskTensor, together: int, elements: int = _CACHED) -> Iterator[Tensor]:
    """Yield the rows of a matrix in fp32, in blocks of a multiple of `together` rows, of about `elements` at most.
    By default they fit the processor's cache.
    """
    single = disk.layout == PLAIN and len(disk.slabs) == 1
    whole = None if single else next(_iter_blocks(source, disk, torch.float32))
    rows, columns = disk.shape
    step = max(1, elements // columns // together) * together
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        if whole is None:
            yield source.read_tensor_slice(disk.slabs[0].name, (begin, 0), (count, columns)).float()
        else:
            yield whole[begin : begin + count]


def _choose_family(
    model: ModelConfig,
    family: str | None,
    described: tuple[ModelFamily, ModelConfig] | None,
    families: Sequence[ModelFamily],
) -> ModelFamily:
    """Return the requested family, else that of the origin if it still fits, else the first that fits."""
    if family is not None:
        chosen = find_family_by_name(family, "--family", families)
        problems = chosen.unsupported_settings(model)
        if problems:
            raise CheckpointError(
                f"a {chosen.name} config.json cannot express this model: {'; '.join(problems)}",
                hint="leave out --family, which writes the first family that has all settings of the model",
            )
        return chosen
    if described is not None and not described[0].unsupported_settings(model):
        return described[0]
    return find_family_expressing_model(model, families)


def _lacks_vision(source: WeightSource, raw: Mapping[str, Any], family: ModelFamily) -> bool:
    """Return whether config.json describes a model with a vision encoder whose weights the source does not have."""
    outer = bool(family.outer_model_type) and raw.get("model_type") == family.outer_model_type
    return outer and bool(raw.get("vision_config")) and VISION not in find_unsupported_parts(source.buffer_names())


def _keep_files(
    headers: Mapping[str, SafetensorsHeader], tensors: Mapping[str, tuple[torch.dtype, TensorShape]]
) -> dict[str, SafetensorsHeader]:
    """Return headers with the same tensors in the same files; a header is unchanged if its dtypes and shapes are."""
    out = {}
    for file, header in headers.items():
        kept = {name: tensors[name] for name in header.entries if name in tensors}
        same = kept == {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}
        if kept:
            out[file] = header if same else SafetensorsHeader.make_header(kept, header.metadata)
    return out


def _split_into_files(
    tensors: TensorTypes, max_shard: int, metadata: Mapping[str, str]
) -> dict[str, SafetensorsHeader]:
    """Return headers that fill files in the order of the forward pass, each with up to `max_shard` bytes of tensors and
    at least one tensor.
    """
    groups: list[dict[str, tuple[torch.dtype, TensorShape]]] = [{}]
    left = max_shard
    for name, (dtype, shape) in tensors.items():
        size = dtype.itemsize * math.prod(shape)
        if size > left and groups[-1]:
            groups.append({})
            left = max_shard
        groups[-1][name] = (dtype, shape)
        left -= size
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    return {name: SafetensorsHeader.make_header(group, metadata) for name, group in zip(names, groups, strict=True)}


def _encode_index(files: Mapping[str, SafetensorsHeader]) -> bytes | None:
    if len(files) == 1:
        return None
    total = sum(header.total_bytes for header in files.values())
    weight_map = {name: file for file, header in files.items() for name in header.entries}
    return encode_json_mapping({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _new_config(raw: Mapping[str, Any], family: ModelFamily, model: ModelConfig) -> dict[str, Any]:
    """Return the family's config.json, with the origin's keys that are independent of the architecture, such as special
    tokens.
    """
    carried = {key: value for key, value in raw.items() if key in CARRIED - _OWN_KEYS}
    absent_tokens = dict.fromkeys(family.tokens if raw.get("model_type") != family.name else ())
    return absent_tokens | carried | family.write_config_json(model)


def _image_files(origin: OriginalHfFolder, model: ModelConfig) -> dict[str, bytes]:
    """Return the image preprocessing files; empty if the origin's files have the same settings."""
    if model.vision is None:
        return {}
    settings = image_processor.read_image_processor_settings(origin.read_other_json)
    if settings and image_processor.update_config_from_image_processor(model.vision, settings) == model.vision:
        return {}
    files = {image_processor.FILE: image_processor.build_preprocessor_config(model.vision)}
    processor = origin.read_other_json(image_processor.PROCESSOR_FILE)
    if image_processor.SECTION in processor:
        files[image_processor.PROCESSOR_FILE] = processor | {image_processor.SECTION: files[image_processor.FILE]}
    return {name: encode_json_mapping(raw) for name, raw in files.items()}


def _embedding_files(model: ModelConfig) -> dict[str, bytes]:
    """Return the files by which sentence-transformers loads an embedding model: transformer, pooling and normalisation;
    empty for other models.
    """
    if model.task_head is None or model.task_head.kind != "embedding":
        return {}
    modes = {"first": "cls_token", "last": "lasttoken", "mean": "mean_tokens"}
    pooling = {f"pooling_mode_{mode}": pooled == model.text_pooling for pooled, mode in modes.items()}
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listing = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    return {
        "modules.json": json.dumps(listing, indent=2).encode(),
        "1_Pooling/config.json": encode_json_mapping({"word_embedding_dimension": model.hidden_size, **pooling}),
        "2_Normalize/config.json": encode_json_mapping({}),
        "config_sentence_transformers.json": encode_json_mapping({"similarity_fn_name": "cosine"}),
    }


def _with_dtype(raw: Mapping[str, Any], tensors: Mapping[str, tuple[torch.dtype, TensorShape]]) -> dict[str, Any]:
    """Return the config with the dtype of most of the model, under the existing key or that of transformers 5."""
    sizes: Counter[torch.dtype] = Counter()
    for dtype, shape in tensors.values():
        sizes[dtype] += math.prod(shape)
    return set_config_dtype(raw, sizes.most_common(1)[0][0])


def _read_content(value: Path | bytes | None) -> bytes | None:
    return value.read_bytes() if isinstance(value, Path) else value
