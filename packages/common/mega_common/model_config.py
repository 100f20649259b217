"""Model architecture as pure data: enough to build a model, to count its parameters and to name its tensors on disk.

Training, parallelism and storage are configured elsewhere. HuggingFace and Megatron configurations convert to this and
back (`mega_ckpt.families`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mega_common.encoder_config import EncoderDecoderConfig, MaskedLmConfig, RelativePositionConfig, TaskHeadConfig
from mega_common.extension_block import (
    ActivationKind,
    BlockDeclaration,
    ExtensionBlocks,
    ExtensionFunction,
    NormKind,
    PositionKind,
)
from mega_common.layer_kinds import (
    COMPRESSED_MIXERS,
    INDEXER,
    AltUpConfig,
    CompressedAttentionConfig,
    FeedForwardKind,
    FullAttentionConfig,
    GatedDeltaConfig,
    HybridConfig,
    HyperConnectionConfig,
    IndexerConfig,
    KimiDeltaConfig,
    LayerKind,
    LayerPatternSpec,
    LightningConfig,
    Mamba1Config,
    MambaConfig,
    MixerKind,
    MlaConfig,
    RepeatedLayers,
    ShortConvolutionConfig,
    expand_layer_pattern,
    find_largest_divisor,
    validate_layer_pattern,
)
from mega_common.model_rules import find_model_config_problems
from mega_common.retro_config import RetroConfig
from mega_common.strict_config import (
    ConfigProblem,
    DimensionSize,
    ExpertCount,
    ExtensionName,
    LayerCount,
    StrictConfig,
)
from mega_common.transformers_config import TransformersModuleConfig
from mega_common.vision_config import VisionConfig

GATED_ACTIVATIONS = frozenset({"swiglu", "clamped_swiglu", "geglu", "geglu_erf", "reglu2"})


class RopeConfig(StrictConfig):
    """Configuration of rotary position embeddings (RoPE, arXiv:2104.09864) and their scaling to longer contexts.

    `scaling` names follow transformers' `rope_type`; the fields after it are the parameters of each kind: `linear` and
    `dynamic` (factor), `llama3` (factor, low_freq_factor, high_freq_factor, original_max_position), `yarn`
    (arXiv:2309.00071: factor, beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate,
    original_max_position), `longrope` (arXiv:2402.13753: short_factor, long_factor, attention_factor,
    original_max_position), `proportional` (factor; frequencies by the whole head, zero after `fraction` of it, Gemma 4).
    """

    theta: float = Field(10_000.0, gt=0)
    fraction: float = Field(1.0, gt=0, le=1, description="share of each head that is rotated")
    interleaved: bool = Field(False, description="rotate neighbors (x0, x1) instead of halves, as in DeepSeek")
    clockwise: bool = Field(False, description="rotate by the negative angles, as in nanochat")
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = "none"
    factor: float = Field(1.0, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = Field(True, description="YaRN's ramp begins and ends at whole dimensions")
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None
    query_scaling: float | None = Field(
        None,
        gt=0,
        description="queries times 1 + query_scaling ln(1 + floor(position / original_max_position)), as in Ministral 3",
    )
    sections: tuple[PositiveInt, PositiveInt, PositiveInt] | None = Field(
        None,
        description="pairs of a head that are rotated by a token's time, row and column (`mrope_section`); outside of "
        "images the three are equal",
    )
    sections_interleaved: bool = Field(
        False,
        description="pairs rotated by time, row and column alternate as long as the sections of row and column last, as in "
        "Qwen3-VL; else the sections follow each other",
    )


class MoeConfig(StrictConfig):
    """Configuration of the mixture of experts (MoE) that replaces the feed-forward block of all or some layers.

    The router's scores are fp32: a function of x W^T, such as a softmax over all experts. Each token goes to the `top_k` experts
    of the highest scores (plus the optional selection bias), of the `top_groups` best of `groups` groups. The outputs
    are added with the scores as weights, normalised to sum to one with `normalize`, times `scaling`. A softmax over
    the chosen experts alone, as in Mixtral and GPT-OSS, equals a normalised softmax over all.
    """

    num_experts: ExpertCount
    top_k: PositiveInt
    ffn_hidden_size: PositiveInt
    layers: list[NonNegativeInt] | None = Field(None, description="layers that have experts; default: all")
    shared_ffn_hidden_size: NonNegativeInt = Field(0, description="width of the shared expert, which gets every token")
    shared_gate: bool = Field(False, description="a sigmoid gate on the shared expert, as in Qwen2-MoE")
    shared_scaling: float = Field(1.0, gt=0, description="factor on the output of the shared expert")
    output_norm: bool = Field(False, description="a norm of the layer's output, shared expert included, as in A.X K1")
    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = Field(
        "softmax",
        description="sqrtsoftplus: sqrt(log(1 + exp(x))), as in DeepSeek-V4; sparsemixer (arXiv:2409.12136): two experts, the weight of each is a softmax over the remaining experts whose "
        "logits are near the largest; its sampling in training is left out",
    )
    jitter: float = Field(0.01, gt=0, lt=0.5, description="sparsemixer: half of the relative distance of near logits")
    choice: Literal["scores", "logits"] = Field(
        "scores",
        description="numbers that choose the experts, to which the selection bias is added; logits as in Kolibri",
    )
    normalize: bool = Field(True, description="the weights of the chosen experts sum to one")
    scaling: float = Field(1.0, description="factor on the weights of the chosen experts")
    router_bias: bool = Field(False, description="a learned bias of the router, as in GPT-OSS")
    groups: PositiveInt = Field(1, description="groups of experts, of which a token may use `top_groups`")
    top_groups: PositiveInt = 1
    group_score: Literal["max", "top2"] = Field("max", description="top2: sum of a group's two best, as in DeepSeek-V3")
    selection_bias: bool = Field(
        False, description="a bias for the expert selection, not for the weights (arXiv:2408.15664)"
    )
    hash_layers: list[NonNegativeInt] | None = Field(
        None,
        description="layers whose experts are chosen by token id from a stored table, as in DeepSeek-V4; their router only weights "
        "the experts, and has no load balancing loss and no selection bias",
    )
    bias_rate: float = Field(0.0, ge=0, description="update rate of the selection bias per step")
    aux_loss: float = Field(0.0, ge=0, description="weight of the load balancing loss (arXiv:2101.03961)")
    aux_loss_scope: Literal["sequence", "batch"] = Field(
        "sequence",
        description="scope of the load count; batch: one micro-batch of all data ranks, so training depends on "
        "batch.micro x data ranks",
    )
    weighted_inputs: bool = Field(
        False, description="a token's weights multiply the inputs of its experts instead of the outputs, as in Llama 4"
    )
    logit_softcap: float | None = Field(None, gt=0, description="router logits become cap tanh(logits / cap)")
    z_loss: float = Field(0.0, ge=0, description="weight of the router's z-loss (arXiv:2202.08906)")
    sinkhorn: bool = Field(
        False, description="Sinkhorn routing in training: scores balanced over each sequence (arXiv:2202.01169)"
    )
    capacity_factor: float | None = Field(None, gt=0, description="drop tokens beyond this multiple of an even load")
    latent_size: PositiveInt | None = Field(
        None, description="width of the experts' input and output, with shared projections, as in Nemotron-3"
    )
    separate_norms: bool = Field(
        False,
        description="shared expert and routed experts each have norms before and after; the router reads the normalised stream "
        "times a learned vector / sqrt(hidden_size), and a learned factor of each expert multiplies its weight, as in Gemma 4",
    )

    zero_experts: NonNegativeInt = Field(
        0,
        description="experts without weights that return their input, which the router chooses like others, as in LongCat-Flash",
    )
    shortcut: bool = Field(
        False,
        description="the routed experts' output is added after the next layer, and only the shared expert's at once "
        "(arXiv:2404.05019), as in LongCat-Flash",
    )

    @property
    def num_router_outputs(self) -> int:
        """Number of experts that the router scores: those with weights, then those that return their input."""
        return self.num_experts + self.zero_experts

    @property
    def mean_active_experts(self) -> float:
        """Number of experts with weights that a token is sent to, on average under an even load."""
        return self.top_k * self.num_experts / self.num_router_outputs

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between the numbers of experts, chosen experts and expert groups."""
        if self.num_experts % self.groups:
            hint = f"groups: {find_largest_divisor(self.num_experts, self.groups)}"
            yield ConfigProblem("groups", f"must divide num_experts = {self.num_experts}", self.groups, hint)
        elif self.top_k > (most := self.num_router_outputs // self.groups * self.top_groups):
            yield ConfigProblem(
                "top_k", f"must be at most the {most} experts a token may use", self.top_k, f"top_k: {most}"
            )
        if self.top_groups > self.groups:
            rule, hint = f"must be at most groups = {self.groups}", f"top_groups: {self.groups}"
            yield ConfigProblem("top_groups", rule, self.top_groups, hint)
        if self.layers == []:
            yield ConfigProblem(
                "layers", "must name at least one layer", [], "leave out layers, for experts in all layers"
            )
        if self.bias_rate and not self.selection_bias:
            yield ConfigProblem("bias_rate", "requires selection_bias", self.bias_rate, "selection_bias: true")
        if self.score == "sparsemixer" and not self._fits_sparse_mixer:
            rule = "requires top_k = 2 of one group, normalize: false, scaling: 1 and no selection_bias, sinkhorn and choice"
            yield ConfigProblem("score", rule, "sparsemixer", "score: softmax")
        if self.hash_layers and (self.score == "sparsemixer" or self.sinkhorn):
            rule = "is not supported with score: sparsemixer and sinkhorn"
            yield ConfigProblem("hash_layers", rule, self.hash_layers, "leave it out")
        if self.choice == "logits" and self.groups > 1:
            yield ConfigProblem("choice", f"is not supported with groups = {self.groups}", "logits", "choice: scores")
        if self.shared_gate and not self.shared_ffn_hidden_size:
            hint = "shared_gate: false, or set shared_ffn_hidden_size"
            yield ConfigProblem("shared_gate", "requires a shared expert", True, hint)
        if self.separate_norms and (
            not self.shared_ffn_hidden_size
            or self.shared_gate
            or self.shared_scaling != 1
            or self.latent_size
            or self.output_norm
        ):
            rule = "requires shared_ffn_hidden_size, and no shared_gate, shared_scaling, latent_size and output_norm"
            yield ConfigProblem("separate_norms", rule, True, "separate_norms: false")
        plain = self.groups == 1 and self.capacity_factor is None and not self.sinkhorn and not self.separate_norms
        if self.zero_experts and not (plain and self.score != "sparsemixer"):
            rule = "is not supported with groups, capacity_factor, sinkhorn, separate_norms and score: sparsemixer"
            yield ConfigProblem("zero_experts", rule, self.zero_experts, "zero_experts: 0")
        if self.shortcut and (not self.shared_ffn_hidden_size or self.separate_norms or self.output_norm):
            rule = "requires shared_ffn_hidden_size, and no separate_norms and output_norm"
            yield ConfigProblem(
                "shortcut", rule, True, "shortcut: false, or set shared_ffn_hidden_size, the MLP's width"
            )
        yield from self._find_sinkhorn_problems() if self.sinkhorn else ()

    @property
    def _fits_sparse_mixer(self) -> bool:
        """True if the router's other settings are those of SparseMixer."""
        plain = self.scaling == 1 and not self.normalize and not self.selection_bias and not self.sinkhorn
        return plain and self.top_k == 2 and self.groups == 1 and self.num_experts > 2 and self.choice == "scores"

    def _find_sinkhorn_problems(self) -> Iterator[ConfigProblem]:
        """Yield settings that conflict with Sinkhorn routing.

        It balances by itself, and uses the plain scores as weights, as in Megatron.
        """
        score = "sigmoid" if self.top_k == 1 else "softmax"
        required = {"normalize": False, "scaling": 1.0, "groups": 1, "selection_bias": False, "aux_loss": 0.0}
        for name, value in {"score": score, **required}.items():
            if getattr(self, name) != value:
                shown = str(value).lower() if isinstance(value, bool) else value
                rule = f"is not supported with sinkhorn and top_k = {self.top_k}"
                yield ConfigProblem(name, rule, getattr(self, name), f"{name}: {shown}")


class ModelConfig(StrictConfig):
    """Architecture of a language model: a decoder, an encoder (`causal: false`) or, with `encoder`, both.

    Sizes are counts of elements; see the README for presets. `layers` gives the kind of each layer: a mixer
    ("attention", "mamba", "mamba1", "delta", "kda", "lightning", "conv", "hybrid", "swa", "csa" or "hca"), a feed-forward block ("mlp" or "moe"), or both, as
    "attention+mlp";
    `{times: 3, of: [mamba, mlp]}` repeats several. A string has one letter per layer: M mamba, G delta, * attention,
    - mlp, E moe. Without `layers`, all layers have attention, and experts in the layers of `moe.layers`. The same holds
    for MTP layers, unless `layers` names them after the others.
    """

    num_layers: LayerCount
    mixers: ExtensionBlocks = Field({}, description="mixers of extensions, by name, with the settings of each")
    feed_forwards: ExtensionBlocks = Field(
        {}, description="feed-forward blocks of extensions, by name, with the settings of each"
    )
    layers: LayerPatternSpec | None = None
    hidden_size: DimensionSize
    embedding_size: DimensionSize | None = Field(
        None,
        description="width of the embeddings, which a projection widens to hidden_size, as in ELECTRA (arXiv:1909.11942); "
        "default: hidden_size",
    )
    ffn_hidden_size: DimensionSize
    num_attention_heads: DimensionSize
    vocab_size: DimensionSize
    num_kv_heads: PositiveInt | None = Field(None, description="grouped-query attention; default: num_attention_heads")
    head_dim: PositiveInt | None = Field(None, description="default: hidden_size / num_attention_heads")
    value_head_dim: PositiveInt | None = Field(
        None, description="size of each head's value, as in MiMo-V2; default: that of queries and keys"
    )
    value_scale: float = Field(1.0, gt=0, description="factor on attention values, as in MiMo-V2")
    max_position: PositiveInt = Field(4096, description="maximum sequence length, in tokens")
    tie_embeddings: bool = False
    causal: bool = Field(True, description="causal attention; false: bidirectional attention, as in BERT")
    functions: dict[str, ExtensionFunction] = Field(
        {},
        description="settings of the norm, activation, position encoding and score modification of an extension, by name",
    )
    norm: NormKind | ExtensionName = Field("rmsnorm", description="rmsnorm, layernorm, or a norm of an extension")
    norm_eps: float = Field(1e-5, gt=0)
    norm_bias: bool = Field(True, description="bias of a layernorm; false as in Cohere")
    norm_weight: bool = Field(
        True, description="false: no norm of the residual stream has a weight or bias, as in OLMo"
    )
    zero_centered_norm: bool = Field(False, description="norms multiply by 1 + weight, as in Gemma")
    activation: ActivationKind | ExtensionName = Field(
        "swiglu",
        description="clamped_swiglu is silu(gate) up with both clamped by activation_limit, as in DeepSeek-V4; geglu uses the tanh approximation of gelu, geglu_erf the exact one; reglu2 has a gate relu(x)^2, as in "
        "BitNet; xielu (arXiv:2411.13010) has two learned slopes in each layer; or an activation of an extension",
    )
    activation_limit: float | None = Field(
        None, gt=0, description="clamp of the inputs of swiglu, which then has GPT-OSS's form, or of clamped_swiglu"
    )
    position: PositionKind | ExtensionName = Field(
        "rope",
        description="alibi: a penalty on attention scores that is linear in the distance, as in BLOOM; or a position encoding of "
        "an extension",
    )
    position_offset: NonNegativeInt = Field(
        0, description="rows of the learned positions before the first, as in RoBERTa"
    )
    token_types: NonNegativeInt = Field(0, description="number of segment types with added embeddings, as in BERT")
    embedding_norm: bool = Field(False, description="a norm of the embeddings, as in BERT")
    rope: RopeConfig = RopeConfig()
    relative: RelativePositionConfig = RelativePositionConfig()
    relative_bias: bool = Field(
        False,
        description="an encoder's attention scores have a bias by distance, from one table for all layers, besides its positions, "
        "as in MPNet; `relative` has the buckets",
    )
    local_rope: RopeConfig | None = Field(None, description="RoPE of layers with a sliding window; default: `rope`")
    no_rope_layers: list[NonNegativeInt] | None = Field(None, description="layers without RoPE, as in SmolLM3")
    no_rope_scaling: tuple[PositiveFloat, PositiveInt] | None = Field(
        None,
        description="[b, n]: queries of layers without RoPE times 1 + b ln(1 + floor((position + 1) / n)), as in Llama 4",
    )
    scale_embeddings: bool = Field(False, description="embeddings times sqrt(hidden_size), as in Gemma")
    embedding_multiplier: float = Field(1.0, gt=0, description="factor on embeddings, as in Granite")
    qkv_bias: bool = False
    qkv_clip: float | None = Field(
        None, gt=0, description="limit of the absolute values of queries, keys and values, as in OLMo"
    )
    attention_out_bias: bool = False
    mlp_bias: bool = False
    mlp_out_bias: bool = Field(False, description="a bias of the MLP's output projection alone, as in GTE")
    qk_norm: bool = Field(False, description="RMSNorm over each head's query and key, as in Qwen3")
    output_input_norms: bool = Field(
        False,
        description="RMSNorm of the inputs of the output projections of attention (over all heads) and MLP, as in BitNet",
    )
    qk_norm_span: Literal["head", "all", "each", "layernorm", "plain"] = Field(
        "head",
        description="`all`: over all heads at once, as in OLMo-2; `each`: a LayerNorm without bias for each head, as in Command R+; "
        "`layernorm`: one LayerNorm for all heads, as in Persimmon; `plain`: RMSNorm of each head without a weight, in layers with RoPE, as in Llama 4",
    )
    qk_norm_after_rope: bool = Field(False, description="norms of queries and keys follow the rotation, as in Hunyuan")
    value_norm: bool = Field(False, description="RMSNorm of each head's value without a weight, as in Gemma 4")
    keys_are_values: bool = Field(
        False, description="no value projection: values are the projected keys before norm and rotation, as in Gemma 4"
    )
    norm_position: Literal["pre", "post", "both", "sum", "stream"] = Field(
        "pre",
        description="`post`: after attention and MLP, as in OLMo-2; `both`: before and after, as in Gemma 2; `sum`: of the "
        "residual stream after each addition, as in BERT; `stream`: of the residual stream before attention and MLP, which the "
        "outputs are added to, as in MiniMax-Text-01",
    )
    norm_positions: dict[str, Literal["pre", "post", "both"]] = Field(
        {},
        description="{mixer: norm_position} of the layers with that mixer, as in OLMo Hybrid; default: norm_position",
    )
    residual_factors: dict[str, tuple[PositiveFloat, PositiveFloat]] = Field(
        {},
        description="with norm_position: stream, {mixer or feed-forward block: [alpha, beta]} of x = alpha norm(x) + beta "
        "block(norm(x)); default: 1 and 1",
    )
    first_norm: bool = Field(True, description="false: no norm before the first layer's mixer, as in ModernBERT")
    parallel_residual: bool = Field(False, description="attention and MLP have the same input, as in GPT-NeoX")
    shared_norm: bool = Field(
        False, description="with parallel_residual: one norm before both, as in Falcon and Cohere"
    )
    residual_multiplier: float = Field(1.0, gt=0, description="factor on outputs of attention and MLP, as in Granite")
    hyper_connections: HyperConnectionConfig | None = Field(
        None, description="several residual streams that learned weights mix, as in DeepSeek-V4; default: one residual"
    )
    altup: AltUpConfig | None = Field(
        None,
        description="several residual streams, of which a layer computes one, as in Gemma 3n; default: one residual",
    )
    ffn_sparsity: list[Annotated[float, Field(ge=0, lt=1)]] | None = Field(
        None,
        description="by layer, the share of the MLP's gates that a cutoff makes zero before the activation, if gates are normally "
        "distributed, as in Gemma 3n; 0: no cutoff",
    )
    mlp_multipliers: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="factors on the MLP's gate before its activation, and on the MLP's output, as in Falcon-H1"
    )
    layer_scale: bool = Field(
        False, description="each layer's output times a stored scalar that is not trained, as in Gemma 4"
    )
    per_layer_input_size: PositiveInt | None = Field(
        None,
        description="width of an input of each layer, from an embedding table for all layers and a projection of the embedded "
        "tokens, which a gate in the layer multiplies, as in Gemma 4",
    )
    per_layer_vocab_size: PositiveInt | None = Field(
        None,
        description="rows of the embedding table of per_layer_input_size; tokens beyond them have row 0, as in Gemma 3n; default: vocab_size",
    )
    shared_kv_layers: NonNegativeInt = Field(
        0,
        description="number of last layers without keys and values of their own: they attend to those of the last earlier layer "
        "with their window, or without one, as in Gemma 4",
    )
    shared_kv_ffn_hidden_size: PositiveInt | None = Field(
        None, description="feed-forward width of the layers of shared_kv_layers; default: ffn_hidden_size"
    )
    sliding_window: PositiveInt | None = Field(
        None, description="attention window in keys, including the query's own; to each side if not causal"
    )
    full_attention_layers: list[NonNegativeInt] | None = Field(None, description="layers without the sliding window")
    full_attention: FullAttentionConfig | None = Field(
        None, description="heads of the layers without a sliding window, as in Gemma 4; default: those of all layers"
    )
    chunked_window: bool = Field(
        False,
        description="the window does not slide: each document is cut into chunks of `sliding_window` tokens, and a query "
        "attends within its chunk, as in Llama 4",
    )
    attention_scale: float | None = Field(None, gt=0, description="factor on scores; default: 1 / sqrt(head size)")
    attention_softcap: float | None = Field(None, gt=0, description="scores become cap tanh(scores / cap)")
    attention_scores: ExtensionName | None = Field(
        None, description="modification of attention scores by an extension, such as a mask or a bias"
    )
    attention_sinks: bool = Field(False, description="a learned score per head without a value, as in GPT-OSS")
    attention_gate: bool = Field(
        False,
        description="attention's output times a sigmoid gate: of each channel, as in Qwen3-Next, or with mla of each head, as in "
        "Ling 3",
    )
    softplus_gate: Literal["head", "channel"] | None = Field(
        None, description="attention's output times a softplus gate of each head or of each channel, as in Laguna"
    )
    head_bias: bool = Field(False, description="a bias per vocabulary token on the logits, as in Phi-2 and GPT-J")
    logit_scale: float = Field(1.0, gt=0, description="factor on logits, before the softcap, as in Cohere")
    logit_softcap: float | None = Field(None, gt=0, description="logits become cap tanh(logits / cap)")
    embedding_dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    residual_dropout: float = Field(0.0, ge=0, lt=1)
    init_std: float = Field(0.02, gt=0)
    scale_residual_init: bool = Field(
        True, description="std / sqrt(additions) for projections into the residual stream"
    )
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    compressed: CompressedAttentionConfig | None = None
    mamba: MambaConfig | None = None
    mamba1: Mamba1Config | None = None
    delta: GatedDeltaConfig | None = None
    kda: KimiDeltaConfig | None = None
    lightning: LightningConfig | None = None
    conv: ShortConvolutionConfig | None = None
    hybrid: HybridConfig | None = None
    vision: VisionConfig | None = None
    encoder: EncoderDecoderConfig | None = None
    retro: RetroConfig | None = None
    score: bool = Field(
        False,
        description="reward model: a head with one output scores a text at its last token, instead of the LM head",
    )
    task_head: TaskHeadConfig | None = Field(
        None, description="head for classification, regression, reranking or embeddings, instead of the LM head"
    )
    masked_lm: MaskedLmConfig | None = None
    pooler: bool = Field(False, description="tanh(W x) of the first token, as in BERT")
    pooler_activation: Literal["tanh", "relu", "gelu"] = Field(
        "tanh", description="activation of the pooler: relu in classifiers of DistilBERT, gelu in those of ELECTRA"
    )
    sentence_pairs: bool = Field(False, description="predict from the pooled first token whether segments are swapped")
    mtp_layers: NonNegativeInt = Field(0, le=64, description="multi-token prediction (MTP) depths, as in DeepSeek-V3")
    mtp_loss: float = Field(0.3, ge=0, description="weight of the mean MTP loss (arXiv:2412.19437)")
    transformers: TransformersModuleConfig | None = Field(
        None,
        description="the model runs as a module of the transformers library; set by `implementation: transformers`, and "
        "then only num_layers, hidden_size, vocab_size and max_position of the other fields describe it",
    )

    @property
    def has_position_bias(self) -> bool:
        """True if attention scores have a bias by the distance of query and key."""
        return self.position in ("relative", "alibi") or self.relative_bias

    @property
    def embedding_width(self) -> int:
        """Width of the token embeddings and of the output matrix."""
        return self.embedding_size or self.hidden_size

    @property
    def stream_width(self) -> int:
        """Elements per token sent between pipeline stages: `hidden_size` times the residual streams (2 with MoE shortcuts).
        The streams are those of hyper-connections or AltUp; with shortcuts the second is the output of experts that the next layer adds.
        """
        several = self.hyper_connections or self.altup
        return self.hidden_size * (several.streams if several else 1 + self.has_shortcuts)

    @property
    def has_shortcuts(self) -> bool:
        """True if the outputs of experts are added after the next layer."""
        return self.moe is not None and self.moe.shortcut

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads of an attention layer."""
        return self.num_kv_heads or self.num_attention_heads

    @property
    def heads_by_mixer(self) -> dict[MixerKind, tuple[int, int]]:
        """Head counts of each mixer kind in use, as (heads, shared heads).
        Shared heads are key/value heads of attention, groups of Mamba-2, and key heads of gated delta nets.
        A channel of a short convolution or of Mamba-1 counts as a head, and so does an output group of compressed attention.
        """
        mamba, delta, used = self.mamba, self.delta, self._mixer_kinds
        every: dict[MixerKind, tuple[int, int]] = {
            "attention": (self.num_attention_heads, self.key_value_heads),
            **({"mamba": (mamba.num_heads, mamba.num_groups)} if mamba else {}),
            **({"delta": (delta.num_value_heads, delta.num_key_heads)} if delta else {}),
            **{
                name: (section.num_heads, section.num_heads)
                for name, section in (("kda", self.kda), ("lightning", self.lightning))
                if section
            },
            **(dict.fromkeys(COMPRESSED_MIXERS, (self.compressed.output_groups,) * 2) if self.compressed else {}),
            **({"mamba1": (self.mamba1.inner_size, self.mamba1.inner_size)} if self.mamba1 else {}),
            "conv": (self.hidden_size, self.hidden_size),
            **{name: (block.heads, block.shared_heads) for name, block in self._declared_mixers.items()},
        }
        return {kind: counts for kind, counts in every.items() if kind in used}

    @property
    def is_recurrent(self) -> bool:
        """True if any layer of mega or of an extension carries a state from token to token."""
        declared = [
            *self._declared_mixers.items(),
            *((name, feed.declares) for name, feed in self.feed_forwards.items()),
        ]
        added = {name for name, block in declared if block is not None and block.recurrent}
        used = self._mixer_kinds | {kind.feed_forward for kind in self._named_layer_kinds}
        return not used.isdisjoint({"mamba", "mamba1", "delta", "kda", "lightning", "conv"} | added)

    @property
    def _declared_mixers(self) -> dict[MixerKind, BlockDeclaration]:
        """Declarations of the mixers of loaded extensions."""
        return {name: block.declares for name, block in self.mixers.items() if block.declares is not None}

    @property
    def _mixer_kinds(self) -> set[MixerKind | None]:
        """Mixer kinds in use, from the pattern alone, because `num_layers` is not validated yet."""
        names = expand_layer_pattern(self.layers or [])
        rest: set[MixerKind | None] = {"attention"} if len(names) < self.num_layers + self.mtp_layers else set()
        return {mixer for kind in self._named_layer_kinds for mixer in kind.mixers} | rest

    @property
    def _named_layer_kinds(self) -> list[LayerKind]:
        """Kinds of layers that the pattern names."""
        names = set(expand_layer_pattern(self.layers or []))
        return [LayerKind.parse(name, self.mixers, self.feed_forwards) for name in names]

    @property
    def shared_head_counts(self) -> set[int]:
        """Numbers of shared heads or groups that several tensor-parallel ranks may replicate.
        They are key/value heads, Mamba-2 groups and delta net key heads.
        """
        groups = {self.mamba.num_groups} if self.mamba else set()
        added = {block.shared_heads for block in self._declared_mixers.values()}
        full = {self.full_attention.num_kv_heads} if self.full_attention else set()
        return {self.key_value_heads} | full | groups | ({self.delta.num_key_heads} if self.delta else set()) | added

    @property
    def query_key_head_dim(self) -> int:
        """Width of one attention head's query and key."""
        if self.mla:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_value_dim(self) -> int:
        """Width of one attention head's value."""
        return self.mla.v_head_dim if self.mla else self.value_head_dim or self.query_key_head_dim

    @property
    def has_asymmetric_attention(self) -> bool:
        """True if attention has values of another size than keys, a factor on values, or a softplus gate."""
        return bool(self.value_head_dim or self.value_scale != 1 or self.softplus_gate)

    @property
    def rotary_dim(self) -> int:
        """Number of elements of each attention head that are rotated by RoPE."""
        if self.rope.scaling == "proportional":
            return self.query_key_head_dim
        return self.mla.qk_rope_head_dim if self.mla else int(self.query_key_head_dim * self.rope.fraction)

    @property
    def head_counts(self) -> list[tuple[int, int]]:
        """(heads, shared heads) of all mixers in use, with those of full-attention layers that have their own."""
        full = self.full_attention
        return [
            *self.heads_by_mixer.values(),
            *([(full.num_attention_heads or self.num_attention_heads, full.num_kv_heads)] if full else []),
        ]

    @property
    def full_attention_layer_config(self) -> ModelConfig:
        """Configuration of the layers without a sliding window: this one, with the heads of `full_attention`."""
        if self.full_attention is None:
            return self
        return self.model_copy(update={**self.full_attention.model_dump(exclude_none=True), "full_attention": None})

    def get_layer_config(self, layer: int) -> ModelConfig:
        """Return the configuration with the attention heads, norm position and feed-forward width of one layer.

        That of a layer with shared keys and values has `shared_kv_layers` = `num_layers`.
        """
        position = self.norm_positions and self.norm_positions.get(self.get_mixer_kind(layer) or "")
        config = self.model_copy(update={"norm_position": position}) if position else self
        if self.shares_keys(layer):
            width = self.shared_kv_ffn_hidden_size or self.ffn_hidden_size
            own = {"shared_kv_layers": self.num_layers, "ffn_hidden_size": width, "full_attention": None}
            return (config if self.get_attention_window(layer) else config.full_attention_layer_config).model_copy(
                update=own
            )
        if self.full_attention is None or self.get_attention_window(layer) is None:
            return config.full_attention_layer_config
        return config.model_copy(update={"full_attention": None})

    def shares_keys(self, layer: int) -> bool:
        """Return whether the layer with this index attends to the keys and values of an earlier one."""
        return self.num_layers - self.shared_kv_layers <= layer < self.num_layers

    @property
    def has_own_keys(self) -> bool:
        """True unless this is `get_layer_config` of a layer that attends to the keys and values of an earlier one."""
        return self.shared_kv_layers < self.num_layers

    @property
    def key_value_sources(self) -> list[int]:
        """Indices of the layers whose keys and values the last `shared_kv_layers` layers reuse: the last one of each window."""
        every, own = range(self.num_layers), range(self.num_layers - self.shared_kv_layers)
        windows = {self.get_attention_window(layer) for layer in filter(self.shares_keys, every)}
        last = {self.get_attention_window(layer): layer for layer in own}
        return sorted(layer for window, layer in last.items() if window in windows)

    def has_norm_before_feed(self, kind: FeedForwardKind | None) -> bool:
        """Return whether a layer's feed-forward of this kind reads the stream through one norm of its own."""
        separate = kind == "moe" and self.moe is not None and self.moe.separate_norms
        return kind is not None and not self.shared_norm and not separate

    def get_attention_window(self, layer: int) -> int | None:
        """Return the sliding attention window of a layer in keys, the query's own included; None: full attention."""
        return None if layer in (self.full_attention_layers or ()) else self.sliding_window

    @property
    def has_attention_windows(self) -> bool:
        """True if a layer has a sliding attention window."""
        return any(self.get_attention_window(layer) for layer in range(self.num_layers))

    @property
    def has_output_bias(self) -> bool:
        """True if a bias per vocabulary token is added to the logits."""
        of_head = self.head_bias and not self.score and not self.task_head
        return bool(of_head or (self.masked_lm and self.masked_lm.bias) or (self.encoder and self.encoder.head_bias))

    @property
    def num_score_outputs(self) -> int:
        """Number of outputs per token of a reward model or task head; 0 for a language model or an embedding model."""
        head = self.task_head
        return int(self.score) if head is None else head.labels if head.kind != "embedding" else 0

    @property
    def has_score_bias(self) -> bool:
        """True if the outputs of the task head have a bias, as in transformers for tokens and for encoders."""
        return (
            self.num_score_outputs > 0
            and self.task_head is not None
            and (self.task_head.kind == "token" or not self.causal)
        )

    @property
    def text_pooling(self) -> Literal["first", "last", "mean"]:
        """Token, or mean of tokens, whose hidden state stands for a text."""
        head = self.task_head
        if head is None or head.pooling is None:
            return "last" if self.causal else "mean" if head and head.kind == "embedding" else "first"
        return head.pooling

    @property
    def has_encoder(self) -> bool:
        """True if an encoder reads a second input in addition to the decoder's text.
        The second input is a source sequence or retrieved neighbors.
        """
        return self.encoder is not None or self.retro is not None

    def is_encoder_layer(self, layer: int) -> bool:
        """Return whether the layer with this index belongs to the encoder of an encoder-decoder model."""
        return self.encoder is not None and layer < self.encoder.num_layers

    def has_cross_attention(self, layer: int) -> bool:
        """Return whether the layer with this index attends to an encoder's output by cross attention."""
        if self.retro is not None:
            return layer in self.retrieval_layers
        return self.encoder is not None and layer >= self.encoder.num_layers

    @property
    def retrieval_layers(self) -> list[int]:
        """Indices of the decoder layers that attend to retrieved neighbors.
        The neighbor encoder runs before the first of them.
        """
        return [] if self.retro is None else self.retro.list_retrieval_layers(self.num_layers)

    @property
    def neighbor_encoder_config(self) -> ModelConfig | None:
        """Configuration of the encoder of retrieved neighbors (Retro); None without retrieval.
        Its first layer attends to the text chunk that they were retrieved for.
        """
        retro = self.retro
        if retro is None:
            return None
        residual, attention = retro.residual_dropout, retro.attention_dropout
        fields = {
            "num_layers": retro.encoder_layers, "retro": retro.model_copy(update={"layers": [0]}), "causal": False,
            "sliding_window": None, "full_attention_layers": None, "no_rope_layers": None,
            "residual_dropout": self.residual_dropout if residual is None else residual,
            "attention_dropout": self.attention_dropout if attention is None else attention,
        }  # fmt: skip
        return self.model_copy(update=fields)

    def has_rotary_positions(self, layer: int) -> bool:
        """Return whether the layer with this index rotates queries and keys by position (RoPE)."""
        return self.position == "rope" and layer not in (self.no_rope_layers or ())

    @property
    def layer_kinds(self) -> list[LayerKind]:
        """Mixer and feed-forward block of every layer, in order; multi-token prediction (MTP) layers come last."""
        return [self.get_layer_kind(layer) for layer in range(self.num_layers + self.mtp_layers)]

    def get_layer_kind(self, layer: int) -> LayerKind:
        """Return the mixer and the feed-forward block of the layer with this index."""
        names = expand_layer_pattern(self.layers or [])
        if layer < len(names):
            return LayerKind.parse(names[layer], self.mixers, self.feed_forwards)
        sparse = self.moe is not None and (self.moe.layers is None or layer in self.moe.layers)
        return LayerKind("attention", "moe" if sparse else "mlp")

    def get_mixer_kind(self, layer: int) -> MixerKind | None:
        """Return the token mixer of the layer with this index (of MIXERS or an extension); None without one."""
        return self.get_layer_kind(layer).mixer

    def get_feed_forward_kind(self, layer: int) -> FeedForwardKind | None:
        """Return the feed-forward block of the layer with this index (mlp or moe); None if it has none."""
        return self.get_layer_kind(layer).feed_forward

    def has_shortcut(self, layer: int) -> bool:
        """Return whether the output of the experts of the layer with this index is added after the next layer."""
        return self.has_shortcuts and layer >= 0 and self.is_moe_layer(layer)

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether the feed-forward block of the layer with this index is a mixture of experts."""
        return self.get_feed_forward_kind(layer) == "moe"

    def is_hash_layer(self, layer: int) -> bool:
        """Return whether the experts of the layer with this index are chosen by token id from a stored table."""
        return self.moe is not None and layer in (self.moe.hash_layers or ())

    @property
    def vision_encoder_config(self) -> ModelConfig | None:
        """Configuration of the vision encoder's transformer layers; None without a vision encoder."""
        return None if self.vision is None else ModelConfig.model_validate(self.vision.encoder_fields)

    @property
    def first_stage_layers(self) -> int:
        """Number of layers that must be on the first pipeline stage.
        They are those to whose outputs image features are added, and with hyper-connections the first, which widens the embeddings.
        """
        return int(self.hyper_connections is not None) if self.vision is None else len(self.vision.deepstack_layers)

    @property
    def last_stage_layers(self) -> int:
        """Number of layers that must be on the last pipeline stage: those with shared keys, and their sources."""
        return self.num_layers - min(self.key_value_sources, default=self.num_layers)

    @property
    def most_pipeline_stages(self) -> int:
        """Largest number of pipeline stages with a layer each and, at both ends, the layers that must be there."""
        ends = self.first_stage_layers, self.last_stage_layers
        return max(1, self.num_layers - sum(max(0, end - 1) for end in ends))

    def uses_tensor(self, name: str) -> bool:
        """Return whether the model's forward pass uses a tensor, by its canonical name.

        The last layers of a vision encoder may be unused.
        """
        return self.vision is None or self.vision.uses_tensor(name)

    def trains_tensor(self, name: str) -> bool:
        """Return whether the losses of training have a gradient for a tensor, by its canonical name.
        An indexer without a loss of its own has none.
        """
        return self.uses_tensor(name) and (self.trains_indexer or INDEXER not in name)

    @property
    def indexer(self) -> IndexerConfig | None:
        """Indexer of sparse latent attention or of compressed sparse attention; None without one."""
        section = self.mla or self.compressed
        return None if section is None else section.indexer

    @property
    def trains_indexer(self) -> bool:
        """True if the indexer of sparse attention has a loss that trains it."""
        return self.indexer is not None and self.indexer.kl_loss > 0

    @property
    def has_gated_mlp(self) -> bool:
        """True if the feed-forward block has a gate projection in addition to its up projection, as in SwiGLU."""
        added = self.functions.get(self.activation)
        return self.activation in GATED_ACTIVATIONS or bool(added and added.declares and added.declares.gated)

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, pattern: LayerPatternSpec | None, info: ValidationInfo) -> LayerPatternSpec | None:
        """Check that every layer kind is one of mega's or of an extension in `mixers` and `feed_forwards`."""
        mixers, feeds = info.data.get("mixers", ()), info.data.get("feed_forwards", ())
        return None if pattern is None else validate_layer_pattern(pattern, mixers, feeds)

    @model_validator(mode="before")
    @classmethod
    def _apply_reward_defaults(cls, raw: Any) -> Any:
        """Disable what a model with a score or task head does not have: tied embeddings, MTP layers and encoder heads.

        A task head of ModernBERT keeps the dense layer; others of encoders have a pooler.
        """
        if not isinstance(raw, dict) or not (raw.get("score") or raw.get("task_head")):
            return raw
        raw = {**raw, "tie_embeddings": False, "mtp_layers": 0, "score": not raw.get("task_head")}
        if not raw.get("task_head") or raw.get("causal", True):
            return raw
        head, masked = TaskHeadConfig.model_validate(raw["task_head"]), raw.get("masked_lm")
        dense = masked is not None and not raw.get("first_norm", True) and head.kind != "embedding"
        if dense:
            masked = {**MaskedLmConfig.model_validate(masked).model_dump(), "bias": False}
        pooler = head.kind == "sequence" and not dense
        return {**raw, "sentence_pairs": False, "masked_lm": masked if dense else None, "pooler": pooler}

    @model_validator(mode="before")
    @classmethod
    def _count_layers(cls, raw: Any) -> Any:
        """Set `num_layers` to the number of layers that `layers` names, if it is not given."""
        if not isinstance(raw, dict) or "num_layers" in raw or not raw.get("layers"):
            return raw
        if not isinstance(raw["layers"], str | list | tuple):  # reported by the validation of the field
            return raw
        try:
            repeats = [item if isinstance(item, str) else RepeatedLayers.model_validate(item) for item in raw["layers"]]
        except ValidationError:  # reported by the validation of the field
            return raw
        return {**raw, "num_layers": len(expand_layer_pattern(repeats))}

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between the fields of this model configuration, as `find_model_config_problems` does."""
        return find_model_config_problems(self)
