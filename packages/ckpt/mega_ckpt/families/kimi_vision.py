"""Kimi-K2.5 (Moonshot AI): DeepSeek-V3's decoder after the vision encoder MoonViT (arXiv:2504.07491) for images of any shape.

The encoder and the projector run as modules of transformers. Folders have the names and the fused projections of the
published model; those that transformers saves, with some other names, are read as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families.config_entries import ConfigDict
from mega_ckpt.families.disk_layouts import DiskTensor, TensorSlice
from mega_ckpt.families.vision_family import VisionLanguageTensorNaming
from mega_ckpt.families.vision_modules import VisionModuleFamily
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.transformers_library import build_vision_language_config
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.strict_config import format_setting_value

_TOWER, _BLOCK = "vision_tower.", "vision_tower.encoder.blocks."
# Names in transformers' module and on disk, by parts that are replaced in order.
_RENAMED = (
    (f"{_TOWER}layers.", _BLOCK), (".norm1.", ".norm0."), (".norm2.", ".norm1."), (".mlp.fc1.", ".mlp.fc0."), (".mlp.fc2.", ".mlp.fc1."),
    (".attn.proj.", ".wo."), (".attn.q_proj.", ".wqkv."), (f"{_TOWER}final_layernorm", f"{_TOWER}encoder.final_layernorm"),
    (".pos_emb.position_embeddings", ".pos_emb.weight"), ("mm_projector.in_proj", "mm_projector.proj.0"),
    ("mm_projector.out_proj", "mm_projector.proj.2"),
)  # fmt: skip
_SAVED = (  # names as published, and as transformers saves them
    ("language_model.model.layers.", "language_model.model.blocks."),
    (f"{_TOWER}patch_embed.proj.", f"{_TOWER}encoder.patch_embed.proj."),
    ("mm_projector.pre_norm.", "model.mm_projector.pre_norm."),
)
_OUTER_KEYS = {"mm_hidden_size": "projection_hidden_size", "projector_ln_eps": "projection_layer_norm_eps"}
_KEYS = {
    **{f"vt_{key}": key for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")},
    **{f"init_pos_emb_{key}": f"pos_emb_{key}" for key in ("height", "width", "time")},
}  # keys of the published vision_config, and of transformers', which has the values of the published model by default
_FIXED = {
    "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
}  # fmt: skip


@dataclass(frozen=True)
class RotaryPairsQkvLayout:
    """Disk layout of queries, keys and values on axis 0, where the rows of a rotary pair of queries and keys are adjacent.
    The parts are the halves of each head of the queries and of the keys, [D/2, ...], and the values.
    """

    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the disk shape: the rows of all parts together."""
        return (sum(part[0] for part in parts), *parts[0][1:])

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a view of each half head, every second row of the head on disk, and of the values."""
        *heads, values = torch.split(disk, [*(2 * part[0] for part in parts[:-1:2]), parts[-1][0]])
        return [*(head[half::2] for head in heads for half in (0, 1)), values]


def _replace_parts(name: str, parts: Iterable[tuple[str, str]]) -> str:
    for old, new in parts:
        name = name.replace(old, new)
    return name


def _fuse_qkv(query: DiskTensor, shape: TensorShape, heads: int) -> DiskTensor:
    """Return the disk tensor of queries, keys and values from that of the queries alone, of `shape`."""
    (slab,), half = query.slabs, shape[0] // heads // 2
    rest, slabs = shape[1:], list[TensorSlice]()
    for part in ("q_proj", "k_proj"):
        name = slab.name.replace("q_proj", part)
        slabs += [TensorSlice(name, (row, *(0,) * len(rest)), (half, *rest)) for row in range(0, shape[0], half)]
    slabs.append(replace(slab, name=slab.name.replace("q_proj", "v_proj")))
    return DiskTensor(query.name, (3 * shape[0], *rest), tuple(slabs), RotaryPairsQkvLayout())


@dataclass(frozen=True)
class KimiVisionFamily(VisionModuleFamily):
    """Declaration of Kimi-K2.5, with the disk names and the keys of the published model."""

    def read_config_json(self, raw: ConfigDict, source: str = "config.json") -> ModelConfig:
        """Return the model configuration of a config.json; see `VisionModuleFamily.read_config_json`.

        Raises:
            CheckpointError: also for keys of the published model whose values transformers does not follow.
        """
        config, given = build_vision_language_config(raw), raw.get("vision_config") or {}
        read = {key: getattr(config.vision_config, own) for key, own in _KEYS.items()}
        read |= {key: getattr(config, own) for key, own in _OUTER_KEYS.items()} | _FIXED
        read["text_hidden_size"] = config.text_config.hidden_size
        for key, value in read.items():
            if given.get(key, value) != value:
                raise CheckpointError(
                    f"{source}: vision_config.{key} = {format_setting_value(given[key])} is not supported: transformers computes with {format_setting_value(value)}",
                    hint=f"give the value as {(_KEYS | _OUTER_KEYS).get(key, key)}, as transformers names it",
                )
        if (token := raw.get("media_placeholder_token_id", config.image_token_id)) != config.image_token_id:
            raise CheckpointError(f"{source}: media_placeholder_token_id = {token} must equal image_token_id")
        return super().read_config_json(raw, source)

    def unread_keys(self, raw: ConfigDict) -> list[str]:
        """Return the keys of a config.json that are neither transformers' nor the published model's."""
        read = {f"vision_config.{key}" for key in (*_KEYS, *_OUTER_KEYS, *_FIXED, "text_hidden_size")}
        return [key for key in super().unread_keys(raw) if key not in read | {"media_placeholder_token_id"}]

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """Return {name on disk: DiskTensor} of a Kimi vision model, with fused query, key and value weights in the encoder."""
        published = {saved: name for name, saved in _SAVED}
        given = {_replace_parts(name, published.items()): name for name in names or ()}
        table = super().disk_tensor_table(model, given or None)
        shapes, heads = canonical_tensors(model), _count_heads(model)
        out: dict[str, DiskTensor] = {}
        for old, tensor in table.items():
            if old.startswith(_TOWER) and (".attn.k_proj." in old or ".attn.v_proj." in old):
                continue
            name = old if old.startswith("language_model.") else _replace_parts(old, _RENAMED)
            renamed = replace(tensor, name=given.get(name, name))
            if ".wqkv." in name:
                renamed = _fuse_qkv(renamed, shapes[tensor.slabs[0].name], heads)
            out[renamed.name] = renamed
        return out


def _count_heads(model: ModelConfig) -> int:
    """Return the number of attention heads of the vision encoder."""
    assert model.vision is not None
    assert model.vision.module is not None
    vision: Mapping[str, Any] = model.vision.module.config.get("vision_config") or {}
    return int(vision.get("num_attention_heads", 16))


KIMI_K25 = KimiVisionFamily(
    name="kimi_k25",
    architecture="Kimi_K25ForConditionalGeneration",
    entries=(),
    styles=(VisionLanguageTensorNaming(_TOWER, "", "language_model.model.", "language_model.", ""),),
    buffers=r"(.*\.)?rotary_emb\.(inv_freq|.*freqs.*)|(.*\.)?time_(position_embeddings|weight)",
)
