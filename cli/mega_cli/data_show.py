"""`mega data show`: training samples token by token, with their loss mask."""

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

    from mega_data.data_config import DataConfig
    from mega_data.reports.show_tokens import DisplayedPart, DisplayedToken
    from mega_data.tokenizer import Tokenizer
    from mega_trainer.config.run_config import RunConfig

SHADES = {True: ("black on green", "black on bright_green"), False: ("default", "bright_black")}


def show_command(
    prefix: Annotated[
        Path | None,
        typer.Argument(metavar="PREFIX|RUN", help="Data set or run.yaml to show.", show_default=False),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Number of the document in the data set, or of the sample in the run; from 0.")
    ] = 0,
    run: Annotated[
        Path | None, typer.Option(help="Show a training sample of this run.yaml instead of a document.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json, or that file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the tokens of a document, or of a training sample as the model receives it, with their loss mask.

    Adjacent tokens have alternating shades; tokens with loss have a green background. Each line has the positions and the
    loss weight of its tokens. A sample is printed document by document. Tokens that are not whole characters are printed
    by their name in the vocabulary.

    Raw data of a run is tokenized into its cache first, and the form of its records is printed.
    """
    from rich.console import Console

    from mega_data.tokenizer import Tokenizer

    if prefix is not None and run is None and prefix.suffix in (".yaml", ".yml"):
        prefix, run = None, prefix
    if (prefix is None) == (run is None):
        raise ConfigError(
            f"mega data show requires PREFIX or --run, but {'both are' if run else 'neither is'} given",
            hint="mega data show data/chat --sample 7, or mega data show --run run.yaml",
        )
    named = Tokenizer(tokenizer) if tokenizer else None
    config = _load_run_config(run) if run else None
    parts = _of_run(config, sample, named) if config else _of_data_set(prefix, sample, named) if prefix else []
    if as_json:
        typer.echo(json.dumps([asdict(part) for part in parts], ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    for note in _describe_raw_data(config.data) if config else []:
        console.print(note)
    for part in parts:
        console.print(_heading(part), style="bold")
        for line in _format_tokens(part):
            console.print(line)


def _of_data_set(prefix: Path, number: int, tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    from mega_data.reports.inspect_dataset import load_original_tokenizer
    from mega_data.reports.show_tokens import split_document_for_display
    from mega_data.token_files.dataset_info import read_dataset_info
    from mega_data.token_files.verify_dataset import check_dataset_tokenizer

    info = read_dataset_info(prefix)
    if tokenizer is not None and info is not None:
        check_dataset_tokenizer(prefix, info, tokenizer)
    return split_document_for_display(prefix, number, tokenizer or load_original_tokenizer(info))


def _of_run(config: RunConfig, number: int, tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    from mega_data.blended_dataset import build_blended_datasets
    from mega_data.reports.show_tokens import split_sample_for_display
    from mega_trainer.data.data_check import find_run_tokenizer

    tokenizer = tokenizer or find_run_tokenizer(config.data, config.model.vocab_size)
    eod = tokenizer.eos_id if tokenizer else None
    train, _, _ = build_blended_datasets(
        config.data, seed=config.train.seed, samples=config.samples_per_split, eod=eod, tokenizer=tokenizer,
        vision=config.model.vision, added_kinds=config.extension_sample_builders,
    )  # fmt: skip
    return split_sample_for_display(train[number], tokenizer)


def _describe_raw_data(data: DataConfig) -> list[str]:
    """Return a line for each raw data set of a run: the form of its records, and its token files."""
    from mega_data.preprocessing.token_cache import read_first_record, tokenize_raw_source
    from mega_data.reading.corpus_sources import find_corpus_sources
    from mega_data.token_files.dataset_info import read_dataset_info

    lines = []
    for source in data.raw_sources:
        prefix = tokenize_raw_source(source, data)
        info = read_dataset_info(prefix)
        form = read_first_record(find_corpus_sources([source.input_name])).form
        columns = ", ".join(f"{role}: {column}" for role, column in source.map.items())
        form = f"columns {{{columns}}}" if columns else form
        if info is not None:
            lines.append(
                f"{source.input_name}: {form}; {info.documents:,} documents, {info.tokens:,} tokens in "
                f"{'the first block, ' if data.is_streamed(source) else ''}{prefix}"
            )
    return lines


def _load_run_config(run: Path) -> RunConfig:
    """Return the configuration of a run.yaml, also if no model is configured for its data."""
    from pydantic import ValidationError

    from mega_common.errors import ConfigError
    from mega_common.strict_config import load_yaml_mapping
    from mega_data.data_config import DataConfig
    from mega_data.raw_data_config import LABELED_KINDS
    from mega_trainer.config.run_config import RunConfig, resolve_run_config

    raw = resolve_run_config(load_yaml_mapping(run))
    kinds = DataConfig.parse(raw.get("data") or {}, source=f"{run}: data").dataset_kinds
    if "prompts" in kinds:
        hint = "read the answers that a run samples in the folder rollouts of its output"
        raise ConfigError("mega data show is not supported with data.kind = prompts", hint=hint)
    if not kinds & {"bert", "masked", "t5", "pairs", *LABELED_KINDS}:
        return RunConfig.parse(raw, source=str(run))
    try:
        return RunConfig.model_validate(raw)
    except ValidationError:  # `parse` reports it with hints
        return RunConfig.parse(raw, source=str(run))


def _heading(part: DisplayedPart) -> str:
    counted = sum(token.weight > 0 for token in part.tokens)
    return f"{part.name}: {len(part.tokens):,} tokens, {counted:,} count in the loss"


def _format_tokens(part: DisplayedPart) -> list[Text]:
    """Return a line for each stretch of tokens with the same weight; none for padding."""
    from rich.text import Text

    if part.name == "padding":
        return []
    lines = []
    for weight, stretch in groupby(part.tokens, key=lambda token: token.weight):
        tokens = list(stretch)
        line = Text(f"{tokens[0].position:>7}-{tokens[-1].position:<7} {weight:>4g}  ", style="cyan")
        for token in tokens:
            line.append(_escape_text(token), style=SHADES[weight > 0][token.position % 2])
        lines.append(line)
    return lines


def _escape_text(token: DisplayedToken) -> str:
    """Return a text on one line, with invisible characters escaped."""
    if token.text is None:
        return f"{token.id} "
    return token.text.replace("\n", "↵").replace("\r", "␍").replace("\t", "⇥").replace("\x1b", "␛")
