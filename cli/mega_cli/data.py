"""`mega data`: tokenizers, cleaning, tokenization and operations on token files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mega_cli.data_options import Input, JsonKey, MoreInput, Overwrite, TokenizerPath
from mega_cli.data_preprocess import preprocess_command
from mega_cli.data_retrieve import EXAMPLES as RETRIEVE_EXAMPLES
from mega_cli.data_retrieve import retrieve_command
from mega_cli.data_show import show_command
from mega_common.errors import DataError, MegaError
from mega_common.progress_logging import format_number

if TYPE_CHECKING:
    from mega_data.reports.inspect_dataset import DatasetInspection

app = typer.Typer(help="Text to tokens, and what one does with token files.", no_args_is_help=True)

app.command(
    "preprocess",
    epilog="Example: mega data preprocess --input corpus/*.jsonl --tokenizer tok/ --output data/wiki --append-eod",
)(preprocess_command)


@app.command(
    "train-tokenizer",
    epilog="Example: mega data train-tokenizer --input corpus/*.jsonl --vocab-size 32000 --output tok/",
)
def train_tokenizer_command(
    input: Input,
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, at least 257.")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Gets tokenizer.json and tokenizer_config.json.")],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer, which transformers loads too."""
    from mega_data.reading.corpus_sources import find_corpus_sources
    from mega_data.reading.source_readers import iterate_texts
    from mega_data.token_files.dataset_info import reject_input_as_output
    from mega_data.tokenizer import train_tokenizer as run

    inputs = [*input, *(more or [])]
    made = (output / name for name in ("tokenizer.json", "tokenizer_config.json"))
    reject_input_as_output(made, (Path(source.name) for source in find_corpus_sources(inputs, json_key)))
    tokenizer = run(iterate_texts(inputs, json_key), vocab_size, output, overwrite=overwrite)
    typer.echo(f"{output}: {tokenizer.vocab_size:,} tokens")


@app.command(
    "convert-tokenizer",
    epilog="Example: mega data convert-tokenizer llama-2/tokenizer.model --input corpus/*.jsonl --output tok/",
)
def convert_tokenizer_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="*.model, *.tiktoken or tekken*.json.")],
    input: Input,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Gets tokenizer.json and tokenizer_config.json.")],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="For *.tiktoken: what cuts text before it is encoded.")
    ] = None,
    special_token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="For *.tiktoken: a token that comes after those of the file; repeated. The first ends a text.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a tokenizer of SentencePiece, tiktoken or Mistral (tekken) to tokenizer.json.

    The format's own library and the converted tokenizer both encode the first four million characters of the input;
    nothing is written unless all tokens agree.
    """
    from mega_data.reading.source_readers import iterate_texts
    from mega_data.tokenizer_conversion import convert_tokenizer as run

    tokenizer = run(
        file,
        output,
        iterate_texts([*input, *(more or [])], json_key),
        pattern=pattern,
        special_tokens=special_token or (),
        overwrite=overwrite,
    )
    typer.echo(f"{output}: {tokenizer.vocab_size:,} tokens, ended by {tokenizer.eos_token or 'none that is named'}")


@app.command("clean", epilog="Example: mega data clean --input corpus/*.jsonl --config clean.yaml --output clean/")
def clean_command(
    input: Input,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Gets kept/, dropped/, changed/ and summary.json.")],
    more: MoreInput = None,
    config: Annotated[Path | None, typer.Option(help="YAML with the rules; each is on where its key is.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="On top of it.")] = None,
    json_key: JsonKey = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="the usable cores")] = None,
    on_bad_line: Annotated[
        Literal["error", "skip"], typer.Option(help="Stop, or put bad lines with what is dropped and go on.")
    ] = "error",
    overwrite: Overwrite = False,
) -> None:
    """Clean text before it is tokenized: filters of length, language, quality and repetition, personal data,
    duplicates.

    What is read is named as for `mega data preprocess`. Documents that stay are written as JSON lines, with all that
    stood beside their text; those that go, beside them, with rule and reason; summary.json counts both, with samples.

    Rules, in the order they are asked: length, language, gopher_quality, gopher_repetition, c4, pii, decontaminate,
    filter (module:function of your own), duplicates (exact, minhash).

    A run that was ended goes on where it was when it is started again.
    """
    from mega_common.strict_config import apply_overrides, load_yaml_mapping
    from mega_data.cleaning.clean_config import CleanConfig
    from mega_data.cleaning.clean_run import clean_corpus as run

    raw = apply_overrides(load_yaml_mapping(config) if config else {}, changes or [])
    summary = run(
        [*input, *(more or [])],
        CleanConfig.parse(raw, source=str(config or "--set")),
        output,
        json_key=json_key,
        folder=config.parent if config else None,
        workers=workers,
        on_bad_line=on_bad_line,
        overwrite=overwrite,
    )
    typer.echo("\n".join(_cleaned(output, summary)))


def _cleaned(output: Path, summary: dict[str, Any]) -> list[str]:
    read, kept = summary["read"], summary["kept"]
    share = kept["bytes"] / max(1, read["bytes"])
    lines = [
        f"{output}: {kept['documents']:,} of {read['documents']:,} documents stay,"
        f" {format_number(kept['bytes'])}B of {format_number(read['bytes'])}B of text ({share:.1%})"
    ]
    for name, rule in summary["rules"].items():
        if rule["dropped"]["documents"]:
            why = sorted(rule["why"].items(), key=lambda item: -item[1])[:3]
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in why)
            lines.append(f"  {name:<18} {rule['dropped']['documents']:>10,} dropped: {reasons}")
        if rule["changed"]["documents"]:
            found = ", ".join(f"{count:,} {kind}" for kind, count in rule["found"].items())
            lines.append(f"  {name:<18} {rule['changed']['documents']:>10,} changed: {found}")
    return lines


@app.command("inspect", epilog="Example: mega data inspect data/wiki --samples 5")
def inspect_command(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX")],
    tokenizer: TokenizerPath = None,
    samples: Annotated[int, typer.Option(min=0, help="Sequences to show the begin of.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show counts, lengths, the most frequent tokens and decoded samples of a data set."""
    from mega_data.reports.inspect_dataset import inspect_dataset as run
    from mega_data.tokenizer import Tokenizer

    found = run(prefix, Tokenizer(tokenizer) if tokenizer else None, samples=samples)
    typer.echo(json.dumps(_plain(found), indent=1) if as_json else "\n".join(_report(found)))


def _plain(found: DatasetInspection) -> dict[str, Any]:
    return {**asdict(found), "info": found.info.model_dump() if found.info else None}


def _report(found: DatasetInspection) -> list[str]:
    lines = [
        f"{found.prefix}: {found.documents:,} documents, {found.sequences:,} sequences, {found.tokens:,} tokens"
        f" ({found.dtype}, {format_number(found.bytes)}B), {found.distinct_tokens:,} different ones"
    ]
    if found.info and found.info.tokenizer:
        end = "ended by a token" if found.info.append_eod else "not ended by a token"
        lines.append(f"made with {found.info.tokenizer.path}, each document {end}")
    lines += ["", "lengths in tokens: " + ", ".join(f"{name} {value:,}" for name, value in found.lengths.items())]
    widest = max(found.histogram.values(), default=1)
    for low, count in found.histogram.items():
        lines.append(f"  {low:>9,} or more  {count:>12,}  {'#' * -(-40 * count // widest)}")
    lines += ["", "most frequent tokens:"]
    for token in found.frequent:
        text = "" if token.text is None else repr(token.text)
        lines.append(f"  {token.id:>9}  {token.count:>12,}  {token.count / found.tokens:6.2%}  {text}")
    for sample in found.samples:
        shown = repr(sample.text) if sample.text is not None else " ".join(map(str, sample.ids))
        lines += ["", f"sequence {sample.sequence:,} ({sample.length:,} tokens): {shown}"]
    return lines


app.command(
    "show",
    epilog="Examples: mega data show data/chat --sample 7\n\nmega data show --run run.yaml --sample 7 --json | jq",
)(show_command)


app.command("retrieve", epilog=RETRIEVE_EXAMPLES)(retrieve_command)


@app.command("report", epilog="Example: mega data report data/wiki data/code clean/ --output report.html")
def report_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PREFIX|FOLDER...")],
    output: Annotated[Path, typer.Option(help="The page; its JSON gets the same name.")] = Path("report.html"),
    tokenizer: TokenizerPath = None,
    samples: Annotated[int, typer.Option(min=0, help="Sequences to show of each data set.")] = 4,
) -> None:
    """Write a page about data sets: lengths, tokens per byte, languages, duplicates, repetition, samples.

    Of a folder that `mega data clean` wrote: what was dropped and why. The page is one file that asks for no other, and
    REPORT.json beside it has all that it shows.
    """
    from mega_data.reports.html_report import write_html_report as run
    from mega_data.tokenizer import Tokenizer

    if output.suffix.lower() not in (".html", ".htm"):
        raise DataError(f"{output}: the page is HTML", hint=f"--output {output}.html")
    run(paths, output, tokenizer=Tokenizer(tokenizer) if tokenizer else None, samples=samples)
    typer.echo(f"{output}: written, and {output.with_suffix('.json')}")


@app.command("merge", epilog="Example: mega data merge data/wiki data/code --output data/all")
def merge_command(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...")],
    output: Annotated[Path, typer.Option(metavar="PREFIX")],
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Merge data sets of different tokenizers or end tokens too.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Merge several data sets into one."""
    from mega_data.token_files.merge_datasets import merge_datasets as run

    info = run(prefixes, output, mixed=mixed, overwrite=overwrite)
    typer.echo(f"{output}: {info.documents:,} documents, {info.tokens:,} tokens")


@app.command("shuffle", epilog="Example: mega data shuffle data/wiki --output data/wiki-shuffled --seed 1")
def shuffle_command(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.info.")],
    seed: Annotated[int, typer.Option(min=0, help="What draws the order.")] = 1234,
    overwrite: Overwrite = False,
) -> None:
    """Write a data set with its documents in a random order given by a seed.

    For data larger than memory: it needs room on disk for the data twice, beside the output, while it runs.

    A run shuffles documents as it reads them (data.order: shuffled). On disks that are slow to seek it is faster to
    shuffle once, and to read the result from begin to end with data.order: stable.
    """
    from mega_data.token_files.shuffle_documents import shuffle_documents as run

    info = run(prefix, output, seed=seed, overwrite=overwrite)
    typer.echo(f"{output}: {info.documents:,} documents, {info.tokens:,} tokens")


@app.command("verify", epilog="Example: mega data verify data/wiki data/code --tokenizer tok/")
def verify_command(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...")], tokenizer: TokenizerPath = None
) -> None:
    """Check structure, checksums and token ids of data sets, and that they belong to a tokenizer."""
    from mega_data.token_files.verify_dataset import verify_dataset as run
    from mega_data.tokenizer import Tokenizer

    loaded = Tokenizer(tokenizer) if tokenizer else None
    wrong = []
    for prefix in prefixes:
        try:
            info = run(prefix, loaded)
        except MegaError as error:
            wrong.append(str(error))
        else:
            typer.echo(f"{prefix}: whole" + ("" if info else ", as far as can be told without its .info"))
    if wrong:
        raise DataError("\n".join(wrong))
