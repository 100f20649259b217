"""Default settings of `mega tune`: a run.yaml from the model, the data and the memory of the machine.

Learning rates follow the width D of the model, as smaller models take larger ones: for D = 4096, 2e-4 for adapters
(arXiv:2305.14314) and 2e-5 for all weights, multiplied by sqrt(4096 / D); a tenth of that for preference losses
(arXiv:2305.18290).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig

Method = Literal["lora", "qlora", "full"]

TUNED_KINDS = ("conversations", "pairs", "text")
STEPS = 60  # optimizer steps that a small data set should have at least
LARGEST_BATCH = 64  # samples of a step
LONGEST = 4096  # tokens of a sample
TEXT_LENGTH = 1024  # tokens of a sample of plain text
USABLE = 0.9  # share of the memory that the prediction may fill
REFERENCE_WIDTH = 4096
RATES: dict[Method, float] = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}


@dataclass(frozen=True)
class TuningDataStatistics:
    """Facts about tokenized training data on which the settings of `mega tune` depend.

    Attributes:
        kind: dataset kind: `conversations`, `pairs` or `text`.
        rated: answers are rated one by one (KTO), not compared in pairs.
        documents: number of conversations, pairs or texts.
        tokens: number of tokens of all documents.
        longest: tokens of the longest document, for pairs of both answers.
    """

    kind: str
    rated: bool
    documents: int
    tokens: int
    longest: int

    @classmethod
    def read(cls, prefixes: Sequence[Path], kind: str) -> TuningDataStatistics:
        """Return the facts about the token data sets at `prefixes`, together."""
        import numpy as np

        from mega_data.token_files.dataset_info import count_unpaired_answers
        from mega_data.token_files.indexed_reader import IndexedReader

        readers = [IndexedReader(prefix) for prefix in prefixes]
        longest = [
            np.add.reduceat(reader.lengths.astype(np.int64), reader.document_index[:-1]).max() for reader in readers
        ]
        rated = kind == "pairs" and any(count_unpaired_answers(prefix) for prefix in prefixes)
        documents, tokens = (
            sum(counts) for counts in zip(*((r.documents, r.num_tokens) for r in readers), strict=True)
        )
        return cls(kind, rated, documents, tokens, int(max(longest)))


@dataclass(frozen=True)
class TuningRequest:
    """Choices of the user of `mega tune`: base model, data, method, output folder and epochs; None is chosen for them.
    `inputs` are entries of `data.train`.
    """

    base: str
    inputs: list[dict[str, Any]]
    method: Method | None
    output: Path
    epochs: float | None = None


def choose_sequence_length(data: TuningDataStatistics, max_position: int) -> int:
    """Return the tokens of a packed sample of a tuning: room for the longest document, 256 to 4096; 1024 for plain text.
    It is a multiple of 64. The model's context is never exceeded.
    """
    if data.kind == "text":
        return min(TEXT_LENGTH, max_position)
    needed = 64 * math.ceil(data.longest / 64)
    return min(max(256, needed), LONGEST, max_position)


def choose_tuning_epochs(documents: int) -> int:
    """Return the default number of passes of a tuning over the data: 3, 2 or 1, fewer for larger data sets."""
    return 3 if documents < 5_000 else 2 if documents < 50_000 else 1


def choose_batch_size(rows: float, epochs: float) -> int:
    """Return the samples per optimizer step of a tuning: a power of two up to 64 that leaves at least 60 steps.
    It is 1 if the run has fewer samples. `rows` are the samples of one epoch.
    """
    return max(1, min(LARGEST_BATCH, 1 << int(math.log2(max(1.0, rows * epochs / STEPS)))))


def choose_learning_rate(method: Method, hidden_size: int, kind: str) -> float:
    """Return the peak learning rate of a tuning by its method, model width and dataset kind, with two digits.
    It falls with the square root of the width; for preference pairs it is a tenth.
    """
    rate = RATES[method] * math.sqrt(REFERENCE_WIDTH / hidden_size) * (0.1 if kind == "pairs" else 1.0)
    return float(f"{rate:.1e}")


def draft_tuning_run_yaml(
    request: TuningRequest, data: TuningDataStatistics, method: Method, model: Any, precision: str
) -> dict[str, Any]:
    """Return the run.yaml of a tuning as nested settings, with micro-batches of one sample.

    Args:
        model: `ModelConfig` of the base.
    """
    length = choose_sequence_length(data, model.max_position)
    rows = max(1.0, 0.9 * data.tokens / (0.9 * length))  # a tenth is held out, and rows are filled to about 90 %
    epochs = choose_tuning_epochs(data.documents) if request.epochs is None else request.epochs
    size = choose_batch_size(rows, epochs)
    steps = max(1, math.ceil(rows * epochs / size))
    rate = choose_learning_rate(method, model.hidden_size, data.kind)
    run: dict[str, Any] = {"model": {"from": request.base}}
    if method != "full":
        run["lora"] = {"rank": 16, "alpha": 32, "modules": [".*_proj"]}
    if method == "qlora":
        run["lora"]["quantize"] = "nf4"
    run["data"] = {
        "train": [each["path"] if len(each) == 1 else each for each in request.inputs],
        "kind": data.kind, "seq_length": length, "split": "90,10",
    }  # fmt: skip
    if len(request.inputs) > 1:
        run["data"]["temperature"] = 1.0  # shares of the data sets by size
    if data.kind == "pairs":
        run["objective"] = {"kind": "kto" if data.rated else "dpo"}
    run |= {
        "batch": {"micro": 1, "global": size},
        "train": {
            "epochs": epochs, "eval_every": max(1, steps // max(1, round(epochs))),
            "eval_steps": max(1, math.ceil(rows / 9 / size)), "eval_first": True,
        },
        "optimizer": {"lr": rate, "weight_decay": 0.0 if method != "full" else 0.1},
        "lr_schedule": {"name": "cosine", "min_lr": float(f"{rate / 10:.1e}")}
        | ({"warmup_share": 0.05} if steps > 4 else {}),  # of a few steps it would leave no decay
        "precision": precision,
        "checkpoint": {"every": max(1, min(steps // 4, 500)), "keep": 1, "best": True},
        "output": str(request.output / "run"),
    }  # fmt: skip
    return run


def iterate_memory_saving_settings(batch: int) -> Iterator[dict[str, Any]]:
    """Yield settings of micro-batch size and activation checkpointing, from the fastest to the smallest in memory."""
    sizes = [size for size in (16, 8, 4, 2, 1) if size <= batch]
    for kind in ("none", "selective", "full"):
        for size in sizes if kind == "none" else sizes[-1:]:
            yield {"batch": {"micro": size, "global": batch}} | ({} if kind == "none" else {"recompute": kind})


def predict_peak_memory_bytes(config: RunConfig) -> int:
    """Return the predicted peak memory of one rank that trains a run alone."""
    from mega_trainer.plan.memory_advice import predict_peak_rank_bytes

    return predict_peak_rank_bytes(config, 1)


def measure_usable_memory(device: str) -> int | None:
    """Return 90 % of the bytes of the GPU's memory, or of the free host memory for a CPU; None if it is unknown."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return int(USABLE * torch.cuda.get_device_properties(0).total_memory)
    information = Path("/proc/meminfo")
    if not information.is_file():
        return None
    kib = {line.split(":")[0]: int(line.split()[1]) for line in information.read_text().splitlines()}
    return int(USABLE * 1024 * kib["MemAvailable"])


def choose_precision() -> str:
    """Return bf16 on a GPU, and on processors that multiply bf16 faster than fp32; else fp32."""
    import torch

    information = Path("/proc/cpuinfo")
    flags = information.read_text() if information.is_file() else ""
    return "bf16" if torch.cuda.is_available() or "amx_bf16" in flags or "avx512_bf16" in flags else "fp32"
