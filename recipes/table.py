"""Writes README.md: what `mega plan` says of each recipe on H100s, beside what others published.

    python recipes/table.py

The figures of others are in published.yaml; the number of GPUs is the last part of a recipe's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mega_trainer.config.run_config import RunConfig, load_run_config
from mega_trainer.plan.device_memory import add_non_tensor_memory
from mega_trainer.plan.flops import compute_flops_by_convention
from mega_trainer.plan.layout_candidates import list_layout_settings
from mega_trainer.plan.layout_search import format_layout_settings, make_planned_run
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory

HERE = Path(__file__).parent
MACHINE = "h100"
HEAD = """# Recipes

One run.yaml for each well-known model, for the number of H100 GPUs at the end of its name. Set the path of your own data:

    mega plan recipes/llama3-70b-64.yaml --machine h100 --ranks 64
    mega train recipes/llama3-70b-64.yaml --set data.train.0.path=data/mine    # by torchrun or mega launch, on 64 GPUs

The table has predictions of `mega plan` for H100s with 80 GB and 400 Gb/s InfiniBand per GPU, and throughput that others published for the
same model and number of GPUs, with their layout and software. TFLOP/s are counted as in Megatron. None of this was measured with mega.
Predictions for models with experts assume that the host never delays the GPU; Megatron's takes about 9 ms per layer to read row counts.
`python recipes/table.py` writes this page.

| recipe | layout | precision | step | tokens/s/GPU | TFLOP/s/GPU | memory | published tokens/s/GPU |
|---|---|---|---|---|---|---|---|
"""


def recipes() -> dict[str, tuple[RunConfig, int]]:
    """Each recipe by its name, and its number of ranks."""
    return {
        path.stem: (load_run_config(path), int(path.stem.rpartition("-")[2])) for path in sorted(HERE.glob("*-*.yaml"))
    }


def predicted(config: RunConfig, ranks: int) -> dict[str, float]:
    """Of a recipe: seconds of a step, tokens a second and GPU, TFLOP/s a GPU."""
    seconds = make_planned_run(config, ranks, load_machine(MACHINE)).predict_step_time().seconds
    rate = config.batch.global_ * config.data.seq_length / seconds / ranks
    return {"seconds": seconds, "rate": rate, "tflops": rate * _flops(config) / 1e12}


def most_memory(config: RunConfig, ranks: int) -> int:
    """Return the bytes that the GPU of its fullest rank must hold."""
    layout = make_training_layout(config, ranks)
    return max(sum(add_non_tensor_memory(layout, kinds).values()) for kinds in predict_memory(config.model, layout))


def begun(name: str, config: RunConfig, ranks: int) -> str:
    """A recipe's line, up to its memory."""
    told = predicted(config, ranks)
    layout = format_layout_settings(list_layout_settings(make_training_layout(config, ranks)))
    figures = f"{told['seconds']:.2f} s | {told['rate']:,.0f} | {told['tflops']:.0f}"
    return f"| [{name}]({name}.yaml) | {layout} | {config.precision} | {figures} |"


def _flops(config: RunConfig) -> float:
    return compute_flops_by_convention(config.model, config.data.seq_length, "megatron")


def _others(found: dict[str, Any], config: RunConfig) -> str:
    if not found:
        return "-"
    rate = found["rate"] if "rate" in found else found["tflops"] * 1e12 / _flops(config)
    return f"{rate:,.0f} ({found['source']})"


def lines() -> Iterator[str]:
    """The table."""
    published = yaml.safe_load((HERE / "published.yaml").read_text())
    for name, (config, ranks) in recipes().items():
        size = f"{most_memory(config, ranks) / 2**30:.0f} GiB"
        yield f"{begun(name, config, ranks)} {size} | {_others(published.get(name, {}), config)} |\n"


if __name__ == "__main__":
    (HERE / "README.md").write_text(HEAD + "".join(lines()), encoding="utf-8")
