"""What the parity suite compares: models, the layouts they are trained in, and how many of those are worth running."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any

RANKS = 8
STEPS = 3
ZERO_LEVELS = (0, 1, 2, 3)
SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 1), ("zbv", 2)]  # with virtual stages
LARGE = 1 << 20  # a bucket that holds any of these models whole

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_attention_heads": 8, "vocab_size": 64},
    "tied": {
        "num_attention_heads": 8, "vocab_size": 59, "tie_embeddings": True, "norm": "layernorm",
        "activation": "gelu_tanh", "position": "learned", "max_position": 16, "qkv_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "embedding_dropout": 0.1, "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "gqa": {
        "num_attention_heads": 8, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 61, "qk_norm": True,
        "qkv_bias": True, "activation": "geglu", "sliding_window": 11, "rope": {"theta": 100.0, "fraction": 0.5},
    },
    "gemma": {
        "num_attention_heads": 8, "num_kv_heads": 4, "head_dim": 6, "vocab_size": 53, "tie_embeddings": True,
        "norm_position": "both", "zero_centered_norm": True, "qk_norm": True, "scale_embeddings": True,
        "attention_softcap": 2.0, "logit_softcap": 1.5, "attention_sinks": True, "attention_scale": 0.5,
        "sliding_window": 5, "full_attention_layers": [1], "rope": {"theta": 500.0}, "local_rope": {"theta": 20.0},
        "activation_limit": 0.7, "mlp_bias": True,
    },
    "mla": {
        "num_attention_heads": 8, "vocab_size": 61, "qkv_bias": True, "rope": {"theta": 100.0, "interleaved": True},
        "mtp_layers": 1,
        "mla": {
            "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
        },
    },
    "long": {
        "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 64, "sliding_window": 19, "full_attention_layers": [1],
        "attention_softcap": 5.0, "attention_sinks": True, "qk_norm": True, "embedding_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "moe": {
        "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 61, "mlp_bias": True,
        "moe": {
            "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24,
            "shared_ffn_hidden_size": 16, "shared_gate": True, "selection_bias": True, "bias_rate": 0.01, "router_bias": True,
            "aux_loss": 0.1, "z_loss": 0.01, "scaling": 1.5,
        },
    },
}  # fmt: skip
MODELS["deepseek"] = MODELS["mla"] | {
    "moe": {
        "num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "score": "sigmoid",
        "groups": 4, "top_groups": 2, "group_score": "top2", "selection_bias": True, "bias_rate": 0.01,
        "aux_loss": 0.1, "scaling": 2.5,
    },
}  # fmt: skip
# Half of the layers are the encoder's, whose sequence is the longer one.
MODELS["t5"] = {
    "num_attention_heads": 8, "vocab_size": 59, "tie_embeddings": True, "logit_scale": 32**-0.5, "position": "relative",
    "relative": {"buckets": 8, "max_distance": 12}, "activation": "relu", "attention_scale": 1.0,
    "head_dim": 3, "encoder": {"num_layers": 1},
}  # fmt: skip
# Sizes by which context ranks pass states where there are few of them, and exchange heads where there are many.
MODELS["hybrid"] = MODELS["moe"] | {
    "mlp_bias": False, "position": "none", "residual_multiplier": 0.7,
    "layers": ["mamba+moe", "attention+mlp", "mamba", "moe", "mamba+mlp", "attention"],
    "mamba": {"num_heads": 8, "head_dim": 2, "state_size": 2, "num_groups": 2, "conv_kernel": 2, "chunk_size": 5},
}  # fmt: skip
# BERT, with two losses; of its variants one is as Megatron's, one as RoBERTa and one as ModernBERT.
MODELS["encoder"] = {
    "num_attention_heads": 8, "vocab_size": 59, "causal": False, "tie_embeddings": True, "norm": "layernorm",
    "norm_position": "sum", "embedding_norm": True, "activation": "gelu", "position": "learned", "max_position": 16,
    "token_types": 2, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "masked_lm": {}, "pooler": True,
    "sentence_pairs": True, "embedding_dropout": 0.1, "residual_dropout": 0.1,
}  # fmt: skip
# Of which one layer computes nothing, and images are fewer, as many and more than the ranks that share them.
MODELS["vision"] = {
    "num_attention_heads": 8, "num_kv_heads": 4, "vocab_size": 61, "scale_embeddings": True,
    "vision": {
        "num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 20, "num_attention_heads": 2, "image_size": 4,
        "patch_size": 2, "image_token": 60,
    },
}  # fmt: skip
# Chunks of which some have no neighbors, and neighbors of which some are short.
MODELS["retro"] = {
    "num_attention_heads": 8, "vocab_size": 61, "retro": {"chunk_length": 4, "neighbors": 2, "encoder_layers": 2},
}  # fmt: skip
LENGTHS = {"long": 32, "hybrid": 48, "t5": 32}
TARGET = 16  # tokens of a decoder that has an encoder
WITH_CONTEXT = ("mla", "long", "moe", "deepseek", "hybrid", "t5", "encoder", "vision")
CONTEXT = ("ring", "allgather", "alltoall")
# A choice that is balanced, and nothing else that would balance it.
SINKHORN = {
    "sinkhorn": True, "normalize": False, "scaling": 1.0, "groups": 1, "selection_bias": False, "bias_rate": 0.0,
    "aux_loss": 0.0,
}  # fmt: skip
# Of which each layout draws one.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {},
        {
            "parallel_residual": True, "shared_norm": True, "norm": "layernorm", "norm_bias": False,
            "tie_embeddings": True, "no_rope_layers": [0], "logit_scale": 0.3,
            "rope": {"theta": 100.0, "interleaved": True},
        },
        {
            "embedding_multiplier": 4.0, "residual_multiplier": 0.4, "logit_scale": 0.25, "attention_scale": 0.3,
            "no_rope_layers": [1], "num_kv_heads": 2,
        },
        {
            "position": "alibi", "head_bias": True, "embedding_norm": True, "norm": "layernorm", "num_kv_heads": 4,
            "vocab_size": 61, "tie_embeddings": True,
        },
    ],
    "gqa": [
        {}, {"attention_gate": True, "zero_centered_norm": True},
        {
            "qk_norm_after_rope": True, "head_bias": True,
            "rope": {"theta": 100.0, "query_scaling": 0.3, "original_max_position": 4},
        },
    ],
    "moe": [
        {}, {"attention_sinks": True, "activation_limit": 0.7, "sliding_window": 5, "full_attention_layers": [1]},
        {"moe": MODELS["moe"]["moe"] | SINKHORN},
    ],
    "mla": [
        {}, {"tie_embeddings": True, "mtp_layers": 2, "mla": {**MODELS["mla"]["mla"], "q_lora_rank": None}},
        {"mla": {**MODELS["mla"]["mla"], "latent_norm": False}},
        {"rope": {"theta": 100.0, "query_scaling": 0.3, "original_max_position": 4}},
    ],
}  # fmt: skip
VARIANTS["deepseek"] = VARIANTS["mla"]
VARIANTS["hybrid"] = [
    {},
    {
        "norm_position": "both", "residual_dropout": 0.1, "mamba": {
            "num_heads": 8, "head_dim": 3, "state_size": 4, "num_groups": 8, "dt_limit": [0.01, 0.3], "bias": True,
            "norm_eps": 1e-2, "conv_bias": False,
        },
        "moe": {**MODELS["moe"]["moe"], "latent_size": 20},
    },
    {"mamba": {"num_heads": 16, "head_dim": 2, "state_size": 1, "num_groups": 1, "chunk_size": 8}},
    {
        "layers": ["delta+moe", "attention+mlp", "mamba", "delta"], "position": "rope", "attention_gate": True,
        "zero_centered_norm": True, "qk_norm": True, "delta": {
            "num_key_heads": 2, "num_value_heads": 8, "key_head_dim": 3, "value_head_dim": 2, "chunk_size": 5,
        },
    },
    {
        "layers": ["mamba+mlp", "delta+moe", "attention"], "delta": {
            "num_key_heads": 8, "num_value_heads": 8, "key_head_dim": 2, "value_head_dim": 3, "conv_kernel": 2,
            "norm_eps": 1e-2,
        },
    },
    {"layers": ["conv+mlp", "conv+moe", "attention", "conv"], "conv": {"kernel": 4, "bias": True}, "qk_norm": True},
]  # fmt: skip
VARIANTS["vision"] = [
    {},
    {
        "tie_embeddings": True, "vision": MODELS["vision"]["vision"] | {
            "class_token": False, "patch_bias": True, "pre_norm": False, "feature_layer": -1, "feature_norm": True,
            "activation": "gelu_tanh", "projector_bias": False,
        },
    },
    {"vision": MODELS["vision"]["vision"] | {"pinpoints": [[4, 8], [8, 4], [4, 4]], "resize": "stretch"}},
    {
        "sliding_window": 5, "full_attention_layers": [1], "vision": MODELS["vision"]["vision"] | {
            "image_size": 8, "projector": "norm", "pool": 2, "bidirectional": True, "feature_layer": -1,
        },
    },
    {
        "head_dim": 8, "scale_embeddings": False, "rope": {"theta": 100.0, "sections": [2, 1, 1]},
        "vision": MODELS["vision"]["vision"] | {
            "hidden_size": 16, "class_token": False, "pre_norm": False, "feature_layer": -1, "activation": "swiglu",
            "projector": "merger", "native": {"window": 8, "full_layers": [1], "min_pixels": 64, "max_pixels": 96},
        },
    },
    {
        "head_dim": 8, "scale_embeddings": False, "qk_norm": True,
        "rope": {"theta": 100.0, "sections": [2, 1, 1], "sections_interleaved": True},
        "vision": MODELS["vision"]["vision"] | {
            "hidden_size": 16, "class_token": False, "pre_norm": False, "feature_layer": -1, "activation": "gelu_tanh",
            "patch_bias": True, "projector": "merger", "native": {
                "norm": "layernorm", "window": None, "positions": 9, "deepstack": [0, 1], "min_pixels": 64, "max_pixels": 96,
            },
        },
    },
]  # fmt: skip
# What may be frozen of a model.
FROZEN: dict[str, list[list[str]]] = {"vision": [[], ["model.vision_tower.*"], ["model.projector.*"]]}
VARIANTS["t5"] = [
    {}, {"residual_dropout": 0.1, "embedding_dropout": 0.1, "relative": {"buckets": 12, "max_distance": 7, "every_layer": True}},
    {"activation": "geglu", "tie_embeddings": False, "logit_scale": 1.0},
    {
        "position": "learned", "max_position": 32, "norm": "layernorm", "activation": "gelu", "qkv_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "attention_scale": None, "num_kv_heads": 4, "encoder": {"num_layers": 1, "head_bias": True},
    },
]  # fmt: skip
VARIANTS["encoder"] = [
    {},
    {"norm_position": "pre", "embedding_norm": False, "tie_embeddings": False, "num_kv_heads": 4},
    {
        "token_types": 1, "position_offset": 2, "pooler": False, "sentence_pairs": False, "sliding_window": 3,
        "masked_lm": {"bias": False, "activation": "gelu_tanh"},
    },
    {
        "norm_position": "pre", "first_norm": False, "norm_bias": False, "activation": "geglu_erf", "position": "rope",
        "rope": {"theta": 500.0}, "local_rope": {"theta": 20.0}, "token_types": 0, "qkv_bias": False,
        "attention_out_bias": False, "mlp_bias": False, "masked_lm": {"dense_bias": False}, "pooler": False,
        "sentence_pairs": False, "sliding_window": 4, "full_attention_layers": [0],
    },
]  # fmt: skip
VARIANTS["retro"] = [
    {},
    {
        "tie_embeddings": True, "norm": "layernorm", "activation": "gelu", "position": "learned", "max_position": 16,
        "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "num_kv_heads": 4, "embedding_dropout": 0.1,
        "residual_dropout": 0.1, "attention_dropout": 0.1,
        "retro": {"chunk_length": 8, "neighbors": 1, "encoder_layers": 1, "attention_dropout": 0.2},
    },
    {"num_kv_heads": 2, "qk_norm": True, "sliding_window": 5, "retro": {"chunk_length": 4, "neighbors": 3}},
]  # fmt: skip
# A start far from zero, so that attention is not uniform and no gradient is too small to show an error.
COMMON = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "init_std": 0.2}


@dataclass(frozen=True, eq=False)
class Case:
    """A model trained in one layout.

    Attributes:
        model: the fields of a `ModelConfig`.
        ranks: ranks that take part.
        parallel, recompute, offload, debug: the sections of a run.yaml.
        micro, batch: samples of one forward pass on one rank, and of a step.
        rampup: of the batch, whose increments `micro` divides.
        bucket: elements of a gradient bucket.
        closed: attention closed at document ends.
        length: tokens of a sample.
        fp8: the section of that name.
        wide: what fp8 does not round is in fp64.
        decoupled_lr: of the input embedding and the output layer; None: that of the others.
        lr_factors: factors on rates, by patterns of names.
        clip: largest gradient norm; 0: no clip.
        steps: to train.
        lora: the section of that name.
        freeze: patterns of what is not trained.
        compiled: leaf functions are compiled.
    """

    name: str
    model: Mapping[str, Any]
    ranks: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    recompute: Mapping[str, Any] = field(default_factory=dict)
    micro: int = 8
    batch: int = 8
    rampup: Mapping[str, int] | None = None
    bucket: int = LARGE
    closed: bool = True
    length: int = 16
    precision: str = "fp64"
    fp8: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = False
    optimizer: str = "adamw"
    decoupled_lr: float | None = None
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    clip: float = 0.1  # small enough that every step is clipped
    steps: int = STEPS
    debug: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    freeze: Sequence[str] = ()
    compiled: bool = False

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The run.yaml. AdamW's epsilon is large: with a usual one it blows a gradient that is zero but for rounding
        (a key bias without rope, which no softmax sees) up to the size of the others."""
        pairs = {"kind": "t5", "t5": {"decoder_seq_length": TARGET}} if "encoder" in self.model else {}
        return {
            "model": dict(self.model),
            "data": {"train": ["none"], "seq_length": self.length, "kind": self.kind, **pairs},
            "parallel": {"bucket_elements": self.bucket, **self.parallel},
            "recompute": dict(self.recompute),
            "offload": dict(self.offload),
            "batch": {"micro": self.micro, "global": self.batch, "rampup": self.rampup},
            "optimizer": {
                "name": self.optimizer, "clip_grad": self.clip, "eps": 1e-4, "decoupled_lr": self.decoupled_lr,
                "lr_factors": dict(self.lr_factors),
            },
            "train": {"steps": 10, "freeze": list(self.freeze)},
            **({"lora": dict(self.lora), "init_from": "nowhere"} if self.lora is not None else {}),
            "precision": self.precision,
            "fp8": dict(self.fp8),
            "debug": dict(self.debug),
            "compile": self.compiled,
        }  # fmt: skip

    @property
    def kind(self) -> str:
        """What kind of data its model is for."""
        if self.model.get("causal", True):
            return "retro" if "retro" in self.model else "text"
        return "bert" if self.model.get("sentence_pairs") else "masked"

    @property
    def single(self) -> Case:
        """The same model and batches in one process, in one micro-batch: the mathematics of a step is the same."""
        micro = self.micro if self.rampup else self.batch
        return replace(self, ranks=1, parallel={}, recompute={}, offload={}, micro=micro, bucket=LARGE, debug={})

    @property
    def layout(self) -> dict[str, Any]:
        """The layout's degrees, all of them."""
        usual = {"tp": 1, "sp": False, "pp": 1, "virtual_stages": 1, "schedule": "1f1b", "cp": 1, "zero": 1}
        degrees = {**usual, "ep": 1, "expert_tp": 1, **self.parallel}
        dp = self.ranks // (degrees["tp"] * degrees["pp"] * degrees["cp"])
        return degrees | {"dp": dp, "recompute": self.recompute.get("kind", "none"), "optimizer": self.optimizer}

    def __str__(self) -> str:
        usual = (0, 1, "none", "adamw", "1f1b")
        used = {key: value for key, value in self.layout.items() if value is True or value not in usual}
        used |= {"zero": self.layout["zero"]} if self.layout["dp"] * self.layout["cp"] > 1 else {}
        used |= {"micro": self.micro, "batch": self.batch} | ({"bucket": self.bucket} if self.bucket != LARGE else {})
        return f"{self.name}: " + " ".join(f"{key}={value}" for key, value in used.items())


def model(name: str, layers: int = 2) -> dict[str, Any]:
    """The fields of one of the models, with so many layers."""
    fields = {**COMMON, **MODELS[name], "num_layers": layers}
    if "moe" in fields and "layers" not in fields:
        fields["moe"] = {**fields["moe"], "layers": list(range(1, layers + fields.get("mtp_layers", 0)))}
    return fields


def case(name: str, ranks: int, *, layers: int = 2, variant: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """A case of the named model, but for the fields of `variant`; `more` are `Case`'s fields."""
    fields, chosen = {"length": LENGTHS.get(name, 16), **more}, {**model(name, layers), **(variant or {})}
    if "layers" in chosen:  # a pattern, again and again
        chosen["layers"] = [chosen["layers"][layer % len(chosen["layers"])] for layer in range(layers)]
    if "encoder" in chosen:
        chosen["encoder"] = {**chosen["encoder"], "num_layers": layers // 2}
    if "retro" in chosen:  # some of the later layers
        attending = list(range((layers - 1) // 3, layers, 1 + layers // 4))
        chosen["retro"] = {**chosen["retro"], "layers": attending}
    return Case(name, chosen, ranks, **fields)


def degrees(ranks: int, tps: Sequence[int], cp: int = 1) -> Iterator[dict[str, Any]]:
    """Every combination of tp (of `tps`), sp, pp, schedule and zero on `ranks` ranks; at most eight stages."""
    for tp, pp, (schedule, v) in product(tps, range(1, ranks + 1), SCHEDULES):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or dp < 1 or pp * v > 8 or (pp == 1 and (schedule, v) != ("1f1b", 1)):
            continue
        data = dp * cp
        levels = [{"zero": zero} for zero in ZERO_LEVELS] if data > 1 else [{"zero": 0}]
        levels += [{"zero": 3, "zero3_shard": size} for size in range(2, data) if data % size == 0]
        for sp, level in product([False, True] if tp > 1 else [False], levels):
            shape = {"tp": tp, "sp": sp, "pp": pp, "virtual_stages": v, **level}
            yield shape if schedule == "1f1b" else {**shape, "schedule": schedule}


def layouts(name: str, ranks: int) -> Iterator[dict[str, Any]]:
    """Every layout of a model on `ranks` ranks: those of `degrees`, with context parallelism of each kind and with every
    combination of ep and expert_tp, where the model has them."""
    shapes = [] if name == "long" else list(degrees(ranks, (1, 2, 4, 8)))
    if name in WITH_CONTEXT:
        shapes += [{**shape, "cp": cp} for cp in (2, 4, 8) for shape in degrees(ranks, (1, 2, 4), cp)]
    for shape in shapes:
        kinds = [{"cp_kind": kind} for kind in CONTEXT] if "cp" in shape else [{}]
        for experts, kind in product(list_expert_degrees(name, ranks // shape["pp"]), kinds):
            yield shape | experts | kind


def list_expert_degrees(name: str, ranks: int) -> list[dict[str, Any]]:
    """Every ep and expert_tp on the ranks of a stage, where the model has experts."""
    if "moe" not in MODELS[name]:
        return [{}]
    pairs = product((1, 2, 4, 8), (1, 2, 4))
    return [{"ep": ep, "expert_tp": parts} for ep, parts in pairs if ranks % (ep * parts) == 0]


def all_layouts() -> list[Case]:
    """Every layout of up to eight ranks, for each model; what else there is to choose is drawn, the same each time."""
    return [
        _with_choices(name, ranks, parallel)
        for name in MODELS
        for ranks in range(1, RANKS + 1)
        for parallel in layouts(name, ranks)
    ]


def _with_choices(name: str, ranks: int, parallel: dict[str, Any]) -> Case:
    rng = random.Random(f"{name} {ranks} {parallel}")
    stages = parallel["pp"] * parallel["virtual_stages"]
    layers, chosen = max(2, stages), dict(parallel)
    # more than half of all are such; the others show what goes wrong from step to step
    steps = 1 if {"cp", "ep"} <= parallel.keys() else STEPS
    if stages > 1 and rng.random() < 0.3:
        layers, chosen["pipeline_layout"] = uneven(stages, rng)
    batch, micro = batch_of(ranks // (parallel["tp"] * parallel["pp"] * parallel.get("cp", 1)), parallel["pp"], rng)
    if parallel["zero"] == 3:
        chosen |= {"zero3_layers": 1 + ranks % 2, "zero3_gather": rng.choice(GATHERS)}
    variants = VARIANTS.get(name, [{}])
    if name == "t5" and parallel.get("cp_kind", "alltoall") != "alltoall":  # which add nothing to scores
        variants = [variant for variant in variants if variant.get("position") == "learned"]
    variant = rng.choice(variants)
    if stages > 1 and (needed := len(variant.get("vision", {}).get("native", {}).get("deepstack", ()))):
        layout = chosen.get("pipeline_layout", [1])
        more = max(0, needed - layout[0])  # layers of the first stage
        layers += more
        if "pipeline_layout" in chosen:
            chosen["pipeline_layout"] = [layout[0] + more, *layout[1:]]
    found = case(
        name, ranks, layers=layers, variant=variant, parallel=chosen,
        recompute=rng.choice(RECOMPUTES), offload=rng.choice(OFFLOADS),
        micro=micro, batch=batch, bucket=rng.choice([LARGE, 1000]),
        optimizer=rng.choice(OPTIMIZERS), steps=steps,
        freeze=rng.choice(FROZEN[name]) if name in FROZEN else (),
    )  # fmt: skip
    return replace(found, steps=min(steps, most_steps(found)))


def most_steps(case: Case) -> int:
    """Steps that can be told from rounding: many layers with delta nets move, in each, by forty times what it changed."""
    layers = case.model.get("layers", [])
    return 1 if len(layers) > 4 and any("delta" in layer for layer in layers) else STEPS


GATHERS = ["micro_batch", "step"]
OPTIMIZERS = ["adamw", "adamw", "muon"]
RECOMPUTES: list[dict[str, Any]] = [{}, {"kind": "selective"}, {"kind": "full"}, {"kind": "full", "layers": 1}]
OFFLOADS: list[dict[str, Any]] = [{}, {}, {"activations": 1, "min_bytes": 0}]


def uneven(stages: int, rng: random.Random) -> tuple[int, list[int]]:
    """A number of layers and of each stage's; no more than one stage has two, the ends may have none."""
    counts = [1] * stages
    counts[rng.randrange(stages)] = 2
    if stages > 2 and rng.random() < 0.5:
        counts[rng.choice([0, -1])] = 0
    return sum(counts), counts


def batch_of(dp: int, pp: int, rng: random.Random) -> tuple[int, int]:
    """(samples of a step, of a micro-batch): about eight samples; a pipeline gets several micro-batches."""
    share = -(-8 // dp)
    sizes = [size for size in range(1, share + 1) if share % size == 0 and (pp == 1 or size < share or share == 1)]
    return share * dp, rng.choice([size for size in sizes if size >= share / 4] or sizes)


def covering(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases, each chosen for holding the most triples of settings that those before it do not."""
    triples = [set(combinations(sorted(_settings(case)), 3)) for case in cases]
    left = set().union(*triples)
    # what a case adds only shrinks, so that one which still adds the most after a second look is the best
    queue = [(-len(held), index) for index, held in enumerate(triples)]
    heapify(queue)
    chosen: list[Case] = []
    while queue and len(chosen) < count:
        _, index = heappop(queue)
        added = len(triples[index] & left)
        if queue and -added > queue[0][0]:
            heappush(queue, (-added, index))
            continue
        chosen.append(replace(cases[index], steps=most_steps(cases[index])))
        left -= triples[index]
    return chosen


def _settings(case: Case) -> set[str]:
    values = {**case.layout, "model": case.name, "small buckets": case.bucket != LARGE}
    return {f"{key}={value is not None if key == 'pipeline_layout' else value}" for key, value in values.items()}


@dataclass(frozen=True, eq=False)
class Run(Case):
    """A run.yaml as it is, on some ranks."""

    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any], ranks: int = 1) -> Run:
        """A case that is nothing but these settings."""
        return cls("run", settings["model"], ranks, settings=settings)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The settings."""
        return dict(self.settings)

    @property
    def single(self) -> Run:
        """The same settings in one process."""
        return Run.of({name: value for name, value in self.settings.items() if name != "parallel"})
