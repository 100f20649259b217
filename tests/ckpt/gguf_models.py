"""Tiny GGUF files, written with the package's own writer as llama.cpp's converter lays models out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

# What llama.cpp calls HuggingFace's tensors, by what follows `model.layers.N.`
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.sinks": "attn_sinks.weight", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_ARCHITECTURES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
}  # fmt: skip


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Halves of each head's rows, in turns."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def tensors_of(folder: Path, raw: Mapping[str, Any]) -> dict[str, Tensor]:
    family, out = raw["model_type"], {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensor = tensor.float()
        if found := _EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{found[1]}.ffn_{_KINDS[found[3]]}_exps.weight", {})[int(found[2])] = tensor
            continue
        if family == "gpt_oss" and ".experts." in name:
            out |= _gpt_oss_experts(name, tensor)
            continue
        base, _, kind = name.rpartition(".")
        if "sinks" in name:
            base, kind = name, ""
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", base)
        names = {**_LAYER, **(_GEMMA if family.startswith("gemma") else {})}
        if family == "gpt_oss":
            names["post_attention_layernorm"] = "post_attention_norm"
        there = f"blk.{layer[1]}.{names[layer[2]]}" if layer else _ENDS[base]
        if family in ("llama", "mixtral") and re.search(r"[qk]_proj", base):
            tensor = _permuted(tensor, raw["num_attention_heads" if "q_proj" in base else "num_key_value_heads"])
        if family.startswith("gemma") and there.endswith("norm"):
            tensor = tensor + 1
        out[f"{there}.{kind}".strip(".")] = tensor.squeeze(0) if there.endswith("inp_shexp") else tensor
    return out | {name: torch.stack([held[e] for e in range(len(held))]) for name, held in experts.items()}


def _gpt_oss_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    block, kind = f"blk.{name.split('.')[2]}", "bias" if name.endswith("bias") else "weight"
    if "down_proj" in name:
        return {f"{block}.ffn_down_exps.{kind}": tensor if kind == "bias" else tensor.transpose(1, 2)}
    parts = {"gate": tensor[..., 0::2], "up": tensor[..., 1::2]}
    return {f"{block}.ffn_{n}_exps.{kind}": t if kind == "bias" else t.transpose(1, 2) for n, t in parts.items()}


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    more: Callable[[gguf.GGUFWriter, str], object] = lambda _, __: None,
    tensors: Mapping[str, Tensor] = {},
) -> Path:
    """The model of a HuggingFace folder; with `kind`, its matrices in that type."""
    raw = json.loads((folder / "config.json").read_text())
    arch = _ARCHITECTURES.get(raw["model_type"], raw["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(raw["vocab_size"])
    rope = raw["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if raw["model_type"] in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    experts = raw.get("num_local_experts") or raw.get("num_experts") or 0
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(raw["num_experts_per_tok"])
    for key, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
    ):  # fmt: skip
        if raw.get(key):
            add(raw[key])
    more(writer, arch)
    for name, tensor in {**tensors_of(folder, raw), **tensors}.items():
        data = tensor.contiguous().numpy()
        if kind is not None and tensor.dim() > 1:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
