"""Options shared by commands of `mega data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
