"""T5 of Megatron's own samples and weights: the losses are Megatron-Core's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_t5
import numpy as np
import pytest
import torch
from masked_data import sentences, word_piece_tokenizer
from torch import Tensor

from mega_data.dataset import build_datasets
from mega_data.loader import Loader, StepBatch
from mega_trainer.batch import micro_batches
from mega_trainer.config import RunConfig, resolve
from mega_trainer.model.builder import Builder
from mega_trainer.model.encoder_decoder import EncoderDecoder
from mega_trainer.parallel.param import info_of

HEADS, WIDTH = 4, 32
MODEL = {
    "num_layers": 5, "encoder": {"num_layers": 2, "head_bias": True}, "hidden_size": WIDTH, "ffn_hidden_size": 48,
    "num_attention_heads": HEADS, "vocab_size": 207, "max_position": 64, "norm": "layernorm", "activation": "gelu",
    "position": "learned", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "tie_embeddings": True,
}  # fmt: skip
KINDS: list[Mapping[str, Any]] = [
    {}, {"position": "rope", "tie_embeddings": False, "encoder": {"num_layers": 2}},
]  # fmt: skip
NAMES = {
    "input_layernorm": "input_layernorm", "self_attn.o_proj": "self_attention.linear_proj",
    "cross_attn_layernorm": "pre_cross_attn_layernorm", "cross_attn.q_proj": "cross_attention.linear_q",
    "cross_attn.o_proj": "cross_attention.linear_proj", "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2",
}  # fmt: skip
FUSED = {
    "self_attention.linear_qkv": [f"self_attn.{x}_proj" for x in "qkv"],
    "cross_attention.linear_kv": [f"cross_attn.{x}_proj" for x in "kv"],
}


def weights_of(model: EncoderDecoder) -> dict[str, Tensor]:
    """By canonical name."""
    found: dict[str, Tensor] = {}
    for parameter in model.parameters():
        found |= {piece.name: piece.view(parameter.detach()) for piece in info_of(parameter).pieces}
    return found


def as_megatron(ours: Mapping[str, Tensor], layers: tuple[int, int]) -> dict[str, Tensor]:
    """The same by Megatron's names, heads of queries, keys and values in turns."""
    out = {
        "embedding.word_embeddings.weight": ours["model.embed_tokens.weight"],
        "embedding.position_embeddings.weight": ours.get("model.embed_positions.weight"),
        "lm_head.output_layer.weight": ours.get("lm_head.weight"),
        "lm_head.output_layer.bias": ours.get("lm_head.bias"),
    }
    for kind in ("weight", "bias"):
        out[f"encoder.final_layernorm.{kind}"] = ours[f"model.encoder_norm.{kind}"]
        out[f"decoder.final_layernorm.{kind}"] = ours[f"model.norm.{kind}"]
        for index in range(sum(layers)):
            stack, number = ("encoder", index) if index < layers[0] else ("decoder", index - layers[0])
            there, here = f"{stack}.layers.{number}", f"model.layers.{index}"
            for mine, other in NAMES.items():
                out[f"{there}.{other}.{kind}"] = ours.get(f"{here}.{mine}.{kind}")
            for other, parts in FUSED.items():
                if f"{here}.{parts[0]}.{kind}" in ours:
                    heads = [ours[f"{here}.{part}.{kind}"].unflatten(0, (HEADS, -1)) for part in parts]
                    out[f"{there}.{other}.{kind}"] = torch.cat(heads, 1).flatten(0, 1)
    return {name: tensor for name, tensor in out.items() if tensor is not None}


def job_of(config: RunConfig, batch: StepBatch) -> tuple[Tensor, dict[str, Any]]:
    """Our losses of a batch [B, S], by weights that are drawn, and the same as a job for Megatron."""
    (micro,) = micro_batches(batch, config, torch.device("cpu"))
    torch.manual_seed(4)
    model = EncoderDecoder(Builder(config.model)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        _, _, ours = model.whole(micro, model.context_of(micro, lambda *_: None))
    assert batch.source is not None
    shape = {
        "hidden_size": WIDTH, "ffn_hidden_size": 48, "num_attention_heads": HEADS, "normalization": "LayerNorm",
        "add_bias_linear": True, "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    made = {
        "vocab_size": config.model.vocab_size, "max_sequence_length": 64,
        "share_embeddings_and_output_weights": config.model.tie_embeddings,
        "position_embedding_type": {"learned": "learned_absolute"}.get(config.model.position, "rope"),
    }  # fmt: skip
    return ours, {
        "args": {"config": shape, "model": made, "layers": [2, 3]}, "weights": as_megatron(weights_of(model), (2, 3)),
        "encoder": torch.from_numpy(batch.source.tokens), "decoder": micro.tokens, "labels": micro.labels,
        "read": torch.from_numpy(batch.loss_weights > 0),
        "seen": torch.arange(40) < torch.from_numpy(batch.source.lengths)[:, None],
    }  # fmt: skip


@pytest.mark.long
def test_losses_are_megatrons(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="the oracle is not installed")
    prefix = sentences(tmp_path / "d", 3, longest=20)
    found = []
    for kind in KINDS:
        raw = {
            "model": {**MODEL, **kind}, "batch": {"micro": 6, "global": 6}, "precision": "fp32",
            "data": {"train": [str(prefix)], "seq_length": 40, "order": "megatron", "t5": {"decoder_seq_length": 32}},
        }  # fmt: skip
        config = RunConfig.parse(resolve(raw), source="test")
        words = word_piece_tokenizer(tmp_path)
        data, *_ = build_datasets(config.data, seed=1, samples={"train": 6}, eod=None, tokenizer=words)
        found.append(job_of(config, next(iter(Loader(data, global_batch=6, seq_length=40)))))
    assert np.unique(found[0][1]["seen"].sum(1)).size > 1
    torch.save([job for _, job in found], tmp_path / "jobs.pt")
    command = [sys.executable, megatron_t5.__file__, str(tmp_path / "jobs.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for (ours, job), theirs in zip(found, torch.load(tmp_path / "jobs.pt.losses"), strict=True):
        torch.testing.assert_close(ours[job["read"]], theirs[job["read"]], rtol=1e-5, atol=1e-5)
