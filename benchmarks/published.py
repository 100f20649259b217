"""Published training runs as what the planner plans: a table's rows as models, layouts, machines and seconds a step.

What a row leaves open is taken from what its source is known to do, and said here. published/bridge_recipes.csv has how
Megatron-Bridge's recipes run experts: CUDA graphs, dispatcher, whether another micro-batch hides the exchange, and recomputation
(NVIDIA-NeMo/Megatron-Bridge, scripts/performance at the tags v0.1.0rc4 to v0.5.1, releases 25.09 to 26.06.01).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mega_common.lora_config import LoraConfig
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.plan.flops import (
    compute_flops_by_convention,
    compute_hardware_flops_per_token,
    compute_model_flops_per_token,
)
from mega_trainer.plan.held_out_error import classify_architecture
from mega_trainer.plan.layer_cost import TrainerProfile
from mega_trainer.plan.machine import MachineSpec, load_machine
from mega_trainer.plan.other_trainers import OTHER_TRAINERS
from mega_trainer.plan.training_layout import RecomputeKind, TrainingLayout

Row = dict[str, str]

# By a word of the source: who wrote the trainer.
MAKERS = {
    "SC21": "megatron-2021", "Megatron": "megatron", "dgxc": "megatron", "NeMo": "megatron", "Mosaic": "mosaic",
    "torchtitan": "torchtitan", "torchao": "torchtitan", "nanotron": "nanotron", "BLOOM": "megatron-2021",
}  # fmt: skip
HABITS = {
    # Transformer Engine's kernels, collectives of tensor parallelism beside products, gradients summed in bf16
    "megatron": replace(OTHER_TRAINERS["megatron"].profile, passes=1.2),
    # before fused attention and sequence parallelism; element by element work mostly fused
    "megatron-2021": TrainerProfile(attention="unfused", tp_waited=10, passes=1.5),
    # PyTorch's FSDP, attention in Triton with ALiBi, nothing compiled
    "mosaic": TrainerProfile(attention="triton", passes=2.0, gradient_bytes=2),
    "torchtitan": TrainerProfile(attention="flash2", passes=1.2, tp_waited=10),
    "nanotron": replace(OTHER_TRAINERS["nanotron"].profile, passes=2.0),
}
# Fine-tuning by the recipes of NeMo (nemo/collections/llm/recipes/llama3_70b.py) and Megatron-Bridge (perf_recipes/llama): packed
# SQuAD, whose documents are about 860 characters long, and LoRA of rank 16 on queries, keys and values.
SQUAD_TOKENS = 200
LORA = LoraConfig(rank=16, modules=["q_proj", "k_proj", "v_proj"]).model_dump_json()
UNFUSED_LOSS = (
    52  # bytes per logit: cast to fp32, maximum, subtraction, exponential, sum, division, product, and cast back
)
HOST = 8e-3  # before any fit
LOOPED, STALL = 2e-5, 2e-3  # before any fit
# Share of a layer's launches that graphs replay: of the router and what precedes the dispatch, of mixers as well, of all.
GRAPHS = {"none": 0.0, "router": 0.2, "mixer": 0.5, "layer": 1.0, "iteration": 1.0}
GPUS = {
    "A100-40GB": "a100-40", "A100-80GB": "a100-80", "H100": "h100", "H100-96GB-HBM2e-500W": "h100-500w", "B200": "b200",
    "GB200": "gb200", "H200": "h200", "GB300": "gb300", "B300": "b300", "MI300X": "mi300x",
}  # fmt: skip
# All-reduce of nanotron's sweep, GB/s a node of eight adapters: the median of its jobs' own tests on 8 to 64 nodes that reached over
# 100 (302 jobs). Those of the others fall with the number of nodes, to 13 on 64, where their steps are several times longer.
SWEEP_ALL_REDUCE = 178
# Models that a table names without their sizes.
SIZES: dict[str, dict[str, object]] = {
    "LLAMA2-7B": {"layers": 32, "hidden": 4096, "ffn": 11_008, "heads": 32, "vocab": 32_000},
    "LLAMA2-70B": {"layers": 80, "hidden": 8192, "ffn": 28_672, "heads": 64, "kv_heads": 8, "vocab": 32_000},
    "GPT3-5B": {"layers": 24, "hidden": 4096, "ffn": 16_384, "heads": 32, "vocab": 51_200},
    "GPT3-20B": {"layers": 44, "hidden": 6144, "ffn": 24_576, "heads": 48, "vocab": 51_200},
    "NEMOTRON-8B": {"layers": 32, "hidden": 4096, "ffn": 16_384, "heads": 32, "vocab": 256_000},
    "NEMOTRON-22B": {"layers": 40, "hidden": 6144, "ffn": 24_576, "heads": 48, "vocab": 256_000},
}


def _nemotron_super() -> dict[str, object]:
    """Nemotron-3-Super: 40 layers of Mamba, 40 of experts and 8 of attention, which take the same time in any order; two
    depths of multi-token prediction, each of attention and experts.
    """
    base = load_model_preset("nemotron-3-nano")
    experts = {
        "num_experts": 512, "top_k": 22, "ffn_hidden_size": 2688, "shared_ffn_hidden_size": 5376, "latent_size": 1024,
        "score": "sigmoid",
    }  # fmt: skip
    pattern = ["mamba", "moe"] * 40 + ["attention"] * 8
    return {
        **base, "layers": [*pattern, *["attention+moe"] * 2], "num_layers": len(pattern), "mtp_layers": 2, "hidden_size": 4096,
        "mamba": {**base["mamba"], "num_heads": 128}, "moe": experts,
    }  # fmt: skip


def _kimi() -> dict[str, object]:
    """Kimi K2 (arXiv:2507.20534): DeepSeek-V3's layers, with half the heads and half as many experts again."""
    base = load_model_preset("deepseek-v3")
    moe = {**base["moe"], "num_experts": 384, "layers": list(range(1, 61)), "groups": 1, "top_groups": 1}
    return {**base, "num_attention_heads": 64, "vocab_size": 163_840, "mtp_layers": 0, "moe": moe}


def _larger(name: str, layers: int, **changed: object) -> dict[str, object]:
    """A preset's family at another size."""
    return {**load_model_preset(name), "num_layers": layers, **changed}


# Models of presets, or of a preset's family.
FAMILIES: dict[str, Callable[[], dict[str, object]]] = {
    "Qwen3-30B-A3B": lambda: load_model_preset("qwen3-30b-a3b"),
    "Qwen3-235B-A22B": lambda: _larger(
        "qwen3-30b-a3b", 94, hidden_size=4096, num_attention_heads=64, ffn_hidden_size=12_288,
        moe={"num_experts": 128, "top_k": 8, "ffn_hidden_size": 1536},
    ),
    "GPT-OSS-120B": lambda: _larger(
        "gpt-oss-20b", 36, full_attention_layers=list(range(1, 36, 2)),
        moe={"num_experts": 128, "top_k": 4, "ffn_hidden_size": 2880, "router_bias": True},
    ),
    "Llama3.1-405B": lambda: load_model_preset("llama3-405b"),
    "Nemotron-3-Nano": lambda: load_model_preset("nemotron-3-nano"),
    "Nemotron-3-Super": _nemotron_super,
    "Kimi-K2": _kimi,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A published run, as it would be planned, and what was measured."""

    row: Row
    model: ModelConfig
    run: TrainingLayout
    machine: MachineSpec
    profile: TrainerProfile
    gpus: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second and GPU."""
        run = self.run
        return run.micro_batch * run.microbatches * run.dp * run.seq_length / self.gpus / self.seconds

    @property
    def maker(self) -> str:
        """Whose trainer."""
        return maker_of(self.row)

    @property
    def source(self) -> str:
        """Where it was published."""
        return re.split(r"[:@(;]| [\d\"]", self.row["source"])[0].strip()

    @property
    def family(self) -> str:
        """Of models: the first word of its name."""
        found = re.match(r"[A-Za-z]+", self.row["model"])
        return found[0].lower() if found else "?"

    @property
    def fusion(self) -> str:
        """How far its elementwise kernels are fused: by hand, by a compiler, or not at all."""
        return "fused" if self.maker == "megatron" else "eager" if self.profile.passes >= 1.5 else "compiled"

    @property
    def kind(self) -> str:
        """Class of its model, for which errors are reported."""
        return classify_architecture(self.model)

    @property
    def mixture(self) -> bool:
        """Whether it has experts."""
        return self.model.moe is not None


def sweep_machine() -> MachineSpec:
    """The H100s of nanotron's sweep, with the network that its own tests measured."""
    machine = load_machine("h100")
    network = SWEEP_ALL_REDUCE / machine.ranks_per_node / machine.achieved_efficiency.network
    return machine.model_copy(update={"networks_gb_s": {"measured": network}})


def maker_of(row: Row) -> str:
    return next((maker for word, maker in MAKERS.items() if word in row["source"]), "")


def published(path: Path, *, tuned: bool = False) -> Iterator[Published]:
    """The rows that give a layout, a model and a speed, on machines that are known, without 4 bits: those of training, or those
    where a model is `tuned`.
    """
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            left_out = ("LoRA" in row["source"] or "SFT" in row["source"]) is not tuned
            known = (
                row["gpu"] in GPUS and "power-limited" not in row["source"]
            )  # to a limit that the source does not give
            if known and maker_of(row) and not left_out and (row["tp"] or row["pp"] or row["dp"]):
                found = _published(row)
                if found is not None:
                    yield found


def _published(row: Row) -> Published | None:
    model, seq = model_of(row), number(row, "seq") or 8192  # torchtitan's default, which it does not state
    gpus = number(row, "gpus")
    if model is None or not gpus:
        return None
    run = _run(row, model, seq, gpus)
    # torchao's H100s are of the cluster that torchtitan's documents describe, whose limit is 500 W
    machine = load_machine("h100-500w" if (row["gpu"], maker_of(row)) == ("H100", "torchtitan") else GPUS[row["gpu"]])
    if "sweep" in row["source"]:
        machine = sweep_machine()
    rate = _rate(row, model, seq, machine)
    if not rate:
        return None
    tokens = run.micro_batch * run.microbatches * run.dp * seq
    profile = HABITS[maker_of(row)]
    if "eager" in row["source"]:
        profile = replace(profile, passes=2.0)
    if model.moe and maker_of(row) == "megatron":
        profile = _moe_profile(row, profile)
    if "async" in row["source"].lower():
        profile = replace(profile, tp_waited=4)
    if run.lora:  # whose recipes do not fuse the loss; NeMo's did not overlap tensor parallelism with GEMMs, either
        profile = replace(
            profile, loss_bytes=UNFUSED_LOSS, tp_waited=6 if "dgxc" in row["source"] else profile.tp_waited
        )
    return Published(row, model, run, machine, profile, gpus, tokens / gpus / rate)


def _moe_profile(row: Row, profile: TrainerProfile) -> TrainerProfile:
    """How Megatron-LM ran a model with experts: by the recipe of Megatron-Bridge's release, or NeMo's before, with neither graphs
    nor a hidden exchange. Runs that drop tokens do not read the number of rows of each expert.
    """
    recipe = recipe_of(row)
    graphs = GRAPHS[recipe["graphs"]] if recipe else 0.0
    profile = replace(profile, host=HOST, graphs=graphs)
    if not recipe or recipe["graphs"] != "iteration":  # which need one kernel for all experts
        profile = replace(profile, looped=LOOPED, stall=0.0 if "tokendrop" in row["source"] else STALL)
    if recipe:
        profile = replace(
            profile, dispatch="expert" if recipe["dispatcher"] == "alltoall" else "node",
            hides_dispatch=recipe["overlap"] == "yes",
        )  # fmt: skip
    return profile


@cache
def _recipes() -> dict[tuple[str, ...], Row]:
    """Recipes of Megatron-Bridge by release, model, GPU and precision."""
    with (Path(__file__).parent / "published" / "bridge_recipes.csv").open(encoding="utf-8") as file:
        return {(row["release"], row["model"], row["gpu"], row["precision"]): row for row in csv.DictReader(file)}


def recipe_of(row: Row) -> Row | None:
    """The recipe of a run's release, or of the last one before that has one."""
    release = re.search(r"Bridge (\d+\.\d+(?:\.\d+)?)", row["source"])
    if release is None:
        return None
    key = (row["model"], row["gpu"], _precision(row))
    known = sorted(found[0] for found in _recipes() if found[1:] == key)
    before = [one for one in known if one <= release[1]] or known[:1]
    return _recipes()[(before[-1], *key)] if before else None


def _rate(row: Row, model: ModelConfig, seq: int, machine: MachineSpec) -> float:
    """Tokens a second and GPU."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    again = "SC21" in row["source"] or "incl. recompute" in row["source"]
    causal = "causal-halved" in row["source"]
    flops = (
        compute_hardware_flops_per_token(model, seq, recompute="full", causal=causal)
        if again
        else compute_model_flops_per_token(model, seq, causal=causal)
    )
    if row["tflops_per_gpu"]:
        return float(row["tflops_per_gpu"]) * 1e12 / flops
    if maker_of(row) == "nanotron":
        # the figure's MFU is 6 N + 12 L H Q S, where N counts a tied table on both end stages
        twice = model.vocab_size * model.hidden_size * (model.tie_embeddings and number(row, "pp") > 1)
        flops = compute_flops_by_convention(model, seq, "mosaic") + 6 * twice
    return float(row["mfu"]) / 100 * machine.get_peak_flops("bf16") / flops if row["mfu"] else 0.0


def _run(row: Row, model: ModelConfig, seq: int, gpus: int) -> TrainingLayout:
    maker, source = maker_of(row), row["source"]
    tp, pp, cp, ep = (number(row, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    fully = maker in ("mosaic", "torchtitan") or "FSDP" in source
    dp = gpus // (tp * pp * cp)
    micro = number(row, "micro_batch") or 1
    batch = number(row, "global_batch") or dp * micro
    if "GBS 1M tokens" in source:
        batch = (1 << 20) // seq
    virtual = number(row, "vpp") or 1
    if not row["vpp"] and "model_table" in source:
        virtual = max(1, model.num_layers // pp) if pp > 1 else 1  # which the table leaves out
    if model.num_layers < pp * virtual or pp == 1:
        virtual = 1
    recompute, modules = _recompute(row, maker)
    # what Megatron takes where none is given; later recipes give 1
    expert_tp = tp if ep > 1 and "v25.03" in source else 1
    return TrainingLayout(
        seq, micro, max(1, batch // (dp * micro)), tp=tp, sp=tp > 1 and maker != "megatron-2021", pp=pp,
        virtual_stages=virtual, cp=cp, ep=ep, expert_tp=expert_tp, dp=dp, zero=3 if fully else 0 if "ZeRO-0" in source else 1,
        lora=LORA if "LoRA" in source else None, document_length=SQUAD_TOKENS if "LoRA" in source or "SFT" in source else None,
        precision=_precision(row), recompute=recompute, modules=modules,
    )  # fmt: skip


def _precision(row: Row) -> str:
    told = row["precision"].lower()
    return "nvfp4" if "fp4" in told else "fp8" if "fp8" in told else "bf16"


def _recompute(row: Row, maker: str) -> tuple[RecomputeKind, tuple[str, ...]]:
    if row["source"] == "torchtitan 2024 FSDP":  # its page: full for 70B, selective for 8B; the table leaves it out
        row = {**row, "recompute": "full" if row["model"] == "Llama3-70B" else "selective"}
    if row["recompute"].startswith("full"):
        return "full", ()
    recipe = recipe_of(row) if "Bridge" in row["source"] else None
    again = recipe["recompute"] if recipe else ""
    if "layernorm" in again or "moe_act" in again:
        return "selective", ("norm", "activation")
    if row["recompute"] == "selective" and maker == "torchtitan":  # every second product, all between them
        return "selective", ("norm", "activation", "mlp")
    return "none", ()


def number(row: Row, name: str) -> int:
    return int(float(row[name])) if row[name] else 0


def model_of(row: Row) -> ModelConfig | None:
    name = row["model"]
    if name.startswith("DeepSeekV3"):
        further = int("w/o MTP" not in row["source"])  # as the FLOPs say that Bridge states for each token
        raw = load_model_preset("deepseek-v3")
        return ModelConfig.parse(
            {**raw, "mtp_layers": further, "moe": {**raw["moe"], "layers": list(range(3, raw["num_layers"] + further))}}
        )
    if name in FAMILIES:
        return ModelConfig.parse(FAMILIES[name]())
    sizes: Mapping[str, object] = SIZES.get(name.upper()) or row
    if not (sizes["layers"] and sizes["hidden"] and sizes["heads"]):
        return None
    layers, hidden, heads = (int(float(str(sizes[key]))) for key in ("layers", "hidden", "heads"))
    gated = not re.match(r"GPT|MPT|BLOOM|Nemotron", name)
    raw = {
        "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_kv_heads": int(str(sizes.get("kv_heads") or heads)), "vocab_size": int(str(sizes.get("vocab") or 51_200)),
        "ffn_hidden_size": int(float(str(sizes.get("ffn") or 4 * hidden))),
        "activation": "swiglu" if gated else "gelu", "position": "rope" if gated else "none",
        "tie_embeddings": not gated, "max_position": 1 << 21,
    }  # fmt: skip
    if maker_of(row) == "nanotron":
        raw["tie_embeddings"] = raw["ffn_hidden_size"] < 10_000  # as its scripts/scaling_benchmarks.py sets it
    if name.startswith("MPT"):  # whose parameters, which the table gives, grow with its sequences
        raw |= {"position": "learned", "max_position": number(row, "seq")}
    if name.startswith(("Grok1", "Mixtral")):
        raw["moe"] = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": raw["ffn_hidden_size"]}
    return ModelConfig.parse(raw)
