"""Megatron-Core's T5 on a CPU: its losses, by weights and samples in a file.

    python megatron_t5.py job.pt

The jobs are a list of dictionaries: `args`, of T5Model; `weights`, its state; `encoder`, `decoder`, `labels`, int64 [B, E], [B, S] and [B, S];
`seen`, bool [B, E] and `read`, bool [B, S], where there is no padding. Its `losses` [B, S] of each are left in <job.pt>.losses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_oracle import _prepare
from torch import Tensor


def masked(queries: Tensor, keys: Tensor) -> Tensor:
    """As Megatron's data sets have it: [B, 1, S, T], true where nothing is seen."""
    return ~(queries[:, None, :, None] & keys[:, None, None, :])


def losses(job: dict[str, Any]) -> Tensor:
    """[B, S]."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer import TransformerConfig, transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    t5_spec.LNImpl = transformer_block.LayerNormImpl = WrappedTorchNorm
    shape, layers = job["args"]["config"], job["args"]["layers"]
    configs = [
        TransformerConfig(
            num_layers=count, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
            bias_activation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
            gradient_accumulation_fusion=False, **shape,
        )
        for count in layers
    ]  # fmt: skip
    makers = t5_spec.encoder_model_with_local_spec, t5_spec.decoder_model_with_local_spec
    specs = [
        TransformerBlockSubmodules([make()] * count, layer_norm=WrappedTorchNorm)
        for make, count in zip(makers, layers, strict=True)
    ]
    model = T5Model(configs[1], configs[0], *specs, parallel_output=False, **job["args"]["model"]).eval()
    wrong = model.load_state_dict(job["weights"], strict=False)
    twice = {"position_embeddings.weight", "output_layer.weight", "output_layer.bias"}  # under other names too
    assert not wrong.unexpected_keys
    assert twice.issuperset(wrong.missing_keys), wrong.missing_keys
    read, seen = job["read"], job["seen"]
    later = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        found: Tensor = model(
            job["encoder"], job["decoder"], masked(seen, seen), masked(read, read) | later, masked(read, seen),
            lm_labels=job["labels"],
        )  # fmt: skip
    return found


if __name__ == "__main__":
    _prepare()
    path = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    torch.save([losses(job) for job in torch.load(path)], f"{path}.losses")
    dist.destroy_process_group()
