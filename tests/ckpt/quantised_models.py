"""Tiny folders of quantised weights, made of random ones, each with what its weights stand for by the published rule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hf_models import save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

Parts = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def spread(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Each scale over its block of a matrix, those at the edges cut off."""
    return scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def random_scales(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    rows, columns = (math.ceil(n / b) for n, b in zip(shape, block, strict=True))
    return (torch.rand(rows, columns) + 0.5).to(dtype)


def fp8(weight: Tensor, block: tuple[int, int], scale: Tensor) -> tuple[Parts, Tensor]:
    codes = weight.float().to(E4M3)
    value = codes.float() * spread(scale, tuple(weight.shape), block)
    return {"weight": codes, "weight_scale_inv": scale}, value.bfloat16()


def packed(codes: Tensor, bits: int) -> Tensor:
    """Columns of codes in int32, the lowest first, by arithmetic on Python's integers."""
    each, mask = 32 // bits, (1 << bits) - 1
    rows = []
    for row in (codes.int() + (1 << bits - 1)).tolist():
        words = [row[i : i + each] for i in range(0, len(row), each)]
        numbers = [sum((code & mask) << bits * i for i, code in enumerate(word)) for word in words]
        rows.append([number - (1 << 32) if number >= 1 << 31 else number for number in numbers])
    return torch.tensor(rows, dtype=torch.int32)


def integers(
    weight: Tensor, bits: int, block: tuple[int, int], *, pack: bool, zero: bool = False, order: bool = False
) -> tuple[Parts, Tensor]:
    """compressed-tensors' pack-quantized or int-quantized."""
    shape, low = tuple(weight.shape), -(1 << bits - 1)
    codes = torch.randint(low, -low, shape)
    scale = random_scales(shape, block, torch.bfloat16)
    zeros = torch.randint(low, -low, scale.shape) if zero else torch.zeros(scale.shape, dtype=torch.int64)
    index = torch.arange(shape[1]) // block[1]
    if order:
        index = index[torch.randperm(shape[1])]
    value = (codes - zeros[:, index]).bfloat16() * scale[:, index]  # each once, in bf16, as the library does
    parts = {"weight_scale": scale}
    if pack:
        parts |= {"weight_packed": packed(codes, bits), "weight_shape": torch.tensor(shape)}
    else:
        parts |= {"weight": codes.to(torch.int8)}
    if zero:
        parts |= {"weight_zero_point": packed(zeros.T, bits).T.contiguous() if pack else zeros.to(torch.int8)}
    if order:
        parts |= {"weight_g_idx": index.int()}
    return parts, value


def quantise(
    folder: Path, case: str, scheme: Mapping[str, Any], change: Callable[[Tensor], tuple[Parts, Tensor]], which: str
) -> tuple[Path, dict[str, Tensor]]:
    """A folder whose matrices with `which` in their names are quantised; returns it with what each of its tensors is."""
    torch.manual_seed(7)
    save_model(folder, case, dtype=torch.bfloat16)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values[name] = tensor
        if tensor.dim() == 2 and which in name and name.endswith(".weight"):
            parts, values[name] = change(tensor)
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    finish(folder, tensors, scheme)
    return folder, values


def finish(folder: Path, tensors: dict[str, Tensor], scheme: Mapping[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": scheme}))


def deepseek(folder: Path, block: tuple[int, int] = (16, 16)) -> tuple[Path, dict[str, Tensor]]:
    """As DeepSeek-V3 is published: every projection in e4m3, blocks that do not divide it, the router plain."""
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    change = lambda weight: fp8(weight, block, random_scales(tuple(weight.shape), block))  # noqa: E731
    return quantise(folder, "deepseek_v3", scheme, change, "_proj")


def gpt_oss(folder: Path) -> Path:
    """As GPT-OSS is published: experts in MXFP4, random bytes and exponents."""
    save_model(folder, "gpt_oss-32", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, height = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, height, width // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(100, 140, (experts, height, width // 32), dtype=torch.uint8)
    finish(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return folder


def group(form: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' settings with one group."""
    held = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": None, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": held, "input_activations": None}},
    }  # fmt: skip
