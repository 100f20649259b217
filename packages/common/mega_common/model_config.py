"""What a model *is*, as pure data: enough to build it, to count it and to name its tensors on disk.

Nothing about how it is trained, split or stored belongs here. Field names are the field's usual ones; a HuggingFace or
Megatron configuration maps onto this and back (`mega_ckpt.families`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from mega_common.config import Config, Problem

GATED_ACTIVATIONS = frozenset({"swiglu", "geglu"})


class RopeConfig(Config):
    """Rotary position embedding (arXiv:2104.09864) and how it was stretched to longer contexts.

    `scaling` names follow transformers' `rope_type`; the fields below it are the parameters of each kind: `linear` and
    `dynamic` (factor), `llama3` (factor, low_freq_factor, high_freq_factor, original_max_position), `yarn`
    (arXiv:2309.00071: factor, beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, original_max_position).
    """

    theta: float = Field(10_000.0, gt=0)
    fraction: float = Field(1.0, gt=0, le=1, description="share of each head that is rotated")
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = Field(1.0, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class MoeConfig(Config):
    """A mixture of experts in place of the feed-forward block."""

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn_hidden_size: PositiveInt
    shared_ffn_hidden_size: int = 0
    aux_loss: float = 0.0
    z_loss: float = 0.0


class ModelConfig(Config):
    """Architecture of a decoder-only language model. Sizes are counts of elements; see the README for presets."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    num_kv_heads: PositiveInt | None = Field(None, description="grouped-query attention; default: every head its own")
    head_dim: PositiveInt | None = Field(None, description="default: hidden_size / num_attention_heads")
    max_position: PositiveInt = Field(4096, description="longest sequence the positions are made for, in tokens")
    tie_embeddings: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    position: Literal["rope", "learned", "none"] = "rope"
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = Field(False, description="RMSNorm over each head's query and key, as in Qwen3")
    qk_norm_span: Literal["head", "all"] = Field("head", description="`all`: over all heads at once, as in OLMo-2")
    norm_position: Literal["pre", "post"] = Field("pre", description="`post`: after attention and MLP, as in OLMo-2")
    parallel_residual: bool = Field(False, description="attention and MLP see the same input, as in GPT-NeoX")
    sliding_window: PositiveInt | None = Field(None, description="keys a query sees, itself included, in tokens")
    embedding_dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    residual_dropout: float = Field(0.0, ge=0, lt=1)
    init_std: float = Field(0.02, gt=0)
    scale_residual_init: bool = Field(True, description="std / sqrt(2 layers) for projections into the residual")
    moe: MoeConfig | None = None

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a gate beside its up projection."""
        return self.activation in GATED_ACTIVATIONS

    def problems(self) -> Iterator[Problem]:
        """Rules between sizes."""
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            yield Problem(
                "hidden_size",
                f"must be a multiple of num_attention_heads = {heads}",
                self.hidden_size,
                "or give head_dim",
            )
        if heads % self.kv_heads:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            yield Problem("num_kv_heads", f"must divide num_attention_heads = {heads}", self.kv_heads, f"one of {fits}")
        if self.position == "rope" and int(self.head_size * self.rope.fraction) % 2:
            yield Problem(
                "rope.fraction", f"must rotate an even part of the head size {self.head_size}", self.rope.fraction
            )
        if self.rope.scaling != "none" and self.rope.factor < 1:
            yield Problem("rope.factor", "must be at least 1 to stretch the context", self.rope.factor)
        if self.rope.scaling in ("llama3", "yarn") and self.rope.original_max_position is None:
            yield Problem("rope.original_max_position", f"required by rope scaling {self.rope.scaling!r}")
        if self.moe and self.moe.top_k > self.moe.num_experts:
            yield Problem("moe.top_k", f"must be at most moe.num_experts = {self.moe.num_experts}", self.moe.top_k)
