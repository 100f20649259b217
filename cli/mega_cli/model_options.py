"""Options shared by several commands: those of `mega data`, and those that run a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

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


ExtensionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--extension",
        metavar="FILE|PACKAGE",
        help="Extension with the code of the model's own layers or family, e.g. ./my_layer.py; installed ones are found by "
        "name. Repeatable.",
    ),
]


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


# A click option takes one value, but a shell expands a glob to several: of `--input a b c`, a is the value of the option,
# and b and c are positional arguments, which are inputs as well.
Input = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="FILE|GLOB|FOLDER|URL|hf:NAME|-...",
        help="Input: files, globs, folders, URLs or hf:NAME, e.g. --input corpus/*.jsonl; - is standard input. Repeatable.",
    ),
]
MoreInput = Annotated[
    list[str] | None, typer.Argument(metavar="[INPUT]...", help="Further inputs, as for --input.", show_default=False)
]
JsonKey = Annotated[
    str, typer.Option(help="Key or column of the text, e.g. content; a.b for the key b in the object a.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
TokenizerPath = Annotated[Path | None, typer.Option("--tokenizer", help="Folder with tokenizer.json, or that file.")]
ParseSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--parse-special-tokens",
        help="Encode <|endoftext|> and other special tokens that occur in a text as these tokens, not as text.",
    ),
]
OnBadLine = Annotated[
    Literal["error", "skip"],
    typer.Option(
        help="On a line that cannot be read: stop (error), or write it to PREFIX.quarantine.jsonl and continue (skip)."
    ),
]
