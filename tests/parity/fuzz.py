"""Random models in random layouts: `make parity-fuzz N=100 SEED=7`. A case is a function of its seed alone."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from typing import Any

from parity.cases import OPTIMIZERS, RANKS, SINKHORN

from mega_trainer.verify.case_comparison import TOLERANCE
from mega_trainer.verify.layout_case import (
    CONTEXT_KINDS,
    LARGE_BUCKET,
    RECOMPUTES,
    ZERO_LEVELS,
    LayoutCase,
    sample_batch_sizes,
    sample_uneven_stage_layers,
)
from mega_trainer.verify.local_examination import compute_error_tolerance, verify_layout_cases


def random_cases(seed: int, count: int) -> list[LayoutCase]:
    """`count` legal cases, of the seeds from `seed` on: what a configuration refuses is drawn again."""
    return [next(_legal(number)) for number in range(seed, seed + count)]


def _legal(seed: int) -> Iterator[LayoutCase]:
    rng = random.Random(seed)
    while True:
        drawn = _case(seed, rng)
        if drawn.ranks <= RANKS and drawn.is_legal:
            yield drawn


def _case(seed: int, rng: random.Random) -> LayoutCase:
    tp, pp, v = rng.choice([1, 1, 2, 3, 4, 6, 8]), rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
    cp = rng.choice([1, 1, 2, 2, 3, 4])
    dp = rng.randint(1, max(1, RANKS // (tp * pp * cp)))
    parallel: dict[str, Any] = {
        "tp": tp, "sp": rng.random() < 0.5, "pp": pp, "virtual_stages": v, "zero": rng.choice(ZERO_LEVELS),
        "cp": cp, "cp_kind": rng.choice(CONTEXT_KINDS),
        "schedule": rng.choice(["1f1b", {1: "zb-h1", 2: "zbv"}.get(v, "gpipe")]),
    }  # fmt: skip
    parallel["tp_comm_overlap"] = bool(parallel["sp"] and tp > 1 and seed % 2)
    layers = pp * v + rng.randint(0, 2)
    experts = _experts(rng, layers) if rng.random() < 0.4 else {}
    if experts:
        parallel |= {"ep": rng.choice([1, 2, 2, 3, 4]), "expert_tp": rng.choice([1, 1, 2, 3])}
    if pp * v > 1 and rng.random() < 0.3:
        layers, parallel["pipeline_layout"] = sample_uneven_stage_layers(pp * v, rng)
    batch, micro = sample_batch_sizes(dp, pp, rng)
    return LayoutCase(
        f"seed {seed}", {**_model(rng), **experts, "num_layers": max(1, layers)}, tp * pp * cp * dp,
        parallel=parallel, recompute=rng.choice(RECOMPUTES), micro=micro, batch=batch,
        bucket=rng.choice([LARGE_BUCKET, 3000, 500]), closed=rng.random() < 0.7, clip=rng.choice([0.0, 0.1, 1.0]),
        length=rng.choice([12, 16, 24, 48]), optimizer=rng.choice(OPTIMIZERS), decoupled_lr=rng.choice([None, 0.03]),
    )  # fmt: skip


def _model(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 4, 6, 8, 12])
    size = rng.choice([2, 4, 6, 8])
    kv = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    position = rng.choice(["rope", "rope", "learned", "none"])
    drawn = _decoder(rng, heads, kv, size, position)
    if position == "rope" and rng.random() < 0.4:
        drawn |= _latent(rng)
    return drawn | {"mtp_layers": 0 if position == "learned" else rng.choice([0, 0, 1, 2])}


def _experts(rng: random.Random, layers: int) -> dict[str, Any]:
    moe = {
        "num_experts": rng.choice([4, 6, 8]), "top_k": rng.choice([1, 2, 3]), "ffn_hidden_size": rng.choice([6, 12]),
        "layers": rng.choice([None, [layer for layer in range(layers) if rng.random() < 0.6]]),
        "shared_ffn_hidden_size": rng.choice([0, 24]), "score": rng.choice(["softmax", "sigmoid"]),
        "normalize": rng.random() < 0.5, "scaling": rng.choice([1.0, 2.0]), "router_bias": rng.random() < 0.5,
        "groups": rng.choice([1, 2]), "top_groups": rng.choice([1, 2]), "group_score": rng.choice(["max", "top2"]),
        "selection_bias": True, "bias_rate": rng.choice([0.0, 0.01]), "aux_loss": rng.choice([0.0, 0.1]),
        "z_loss": rng.choice([0.0, 0.01]), "capacity_factor": rng.choice([None, None, 0.7, 1.2]),
    }  # fmt: skip
    moe["shared_gate"] = bool(moe["shared_ffn_hidden_size"]) and rng.random() < 0.5
    if rng.random() < 0.25:
        moe |= SINKHORN | {"score": "sigmoid" if moe["top_k"] == 1 else "softmax"}
    return {"moe": moe}


def _latent(rng: random.Random) -> dict[str, Any]:
    mla = {
        "q_lora_rank": rng.choice([None, 5, 12]), "kv_lora_rank": rng.choice([3, 8]), "v_head_dim": rng.choice([2, 5]),
        "qk_nope_head_dim": rng.choice([1, 4]), "qk_rope_head_dim": rng.choice([2, 4]),
        "latent_norm": rng.random() < 0.7,
    }  # fmt: skip
    rope = {"theta": 100.0, "interleaved": rng.random() < 0.5}
    return {"mla": mla, "rope": rope, "num_kv_heads": None, "head_dim": None, "qk_norm": False}


def _decoder(rng: random.Random, heads: int, kv: int, size: int, position: str) -> dict[str, Any]:
    return {
        "hidden_size": rng.choice([16, 24, 33]), "ffn_hidden_size": rng.choice([24, 48, 72]),
        "num_attention_heads": heads, "num_kv_heads": kv, "head_dim": size, "vocab_size": rng.randint(9, 70),
        "tie_embeddings": rng.random() < 0.5, "norm": rng.choice(["rmsnorm", "layernorm"]), "position": position,
        "activation": rng.choice(["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"]),
        "rope": {"theta": rng.choice([100.0, 10_000.0]), "fraction": rng.choice([0.5, 1.0])},
        "qkv_bias": rng.random() < 0.5, "attention_out_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5,
        "qk_norm": rng.random() < 0.5, "sliding_window": rng.choice([None, None, 2, 5]),
        "max_position": 48,
        **{f"{site}_dropout": rng.choice([0.0, 0.2]) for site in ("embedding", "attention", "residual")},
        "init_std": rng.choice([0.1, 0.2]), "scale_residual_init": rng.random() < 0.5,
        # a LayerNorm of two numbers is a step from -1 to 1
        "qk_norm_span": rng.choice(["head", "all", "each" if size > 2 else "all"]), "norm_position": rng.choice(["pre", "post", "both"]),
        "parallel_residual": rng.random() < 0.5,
        "zero_centered_norm": rng.random() < 0.5, "scale_embeddings": rng.random() < 0.3,
        "attention_scale": rng.choice([None, 0.3]), "attention_softcap": rng.choice([None, 2.0]),
        "attention_sinks": rng.random() < 0.3, "logit_softcap": rng.choice([None, 2.0]),
        "full_attention_layers": rng.choice([None, [0]]), "local_rope": rng.choice([None, {"theta": 50.0}]),
        "no_rope_layers": rng.choice([None, None, [0]]), "norm_bias": rng.random() < 0.7, "shared_norm": rng.random() < 0.3,
        "embedding_multiplier": rng.choice([1.0, 3.0]), "residual_multiplier": rng.choice([1.0, 0.4]),
        "logit_scale": rng.choice([1.0, 0.3]),
    }  # fmt: skip


def main() -> int:
    """Run so many cases from a seed on; tell each that disagrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=None, help="first seed; default: a new one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seeds {seed} to {seed + options.count - 1}")
    problems = disagreements(random_cases(seed, options.count))
    print("\n".join(problems) or f"{options.count} cases agree with one process to {TOLERANCE:g}")
    return 1 if problems else 0


def disagreements(cases: list[LayoutCase]) -> list[str]:
    """What is wrong with each case that does not agree with one process, with all it takes to see it again."""
    found = [(one, one.describe_problem(compute_error_tolerance(one))) for one in verify_layout_cases(cases)]
    return [f"{problem}\n  {one.case.raw}" for one, problem in found if problem]


if __name__ == "__main__":
    sys.exit(main())
