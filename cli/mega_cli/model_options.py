"""Options shared by the commands that run a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class EvalPrecision(StrEnum):
    """Dtypes of weights and activations that `--precision` offers for evaluation, generation and serving."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


Model = Annotated[
    str,
    typer.Argument(
        help="Model: a mega checkpoint, a run folder (latest checkpoint), a HuggingFace folder or a GGUF file; path or URL."
    ),
]


PrecisionOption = Annotated[EvalPrecision, typer.Option(help="Dtype of weights and activations.")]


Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]


TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", help="Folder with tokenizer.json, or that file; default: the tokenizer in the model's folder."
    ),
]


DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Speculative decoding (the output stays the same): ngrams drafts from repetitions in the text, mtp uses the "
        "model's MTP layers, a folder is a smaller draft model; none turns it off.",
        show_default="ngrams on a CPU, in fp32 and fp64",
    ),
]


Temperature = Annotated[float | None, typer.Option(min=0, help="Sampling temperature, e.g. 0.7; 0 is greedy decoding.")]


TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens only, e.g. 50.")]


TopP = Annotated[
    float | None,
    typer.Option(
        help="Nucleus sampling: sample from the smallest set of tokens with this total probability, e.g. 0.95; above 0, up to 1."
    ),
]


MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample only from tokens with at least this fraction of the highest probability, e.g. 0.1; 0 to 1."
    ),
]


ChatTemplateOption = Annotated[
    Path | None, typer.Option(help="Jinja chat template; default: the template in the tokenizer's folder.")
]


MaxLength = Annotated[
    int | None,
    typer.Option(
        min=2, help="Context length in tokens (prompt and answer); default: the model's maximum, at most 8192."
    ),
]
