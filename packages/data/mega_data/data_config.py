"""The `data:` section of a run, with the sections of denoising data: `data.fim`, `data.bert` and `data.t5`."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from mega_common.strict_config import ConfigProblem, ExtensionName, StrictConfig
from mega_data.raw_data_config import (
    RawDataConfig,
    RecordKey,
    find_raw_source_problems,
    find_stream_problems,
    is_raw_path,
)
from mega_data.reading.corpus_sources import HUB
from mega_data.token_files.remote_copies import restore_url_slashes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanCorruption:
    """Sizes of T5 span corruption for a text of `tokens` tokens: `hidden` of them are masked, in `count` spans."""

    tokens: int
    hidden: int
    count: int

    @classmethod
    def from_token_count(cls, tokens: int, share: float, mean: float) -> SpanCorruption:
        """Return the span corruption of a text of `tokens` tokens (at least 2).
        The share `share` of tokens is masked in spans of `mean` tokens on average.
        """
        hidden = min(max(round(tokens * share), 1), tokens - 1)
        return cls(tokens, hidden, min(max(round(hidden / mean), 1), tokens - hidden))

    @classmethod
    def from_encoder_length(cls, length: int, share: float, mean: float) -> SpanCorruption:
        """Return the span corruption of the longest text whose encoder input has at most `length` tokens.
        The share `share` of tokens is masked in spans of `mean` tokens on average.

        The encoder input includes the sentinels and the end token.
        """
        spans = cls.from_token_count(2, share, mean)
        while (longer := cls.from_token_count(spans.tokens + 1, share, mean)).num_encoder_tokens <= length:
            spans = longer
        return spans

    @property
    def num_encoder_tokens(self) -> int:
        """Number of encoder tokens: unmasked tokens, one sentinel per span and the end token."""
        return self.tokens - self.hidden + self.count + 1

    def draw_spans(self, random: np.random.RandomState) -> list[Ints]:
        """Return the token positions of each masked span of a text, drawn from `random`.
        Unmasked text and spans alternate, text first, all partitions equally likely.
        """
        hidden, text = (
            _draw_partition(self.hidden, self.count, random),
            _draw_partition(self.tokens - self.hidden, self.count, random),
        )
        ends = np.cumsum(text + hidden)
        return [np.arange(end - size, end) for end, size in zip(ends.tolist(), hidden.tolist(), strict=True)]


def _draw_partition(total: int, parts: int, random: np.random.RandomState) -> Ints:
    """Draw sizes of `parts` parts of `total`, each at least one: int64 [parts]."""
    cuts = np.sort(random.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]

ROOM = (
    8  # extra positions of a rearranged document: three special tokens, and the tokens added by two cuts within words
)


class FimConfig(StrictConfig):
    """Settings of fill-in-the-middle (Bavarian et al., 2022).
    A document is split into prefix, middle and suffix, and the middle is moved to the end.
    """

    rate: Probability = Field(0.5, description="share of the documents that are rearranged")
    spm_rate: Probability = Field(0.5, description="share of the rearranged ones with the suffix first (SPM); else PSM")
    cut: Literal["character", "token"] = Field("character", description="cut between characters or between tokens")
    level: Literal["context", "document"] = Field(
        "context",
        description="context: rearrange the part of a document in a window; document: whole documents, before packing",
    )
    tokens: Annotated[list[str], Field(min_length=3, max_length=3)] | None = Field(
        None, description="tokens before prefix, middle and suffix; default: common names that the tokenizer has"
    )


class BertConfig(StrictConfig):
    """Settings of BERT samples: masked words and sentence order prediction.
    Dataset kind `masked` uses only `mask_probability`.
    """

    mask_probability: Share = Field(0.15, description="share of the tokens that are predicted")
    short_probability: Probability = Field(0.1, description="share of the samples that are shorter than seq_length")
    sentence_pairs: bool = Field(True, description="two segments, swapped half the time; the model predicts the order")


class T5Config(StrictConfig):
    """Settings of T5 samples: span corruption and decoder length."""

    mask_probability: Share = Field(0.15, description="share of the tokens that are masked in the encoder's input")
    mean_span: float = Field(3.0, ge=1, description="mean number of tokens of a span; not used by order megatron")
    short_probability: Probability = Field(0.1, description="share of shorter samples in order megatron")
    decoder_seq_length: PositiveInt | None = Field(
        None, description="tokens of the decoder; default: follows from seq_length, except with order megatron"
    )

    def get_decoder_length(self, seq_length: int) -> int:
        """Return the number of decoder tokens of a T5 sample with `seq_length` encoder tokens."""
        if self.decoder_seq_length is not None:
            return self.decoder_seq_length
        spans = SpanCorruption.from_encoder_length(seq_length, self.mask_probability, self.mean_span)
        return spans.hidden + spans.count + 1


Order = Literal["shuffled", "stable", "blocks", "megatron"]
KindName = Literal[
    "text", "documents", "conversations", "pairs", "labels", "token_labels", "groups", "fim", "bert", "masked", "t5", "retro",
    "prompts",
]  # fmt: skip


class DatasetSource(StrictConfig):
    """Data set of a blend in the configuration, with its weight and kind.
    It is token files, by their path without `.bin` and `.idx` or a glob, or raw data.

    A bare string is a path, and a URL is downloaded. A path with `*`, `?` or `[` is a glob: the matching data sets share
    its weight in proportion to their tokens, like one data set. Raw data is one data set: a file (JSON lines, JSON,
    CSV, Parquet, text), folder or glob of files, or `hf:NAME`.
    """

    path: Path
    weight: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="share of the samples, relative to the others; default: 1"
    )
    kind: KindName | ExtensionName | None = Field(None, description="dataset kind; default: data.kind")
    neighbors: Path | None = Field(
        None, description="for kind retro: output folder of mega data retrieve; default: PATH.neighbors"
    )
    subset: str | None = Field(None, description="for raw data hf:NAME: configuration of the data set")
    split: str | None = Field(None, description="for raw data hf:NAME: split, such as train[:10%]; default: train")
    map: dict[RecordKey, str] = Field(
        {},
        description="for raw data: columns of the records by their role, such as {prompt: question, completion: answer}; a.b "
        "is b in the object a; all other columns are ignored; default: the usual names are recognized",
    )
    max_epochs: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="maximum number of epochs; the other data sets then continue alone"
    )
    curriculum: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {},
        description="weight from each number of training tokens on, such as {2000000000: 0.5}; before the first: weight",
    )

    @property
    def weights_by_tokens(self) -> dict[int, float]:
        """Blend weight of the data set from each number of training tokens on, beginning with 0."""
        return {0: self.weight or 1.0, **self.curriculum}

    @property
    def is_raw(self) -> bool:
        """True if the path names raw data, which is tokenized at the start of a run, and not token files."""
        return is_raw_path(self.path)

    @property
    def input_name(self) -> str:
        """Name of raw data as an input of `mega data preprocess`, such as `hf:NAME:SUBSET@SPLIT`."""
        name = str(self.path) if str(self.path).startswith(HUB) else restore_url_slashes(self.path)
        return name + (f":{self.subset}" if self.subset else "") + (f"@{self.split}" if self.split else "")

    @property
    def is_glob(self) -> bool:
        """True if the path is a glob that stands for all matching data sets of token files."""
        return glob.has_magic(str(self.path)) and not self.is_raw

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_path(cls, raw: Any) -> Any:
        return {"path": raw} if isinstance(raw, str | Path) else raw

    @field_validator("path", mode="before")
    @classmethod
    def _reject_empty_path(cls, path: Any) -> Any:
        if path == "":
            raise ValueError("must be the path of a data set, and is empty")
        return path


class BlendRestartPoint(StrictConfig):
    """Numbers of samples consumed by the time when a resumed run changed its data blend.

    They are the total, and the samples read of each data set, by path.
    """

    samples: int = Field(ge=0)
    read: dict[str, Annotated[int, Field(ge=0)]]


class StreamPosition(StrictConfig):
    """Position in streamed raw data (`mega_data.preprocessing.token_stream`).
    Block number `block` of the input with digest `key` starts with sample `first` of its epoch at `start`. An epoch has
    `total` samples, None if that is not known yet.
    """

    key: str
    block: int = Field(ge=0)
    first: int = Field(ge=0)
    start: list[Annotated[int, Field(ge=0)]]
    total: int | None = Field(None, ge=1)


def _wrap_in_list(raw: Any) -> Any:
    return [raw] if isinstance(raw, str | Path | dict | DatasetSource) else raw


def _parse_split(raw: Any) -> Any:
    if isinstance(raw, str):
        raw = [part.strip() for part in raw.split(",")]
    return [*raw, 0.0, 0.0, 0.0][: max(3, len(raw))] if isinstance(raw, list | tuple) else raw


Sources = Annotated[list[DatasetSource], BeforeValidator(_wrap_in_list), Field(min_length=1)]
Split = Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], BeforeValidator(_parse_split)]


class DataConfig(StrictConfig):
    """The `data` section of a run.
    It has training and validation data, the order of samples, and the treatment of document boundaries.
    """

    train: Sources
    valid: Sources | None = Field(None, description="separate validation data sets; replaces the share in `split`")
    test: Sources | None = Field(None, description="separate test data sets; replaces the share in `split`")
    split: Split = Field(
        [969.0, 30.0, 1.0], description="shares of train, valid and test in each of the train data sets, by sequences"
    )
    seq_length: PositiveInt = Field(1024, description="tokens of a training sample")
    kind: KindName | ExtensionName = Field(
        "text",
        description="text: windows of running text; documents: packed whole documents; conversations: packed conversations "
        "with a loss mask; pairs: preference pairs (chosen and rejected answer); labels: texts with labels; token_labels: "
        "words with labels; groups: queries with positive and negative texts; fim: fill-in-the-middle; bert: masked "
        "words and sentence pairs; masked: running text with masked tokens; t5: span corruption; retro: chunks with the "
        "neighbors of mega data retrieve; prompts: JSON lines with a prompt, for objective.kind: grpo; or a kind of an extension",
    )
    options: dict[str, Any] = Field({}, description="settings of an extension's kind of data")
    fim: FimConfig = FimConfig()
    bert: BertConfig = BertConfig()
    t5: T5Config = T5Config()
    long_documents: Literal["split", "drop"] = Field(
        "split", description="documents of more than seq_length + 1 tokens, for kind documents: split or leave out"
    )
    order: Order | None = Field(
        None,
        description="shuffled: documents in an order drawn by the seed; stable: in file order; blocks: in file order, shuffled "
        "within blocks of block_tokens tokens; these depend on seed and sample number alone; megatron: bit-identical to "
        "Megatron-LM; default: shuffled, for streamed data blocks, or the order of the resumed run",
    )
    block_tokens: PositiveInt = Field(1 << 26, description="tokens of a block of order blocks, in whole documents")
    temperature: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="shares are weight * tokens ** (1 / temperature): 1 is by size, larger values favor small data sets; "
        "default: shares by weight alone",
    )
    begun: BlendRestartPoint | None = Field(
        None, description="start of the current blend, written by a run that was resumed with another blend"
    )
    image_folder: Path | None = Field(
        None, description="base folder of image paths, if it changed since the data was prepared"
    )
    on_bad_sample: Literal["stop", "skip"] = Field(
        "stop", description="for an image that cannot be read; skip: no token of the sample counts in the loss"
    )
    tokenizer: Path | None = Field(
        None,
        description="folder with tokenizer.json; default: the tokenizer of token files, and for raw data that of "
        "the model's folder (model.from or init_from)",
    )
    raw: RawDataConfig = RawDataConfig()
    stream: bool = Field(
        False,
        description="tokenize raw data of train during the run, in blocks that are removed after use, instead of into `cache` "
        "before the run: for data that is too large to keep",
    )
    streamed: dict[str, StreamPosition] = Field(
        {}, exclude=True, description="position in each stream, by path, from the checkpoint of a resumed run"
    )
    allow_other_tokenizer: bool = Field(
        False, description="accept initial weights with another tokenizer than that of the data"
    )
    reset_position_ids: bool = Field(False, description="restart positions after each end-of-document token")
    reset_attention_mask: bool = Field(False, description="no attention across end-of-document tokens")
    eod_mask_loss: bool = Field(False, description="no loss at inputs that are end-of-document tokens")
    cache: Path | None = Field(
        None,
        description="folder of the index cache (packing, orders shuffled and megatron), default: .cache next to the data, if "
        "writable; and of downloaded data sets and the tokens of raw data, default: ~/.cache/mega/data",
    )

    @property
    def sample_order(self) -> Order:
        """Sample order that a new run uses: `shuffled`, `stable`, `blocks` or `megatron`."""
        return self.order or ("blocks" if self.stream else "shuffled")

    @property
    def split_shares(self) -> list[float]:
        """Shares of train, valid and test from the key `split`; 0 for a split that has data sets of its own.
        Valid and test of streamed data have 0 as well.
        """
        separate = (False, self.stream or self.valid is not None, self.stream or self.test is not None)
        return [0.0 if has else number for number, has in zip(self.split, separate, strict=True)]

    @property
    def all_sources(self) -> list[DatasetSource]:
        """Data sets of train, valid and test, in this order."""
        return [*self.train, *(self.valid or []), *(self.test or [])]

    @property
    def dataset_kinds(self) -> set[str]:
        """Kinds (text, documents, bert and so on) of all data sets of the run."""
        return {source.kind or self.kind for source in self.all_sources}

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules of the `data` section: dataset kinds, raw data, streaming, splits, weights and order."""
        yield from self._find_kind_problems()
        yield from self._find_raw_problems()
        if len(self.split) != 3 or not math.fsum(self.split):
            yield ConfigProblem(
                "split", "must be up to three numbers, for train, valid and test", self.split, "split: 969,30,1"
            )
        elif not self.split[0]:
            yield ConfigProblem("split", "the share of train must be above 0", self.split, "split: 969,30,1")
        for name in ("train", "valid", "test"):
            yield from self._find_blend_problems(name, getattr(self, name) or [])

    def _find_blend_problems(self, name: str, sources: list[DatasetSource]) -> Iterator[ConfigProblem]:
        curricula = [source.weights_by_tokens for source in sources]
        for tokens in sorted({tokens for each in curricula for tokens in each}) if sources else []:
            if not any(lookup_curriculum_weight(each, tokens) for each in curricula):
                rule = f"requires a data set with a weight above 0 at {tokens} training tokens"
                yield ConfigProblem(name, rule, hint="change curriculum or weight")
        for i, source in enumerate(sources):
            if source.neighbors and (source.kind or self.kind) != "retro":
                yield ConfigProblem(f"{name}.{i}.neighbors", "requires kind: retro", source.neighbors, "kind: retro")
            elif source.neighbors and source.is_glob:
                rule = "is not supported with a glob as path"
                hint = "leave it out, and name the folder of each data set PREFIX.neighbors"
                yield ConfigProblem(f"{name}.{i}.neighbors", rule, source.neighbors, hint)
        if self.order != "megatron":
            return
        missing = [i for i, source in enumerate(sources) if source.weight is None]
        if len(sources) > 1 and missing:
            rule = "order: megatron requires a weight for every data set"
            yield ConfigProblem(f"{name}.{missing[0]}.weight", rule, hint="weight: 1")
        for i, source in enumerate(sources):
            for key in ("max_epochs", "curriculum"):
                if getattr(source, key):
                    rule = "is not supported with order: megatron, whose blend is constant"
                    yield ConfigProblem(f"{name}.{i}.{key}", rule, getattr(source, key), "order: shuffled")

    @property
    def raw_sources(self) -> list[DatasetSource]:
        """Raw data sets of train, valid and test, in this order, without those of kind `prompts`."""
        return [source for source in self.all_sources if source.is_raw and (source.kind or self.kind) != "prompts"]

    def is_streamed(self, source: DatasetSource) -> bool:
        """Return whether a data set of this configuration is tokenized during the run: raw data of train with `stream`."""
        return self.stream and source.is_raw and any(source is each for each in self.train)

    def _find_raw_problems(self) -> Iterator[ConfigProblem]:
        yield from find_stream_problems(self)
        raw = self.raw_sources
        if raw and self.tokenizer is None:
            rule = f"is required for raw data ({raw[0].path}), unless model.from is a folder with a tokenizer"
            hint = "set data.tokenizer to a folder with tokenizer.json"
            if not str(raw[0].path).startswith(HUB) and not glob.glob(str(raw[0].path)):
                rule, hint = (
                    f"is required for raw data, and {raw[0].path} does not exist",
                    f"correct the path, and {hint}",
                )
            yield ConfigProblem("tokenizer", rule, None, hint)
        for name in ("train", "valid", "test"):
            for i, source in enumerate(getattr(self, name) or []):
                yield from find_raw_source_problems(f"{name}.{i}", source, source.kind or self.kind)
        kinds = [source.kind or self.kind for source in raw]
        yield from self.raw.find_kind_problems(kinds, prompts="prompts" in self.dataset_kinds)

    def _find_kind_problems(self) -> Iterator[ConfigProblem]:
        if "fim" in self.dataset_kinds and self.fim.level == "document" and self.seq_length < 2 * ROOM:
            rule = f"must be at least {2 * ROOM} with fim.level: document"
            yield ConfigProblem("seq_length", rule, self.seq_length)
        alone = self.dataset_kinds & {"bert", "masked", "t5"}
        if not alone:
            return
        if len(self.dataset_kinds) > 1:
            rule = f"the kinds {' and '.join(sorted(self.dataset_kinds))} cannot be mixed in one run"
            yield ConfigProblem("kind", rule, self.kind, "use only one kind with bert, masked or t5")
        least = {"bert": 5, "masked": 1, "t5": 4}[min(alone)]
        if self.seq_length < least:
            yield ConfigProblem("seq_length", f"must be at least {least} for the kind {min(alone)}", self.seq_length)
        for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, flag) and alone != {"masked"}:
                rule = f"is not supported with the kind {min(alone)}"
                yield ConfigProblem(flag, rule, True, f"{flag}: false")
        if "t5" in alone and self.sample_order == "megatron" and self.t5.decoder_seq_length is None:
            rule = "is required with order: megatron"
            yield ConfigProblem("t5.decoder_seq_length", rule, None, "the value of Megatron's --decoder-seq-length")


def lookup_curriculum_weight(weights: Mapping[int, float], tokens: int) -> float:
    """Return the blend weight of a data set after `tokens` training tokens.
    The curriculum `weights` maps each start token, beginning with 0, to a weight.
    """
    return weights[max(begin for begin in weights if begin <= tokens)]


def list_raw_paths(data: Mapping[str, Any]) -> list[Path]:
    """Return the paths of raw data in an unchecked `data` section; entries that are not valid are left out."""
    paths: list[Path] = []
    for name in ("train", "valid", "test"):
        given = _wrap_in_list(data.get(name))
        entries = [each.get("path") if isinstance(each, Mapping) else each for each in given or []]
        paths += [Path(each) for each in entries if isinstance(each, str | Path) and is_raw_path(Path(each))]
    return paths
