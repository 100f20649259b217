"""`mega data preprocess`: text or conversations to token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega_cli.model_options import (
    Input,
    JsonKey,
    MoreInput,
    OnBadLine,
    Overwrite,
    ParseSpecialTokens,
    parse_key_values,
)
from mega_common.errors import ConfigError

if TYPE_CHECKING:
    from mega_common.vision_config import VisionConfig
    from mega_data.chat.chat_preparation import ChatOptions
    from mega_data.images.image_preprocessing import ImageOptions

PreprocessKind = Literal["text", "conversations", "pairs", "labels", "token_labels", "groups"]
CHAT = "Conversations"  # panel of the help
HELP = """Tokenize text or conversations into a data set for training.

Input formats, by file name: JSON lines (.jsonl, .ndjson), JSON (.json: lines, an array, or objects over several
lines), CSV with a header (.csv, .tsv), Parquet (.parquet). The format of any other file, and of .json files in a
folder, is detected from its content; files in no known format are plain text, one document per file. gzip, bzip2, xz
and zstd are decompressed. HuggingFace data sets are hf:NAME, hf:NAME:CONFIG or hf:NAME@SPLIT. URLs of object stores
are supported, e.g. s3://bucket/folder/*.jsonl.

From a folder, all files are read except hidden files, README and license files next to data files, splits other than
train, symbolic links to folders, token data sets and files that are not UTF-8 text. Skipped files are listed at the
end.

Conversations are records with messages (OpenAI), conversations (ShareGPT), prompt with completion or response, or
instruction with output (Alpaca). Preference pairs have chosen and rejected, or completion and label (KTO). All may
have tools. The tokenizer's chat template renders them. Its {% generation %} blocks mark assistant turns; without
them, an assistant turn is the text that its message adds. Records that the template does not render completely are
rejected.

With --images, records are in LLaVA's format: image (or images) next to conversations or messages, and <image> in the
text. Input may also be webdataset shards (.tar: an image and a .json record or a .txt caption of the same name), or
tables that contain the images. PREFIX.images stores the locations of the images. For Gemma 3: --image-tokens 256
--image-token '<image_soft_token>' --image-text $'\\n\\n<start_of_image><image_soft_token><end_of_image>\\n\\n'. For
LLaVA-NeXT, whose tokens per image depend on its size: --image-model FOLDER.

After an interruption, the same command resumes. Output for an object store is built in ~/.cache/mega and removed
from there after the upload.

With --shard, each of N jobs, on any machines with access to the same files, writes a part PREFIX.shard-I-of-N; the
last job joins the parts into the data set that a single job would write. Parts are split by input bytes: at lines of
JSON lines, at row groups of Parquet, and between files for other formats and compressed files.

--engine processes makes the parts on this machine, for more than about 16 cores; --engine ray makes them on the Ray
cluster at RAY_ADDRESS. Failed parts are reported when all others are complete; re-running the command makes only the
missing parts.

The package fastokens gives the same tokens several times faster. Its output is compared with the tokenizers library
on the first documents and on 0.5 % of the rest; at the first difference the job restarts without it.
"""


def preprocess_command(
    input: Input,
    tokenizer: Annotated[Path, typer.Option(help="Folder with tokenizer.json, or that file.")],
    output: Annotated[
        Path,
        typer.Option(
            metavar="PREFIX",
            help="Writes PREFIX.bin, PREFIX.idx and PREFIX.info, e.g. data/wiki or s3://bucket/wiki.",
        ),
    ],
    more: MoreInput = None,
    json_key: JsonKey = "text",
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="Append the end-of-document token to each document.")
    ] = False,
    parse_special_tokens: ParseSpecialTokens = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Encoding threads; with --engine processes, parallel processes.",
            show_default="the usable cores",
        ),
    ] = None,
    on_bad_line: OnBadLine = "error",
    overwrite: Overwrite = False,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="Store each sentence as a sequence, for BERT.")
    ] = False,
    language: Annotated[
        str | None,
        typer.Option(help="Language whose rules split sentences, e.g. de; with --split-sentences.", show_default="en"),
    ] = None,
    kind: Annotated[
        PreprocessKind,
        typer.Option(
            help="Type of a record: a text, a conversation, a preference pair (chosen and rejected answer), a labeled text, "
            "labeled words, or a query with positive and negative texts.",
            rich_help_panel=CHAT,
        ),
    ] = "text",
    loss_on: Annotated[
        Literal["answers", "last", "all"] | None,
        typer.Option(
            help="Turns that contribute to the loss: all assistant turns (answers), the last one, or everything.",
            rich_help_panel=CHAT,
            show_default="answers",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Truncate conversations to this many tokens, e.g. 4096.", rich_help_panel=CHAT),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja chat template that replaces the tokenizer's.", rich_help_panel=CHAT),
    ] = None,
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Variable for the chat template, e.g. enable_thinking=false. Repeatable.",
            rich_help_panel=CHAT,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="Names of the labels, in order, e.g. negative,positive.", rich_help_panel=CHAT),
    ] = None,
    negatives: Annotated[
        int, typer.Option(min=0, help="Negatives per record, with --kind groups.", rich_help_panel=CHAT)
    ] = 0,
    turn_weights: Annotated[
        bool,
        typer.Option(
            "--turn-weights",
            help="Read a loss weight per assistant turn from the records: 0 to 2.55 in steps of 0.01.",
            rich_help_panel=CHAT,
        ),
    ] = False,
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="KEY=COLUMN",
            help="Column of the records that is read as this key, e.g. prompt=question; others are then ignored. Repeatable.",
            rich_help_panel=CHAT,
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Records are conversations about images; image paths are relative to this folder.",
            rich_help_panel=CHAT,
        ),
    ] = None,
    image_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per image, e.g. 576 for LLaVA 1.5, 256 for Gemma 3.",
            rich_help_panel=CHAT,
            show_default="576",
        ),
    ] = None,
    image_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Model folder whose image settings give the tokens per image, also for tiled images (LLaVA-NeXT).",
            rich_help_panel=CHAT,
        ),
    ] = None,
    image_token: Annotated[
        str | None,
        typer.Option(
            help="Placeholder token of an image in the encoded text.",
            rich_help_panel=CHAT,
            show_default="<image>, or the model's token",
        ),
    ] = None,
    image_text: Annotated[
        str | None,
        typer.Option(
            help="Text that replaces <image>: the placeholder token with the markers that the model expects.",
            rich_help_panel=CHAT,
            show_default="the token with the markers of --image-model",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Process only part I of N, e.g. 3/16, as one of N independent jobs; the last job joins the parts.",
        ),
    ] = None,
    engine: Annotated[
        Literal["threads", "processes", "ray"],
        typer.Option(help="Run in threads of one process, in processes on this machine, or on a Ray cluster."),
    ] = "threads",
    shards: Annotated[
        int | None,
        typer.Option(min=1, help="Number of parts with --engine processes or ray.", show_default="one per 256 MiB"),
    ] = None,
    encoder: Annotated[
        Literal["auto", "tokenizers", "fastokens"],
        typer.Option(help="Tokenizer library; auto uses fastokens if it is installed and gives the same tokens."),
    ] = "auto",
) -> None:
    """Tokenize text or conversations into a data set for training."""
    from mega_data.preprocessing.preprocess_corpus import preprocess_corpus as run
    from mega_data.preprocessing.sharding import InputShard
    from mega_data.token_files.remote_copies import restore_url_slashes

    if shard is not None and engine != "threads":
        raise ConfigError(
            f"--shard conflicts with --engine {engine}: --shard makes one part, the engine makes all of them",
            hint="leave out one of them",
        )
    if shards is not None and engine == "threads":
        raise ConfigError(
            "--shards requires --engine processes or --engine ray, found --engine threads",
            hint="add --engine processes; for one of N independent jobs use --shard I/N",
        )
    if language is not None and not split_sentences:
        raise ConfigError(f"--language {language} requires --split-sentences", hint="add --split-sentences")
    chat = _chat_options(
        kind, loss_on, max_length, chat_template, template_option, turn_weights, map_, labels, negatives
    )
    if chat is not None and (append_eod or parse_special_tokens or split_sentences or json_key != "text"):
        raise ConfigError(
            f"--kind {kind} conflicts with --append-eod, --parse-special-tokens, --split-sentences and --json-key",
            hint="leave them out: the chat template ends a conversation, which is read from the whole record",
        )
    image_options = _image_options(images, image_tokens, image_model, image_token, image_text)
    if image_options is not None:
        if chat is None or chat.kind != "conversations" or shard is not None or engine != "threads":
            raise ConfigError(
                "--images requires --kind conversations, without --shard and --engine", hint="--kind conversations"
            )
        from mega_data.images.image_preprocessing import preprocess_image_chats

        info = preprocess_image_chats(
            [*input, *(more or [])],
            tokenizer,
            output,
            chat,
            image_options,
            on_bad_line=on_bad_line,
            overwrite=overwrite,
        )
        typer.echo(f"{output}: {info.documents:,} conversations, {info.tokens:,} tokens")
        return
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
        shard=InputShard.parse(shard) if shard else None,
        engine=engine,
        shards=shards,
        encoder=encoder,
        sentences=(language or "en") if split_sentences else None,
    )
    name = restore_url_slashes(output) + (f", part {info.shard.number} of {info.shard.of}" if info.shard else "")
    typer.echo(f"{name}: {info.documents:,} documents, {info.tokens:,} tokens, {info.text_bytes:,} bytes of text")


def _image_options(
    images: Path | None,
    image_tokens: int | None,
    image_model: Path | None,
    image_token: str | None,
    image_text: str | None,
) -> ImageOptions | None:
    """Return the options of conversations about images, or None without --images."""
    if images is None:
        if image_tokens or image_token or image_text or image_model:
            raise ConfigError(
                "--image-tokens, --image-model, --image-token and --image-text require --images",
                hint="add --images FOLDER",
            )
        return None
    from mega_data.images.image_preprocessing import ImageOptions

    vision = None if image_model is None else _read_image_processing(image_model, image_tokens)
    features = vision.tokens_per_image if vision else image_tokens or 576
    return ImageOptions(images, features, image_token or "", image_text or "", vision)


def _read_image_processing(folder: Path, image_tokens: int | None) -> VisionConfig:
    """Return the image preprocessing of the model in a folder."""
    from mega_ckpt.source import read_model_config

    if image_tokens is not None:
        raise ConfigError(
            "--image-tokens conflicts with --image-model, which sets the tokens per image", hint="leave out one of them"
        )
    vision = read_model_config(str(folder)).vision
    if vision is None:
        raise ConfigError(
            f"--image-model requires a vision-language model, but {folder} has no vision encoder",
            hint="leave it out and set --image-tokens, e.g. 576",
        )
    return vision


def _chat_options(
    kind: PreprocessKind,
    loss_on: Literal["answers", "last", "all"] | None,
    max_length: int | None,
    chat_template: Path | None,
    template_option: list[str] | None,
    turn_weights: bool,
    columns: list[str] | None,
    labels: str | None,
    negatives: int,
) -> ChatOptions | None:
    """Return the options of whole records, or None for text, which accepts none of them."""
    from mega_data.chat.chat_preparation import ChatOptions

    if (labels and kind not in ("labels", "token_labels")) or (negatives and kind != "groups"):
        raise ConfigError(
            f"--labels requires --kind labels or token_labels, and --negatives --kind groups, found --kind {kind}",
            hint="leave them out, or change --kind",
        )
    if kind == "text":
        values = {
            "--loss-on": loss_on, "--max-length": max_length, "--chat-template": chat_template, "--map": columns,
            "--template-option": template_option, "--turn-weights": turn_weights,
        }  # fmt: skip
        if given := [option for option, value in values.items() if value]:
            raise ConfigError(
                f"{' and '.join(given)} conflicts with texts (--kind text)",
                hint="leave it out; or, if the records are conversations, add --kind conversations or --kind pairs",
            )
        return None
    if kind not in ("conversations", "pairs") and (loss_on or chat_template or template_option or turn_weights):
        raise ConfigError(
            f"--loss-on, --chat-template, --template-option and --turn-weights conflict with --kind {kind}",
            hint="leave them out: labeled texts are encoded without a chat template",
        )
    options = parse_key_values(template_option or [], "--template-option", "enable_thinking=false")
    return ChatOptions(
        kind=kind,
        loss_on=loss_on or "answers",
        max_length=max_length,
        template=chat_template,
        template_options=options,
        turn_weights=turn_weights,
        columns=parse_column_mapping(columns or []),
        labels=[name.strip() for name in labels.split(",")] if labels else [],
        negatives=negatives,
    )


def parse_column_mapping(given: list[str]) -> dict[str, str]:
    """Return the record columns that `--map KEY=COLUMN` options name, by key."""
    from typing import get_args

    from mega_data.raw_data_config import RecordKey

    columns = {}
    for option in given:
        key, equals, column = option.partition("=")
        names = [name for name in get_args(RecordKey) if name != "text"]
        if equals and column and key not in names:
            hint = f"the keys are {', '.join(names)}; --json-key {column} reads plain text from a column"
            raise ConfigError(f"--map {option}: {key!r} is not a key of records", hint=hint)
        if not equals or not column:
            raise ConfigError(
                f"--map must have the form KEY=COLUMN, found {option!r}", hint=f"the keys are {', '.join(names)}"
            )
        columns[key] = column
    return columns
