"""Published memory of peers' runs against a prediction from how each peer keeps things.

    python benchmarks/plan_memory.py published_memory.csv

A peer's trainer is not ours, so what it keeps is counted here, product by product, in bytes of a token and layer (D width, F feed-forward
width, Q and K widths of queries and of keys), with what its states are; the pipeline is our planner's 1F1B. What is known of
a peer is from its source or documents; that nanotron's runs kept gathered inputs is assumed, as its table does not say.
One thing is fitted: the allocator's slack, on the rows whose source says that it reports reserved memory. `cross-validated` predicts
each source, and each model, with the slack of the others.
Rows that leave the sequence, the layout or the model open, and those of fine-tuning by adapters, are not predicted.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.plan.device_memory import SLACK
from mega_trainer.plan.other_trainer_memory import TrainerMemoryOptions, TrainerName, predict_other_trainer_memory
from mega_trainer.plan.training_layout import TrainingLayout

UNITS = {"GiB": 2**30, "GB": 1e9}
# Moonlight's recipe says "precision-aware optimizer with bf16 gradients/moments" (Megatron-Bridge, recipes/moonlight); those of
# NeMo, which dgxc runs, say `grad_reduce_in_fp32 = False`.
BF16_MOMENTS, HALF_GRADIENTS = "Megatron-Bridge", ("dgxc", "Megatron-Bridge")
# torchtitan compiled the loss from April 2025 on (its pull request 1033). torchao's H100s ran its version 0.0.2, of before.
EAGER_LOSS = ("torchtitan 2024-12", "torchao H100")
# Sources whose tables say GB, but whose programs print bytes / 2^30: nanotron's create_table_log, and torchtitan's log.
GIBIBYTES = ("nanotron", "torchao")
# torchtitan's trainer checkpoints every second product by default.
SELECTIVE = {"norm", "activation"}
# As Bridge's recipes name parts of a layer, and we do.
MODULES = {"layernorm": "norm", "moe_act": "activation", "mla_up_proj": "mla_up_proj", "mlp": "mlp"}
MODELS = {
    "Llama3-8B": ModelConfig.parse(load_model_preset("llama3-8b")),
    "Llama3.1-8B": ModelConfig.parse(load_model_preset("llama3-8b")),
    **{
        f"Llama-like-{name}": ModelConfig.parse(
            {
                "num_layers": layers, "hidden_size": width, "ffn_hidden_size": wide, "num_attention_heads": heads,
                "vocab_size": 131_072, "tie_embeddings": wide < 10_000,  # as its scripts/scaling_benchmarks.py sets it
            }
        )
        for name, layers, width, wide, heads in (
            ("1.34B", 16, 2048, 8192, 32), ("8.86B", 32, 4096, 14_336, 32), ("80B", 80, 8192, 28_672, 64),
        )
    },
    "Moonlight": ModelConfig.parse(
        {
            "num_layers": 27, "hidden_size": 2048, "ffn_hidden_size": 11_264, "num_attention_heads": 16, "vocab_size": 163_840,
            "mla": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            "moe": {
                "num_experts": 64, "top_k": 6, "ffn_hidden_size": 1408, "shared_ffn_hidden_size": 2816, "score": "sigmoid",
                "layers": list(range(1, 27)), "selection_bias": True,
            },
        }
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A row of the table, as far as it can be planned; whether its bytes are reserved, and whether its source says so."""

    name: str
    source: str
    family: str
    model: ModelConfig
    run: TrainingLayout
    recompute: str
    bytes: float
    reserved: bool
    told: bool


def read(path: Path) -> Iterator[Published | str]:
    """Each row, or why it is not predicted."""
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = (
                f"{row['source']}, {row['model']}, {row['gpu']} x {row['gpus']}, {row['precision']}, {row['recompute']}"
            )
            model = next((model for name, model in MODELS.items() if row["model"].startswith(name)), None)
            if model is None or not (row["gpus"] and row["micro_batch"]):
                yield f"{name}: its layout is not told"
                continue
            run = _run(row, model)
            source = "torchao H100" if row["source"] == "torchao" and row["gpu"] == "H100" else row["source"]
            yield Published(
                name, source, row["model"].replace("3.1", "3"), model, run, row["recompute"] or "unstated",
                float(row["peak_mem"]) * UNITS["GiB" if row["source"].startswith(GIBIBYTES) else row["unit"]], "max allocated" not in row["what"], "reserved" in row["what"],
            )  # fmt: skip


def _run(row: Mapping[str, str], model: ModelConfig) -> TrainingLayout:
    def number(key: str) -> int:
        return int(row[key] or 1)

    tp, pp, cp = number("tp"), number("pp"), number("cp")
    dp = int(row["gpus"]) // (tp * pp * cp)
    steps = row["source"].partition("grad-accum ")[2].rstrip(")")
    zero = 3 if "FSDP" in row["zero_or_fsdp"] else 0 if row["zero_or_fsdp"] == "ZeRO-0" else 1
    return TrainingLayout(
        int(row["seq"] or 8192), micro_batch=number("micro_batch"), microbatches=int(steps or 1), tp=tp, sp=tp > 1, pp=pp,
        cp=cp, ep=number("ep"), dp=dp, zero=zero,
    )  # fmt: skip


def predicted(row: Published, slack: float = SLACK) -> float:
    """Bytes on the rank that holds most; of nanotron's on the first rank, which writes its table."""
    ranks = predict_other_trainer_memory(row.model, row.run, _like(row), _keeping(row))
    reported = ranks[:1] if _like(row) == "nanotron" else ranks
    return max(sum(kinds.values()) for kinds in reported) * (slack if row.reserved else 1.0)


def crossed(rows: Sequence[Published], key: Callable[[Published], str]) -> dict[str, dict[str, float]]:
    """Errors of each group by `key`, with the slack that the others' rows have in the median."""
    table, every = {}, []
    for name in sorted({key(row) for row in rows}):
        others = [row for row in rows if key(row) != name and row.told]
        slack = statistics.median(row.bytes / predicted(row, 1.0) for row in others) if others else SLACK
        errors = [predicted(row, slack) / row.bytes - 1 for row in rows if key(row) == name]
        table[name] = {"slack": round(slack, 4), **_told(errors)}
        every += errors
    table["all"] = _told(every)
    return table


def _told(errors: Sequence[float]) -> dict[str, float]:
    return {
        "rows": len(errors), "median_error": round(statistics.median(map(abs, errors)), 4),
        "furthest": round(max(errors, key=abs), 4),
    }  # fmt: skip


def _like(row: Published) -> TrainerName:
    return "fsdp2" if row.run.zero == 3 else "nanotron" if row.source.startswith("nanotron") else "megatron"


def _keeping(row: Published) -> TrainerMemoryOptions:
    """What a source says of its run, or is known to do."""
    fully = row.run.zero == 3
    again = {ours for theirs, ours in MODULES.items() if theirs in row.recompute}
    eager = 2 + 3 * 4 if row.source in EAGER_LOSS else 0
    return TrainerMemoryOptions(
        gradients=2 if row.source.startswith(HALF_GRADIENTS) else 4,
        optimizer=8 if row.source.startswith(BF16_MOMENTS) else 12,
        logits=eager if fully else 0,
        recomputed=frozenset({"full"} if row.recompute == "full" else SELECTIVE if fully else again),
    )


def compared(rows: Iterable[Published]) -> list[dict[str, Any]]:
    """Each row beside its prediction."""
    return [
        {
            "run": row.name, "source": row.source.split(" (")[0], "recompute": row.recompute, "published_gb": row.bytes / 1e9,
            "predicted_gb": predicted(row) / 1e9, "error": predicted(row) / row.bytes - 1,
        }
        for row in rows
    ]  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the errors."""
    told = [row["error"] for row in rows if row["recompute"] != "unstated"]
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": len(rows), "median": statistics.median(errors), "within 10 %": sum(e < 0.1 for e in errors) / len(errors),
        "furthest under where recomputation is stated": min(told, default=0.0),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path, help="a table of runs, with the columns of published_memory.csv")
    options = parser.parse_args()
    found = list(read(options.published))
    runs, left_out = [r for r in found if isinstance(r, Published)], [r for r in found if isinstance(r, str)]
    rows = compared(runs)
    for row in rows:
        print(
            f"{row['run'][:92]:92} {row['published_gb']:7.2f} {row['predicted_gb']:7.2f} {100 * row['error']:+6.1f} %"
        )
    print(*left_out, sep="\n")
    sources = {
        source: [row for row in rows if row["source"] == source] for source in dict.fromkeys(r["source"] for r in rows)
    }
    for source, own in sources.items():
        print(f"{source:40} median {100 * summary(own)['median']:5.1f} % of {len(own)}")
    print(", ".join(f"{name} {value:.3g}" for name, value in summary(rows).items()))
    validated = {
        "each source by the others": crossed(runs, lambda row: row.source.split(" (")[0]),
        "each model by the others": crossed(runs, lambda row: row.family),
    }
    for kind, table in validated.items():
        print(kind)
        for name, told in table.items():
            print(f"  {name:40} {told}")
    record.write("plan_memory", {**summary(rows), "cross-validated": validated, "runs": rows, "left_out": left_out})


if __name__ == "__main__":
    main()
