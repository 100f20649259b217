"""`mega data show`: what a model is taught, token by token."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_common.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from mega_data.reports.show import Part, Token
    from mega_data.tokenizer import Tokenizer
    from mega_trainer.config import RunConfig

SHADES = {True: ("black on green", "black on bright_green"), False: ("default", "bright_black")}


def show(
    prefix: Annotated[Path | None, typer.Argument(metavar="PREFIX", help="A data set.", show_default=False)] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Which document of the data set, or which sample of the run; from 0.")
    ] = 0,
    run: Annotated[Path | None, typer.Option(help="Show what this run.yaml trains on, in place of a data set.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json, or that file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tokens of a document, or of a run's sample as the model gets it, and which of them count in the loss.

    Tokens are told apart by shades, those that count stand on green; before each stretch of them stand the positions and
    the weight in the loss. In a sample each document is by itself. Tokens that are no whole character go by their name.
    """
    from rich.console import Console

    from mega_data.tokenizer import Tokenizer

    if (prefix is None) == (run is None):
        raise ConfigError(
            "mega data show takes a PREFIX or --run, one of them", hint="mega data show data/chat --sample 7"
        )
    named = Tokenizer(tokenizer) if tokenizer else None
    parts = _of_run(run, sample, named) if run else _of_data_set(prefix, sample, named) if prefix else []
    if as_json:
        typer.echo(json.dumps([asdict(part) for part in parts], ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    for part in parts:
        console.print(_heading(part), style="bold")
        for line in _lines(part):
            console.print(line)


def _of_data_set(prefix: Path, number: int, tokenizer: Tokenizer | None) -> list[Part]:
    from mega_data.files.info import read_info
    from mega_data.files.verify import check_tokenizer
    from mega_data.reports.inspect import tokenizer_of
    from mega_data.reports.show import show_document

    info = read_info(prefix)
    if tokenizer is not None and info is not None:
        check_tokenizer(prefix, info, tokenizer)
    return show_document(prefix, number, tokenizer or tokenizer_of(info))


def _of_run(run: Path, number: int, tokenizer: Tokenizer | None) -> list[Part]:
    from mega_data.dataset import build_datasets
    from mega_data.reports.show import show_sample
    from mega_trainer.tokens import run_tokenizer

    config = _config(run)
    tokenizer = tokenizer or run_tokenizer(config.data, config.model.vocab_size)
    eod = tokenizer.eos_id if tokenizer else None
    train, _, _ = build_datasets(
        config.data, seed=config.train.seed, samples=config.samples, eod=eod, tokenizer=tokenizer,
        vision=config.model.vision,
    )  # fmt: skip
    return show_sample(train[number], tokenizer)


def _config(run: Path) -> RunConfig:
    """What a run.yaml says, also where it reads data that no model here trains on."""
    from pydantic import ValidationError

    from mega_common.config import load_yaml
    from mega_data.config import DataConfig
    from mega_trainer.config import RunConfig, resolve

    raw = resolve(load_yaml(run))
    if not DataConfig.parse(raw.get("data") or {}, source=f"{run}: data").kinds & {"bert", "masked", "t5", "pairs"}:
        return RunConfig.parse(raw, source=str(run))
    try:
        return RunConfig.model_validate(raw)
    except ValidationError:  # which `parse` tells
        return RunConfig.parse(raw, source=str(run))


def _heading(part: Part) -> str:
    counted = sum(token.weight > 0 for token in part.tokens)
    return f"{part.name}: {len(part.tokens):,} tokens, {counted:,} count in the loss"


def _lines(part: Part) -> list[Text]:
    """A line for each stretch of tokens of one weight; none for padding, where every token is the same."""
    from rich.text import Text

    if part.name == "padding":
        return []
    lines = []
    for weight, stretch in groupby(part.tokens, key=lambda token: token.weight):
        tokens = list(stretch)
        line = Text(f"{tokens[0].position:>7}-{tokens[-1].position:<7} {weight:>4g}  ", style="cyan")
        for token in tokens:
            line.append(_text(token), style=SHADES[weight > 0][token.position % 2])
        lines.append(line)
    return lines


def _text(token: Token) -> str:
    """On one line, with what would not be seen made visible."""
    if token.text is None:
        return f"{token.id} "
    return token.text.replace("\n", "↵").replace("\r", "␍").replace("\t", "⇥").replace("\x1b", "␛")
