"""Options shared by commands of `mega data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# An option of click takes one value, and a shell expands a glob to many: `--input a b c` reads a as the option's and
# the others as arguments, which are inputs as well.
Input = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="FILE|GLOB|FOLDER|URL|hf:NAME|-...",
        help="What to read; several, or repeated; - is stdin.",
    ),
]
MoreInput = Annotated[list[str] | None, typer.Argument(metavar="[INPUT]...", help="More inputs.", show_default=False)]
JsonKey = Annotated[
    str, typer.Option(help="The key or column that holds the text; a.b is b in the object or struct a.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")]
TokenizerPath = Annotated[Path | None, typer.Option("--tokenizer", help="Folder with tokenizer.json, or that file.")]
ParseSpecialTokens = Annotated[
    bool,
    typer.Option("--parse-special-tokens", help="Take <|endoftext|> and its like in a text for the tokens."),
]
OnBadLine = Annotated[
    Literal["error", "skip"], typer.Option(help="Stop, or put bad lines into PREFIX.quarantine.jsonl and go on.")
]
