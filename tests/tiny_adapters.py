"""Random adapters of low rank beside tiny models, as PEFT's folders."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_ckpt.adapter import Adapter
from mega_ckpt.formats.peft import write_peft
from mega_ckpt.lora import adapted, adapter_tensors
from mega_ckpt.pieces import crop
from mega_ckpt.source import open_source
from mega_common.lora import LoraConfig, is_adapter


def save_adapter(
    folder: Path, base: Path, lora: LoraConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write one, whose B is not zero, beside the HuggingFace folder `base`; returns `folder`."""
    source = open_source(base)
    modules = adapted(source.model, lora)
    made = torch.Generator().manual_seed(seed)
    shapes = adapter_tensors(modules) | {
        name: source.shape(name)
        for name in source.keys()  # noqa: SIM118
        if lora.saves(name)
    }
    tensors = {name: torch.randn(shape, generator=made, dtype=dtype) / 4 for name, shape in shapes.items()}
    assert lora.modules_to_save or all(map(is_adapter, tensors))
    folder.mkdir(parents=True)
    write_peft(Adapter(lora, modules, shapes, lambda name, *box: crop(tensors[name], *box), {}), source, folder)
    return folder
