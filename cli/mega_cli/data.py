"""`mega data`: tokenizers, cleaning, tokenization and operations on token files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mega_cli.data_preprocess import HELP as PREPROCESS_HELP
from mega_cli.data_preprocess import preprocess_command
from mega_cli.data_retrieve import EXAMPLES as RETRIEVE_EXAMPLES
from mega_cli.data_retrieve import retrieve_command
from mega_cli.data_show import show_command
from mega_cli.model_options import Input, JsonKey, MoreInput, Overwrite, TokenizerPath
from mega_common.errors import ConfigError, DataError, MegaError
from mega_common.progress_logging import format_with_decimal_unit

if TYPE_CHECKING:
    from mega_data.reports.inspect_dataset import DatasetInspection

app = typer.Typer(help="Clean and tokenize text; inspect, merge, shuffle and verify token files.", no_args_is_help=True)

app.command(
    "preprocess",
    help=PREPROCESS_HELP,
    epilog="Example: mega data preprocess --input corpus/*.jsonl --tokenizer tok/ --output data/wiki --append-eod",
)(preprocess_command)


@app.command(
    "train-tokenizer",
    epilog="Example: mega data train-tokenizer --input corpus/*.jsonl --vocab-size 32000 --output tok/",
)
def train_tokenizer_command(
    input: Input,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary, at least 257, e.g. 32000.")],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for tokenizer.json and tokenizer_config.json.")
    ],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer in the format of HuggingFace (tokenizer.json)."""
    from mega_data.reading.corpus_sources import find_corpus_sources
    from mega_data.reading.source_readers import iterate_document_texts
    from mega_data.token_files.dataset_info import reject_input_as_output
    from mega_data.tokenizer import train_tokenizer as run

    inputs = [*input, *(more or [])]
    outputs = (output / name for name in ("tokenizer.json", "tokenizer_config.json"))
    reject_input_as_output(outputs, (Path(source.name) for source in find_corpus_sources(inputs, json_key)))
    tokenizer = run(iterate_document_texts(inputs, json_key), vocab_size, output, overwrite=overwrite)
    typer.echo(f"{output}: {tokenizer.vocab_size:,} tokens")


@app.command(
    "convert-tokenizer",
    epilog="Example: mega data convert-tokenizer llama-2/tokenizer.model --input corpus/*.jsonl --output tok/",
)
def convert_tokenizer_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Tokenizer to convert: *.model (SentencePiece), *.tiktoken or tekken*.json (Mistral)."
        ),
    ],
    input: Input,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for tokenizer.json and tokenizer_config.json.")
    ],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    pattern: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Regular expression that splits text before encoding; for *.tiktoken."),
    ] = None,
    special_token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            help="Special token to append to the vocabulary, e.g. '<|endoftext|>'; for *.tiktoken. The first is the end token. Repeatable.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a SentencePiece, tiktoken or Mistral (tekken) tokenizer to tokenizer.json, and compare both on texts.

    The original library and the converted tokenizer both encode the first four million characters of the input. The
    result is written only if all tokens agree.
    """
    from mega_data.reading.source_readers import iterate_document_texts
    from mega_data.tokenizer_conversion import convert_tokenizer as run

    tokenizer = run(
        file,
        output,
        iterate_document_texts([*input, *(more or [])], json_key),
        pattern=pattern,
        special_tokens=special_token or (),
        overwrite=overwrite,
    )
    typer.echo(f"{output}: {tokenizer.vocab_size:,} tokens, end token {tokenizer.eos_token or 'not defined'}")


@app.command("clean", epilog="Example: mega data clean --input corpus/*.jsonl --config clean.yaml --output clean/")
def clean_command(
    input: Input,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for kept/, dropped/, changed/ and summary.json.")
    ],
    more: MoreInput = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the rules; a rule is active if its key is present.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. length.min_words=50. Repeatable."),
    ] = None,
    json_key: JsonKey = "text",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="the usable cores")
    ] = None,
    on_bad_line: Annotated[
        Literal["error", "skip"],
        typer.Option(help="On a line that cannot be read: stop (error), or write it to dropped/ and continue (skip)."),
    ] = "error",
    overwrite: Overwrite = False,
) -> None:
    """Clean the text of a corpus before tokenization.
    Filter by length, language, quality and repetition; remove personal data and duplicates.

    Inputs are named as for `mega data preprocess`. Kept documents are written to kept/ as JSON lines with all keys of the
    input record, dropped documents to dropped/ with the rule and the reason; summary.json has counts and samples.

    Rules, in the order of evaluation: length, language, gopher_quality, gopher_repetition, c4, pii, decontaminate,
    filter (your own module:function), duplicates (exact, minhash).

    After an interruption, the same command resumes.
    """
    from mega_common.strict_config import apply_config_overrides, load_yaml_mapping
    from mega_data.cleaning.clean_config import CleanConfig
    from mega_data.cleaning.clean_run import clean_corpus as run

    if config is None and not changes:
        raise ConfigError("mega data clean requires rules", hint="--config clean.yaml, or --set length.min_words=50")
    raw = apply_config_overrides(load_yaml_mapping(config) if config else {}, changes or [])
    summary = run(
        [*input, *(more or [])],
        CleanConfig.parse(raw, source=f"the rules in {config}" if config else "the rules of --set"),
        output,
        json_key=json_key,
        folder=config.parent if config else None,
        workers=workers,
        on_bad_line=on_bad_line,
        overwrite=overwrite,
    )
    typer.echo("\n".join(_format_cleaning_summary(output, summary)))


def _format_cleaning_summary(output: Path, summary: dict[str, Any]) -> list[str]:
    read, kept = summary["read"], summary["kept"]
    share = kept["bytes"] / max(1, read["bytes"])
    lines = [
        f"{output}: {kept['documents']:,} of {read['documents']:,} documents kept,"
        f" {format_with_decimal_unit(kept['bytes'])}B of {format_with_decimal_unit(read['bytes'])}B of text ({share:.1%})"
    ]
    for name, rule in summary["rules"].items():
        if rule["dropped"]["documents"]:
            frequent = sorted(rule["why"].items(), key=lambda item: -item[1])[:3]
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in frequent)
            lines.append(f"  {name:<18} {rule['dropped']['documents']:>10,} dropped: {reasons}")
        if rule["changed"]["documents"]:
            found = ", ".join(f"{count:,} {kind}" for kind, count in rule["found"].items())
            lines.append(f"  {name:<18} {rule['changed']['documents']:>10,} changed: {found}")
    return lines


@app.command("inspect", epilog="Example: mega data inspect data/wiki --samples 5")
def inspect_command(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX")],
    tokenizer: TokenizerPath = None,
    samples: Annotated[int, typer.Option(min=0, help="Sequences whose first tokens are printed.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print counts, lengths, the most frequent tokens and decoded samples of a data set."""
    from mega_data.reports.inspect_dataset import inspect_dataset as run
    from mega_data.tokenizer import Tokenizer

    found = run(prefix, Tokenizer(tokenizer) if tokenizer else None, samples=samples)
    typer.echo(json.dumps(_inspection_to_json(found), indent=1) if as_json else "\n".join(_format_inspection(found)))


def _inspection_to_json(found: DatasetInspection) -> dict[str, Any]:
    return {**asdict(found), "info": found.info.model_dump() if found.info else None}


def _format_inspection(found: DatasetInspection) -> list[str]:
    lines = [
        f"{found.prefix}: {found.documents:,} documents, {found.sequences:,} sequences, {found.tokens:,} tokens"
        f" ({found.dtype}, {format_with_decimal_unit(found.bytes)}B), {found.distinct_tokens:,} distinct tokens"
    ]
    if found.info and found.info.tokenizer:
        end = "with" if found.info.append_eod else "without"
        lines.append(f"tokenizer {found.info.tokenizer.path}, documents {end} an end token")
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
    output: Annotated[
        Path, typer.Option(help="HTML file to write, e.g. report.html; the same data are written to report.json.")
    ] = Path("report.html"),
    tokenizer: TokenizerPath = None,
    samples: Annotated[int, typer.Option(min=0, help="Sample sequences of each data set in the page.")] = 4,
) -> None:
    """Write an HTML page about data sets: lengths, tokens per byte, languages, duplicates, repetition, samples.

    For an output folder of `mega data clean`, the page shows dropped documents by reason. The page is self-contained.
    """
    from mega_data.reports.html_report import write_dataset_html_report as run
    from mega_data.tokenizer import Tokenizer

    if output.suffix.lower() not in (".html", ".htm"):
        raise DataError(
            f"--output {output}: the file name must end in .html", hint=f"--output {output.with_suffix('.html')}"
        )
    run(paths, output, tokenizer=Tokenizer(tokenizer) if tokenizer else None, samples=samples)
    typer.echo(f"wrote {output} and {output.with_suffix('.json')}")


@app.command("merge", epilog="Example: mega data merge data/wiki data/code --output data/all")
def merge_command(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.info.")],
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Allow data sets with different tokenizers or end tokens.")
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
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the order.")] = 1234,
    overwrite: Overwrite = False,
) -> None:
    """Write a copy of a data set with its documents in random order.

    Works for data larger than memory, and needs disk space for two temporary copies of the data next to the output.

    Training shuffles documents when it reads them (data.order: shuffled). On disks with slow random access it is faster
    to shuffle once with this command and to read sequentially with data.order: stable.
    """
    from mega_data.sampling.shuffle_documents import shuffle_documents as run

    info = run(prefix, output, seed=seed, overwrite=overwrite)
    typer.echo(f"{output}: {info.documents:,} documents, {info.tokens:,} tokens")


@app.command("verify", epilog="Example: mega data verify data/wiki data/code --tokenizer tok/")
def verify_command(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...")], tokenizer: TokenizerPath = None
) -> None:
    """Check the structure, checksums and token ids of data sets, and with --tokenizer that this tokenizer made them."""
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
            typer.echo(f"{prefix}: ok" + ("" if info else " (no .info file: checksums and tokenizer are not checked)"))
    if wrong:
        raise DataError("\n".join(wrong))
