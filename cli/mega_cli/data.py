"""`mega data`: text to tokens, and what one does with token files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mega_cli.data_show import show
from mega_common.errors import ConfigError, DataError, MegaError
from mega_common.log import human

if TYPE_CHECKING:
    from mega_data.chat.prepare import ChatOptions
    from mega_data.inspect import Inspection

CHAT = "Conversations"

app = typer.Typer(help="Text to tokens, and what one does with token files.", no_args_is_help=True)

# An option of click takes one value, and a shell expands a glob to many: `--input a b c` reads a as the option's and
# the others as arguments, which are inputs as well.
Input = Annotated[
    list[str],
    typer.Option(
        "--input", "-i", metavar="FILE|GLOB|FOLDER|hf:NAME|-...", help="What to read; several, or repeated; - is stdin."
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


@app.command(
    epilog="Example: mega data preprocess --input corpus/*.jsonl --tokenizer tok/ --output data/wiki --append-eod"
)
def preprocess(
    input: Input,
    tokenizer: Annotated[Path, typer.Option(help="Folder with tokenizer.json, or that file.")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.info.")],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End each document with the end token.")] = False,
    parse_special_tokens: ParseSpecialTokens = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Encoding threads, or parts made at once.", show_default="the usable cores"),
    ] = None,
    on_bad_line: OnBadLine = "error",
    overwrite: Overwrite = False,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="Make each sentence a sequence, as BERT's data has it.")
    ] = False,
    language: Annotated[
        str | None, typer.Option(help="Of the text, by whose rules sentences end.", show_default="en")
    ] = None,
    kind: Annotated[
        Literal["text", "conversations", "pairs"],
        typer.Option(
            help="What a document is: a text, a conversation, or a chosen and a rejected one.", rich_help_panel=CHAT
        ),
    ] = "text",
    loss_on: Annotated[
        Literal["answers", "last", "all"] | None,
        typer.Option(
            help="What of a conversation is learned: each answer, the last, or all of it.",
            rich_help_panel=CHAT,
            show_default="answers",
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens to keep of a conversation, from its begin.", rich_help_panel=CHAT)
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A chat template in Jinja, in place of the tokenizer's.", rich_help_panel=CHAT
        ),
    ] = None,
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="What the template is given, as YAML; may be repeated.", rich_help_panel=CHAT
        ),
    ] = None,
    turn_weights: Annotated[
        bool,
        typer.Option(
            "--turn-weights",
            help="Answers may weigh other than 0 or 1: multiples of 0.01 up to 2.55.",
            rich_help_panel=CHAT,
        ),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Read only the I-th (from 1) of N shares of the input, as one of N jobs."),
    ] = None,
    engine: Annotated[
        Literal["threads", "processes", "ray"],
        typer.Option(help="Threads of one process; or parts, by processes of this machine or on a Ray cluster."),
    ] = "threads",
    shards: Annotated[
        int | None,
        typer.Option(min=1, help="Number of parts, with an engine that makes parts.", show_default="one for 256 MiB"),
    ] = None,
    encoder: Annotated[
        Literal["auto", "tokenizers", "fastokens"],
        typer.Option(help="The library that encodes; auto takes fastokens where it is installed and agrees."),
    ] = "auto",
) -> None:
    """Tokenize text or conversations into a data set for training.

    By its name, whatever its case, a file is read as JSON lines (.jsonl, .ndjson), JSON (.json: lines, an array, objects
    over many lines), CSV with a header (.csv, .tsv) or Parquet (.parquet). Any other is JSON lines, JSON or Parquet if
    its begin says so, and else text, a document a file; so is a .json in a folder. gzip, bzip2, xz and zstd are unpacked.
    HuggingFace data sets are hf:NAME, with :CONFIG and @SPLIT after it where needed.

    A folder is its files but hidden ones, README and licences beside data files, other splits than train, links to
    folders, data sets of mega's own and what is no UTF-8 text: what is left out is named at the end.

    Conversations are records with messages (OpenAI's form), conversations (ShareGPT's), or prompt with completion or
    response; pairs have chosen and rejected. tools may stand beside them. The tokenizer's chat template makes text of
    them, and says what the answers are, if by {% generation %}; else they are what each adds to the text before it.

    A run that was ended goes on where it was when it is started again.

    With --shard, N jobs on any machines that see the same files make a part each, PREFIX.shard-I-of-N, and whichever is
    last joins them to the data set that one run would have made. A part is begun after a share of the input's bytes: at
    a line of JSON lines, at a row group of Parquet, at a file of any other kind or packed.

    --engine processes makes parts on this machine, for when it has more cores than one process keeps busy (some 16);
    --engine ray on the Ray cluster of RAY_ADDRESS, whose machines see the same files. A part that cannot be made is told
    at the end, when the others are made; the same command then makes only what is missing.

    The package fastokens encodes the same tokens many times as fast. It is compared with tokenizers on the begin of the
    corpus and a two-hundredth of the rest; at the first difference the work begins again without it.
    """
    from mega_data.preprocess import preprocess as run
    from mega_data.shards import Shard

    if shard is not None and engine != "threads":
        raise ConfigError("--shard and --engine: one job makes one part, an engine makes all", hint="give one of them")
    if shards is not None and engine == "threads":
        raise ConfigError(
            "--shards: threads make no parts", hint="--engine processes, or --shard I/N for one of N jobs"
        )
    if language is not None and not split_sentences:
        raise ConfigError("--language: says where sentences end", hint="give --split-sentences too")
    chat = _chat_options(kind, loss_on, max_length, chat_template, template_option, turn_weights)
    if chat is not None and (append_eod or parse_special_tokens or split_sentences or json_key != "text"):
        raise ConfigError(
            f"--kind {kind}: takes no --append-eod, --parse-special-tokens, --split-sentences or --json-key",
            hint="a conversation ends as its template says, and is read from a whole record",
        )

    info = run(
        [*input, *(more or [])],
        tokenizer,
        output,
        json_key=json_key,
        append_eod=append_eod,
        parse_special_tokens=parse_special_tokens,
        workers=workers,
        on_bad_line=on_bad_line,
        overwrite=overwrite,
        chat=chat,
        shard=Shard.parse(shard) if shard else None,
        engine=engine,
        shards=shards,
        encoder=encoder,
        sentences=(language or "en") if split_sentences else None,
    )
    made = f"{output}, part {info.shard.number} of {info.shard.of}" if info.shard else f"{output}"
    typer.echo(f"{made}: {info.documents:,} documents, {info.tokens:,} tokens, {info.text_bytes:,} bytes of text")


def _chat_options(
    kind: Literal["text", "conversations", "pairs"],
    loss_on: Literal["answers", "last", "all"] | None,
    max_length: int | None,
    chat_template: Path | None,
    template_option: list[str] | None,
    turn_weights: bool,
) -> ChatOptions | None:
    """The options that belong to conversations; None for text, which takes none of them."""
    import yaml

    from mega_data.chat.prepare import ChatOptions

    if kind == "text":
        if loss_on or max_length or chat_template or template_option or turn_weights:
            raise ConfigError(
                "--loss-on, --max-length, --chat-template, --template-option and --turn-weights are for conversations",
                hint="say --kind conversations or --kind pairs",
            )
        return None
    options = {}
    for one in template_option or []:
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise ConfigError(f"--template-option {one}: not of the form KEY=VALUE", hint="enable_thinking=false")
        options[key] = yaml.safe_load(value)
    return ChatOptions(
        kind=kind,
        loss_on=loss_on or "answers",
        max_length=max_length,
        template=chat_template,
        template_options=options,
        turn_weights=turn_weights,
    )


@app.command(epilog="Example: mega data train-tokenizer --input corpus/*.jsonl --vocab-size 32000 --output tok/")
def train_tokenizer(
    input: Input,
    vocab_size: Annotated[int, typer.Option(help="Number of tokens, at least 257.")],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Gets tokenizer.json and tokenizer_config.json.")],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer, which transformers loads too."""
    from mega_data.info import refuse_inputs
    from mega_data.readers import texts
    from mega_data.sources import find_sources
    from mega_data.tokenizer import train_tokenizer as run

    inputs = [*input, *(more or [])]
    made = (output / name for name in ("tokenizer.json", "tokenizer_config.json"))
    refuse_inputs(made, (Path(source.name) for source in find_sources(inputs, json_key)))
    tokenizer = run(texts(inputs, json_key), vocab_size, output, overwrite=overwrite)
    typer.echo(f"{output}: {tokenizer.vocab_size:,} tokens")


@app.command(epilog="Example: mega data clean --input corpus/*.jsonl --config clean.yaml --output clean/")
def clean(
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
    """Clean text before it is tokenized: rules on length, language, quality and repetition, personal data, duplicates.

    What is read is named as for `mega data preprocess`. Documents that stay are written as JSON lines, with all that
    stood beside their text; those that go, beside them, with rule and reason; summary.json counts both, with samples.

    Rules, in the order they are asked: length, language, gopher_quality, gopher_repetition, c4, pii, decontaminate,
    filter (module:function of your own), duplicates (exact, minhash).

    A run that was ended goes on where it was when it is started again.
    """
    from mega_common.config import apply_overrides, load_yaml
    from mega_data.cleaning.config import CleanConfig
    from mega_data.cleaning.run import clean as run

    raw = apply_overrides(load_yaml(config) if config else {}, changes or [])
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
        f" {human(kept['bytes'])}B of {human(read['bytes'])}B of text ({share:.1%})"
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


@app.command(epilog="Example: mega data inspect data/wiki --samples 5")
def inspect(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX")],
    tokenizer: TokenizerPath = None,
    samples: Annotated[int, typer.Option(min=0, help="Sequences to show the begin of.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show counts, lengths, the most frequent tokens and decoded samples of a data set."""
    from mega_data.inspect import inspect as run
    from mega_data.tokenizer import Tokenizer

    found = run(prefix, Tokenizer(tokenizer) if tokenizer else None, samples=samples)
    typer.echo(json.dumps(_plain(found), indent=1) if as_json else "\n".join(_report(found)))


def _plain(found: Inspection) -> dict[str, Any]:
    return {**asdict(found), "info": found.info.model_dump() if found.info else None}


def _report(found: Inspection) -> list[str]:
    lines = [
        f"{found.prefix}: {found.documents:,} documents, {found.sequences:,} sequences, {found.tokens:,} tokens"
        f" ({found.dtype}, {human(found.bytes)}B), {found.distinct_tokens:,} different ones"
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
    epilog="Examples: mega data show data/chat --sample 7\n\nmega data show --run run.yaml --sample 7 --json | jq"
)(show)


@app.command(epilog="Example: mega data report data/wiki data/code clean/ --output report.html")
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="PREFIX|FOLDER...")],
    output: Annotated[Path, typer.Option(help="The page; its JSON gets the same name.")] = Path("report.html"),
    tokenizer: TokenizerPath = None,
    samples: Annotated[int, typer.Option(min=0, help="Sequences to show of each data set.")] = 4,
) -> None:
    """Write a page on data sets: lengths, tokens per byte, languages, duplicates, what repeats, samples.

    Of a folder that `mega data clean` wrote: what was dropped and why. The page is one file that asks for no other, and
    REPORT.json beside it has all that it shows.
    """
    from mega_data.report import report as run
    from mega_data.tokenizer import Tokenizer

    if output.suffix.lower() not in (".html", ".htm"):
        raise DataError(f"{output}: the page is HTML", hint=f"--output {output}.html")
    run(paths, output, tokenizer=Tokenizer(tokenizer) if tokenizer else None, samples=samples)
    typer.echo(f"{output}: written, and {output.with_suffix('.json')}")


@app.command(epilog="Example: mega data merge data/wiki data/code --output data/all")
def merge(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...")],
    output: Annotated[Path, typer.Option(metavar="PREFIX")],
    mixed: Annotated[
        bool, typer.Option("--mixed", help="Merge data sets of different tokenizers or end tokens too.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Put several data sets together as one."""
    from mega_data.merge import merge as run

    info = run(prefixes, output, mixed=mixed, overwrite=overwrite)
    typer.echo(f"{output}: {info.documents:,} documents, {info.tokens:,} tokens")


@app.command(epilog="Example: mega data shuffle data/wiki --output data/wiki-shuffled --seed 1")
def shuffle(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.info.")],
    seed: Annotated[int, typer.Option(min=0, help="What draws the order.")] = 1234,
    overwrite: Overwrite = False,
) -> None:
    """Write a data set with its documents in another order, drawn by a seed.

    For data larger than memory: it needs room on disk for the data twice, beside the output, while it runs.

    A run shuffles documents as it reads them (data.order: shuffled). On disks that are slow to seek it is faster to
    shuffle once, and to read the result from begin to end with data.order: stable.
    """
    from mega_data.shuffle import shuffle as run

    info = run(prefix, output, seed=seed, overwrite=overwrite)
    typer.echo(f"{output}: {info.documents:,} documents, {info.tokens:,} tokens")


@app.command(epilog="Example: mega data verify data/wiki data/code --tokenizer tok/")
def verify(
    prefixes: Annotated[list[Path], typer.Argument(metavar="PREFIX...")], tokenizer: TokenizerPath = None
) -> None:
    """Check structure, checksums and token ids of data sets, and that a tokenizer is theirs."""
    from mega_data.tokenizer import Tokenizer
    from mega_data.verify import verify as run

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
