"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors, with names of transformers' modules.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, D], ...lora_B.weight [N, r]
    base_model.model.lm_head.weight                                              of modules_to_save, fully trained

Adapters of projections that transformers fuses into one module, such as query-key-value, are written as one adapter of
the sum R of their ranks: A is concatenated, B is block-diagonal. When read, each projection gets all of A and its own
rows of B.

The experts of a layer are parameters of one module, selected by `target_parameters`: A [E r, D] is stacked by expert, and
in B [N, r E] the experts are interleaved. With two parameters, gate_up_proj is in `experts.base_layer` and down_proj in
`experts`.

Legend: D input width, N output width, E experts, r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import EMBEDDING, abbreviate_name_list
from mega_ckpt.families import ModelFamily, detect_model_family, find_family_expressing_model
from mega_ckpt.families.disk_layouts import TRANSPOSED, DiskTensor
from mega_ckpt.formats.hf_source import find_additional_templates
from mega_ckpt.formats.hf_weight_files import encode_json_mapping, read_json_mapping
from mega_ckpt.formats.peft_tensor_changes import (
    WEIGHTS,
    check_lora_factors,
    check_peft_options,
    get_lora_alpha_of_module,
    open_adapter_weights,
    take_peft_tensor_changes,
)
from mega_ckpt.formats.safetensors_file import SafetensorsHeader, write_safetensors
from mega_ckpt.lora_adapter import ADAPTER_TOKENIZER_FILES, SavedAdapter, check_adapter_modules, compute_row_norms
from mega_ckpt.lora_tensors import MAGNITUDE, A, B, adaptable_projections
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor
from mega_ckpt.weight_source import WeightSource
from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import CheckpointError
from mega_common.lora_config import LoraConfig, is_adapter_tensor
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, read_if_remote

N = TypeVar("N", int, float)
CONFIG = "adapter_config.json"
_NO_MODULE = "none"  # pattern of an adapter that only replaces tensors
PREFIX = "base_model.model."
# Families whose experts are `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F] of `mlp.experts` in transformers.
_STACKED = frozenset(
    ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"]
)


@dataclass(frozen=True)
class PeftModule:
    """A linear module of transformers that can have a PEFT adapter.
    It has its name in transformers, and the canonical projections that its rows consist of.
    """

    name: str
    disk: DiskTensor

    @property
    def projection_names(self) -> list[str]:
        """Canonical names of the projections in the module, in row order."""
        return list(dict.fromkeys(slab.name.removesuffix(".weight") for slab in self.disk.slabs))

    def join_adapters(self, adapter: SavedAdapter) -> tuple[Tensor, Tensor, float]:
        """Return the factors and the scale of one LoRA adapter of the module, joined from its projections.
        The factors are A [rank, inputs] and B [outputs, rank]. Each projection has its own adapter in `adapter`.
        """
        adapted = [part for part in self.projection_names if part in adapter.modules]
        a = {part: adapter.read_tensor(part + A) for part in adapted}
        scale, start, columns = adapter.modules[adapted[0]].scale, 0, {}
        for part in adapted:
            columns[part] = slice(start, start := start + len(a[part]))
        b = a[adapted[0]].new_zeros(sum(slab.shape[0] for slab in self.disk.slabs), start)
        for slab, rows in zip(self.disk.slabs, torch.split(b, [s.shape[0] for s in self.disk.slabs]), strict=True):
            part = slab.name.removesuffix(".weight")
            if part in columns:
                factor = crop_tensor(adapter.read_tensor(part + B), (slab.offset[0], 0), (slab.shape[0], len(a[part])))
                rows[:, columns[part]] = factor * (adapter.modules[part].scale / scale)
        return torch.cat(list(a.values())), b, scale

    def join_dora_magnitudes(self, adapter: SavedAdapter, base: WeightSource) -> Tensor:
        """Return the DoRA magnitudes [outputs] of the module's rows, joined from its projections.
        A projection without an adapter keeps its row norms.
        """
        out = []
        for slab in self.disk.slabs:
            part, first, rows = slab.name.removesuffix(".weight"), slab.offset[0], slab.shape[0]
            if part in adapter.modules:
                out.append(adapter.read_tensor_slice(part + MAGNITUDE, (first,), (rows,)))
            else:
                out.append(compute_row_norms(base, slab.name, first, rows).float())
        return torch.cat(out)

    def split_adapter(self, a: Tensor, b: Tensor, magnitude: Tensor | None) -> dict[str, Tensor]:
        """Split a module's adapter (A, B, DoRA magnitude) into adapters of its projections, as {canonical name: tensor}."""
        rows = torch.split(b, [slab.shape[0] for slab in self.disk.slabs])
        out: dict[str, Tensor] = {}
        for part in self.projection_names:
            own = [slab.name == f"{part}.weight" for slab in self.disk.slabs]  # slabs of a tensor are in its order
            out |= {part + A: a, part + B: torch.cat([*compress(rows, own)])}
            if magnitude is not None:
                lengths = torch.split(magnitude, [len(block) for block in rows])
                out[part + MAGNITUDE] = torch.cat([*compress(lengths, own)])
        return out


def write_peft_folder(adapter: SavedAdapter, base: WeightSource, folder: Path) -> None:
    """Write a LoRA adapter as a PEFT folder, which is durable when this returns.
    The adapter, `adapter`, was trained on `base`.

    Raises:
        CheckpointError: when PEFT cannot express the adapter.
    """
    family = _family_of_base(base)
    tensors, ranks, scales = _encode_adapter(adapter, base, family)
    model = base.model.model_copy(
        update={"tie_embeddings": base.model.tie_embeddings and not adapter.unties_embeddings}
    )
    saved = {name: _disk_name(name, model, family) for name in adapter.shapes if not is_adapter_tensor(name)}
    if model.tie_embeddings and EMBEDDING in saved:
        raise CheckpointError(
            "a trained embedding that is tied to the output layer is not supported by PEFT",
            hint="merge the adapter instead: mega ckpt convert --to hf",
        )
    _check_saved_modules(saved.values(), ranks, model, family)
    tensors |= {disk: adapter.read_tensor(name) for name, disk in saved.items()}
    config = _peft_config(adapter, ranks, scales, sorted({disk.rpartition(".")[0] for disk in saved.values()}))
    modules = list(peft_modules(base.model, family))
    config["target_modules"] = _shorten_targets(config["target_modules"], [one.name for one in modules])
    config["fan_in_fan_out"] = any(one.disk.layout == TRANSPOSED for one in modules)
    (folder / CONFIG).write_bytes(encode_json_mapping(config))
    header = SafetensorsHeader.make_header(
        {PREFIX + name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"format": "pt"}
    )
    write_safetensors(
        folder / WEIGHTS, header, (tensors[name.removeprefix(PREFIX)].contiguous() for name in header.entries)
    )


def _check_saved_modules(
    saved: Iterable[str], ranks: Mapping[str, int], model: ModelConfig, family: ModelFamily
) -> None:
    """Check that `saved`, tensors by their names in transformers, are complete modules without adapters, as PEFT
    requires.

    Raises:
        CheckpointError: naming a module that is saved in part, or when no module has an adapter.
    """
    merge, names = "merge the adapter instead: mega ckpt merge-adapter", {*saved}
    if not ranks:
        raise CheckpointError(
            "PEFT requires a module with a low-rank adapter, but only whole tensors were trained", hint=merge
        )
    modules = {name.rpartition(".")[0] for name in names}
    complete = {name for name in family.disk_tensor_table(model) if name.rpartition(".")[0] in modules}
    if parts := (complete - names) | {name for name in names if name.rpartition(".")[0] in ranks}:
        raise CheckpointError(
            f"PEFT requires that modules are saved whole, but only a part of {abbreviate_name_list(parts)} was trained",
            hint=merge,
        )


def read_peft_adapter(folder: Location, base: WeightSource) -> SavedAdapter:
    """Return the LoRA adapter in a PEFT folder, trained on `base`; CheckpointError if it is of another model.

    Raises:
        CheckpointError: naming an unsupported option or tensor, or one of another model.
    """
    config, family = read_json_mapping(folder / CONFIG), _family_of_base(base)
    check_peft_options(config, folder / CONFIG)
    file = open_adapter_weights(folder)
    check_lora_factors(file.shapes, folder)
    left = {name.removeprefix(PREFIX): name for name in file.shapes}
    tensors: dict[str, Tensor] = {}
    experts = base.model.moe.num_experts if base.model.moe else 0
    names: dict[str, str] = {}  # the module in transformers of each canonical one
    for module in peft_modules(base.model, family):
        if {module.name + A, module.name + B} <= left.keys():
            a, b = (file.read(left.pop(module.name + suffix)) for suffix in (A, B))
            rows = sum(slab.shape[0] for slab in module.disk.slabs)
            if len(b) != rows:
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {module.name}{B} has {len(b)} rows instead of {rows}",
                    hint="give the base model that the adapter was trained on",
                )
            magnitude = left.pop(module.name + MAGNITUDE, None)
            tensors |= module.split_adapter(a, b, file.read(magnitude) if magnitude else None)
            names |= dict.fromkeys(module.projection_names, module.name)
    for canonical, key in _expert_keys(base.model, family, dict(left), config.get("target_parameters") or []):
        a, b = (file.read(left.pop(key + suffix)) for suffix in (A, B))
        tensors |= {canonical + A: _unstack_experts(a, experts), canonical + B: _deinterleave_experts(b, experts)}
        names[canonical] = canonical
    changed = take_peft_tensor_changes(config, left, file.shapes, file.read, base, family, str(folder / WEIGHTS))
    _reject_unused(left, folder, family)
    lora = _lora_config(config, {part: tensors[part + A].shape[-2] for part in names}, names, [*changed.tensor_shapes])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    modules = check_adapter_modules(base.model, lora, shapes, str(folder)) if names else {}

    def read_slice(name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        return (
            crop_tensor(tensors[name], offset, shape)
            if name in tensors
            else changed.read_tensor_slice(name, offset, shape)
        )

    where = config.get("base_model_name_or_path")
    return SavedAdapter(
        lora,
        modules,
        shapes | changed.tensor_shapes,
        read_slice,
        {"path": where} if where else {},
        unties_embeddings=changed.untied,
        tokenizer=_tokenizer_files(folder),
    )


def _tokenizer_files(folder: Location) -> dict[str, Path | bytes]:
    """Return the tokenizer files next to an adapter; none without a tokenizer.json."""
    if not (folder / ADAPTER_TOKENIZER_FILES[0]).is_file():
        return {}
    found = {name: folder / name for name in ADAPTER_TOKENIZER_FILES if (folder / name).is_file()}
    return {name: read_if_remote(path) for name, path in (found | find_additional_templates(folder)).items()}


def _reject_unused(left: Mapping[str, str], folder: Location, family: ModelFamily) -> None:
    """Reject an adapter with tensors that were not used.

    Raises:
        CheckpointError: naming the module and a tensor.
    """
    if not left:
        return
    biases = [name for name in left if name.endswith(".lora_B.bias")]
    if biases:
        module = biases[0].removesuffix(".lora_B.bias")
        raise CheckpointError(
            f"{folder / WEIGHTS}: lora_bias = true is not supported for {module}, which has no bias in the base model"
        )
    parts = re.compile(r"\.(lora_|base_layer\b|token_adapter\b|trainable_tokens_|modules_to_save\b)")
    modules = dict.fromkeys(parts.split(name)[0].removesuffix(".weight") for name in left)
    raise CheckpointError(
        f"{folder / WEIGHTS}: an adapter of the module {abbreviate_name_list(modules)} is not supported in a {family.name} model "
        f"(tensor {abbreviate_name_list(left)})",
        hint="merge the adapter with PEFT (merge_and_unload, save_pretrained), unless it is of another model",
    )


def peft_modules(model: ModelConfig, family: ModelFamily) -> Iterator[PeftModule]:
    """Yield the modules of transformers that can have a LoRA adapter, experts excluded."""
    adaptable = {
        name for weights in adaptable_projections(model).values() for name, shape in weights.items() if len(shape) == 2
    }
    for disk in family.disk_tensor_table(model).values():
        if all(slab.name in adaptable for slab in disk.slabs):
            yield PeftModule(disk.name.removesuffix(".weight"), disk)


def _encode_adapter(
    adapter: SavedAdapter, base: WeightSource, family: ModelFamily
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, float]]:
    """Return tensors, and ranks and scales of modules, all by their names in transformers."""
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    done: set[str] = set()
    for module in peft_modules(base.model, family):
        if not done.issuperset(own := adapter.modules.keys() & set(module.projection_names)):
            a, b, scales[module.name] = module.join_adapters(adapter)
            tensors |= {module.name + A: a, module.name + B: b}
            ranks[module.name] = len(a)
            if adapter.lora.dora:
                tensors[module.name + MAGNITUDE] = module.join_dora_magnitudes(adapter, base)
            done |= own
    stacked = {part: of for part, of in adapter.modules.items() if of.num_experts is not None}
    for part, of in stacked.items() if family.name in _STACKED else ():
        experts, _, which = part.rpartition(".")
        inner = which != "down_proj" and f"{experts}.down_proj" in stacked
        key = f"{experts}.base_layer" if inner else experts
        tensors[key + A] = adapter.read_tensor(part + A).flatten(0, 1)
        tensors[key + B] = adapter.read_tensor(part + B).permute(1, 2, 0).flatten(1)
        ranks[part], scales[part] = of.rank, of.scale
        done.add(part)
    if left := adapter.modules.keys() - done:
        raise CheckpointError(
            f"an adapter of {abbreviate_name_list(left)} in a {family.name} model is not supported by PEFT",
            hint="merge the adapter instead: --to hf",
        )
    return tensors, ranks, scales


def _peft_config(
    adapter: SavedAdapter, ranks: Mapping[str, int], scales: Mapping[str, float], saved: list[str]
) -> dict[str, Any]:
    """Return adapter_config.json; the alphas give the scales for these ranks."""
    root = adapter.lora.rslora
    alphas = {name: scales[name] * (math.sqrt(rank) if root else rank) for name, rank in ranks.items()}
    rank, alpha = _most_common(list(ranks.values())), _most_common(list(alphas.values()))
    stacked = {part for part, of in adapter.modules.items() if of.num_experts is not None}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": adapter.base_fingerprint.get("path"),
        "r": rank, "lora_alpha": alpha, "lora_dropout": adapter.lora.dropout, "bias": "none", "use_rslora": root, "use_dora": adapter.lora.dora,
        "target_modules": sorted(ranks.keys() - stacked), "target_parameters": sorted(stacked) or None,
        "rank_pattern": {re.escape(name): own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {re.escape(name): own for name, own in alphas.items() if own != alpha},
        "modules_to_save": saved or None, "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip


def _shorten_targets(targets: list[str], modules: Sequence[str]) -> list[str]:
    """Return the last parts of the target names, as serving programs expect, if they select the same `modules`; else
    the full names.
    """
    last = {name.rpartition(".")[2] for name in targets}
    selected = {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last) if selected == {*targets} else targets


def _lora_config(
    config: Mapping[str, Any], ranks: Mapping[str, int], names: Mapping[str, str], saved: list[str]
) -> LoraConfig:
    """Return mega's configuration of adapted projections: their `ranks`, and the `names` of their transformers modules."""
    rank, usual = _most_common([*ranks.values()] or [1]), float(config.get("lora_alpha", 8))
    return LoraConfig(
        rank=rank, alpha=usual, rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")), dropout=float(config.get("lora_dropout") or 0.0), modules=[re.escape(part) for part in ranks] or [_NO_MODULE],
        ranks={re.escape(part): own for part, own in ranks.items() if own != rank},
        alphas={re.escape(part): own for part in ranks if (own := get_lora_alpha_of_module(config, names[part])) != usual},
        modules_to_save=[re.escape(name.rpartition(".")[0]) for name in saved],
    )  # fmt: skip


def _most_common(values: list[N]) -> N:
    return max(values, key=values.count)


def _expert_keys(
    model: ModelConfig, family: ModelFamily, held: Mapping[str, str], targets: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the experts' projections with an adapter among the keys `held`, and their key prefixes; `targets` are PEFT's
    target parameters, which identify the projection if there is only one.
    """
    for part, weights in adaptable_projections(model).items() if family.name in _STACKED else ():
        experts, _, which = part.rpartition(".")
        if len(next(iter(weights.values()))) != 3:
            continue
        both = f"{experts}.base_layer{A}" in held
        key = f"{experts}.base_layer" if both and which != "down_proj" else experts
        if key + A in held and (both or any(target.endswith(which) for target in targets)):
            yield part, key


def _unstack_experts(a: Tensor, experts: int) -> Tensor:
    """Reshape [E r, D] to [E, r, D]."""
    return torch.unflatten(a, 0, (experts, -1))


def _deinterleave_experts(b: Tensor, experts: int) -> Tensor:
    """Reshape [N, r E] to [E, N, r]."""
    return torch.unflatten(b, 1, (-1, experts)).permute(2, 0, 1)


def _family_of_base(base: WeightSource) -> ModelFamily:
    """Return the family of the base on disk, or the first that fits.

    Raises:
        CheckpointError: when PEFT adapters of the family are not supported.
    """
    raw = base.asset_files().get("config.json")
    try:
        family = detect_model_family(parse_json_text(raw.read_bytes() if isinstance(raw, Path) else raw or b"{}"))
    except (CheckpointError, ValueError):
        family = find_family_expressing_model(base.model)
    family = family if not family.unsupported_settings(base.model) else find_family_expressing_model(base.model)
    if not family.supports_peft:
        raise CheckpointError(
            f"PEFT adapters of a {family.name} model are not supported: its tensors are not named after transformers' modules",
            hint="merge the adapter instead: mega ckpt convert --to hf",
        )
    return family


def _disk_name(name: str, model: ModelConfig, family: ModelFamily) -> str:
    """Return transformers' name of a whole canonical tensor.

    Raises:
        CheckpointError: when transformers fuses it with another tensor.
    """
    for disk in family.disk_tensor_table(model).values():
        if [slab.name for slab in disk.slabs] == [name]:
            return disk.name
    raise CheckpointError(
        f"{name} must be a separate tensor for PEFT, but is fused with others in a {family.name} model",
        hint="merge the adapter instead: --to hf",
    )
