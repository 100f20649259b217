"""Raw data in the `data:` section of a run: texts and records that are tokenized at the start of the run."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt

from mega_common.strict_config import ConfigProblem, StrictConfig
from mega_data.chat.chat_records import LossOn
from mega_data.reading.corpus_sources import HUB, NAMES, get_content_suffix
from mega_data.token_files.indexed_reader import get_idx_path, strip_data_suffix

RecordKey = Literal[
    "text", "messages", "conversations", "prompt", "completion", "response", "instruction", "input", "output",
    "chosen", "rejected", "label", "system", "tools", "text_pair", "query", "passage", "positive", "negatives", "tokens", "tags",
]  # fmt: skip
CHAT_KINDS = ("conversations", "pairs")
LABELED_KINDS = ("labels", "token_labels", "groups")
RECORD_KINDS = (*CHAT_KINDS, *LABELED_KINDS)  # kinds that read whole records
KINDS_OF_SETTING = {
    **dict.fromkeys(("loss_on", "chat_template", "template_options", "turn_weights"), CHAT_KINDS),
    "max_length": RECORD_KINDS,
    "labels": ("labels", "token_labels"),
    "negatives": ("groups",),
    "language": ("bert", "t5"),
}
TEXT_SETTINGS = ("append_eod", "parse_special_tokens")  # of kinds that read texts
TEXT_SUFFIXES = (".txt", ".text", ".md")


class RawDataConfig(StrictConfig):
    """Settings of the tokenization of raw data; those of `mega data preprocess`, with the same results."""

    append_eod: bool | None = Field(
        None,
        description="end each text with the end-of-document token; default: true if the tokenizer has one, except for "
        "kind bert and for t5 in order megatron",
    )
    parse_special_tokens: bool = Field(False, description="encode a special token that a text spells as that token")
    language: str = Field("en", description="language whose rules split sentences, for kind bert")
    loss_on: LossOn = Field("answers", description="turns of a conversation that count in the loss")
    max_length: int | None = Field(
        None,
        ge=2,
        description="truncate conversations, or labeled texts, to this many tokens; default for the latter: seq_length",
    )
    labels: list[str] = Field([], description="names of the labels, in order, for kinds labels and token_labels")
    negatives: int = Field(0, ge=0, description="number of negatives of each record, for kind groups")
    chat_template: Path | None = Field(None, description="file with a chat template that replaces the tokenizer's")
    template_options: dict[str, Any] = Field({}, description="variables for the chat template")
    turn_weights: bool = Field(False, description="read a loss weight per assistant turn: 0 to 2.55, in steps of 0.01")
    on_bad_line: Literal["error", "skip"] = Field(
        "error", description="on a record that cannot be read: stop, or move it to a file next to the tokens"
    )
    workers: PositiveInt | None = Field(None, description="encoding threads; default: the usable cores")

    def find_kind_problems(self, kinds: Iterable[str], *, prompts: bool = False) -> Iterator[ConfigProblem]:
        """Yield a problem for each changed setting that no dataset kind in `kinds`, those of the run's raw data, uses."""
        kinds, default = set(kinds), RawDataConfig()
        for key in sorted(RawDataConfig.model_fields):
            users = KINDS_OF_SETTING.get(key, ())
            using = kinds & {*users} if users else kinds - {*RECORD_KINDS} if key in TEXT_SETTINGS else kinds
            if using or getattr(self, key) == getattr(default, key):
                continue
            need = f"data.kind = {' or '.join(users)}" if users else "raw data of another data.kind"
            rule = f"requires {need if kinds else 'raw data, such as data.train: chats.jsonl'}"
            if prompts and not kinds:
                rule = "is not supported with data.kind = prompts, whose texts the model gets as they are"
            yield ConfigProblem(f"raw.{key}", rule, getattr(self, key), f"remove data.raw.{key}")
        if "pairs" in kinds and self.loss_on == "all":
            yield ConfigProblem("raw.loss_on", "conflicts with data.kind = pairs", "all", "loss_on: answers")


def is_raw_path(path: Path) -> bool:
    """Return whether a path of `data.train` names raw data, not token files: by its suffix or `hf:`, else by what exists.

    Token files have precedence: `data/wiki` is token data if `data/wiki.idx` exists, also next to a folder `data/wiki`.
    """
    name = str(path)
    if name.startswith(HUB) or get_content_suffix(path) in (*NAMES, *TEXT_SUFFIXES):
        return True
    if not path.name:
        return True  # a folder such as `.`
    # os.path.exists is False for a name that is too long for a file, where Path.exists raises an error
    if path.suffix in (".bin", ".idx") or os.path.exists(get_idx_path(strip_data_suffix(path))):
        return False
    if glob.has_magic(name):
        return not glob.glob(f"{name}.idx", recursive=True) and bool(glob.glob(name, recursive=True))
    return os.path.exists(path)


def find_stream_problems(data: Any) -> Iterator[ConfigProblem]:
    """Yield settings of a `data` section that conflict with order `blocks` or with `stream`."""
    blocks = data.sample_order == "blocks"
    if blocks and (wrong := data.dataset_kinds & {"retro", "prompts"}):
        name = "stream" if data.stream else "order"
        rule = f"is not supported with data.kind = {min(wrong)}"
        yield ConfigProblem(name, rule, getattr(data, name), f"remove data.{name}")
    if not blocks and data.block_tokens != type(data).model_fields["block_tokens"].default:
        yield ConfigProblem("block_tokens", "requires data.order = blocks", data.block_tokens, "order: blocks")
    if not data.stream:
        return
    streams = [(i, source) for i, source in enumerate(data.train) if source.is_raw]
    if not streams:
        yield ConfigProblem("stream", "requires raw data in data.train", True, "name a file such as texts.jsonl")
    if not blocks:
        yield ConfigProblem("order", "must be blocks with data.stream", data.order, "remove data.order")
    if data.split != type(data).model_fields["split"].default and any(data.split[1:]):
        rule = "gives valid or test a share of the data, which is not supported with data.stream"
        yield ConfigProblem("split", rule, data.split, "set data.valid to other files, and remove data.split")
    if data.temperature is not None:
        rule = "requires the number of tokens of all data, which is not known with data.stream"
        yield ConfigProblem("temperature", rule, data.temperature, "set weight for each data set")
    for i, source in streams:
        if source.max_epochs:
            rule = "is not supported with data.stream, which does not know the size of an epoch"
            yield ConfigProblem(f"train.{i}.max_epochs", rule, source.max_epochs, "remove max_epochs")


def find_raw_source_problems(key: str, source: Any, kind: str) -> Iterator[ConfigProblem]:
    """Yield problems of the raw-data keys of a configured data set.
    The data set `source` is at `key`, such as `train.0`, with dataset kind `kind`.
    """
    given = {name: getattr(source, name) for name in ("map", "subset", "split") if getattr(source, name)}
    if not source.is_raw:
        for name, value in given.items():
            rule = f"requires raw data, and {source.path} names token files"
            yield ConfigProblem(f"{key}.{name}", rule, value, f"remove {name}, or name a file such as chats.jsonl")
        return
    if kind == "retro":
        rule = "is not supported with raw data, as retrieval needs the neighbors of token files"
        yield ConfigProblem(f"{key}.path", rule, str(source.path), "use mega data preprocess and mega data retrieve")
    for name in ("subset", "split"):
        if given.get(name) and not str(source.path).startswith(HUB):
            rule = "requires a data set of the HuggingFace Hub or a folder saved by datasets, as path: hf:NAME"
            yield ConfigProblem(f"{key}.{name}", rule, given[name], f"remove {name}, or write hf: before the name")
    wrong = [name for name in source.map if (name == "text") == (kind in CHAT_KINDS) and kind not in LABELED_KINDS]
    if wrong:
        names = "text" if kind not in CHAT_KINDS else ", ".join(name for name in get_args(RecordKey) if name != "text")
        yield ConfigProblem(f"{key}.map", f"must name columns for data.kind = {kind}: {names}", wrong, "correct map")
