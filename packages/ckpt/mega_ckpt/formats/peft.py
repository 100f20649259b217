"""PEFT's folders: adapter_config.json and adapter_model.safetensors, by the names of transformers' modules.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, D], ...lora_B.weight [N, r]
    base_model.model.lm_head.weight                                              of modules_to_save, trained whole

Where transformers has several projections in one module, such as a fused query-key-value projection, their adapters are one
of the sum R of their ranks: their A one below the other, and a B that is zero but for blocks. Read, each of the projections
has all of A and its own rows of B.

A layer's experts are parameters of one module, reached by `target_parameters`: A [E r, D] stacked by expert, B [N, r E] with
the experts in turns; of two, gate_up_proj lies in `experts.base_layer` and down_proj in `experts`.

Legend: D input width, N output width, E experts, r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mega_ckpt.adapter import ADAPTER_TOKENIZER_FILES, Adapter, checked_modules, row_lengths
from mega_ckpt.families import Family, family_for, family_of
from mega_ckpt.families.layouts import TRANSPOSED, DiskTensor
from mega_ckpt.formats.hf_files import encode_json, read_json
from mega_ckpt.formats.peft_changes import changes_of
from mega_ckpt.formats.peft_options import alpha_of, check_options
from mega_ckpt.formats.safetensors import Header, SafetensorsFile, write_file
from mega_ckpt.formats.torch_state import state_tensors
from mega_ckpt.lora import MAGNITUDE, A, B, projections
from mega_ckpt.names import EMBEDDING, some
from mega_ckpt.pieces import Shape, crop
from mega_common.errors import CheckpointError
from mega_common.lora import LoraConfig, is_adapter
from mega_common.model_config import ModelConfig
from mega_common.parsing import parse_json
from mega_common.remote import Place, content_of

if TYPE_CHECKING:
    from mega_ckpt.source import Source

N = TypeVar("N", int, float)
CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_NO_MODULE = "none"  # pattern of an adapter that only replaces tensors
PREFIX = "base_model.model."
# Whose experts are `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F] of a module `mlp.experts` in transformers.
_STACKED = frozenset(
    ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe"]
)


@dataclass(frozen=True)
class Module:
    """A module of transformers that an adapter may be beside: its name there, and what it is made of, by rows."""

    name: str
    disk: DiskTensor

    @property
    def parts(self) -> list[str]:
        """The canonical projections, as their rows come."""
        return list(dict.fromkeys(slab.name.removesuffix(".weight") for slab in self.disk.slabs))

    def joined(self, adapter: Adapter) -> tuple[Tensor, Tensor, float]:
        """A [R, D], B [N, R] and the scale of the adapters of all its parts."""
        own = [part for part in self.parts if part in adapter.modules]
        a = {part: adapter.whole(part + A) for part in own}
        scale, start, columns = adapter.modules[own[0]].scale, 0, {}
        for part in own:
            columns[part] = slice(start, start := start + len(a[part]))
        b = a[own[0]].new_zeros(sum(slab.shape[0] for slab in self.disk.slabs), start)
        for slab, rows in zip(self.disk.slabs, torch.split(b, [s.shape[0] for s in self.disk.slabs]), strict=True):
            part = slab.name.removesuffix(".weight")
            if part in columns:
                held = crop(adapter.whole(part + B), (slab.offset[0], 0), (slab.shape[0], len(a[part])))
                rows[:, columns[part]] = held * (adapter.modules[part].scale / scale)
        return torch.cat(list(a.values())), b, scale

    def magnitude(self, adapter: Adapter, base: Source) -> Tensor:
        """The magnitudes [N] of all its parts; a part without an adapter keeps its rows as they are."""
        out = []
        for slab in self.disk.slabs:
            part, first, rows = slab.name.removesuffix(".weight"), slab.offset[0], slab.shape[0]
            if part in adapter.modules:
                out.append(adapter.read(part + MAGNITUDE, (first,), (rows,)))
            else:
                out.append(row_lengths(base, slab.name, first, rows).float())
        return torch.cat(out)

    def taken_apart(self, a: Tensor, b: Tensor, magnitude: Tensor | None) -> dict[str, Tensor]:
        """The adapters of its parts by canonical name, from those of the module."""
        rows = torch.split(b, [slab.shape[0] for slab in self.disk.slabs])
        out: dict[str, Tensor] = {}
        for part in self.parts:
            own = [slab.name == f"{part}.weight" for slab in self.disk.slabs]  # slabs of a tensor are in its order
            out |= {part + A: a, part + B: torch.cat([*compress(rows, own)])}
            if magnitude is not None:
                lengths = torch.split(magnitude, [len(held) for held in rows])
                out[part + MAGNITUDE] = torch.cat([*compress(lengths, own)])
        return out


def write_peft(adapter: Adapter, base: Source, folder: Path) -> None:
    """Write the folder of an adapter beside `base`; durable when this returns.

    Raises:
        CheckpointError: when PEFT has no way to say something of it.
    """
    family = _family(base)
    tensors, ranks, scales = _encoded(adapter, base, family)
    model = base.model.model_copy(update={"tie_embeddings": base.model.tie_embeddings and not adapter.unties})
    saved = {name: _disk_name(name, model, family) for name in adapter.shapes if not is_adapter(name)}
    if model.tie_embeddings and EMBEDDING in saved:
        raise CheckpointError(
            "PEFT would leave the output layer as it is, to which the trained embedding is tied",
            hint="merge instead: mega ckpt convert --to hf",
        )
    _check_saved(saved.values(), ranks, model, family)
    tensors |= {disk: adapter.whole(name) for name, disk in saved.items()}
    config = _config(adapter, ranks, scales, sorted({disk.rpartition(".")[0] for disk in saved.values()}))
    modules = list(modules_of(base.model, family))
    config["target_modules"] = _short(config["target_modules"], [one.name for one in modules])
    config["fan_in_fan_out"] = any(one.disk.layout == TRANSPOSED for one in modules)
    (folder / CONFIG).write_bytes(encode_json(config))
    header = Header.make({PREFIX + name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"format": "pt"})
    write_file(folder / WEIGHTS, header, (tensors[name.removeprefix(PREFIX)].contiguous() for name in header.entries))


def _check_saved(saved: Iterable[str], ranks: Mapping[str, int], model: ModelConfig, family: Family) -> None:
    """Check that `saved`, tensors by their names in transformers, are whole modules without adapters, as PEFT saves them.

    Raises:
        CheckpointError: naming a module that is saved in part, or when no module has an adapter.
    """
    merge, held = "merge instead: mega ckpt merge-adapter", {*saved}
    if not ranks:
        raise CheckpointError(
            "PEFT requires a module with an adapter of low rank, and only whole tensors changed", hint=merge
        )
    modules = {name.rpartition(".")[0] for name in held}
    whole = {name for name in family.table(model) if name.rpartition(".")[0] in modules}
    if parts := (whole - held) | {name for name in held if name.rpartition(".")[0] in ranks}:
        raise CheckpointError(
            f"PEFT saves modules whole, and the adapter changes only a part of {some(parts)}", hint=merge
        )


def read_peft(folder: Place, base: Source) -> Adapter:
    """The adapter in a folder of PEFT's, which is beside `base`.

    Raises:
        CheckpointError: naming what of it is not understood, or is of another model.
    """
    config, family = read_json(folder / CONFIG), _family(base)
    check_options(config, folder / CONFIG)
    file = _open_weights(folder)
    _check_factors(file.shapes, folder)
    left = {name.removeprefix(PREFIX): name for name in file.shapes}
    tensors: dict[str, Tensor] = {}
    experts = base.model.moe.num_experts if base.model.moe else 0
    names: dict[str, str] = {}  # the module in transformers of each canonical one
    for module in modules_of(base.model, family):
        if {module.name + A, module.name + B} <= left.keys():
            a, b = (file.read(left.pop(module.name + suffix)) for suffix in (A, B))
            rows = sum(slab.shape[0] for slab in module.disk.slabs)
            if len(b) != rows:
                raise CheckpointError(
                    f"{folder / WEIGHTS}: {module.name}{B} has {len(b)} rows instead of {rows}",
                    hint="the adapter is of another model",
                )
            magnitude = left.pop(module.name + MAGNITUDE, None)
            tensors |= module.taken_apart(a, b, file.read(magnitude) if magnitude else None)
            names |= dict.fromkeys(module.parts, module.name)
    for canonical, key in _expert_keys(base.model, family, dict(left), config.get("target_parameters") or []):
        a, b = (file.read(left.pop(key + suffix)) for suffix in (A, B))
        tensors |= {canonical + A: _by_expert(a, experts), canonical + B: _in_turns(b, experts)}
        names[canonical] = canonical
    changed = changes_of(config, left, file.shapes, file.read, base, family, str(folder / WEIGHTS))
    _refuse_rest(left, folder, family)
    lora = _lora(config, {part: tensors[part + A].shape[-2] for part in names}, names, [*changed.shapes])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    modules = checked_modules(base.model, lora, shapes, str(folder)) if names else {}

    def read(name: str, offset: Shape, shape: Shape) -> Tensor:
        return crop(tensors[name], offset, shape) if name in tensors else changed.read(name, offset, shape)

    where = config.get("base_model_name_or_path")
    return Adapter(
        lora,
        modules,
        shapes | changed.shapes,
        read,
        {"path": where} if where else {},
        unties=changed.untied,
        tokenizer=_tokenizer_in(folder),
    )


def _tokenizer_in(folder: Place) -> dict[str, Path | bytes]:
    """Return the files of the tokenizer beside an adapter; none without a tokenizer.json."""
    if not (folder / ADAPTER_TOKENIZER_FILES[0]).is_file():
        return {}
    return {name: content_of(folder / name) for name in ADAPTER_TOKENIZER_FILES if (folder / name).is_file()}


@dataclass(frozen=True)
class WeightsFile:
    """Tensors of an adapter's file: their shapes by key, and a reader."""

    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]


def _open_weights(folder: Place) -> WeightsFile:
    """Open adapter_model.safetensors, or adapter_model.bin where that is missing.

    Raises:
        CheckpointError: when there is neither, or it is damaged.
    """
    if not (folder / WEIGHTS).is_file() and isinstance(folder, Path) and (folder / PICKLED).is_file():
        state = state_tensors(folder / PICKLED)
        return WeightsFile({key: stored.shape for key, stored in state.items()}, lambda key: state[key].read())
    file = SafetensorsFile.open(folder / WEIGHTS)
    return WeightsFile({key: entry.shape for key, entry in file.header.entries.items()}, file.read)


def _check_factors(shapes: Mapping[str, Shape], folder: Place) -> None:
    """Check that factors are matrices.

    Raises:
        CheckpointError: naming one that is flat or empty.
    """
    for key, shape in shapes.items():
        if key.endswith((A, B, ".lora_embedding_A", ".lora_embedding_B")) and (len(shape) < 2 or 0 in shape):
            raise CheckpointError(
                f"{folder / WEIGHTS}: {key} has shape {list(shape)}, and must be a matrix",
                hint="an adapter trained under ZeRO-3 or FSDP must be gathered before it is saved",
            )


def _refuse_rest(left: Mapping[str, str], folder: Place, family: Family) -> None:
    """Refuse an adapter with tensors that nothing has taken.

    Raises:
        CheckpointError: naming the module and what its tensors are.
    """
    if not left:
        return
    biases = [name for name in left if name.endswith(".lora_B.bias")]
    if biases:
        module = biases[0].removesuffix(".lora_B.bias")
        raise CheckpointError(
            f"{folder / WEIGHTS}: lora_bias = True is not supported for {module}, which has no bias in the base"
        )
    parts = re.compile(r"\.(lora_|base_layer\b|token_adapter\b|trainable_tokens_|modules_to_save\b)")
    modules = dict.fromkeys(parts.split(name)[0].removesuffix(".weight") for name in left)
    raise CheckpointError(
        f"{folder / WEIGHTS}: an adapter of the module {some(modules)} is not supported in a {family.name} model "
        f"(tensor {some(left)})",
        hint="merge the adapter with PEFT (merge_and_unload, save_pretrained), unless it is of another model",
    )


def modules_of(model: ModelConfig, family: Family) -> Iterator[Module]:
    """The modules of transformers that may have an adapter, experts left out."""
    ours = {name for weights in projections(model).values() for name, shape in weights.items() if len(shape) == 2}
    for disk in family.table(model).values():
        if all(slab.name in ours for slab in disk.slabs):
            yield Module(disk.name.removesuffix(".weight"), disk)


def _encoded(
    adapter: Adapter, base: Source, family: Family
) -> tuple[dict[str, Tensor], dict[str, int], dict[str, float]]:
    """Tensors, and ranks and scales of modules, all by their names in transformers."""
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    done: set[str] = set()
    for module in modules_of(base.model, family):
        if not done.issuperset(own := adapter.modules.keys() & set(module.parts)):
            a, b, scales[module.name] = module.joined(adapter)
            tensors |= {module.name + A: a, module.name + B: b}
            ranks[module.name] = len(a)
            if adapter.lora.dora:
                tensors[module.name + MAGNITUDE] = module.magnitude(adapter, base)
            done |= own
    stacked = {part: of for part, of in adapter.modules.items() if of.experts is not None}
    for part, of in stacked.items() if family.name in _STACKED else ():
        experts, _, which = part.rpartition(".")
        inner = which != "down_proj" and f"{experts}.down_proj" in stacked
        key = f"{experts}.base_layer" if inner else experts
        tensors[key + A] = adapter.whole(part + A).flatten(0, 1)
        tensors[key + B] = adapter.whole(part + B).permute(1, 2, 0).flatten(1)
        ranks[part], scales[part] = of.rank, of.scale
        done.add(part)
    if left := adapter.modules.keys() - done:
        raise CheckpointError(f"PEFT reaches no {some(left)} of a {family.name} model", hint="merge instead: --to hf")
    return tensors, ranks, scales


def _config(
    adapter: Adapter, ranks: Mapping[str, int], scales: Mapping[str, float], saved: list[str]
) -> dict[str, Any]:
    """adapter_config.json; alphas are what makes the scales of these ranks."""
    root = adapter.lora.rslora
    alphas = {name: scales[name] * (math.sqrt(rank) if root else rank) for name, rank in ranks.items()}
    rank, alpha = _commonest(list(ranks.values())), _commonest(list(alphas.values()))
    stacked = {part for part, of in adapter.modules.items() if of.experts is not None}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": adapter.base.get("path"),
        "r": rank, "lora_alpha": alpha, "lora_dropout": adapter.lora.dropout, "bias": "none", "use_rslora": root, "use_dora": adapter.lora.dora,
        "target_modules": sorted(ranks.keys() - stacked), "target_parameters": sorted(stacked) or None,
        "rank_pattern": {re.escape(name): own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {re.escape(name): own for name, own in alphas.items() if own != alpha},
        "modules_to_save": saved or None, "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip


def _short(targets: list[str], modules: Sequence[str]) -> list[str]:
    """The last parts of the names alone, as serving programs want them, where these mean the same of a model's `modules`."""
    last = {name.rpartition(".")[2] for name in targets}
    meant = {name for name in modules if name.rpartition(".")[2] in last}
    return sorted(last) if meant == {*targets} else targets


def _lora(
    config: Mapping[str, Any], ranks: Mapping[str, int], names: Mapping[str, str], saved: list[str]
) -> LoraConfig:
    """Ours for projections of these ranks, whose modules in transformers have these names."""
    rank, usual = _commonest([*ranks.values()] or [1]), float(config.get("lora_alpha", 8))
    return LoraConfig(
        rank=rank, alpha=usual, rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")), dropout=float(config.get("lora_dropout") or 0.0), modules=[re.escape(part) for part in ranks] or [_NO_MODULE],
        ranks={re.escape(part): own for part, own in ranks.items() if own != rank},
        alphas={re.escape(part): own for part in ranks if (own := alpha_of(config, names[part])) != usual},
        modules_to_save=[re.escape(name.rpartition(".")[0]) for name in saved],
    )  # fmt: skip


def _commonest(values: list[N]) -> N:
    return max(values, key=values.count)


def _expert_keys(
    model: ModelConfig, family: Family, held: Mapping[str, str], targets: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """The experts' projections with an adapter among `held`, and what their keys begin with; `targets` are what PEFT was
    told to adapt, which says what one is if there is no other."""
    for part, weights in projections(model).items() if family.name in _STACKED else ():
        experts, _, which = part.rpartition(".")
        if len(next(iter(weights.values()))) != 3:
            continue
        both = f"{experts}.base_layer{A}" in held
        key = f"{experts}.base_layer" if both and which != "down_proj" else experts
        if key + A in held and (both or any(target.endswith(which) for target in targets)):
            yield part, key


def _by_expert(a: Tensor, experts: int) -> Tensor:
    """[E r, D] -> [E, r, D]."""
    return torch.unflatten(a, 0, (experts, -1))


def _in_turns(b: Tensor, experts: int) -> Tensor:
    """[N, r E] -> [E, N, r]."""
    return torch.unflatten(b, 1, (-1, experts)).permute(2, 0, 1)


def _family(base: Source) -> Family:
    """The family that the base is of on disk, or the first that it could be."""
    raw = base.assets().get("config.json")
    try:
        family = family_of(parse_json(raw.read_bytes() if isinstance(raw, Path) else raw or b"{}"))
    except (CheckpointError, ValueError):
        return family_for(base.model)
    return family if not family.problems(base.model) else family_for(base.model)


def _disk_name(name: str, model: ModelConfig, family: Family) -> str:
    """What a whole canonical tensor is called in transformers.

    Raises:
        CheckpointError: when it is a part of another there.
    """
    for disk in family.table(model).values():
        if [slab.name for slab in disk.slabs] == [name]:
            return disk.name
    raise CheckpointError(f"{name} is no tensor of its own in a {family.name} model", hint="merge instead: --to hf")
