"""Options shared by several commands: those of `mega data`, and those that run a model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mega_common.errors import ConfigError


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
        help="Extension with the code of the model's own layers or family, or with a sampler, e.g. ./my_layer.py; installed ones "
        "are found by name. Repeatable.",
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


SamplerOption = Annotated[
    str | None,
    typer.Option("--sampler", help="Sampler of an extension that is named with --extension, e.g. top_n_sigma."),
]


SamplerSettings = Annotated[
    list[str] | None,
    typer.Option("--sampler-option", metavar="KEY=VALUE", help="Setting of --sampler, e.g. n=1.5. Repeatable."),
]


def parse_key_values(given: Sequence[str], flag: str, example: str) -> dict[str, Any]:
    """Return the values of the options KEY=VALUE of a flag, parsed as YAML, by key.

    Raises:
        ConfigError: for an option of another form.
    """
    from mega_common.bounded_parsing import BoundedYamlLoader, parse_yaml_text

    found = {}
    for option in given:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ConfigError(f"{flag} must have the form KEY=VALUE, found {option!r}", hint=f"{flag} {example}")
        found[key] = parse_yaml_text(value, f"{flag} {key}", BoundedYamlLoader)
    return found


def make_sampler_settings(name: str | None, options: Sequence[str] | None) -> dict[str, Any]:
    """Return the sampling settings that `--sampler` and `--sampler-option` give."""
    if not options:
        return {} if name is None else {"sampler": name}
    if name is None:
        raise ConfigError("--sampler-option requires --sampler", hint="add --sampler NAME")
    return {"sampler": name, "sampler_options": parse_key_values(options, "--sampler-option", "n=1.5")}


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
