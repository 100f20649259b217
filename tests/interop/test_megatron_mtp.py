"""Layers that predict further tokens against Megatron-Core's: which token they are fed, in which order, normed where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import megatron_mtp_oracle
import pytest
import torch
from torch import Tensor

from mega_ckpt.pieces import Box, boxes_of, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.batch import Ahead, MicroBatch
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.param import info_of

pytest.importorskip("megatron.core", reason="the reference implementation")

LAYER = {
    "input_layernorm": "input_layernorm", "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm", "mlp.linear_fc2": "mlp.down_proj",
}  # fmt: skip
ENDS = {
    "embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm", "output_layer": "lm_head",
}  # fmt: skip


def canonical(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's weights by our names."""
    out = {f"{ours}.weight": theirs[f"{name}.weight"] for name, ours in ENDS.items()}
    for index, prefix in enumerate(("decoder.layers.0", "decoder.layers.1", "mtp.layers.0", "mtp.layers.1")):
        inner = prefix if index < 2 else f"{prefix}.transformer_layer"
        names = {f"{inner}.{name}": ours for name, ours in LAYER.items()}
        if index >= 2:
            names |= {f"{prefix}.{name}": name for name in ("enorm", "hnorm", "eh_proj")}
            names[f"{prefix}.final_layernorm"] = "shared_head.norm"
        layer = {ours: theirs[f"{name}.weight"] for name, ours in names.items()}
        heads = theirs[f"{inner}.self_attention.linear_qkv.weight"].view(4, 3, 8, 32).transpose(0, 1).flatten(1, 2)
        layer |= {f"self_attn.{x}_proj": heads[i] for i, x in enumerate("qkv")}
        gate_up = theirs[f"{inner}.mlp.linear_fc1.weight"].chunk(2)
        layer |= {f"mlp.{x}_proj": part for x, part in zip(("gate", "up"), gate_up, strict=True)}
        out |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    return out


def test_logits(tmp_path: Path) -> None:
    command = [sys.executable, megatron_mtp_oracle.__file__, str(tmp_path / "theirs.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    sizes = {name: size for name, size in megatron_mtp_oracle.SIZES.items() if name != "mtp_num_layers"}
    model = Decoder(Builder(ModelConfig.parse({**sizes, "vocab_size": 61, "mtp_layers": 2})))
    weights = canonical(theirs["weights"])
    held = boxes_of((parameter.detach(), info_of(parameter).pieces) for parameter in model.parameters())
    assert held.keys() == weights.keys()
    for name, sharded in held.items():
        for box in sharded.boxes:
            copy_overlap(box, Box((0,) * weights[name].dim(), weights[name]))

    tokens, found = theirs["tokens"], []
    for module in (model.norm, *model.predictors):
        module.register_forward_hook(lambda module, inputs, output: found.append(output @ model.head_weight.T))
    inputs, positions, ones = tokens[:, :-1], torch.arange(11).expand(2, -1), torch.ones(2, 11)
    ahead = [Ahead(inputs.roll(-k, 1), inputs.roll(-k, 1), ones) for k in (1, 2)]
    for one, k in zip(ahead, (1, 2), strict=True):
        one.tokens[:, -k:] = 0
    batch = MicroBatch(inputs, tokens[:, 1:], ones, positions, None, [0, 1], ahead=ahead)
    model.whole(batch, model.context(positions))
    for mine, expected in zip(found, theirs["logits"], strict=True):
        assert expected.std() > 0.1, "logits that say nothing"
        torch.testing.assert_close(mine.detach(), expected.transpose(0, 1), rtol=0, atol=1e-5)
