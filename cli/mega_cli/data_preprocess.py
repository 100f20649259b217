"""`mega data preprocess`: text or conversations to token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mega_cli.data_options import Input, JsonKey, MoreInput, OnBadLine, Overwrite, ParseSpecialTokens
from mega_common.errors import ConfigError

if TYPE_CHECKING:
    from mega_common.vision_config import VisionConfig
    from mega_data.chat.chat_preparation import ChatOptions

CHAT = "Conversations"


def preprocess_command(
    input: Input,
    tokenizer: Annotated[Path, typer.Option(help="Folder with tokenizer.json, or that file.")],
    output: Annotated[
        Path, typer.Option(metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx and PREFIX.info; a URL, too.")
    ],
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
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Conversations about images, whose paths begin here.", rich_help_panel=CHAT
        ),
    ] = None,
    image_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Features of an image: 576 of LLaVA 1.5.", rich_help_panel=CHAT, show_default="576"),
    ] = None,
    image_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A model, which says how many features an image has, by its size where that is cut in tiles (LLaVA-NeXT).",
            rich_help_panel=CHAT,
        ),
    ] = None,
    image_token: Annotated[
        str | None,
        typer.Option(
            help="What stands for an image in a text.",
            rich_help_panel=CHAT,
            show_default="<image>, or the model's token",
        ),
    ] = None,
    image_text: Annotated[
        str | None,
        typer.Option(
            help="What <image> becomes in a text: the token, and what a model wants around it.",
            rich_help_panel=CHAT,
            show_default="the token, and around it what --image-model wants",
        ),
    ] = None,
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
    HuggingFace data sets are hf:NAME, with :CONFIG and @SPLIT after it where needed. A URL that fsspec knows, such as
    s3://bucket/folder/*.jsonl, names objects as a path names files.

    A folder is its files but hidden ones, README and licences beside data files, other splits than train, links to
    folders, data sets of mega's own and what is no UTF-8 text: what is left out is named at the end.

    Conversations are records with messages (OpenAI), conversations (ShareGPT), prompt with completion or response, or
    instruction with output (Alpaca); pairs have chosen and rejected, or completion and label (KTO); all may have tools.
    The tokenizer's chat template renders them. Its {% generation %} blocks mark the answers; without these, an answer is
    what it adds to the text before it. Records whose messages or tools the template does not render are refused.

    With --images they are about images, in LLaVA's form: image (or images) beside conversations or messages, and <image>
    in the text where it belongs. Input may also be shards of webdataset (.tar): an image and, by the same name, a record
    (.json) or its caption (.txt); or tables with the images in them. Where images lie is written, to PREFIX.images. For
    Gemma 3: --image-tokens 256 --image-token '<image_soft_token>' --image-text
    $'\\n\\n<start_of_image><image_soft_token><end_of_image>\\n\\n'. For LLaVA-NeXT, whose images have features by their sizes:
    --image-model FOLDER.

    A run that was ended goes on where it was when it is started again. Files for an object store are made in
    ~/.cache/mega, and are gone there when they are in the store.

    With --shard, N jobs on any machines that see the same files make a part each, PREFIX.shard-I-of-N, and whichever is
    last joins them to the data set that one run would have made. A part is begun after a share of the input's bytes: at
    a line of JSON lines, at a row group of Parquet, at a file of any other kind or packed.

    --engine processes makes parts on this machine, for when it has more cores than one process keeps busy (some 16);
    --engine ray on the Ray cluster of RAY_ADDRESS, whose machines see the same files. A part that cannot be made is told
    at the end, when the others are made; the same command then makes only what is missing.

    The package fastokens encodes the same tokens many times as fast. It is compared with tokenizers on the begin of the
    corpus and a two-hundredth of the rest; at the first difference the work begins again without it.
    """
    from mega_data.preprocessing.preprocess_corpus import preprocess_corpus as run
    from mega_data.preprocessing.sharding import InputShard
    from mega_data.token_files.remote_copies import restore_url

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
    if images is None and (image_tokens or image_token or image_text or image_model):
        told = "--image-tokens, --image-model, --image-token and --image-text: are about images"
        raise ConfigError(told, hint="give --images too")
    if images is not None:
        if chat is None or chat.kind != "conversations" or shard is not None or engine != "threads":
            raise ConfigError("--images: is for --kind conversations, made by one process", hint="--kind conversations")
        from mega_data.images.image_preprocessing import ImageOptions, preprocess_image_chats

        vision = None if image_model is None else _read_image_processing(image_model, image_tokens)
        features = vision.tokens_per_image if vision else image_tokens or 576
        options = ImageOptions(images, features, image_token or "", image_text or "", vision)
        info = preprocess_image_chats(
            [*input, *(more or [])], tokenizer, output, chat, options, on_bad_line=on_bad_line, overwrite=overwrite
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
    made = restore_url(output) + (f", part {info.shard.number} of {info.shard.of}" if info.shard else "")
    typer.echo(f"{made}: {info.documents:,} documents, {info.tokens:,} tokens, {info.text_bytes:,} bytes of text")


def _read_image_processing(folder: Path, image_tokens: int | None) -> VisionConfig:
    """Return the image preprocessing of the model in a folder."""
    from mega_ckpt.source import read_model_config

    if image_tokens is not None:
        raise ConfigError("--image-tokens: --image-model says it", hint="leave one of both out")
    vision = read_model_config(str(folder)).vision
    if vision is None:
        raise ConfigError(f"--image-model {folder}: sees no images", hint="a model with a section `vision`")
    return vision


def _chat_options(
    kind: Literal["text", "conversations", "pairs"],
    loss_on: Literal["answers", "last", "all"] | None,
    max_length: int | None,
    chat_template: Path | None,
    template_option: list[str] | None,
    turn_weights: bool,
) -> ChatOptions | None:
    """Return the options of conversations, or None for text, which accepts none of them."""
    from mega_common.bounded_parsing import BoundedYamlLoader, parse_yaml_text
    from mega_data.chat.chat_preparation import ChatOptions

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
        options[key] = parse_yaml_text(value, f"--template-option {key}", BoundedYamlLoader)
    return ChatOptions(
        kind=kind,
        loss_on=loss_on or "answers",
        max_length=max_length,
        template=chat_template,
        template_options=options,
        turn_weights=turn_weights,
    )
