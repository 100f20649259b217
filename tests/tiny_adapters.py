"""Random adapters of low rank beside tiny models, as PEFT's folders."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_ckpt.formats.peft_adapter import write_peft_folder
from mega_ckpt.lora_adapter import SavedAdapter
from mega_ckpt.lora_tensors import adapted_modules, adapter_tensor_shapes
from mega_ckpt.source import open_weight_source
from mega_ckpt.tensor_pieces import crop_tensor
from mega_common.lora_config import LoraConfig, is_adapter_tensor


def save_adapter(
    folder: Path, base: Path, lora: LoraConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write one, whose B is not zero, beside the HuggingFace folder `base`; returns `folder`."""
    source = open_weight_source(base)
    modules = adapted_modules(source.model, lora)
    made = torch.Generator().manual_seed(seed)
    shapes = adapter_tensor_shapes(modules) | {
        name: source.tensor_shape(name) for name in source.tensor_names() if lora.is_fully_trained(name)
    }
    tensors = {name: torch.randn(shape, generator=made, dtype=dtype) / 4 for name, shape in shapes.items()}
    assert lora.modules_to_save or all(map(is_adapter_tensor, tensors))
    folder.mkdir(parents=True)
    write_peft_folder(
        SavedAdapter(lora, modules, shapes, lambda name, *box: crop_tensor(tensors[name], *box), {}), source, folder
    )
    return folder
