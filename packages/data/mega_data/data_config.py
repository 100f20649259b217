"""The `data:` section of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from mega_common.strict_config import ConfigProblem, StrictConfig
from mega_data.denoising_config import ROOM, BertConfig, FimConfig, T5Config

Order = Literal["shuffled", "stable", "megatron"]
KindName = Literal["text", "documents", "conversations", "pairs", "fim", "bert", "masked", "t5", "retro"]


class DatasetSource(StrictConfig):
    """One data set of a blend: a path without `.bin` and `.idx`, its weight and kind. A bare string is a path, and a
    URL is downloaded.

    A path with `*`, `?` or `[` is a glob: the data sets that match it share its weight by their tokens, as one would.
    """

    path: Path
    weight: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="share of the samples, relative to the others; default: 1"
    )
    kind: KindName | None = Field(None, description="what kind of data it is, where that is not data.kind")
    neighbors: Path | None = Field(
        None,
        description="of kind retro: the folder that mega data retrieve made of it, where that is not PATH.neighbors",
    )
    max_epochs: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="passes after which it is read no more, and the others go on"
    )
    curriculum: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {},
        description="weights from some numbers of training tokens on, such as {2000000000: 0.5}; until the first: weight",
    )

    @property
    def weights_by_tokens(self) -> dict[int, float]:
        """Weight from each number of training tokens on, 0 included."""
        return {0: self.weight or 1.0, **self.curriculum}

    @property
    def is_glob(self) -> bool:
        """True if the path is a glob that stands for all matching data sets."""
        return any(sign in str(self.path) for sign in "*?[")

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_path(cls, raw: Any) -> Any:
        return {"path": raw} if isinstance(raw, str | Path) else raw


class BlendStart(StrictConfig):
    """First sample of a blend that was changed at a resume, and the samples read of each data set by then, by path."""

    samples: int = Field(ge=0)
    read: dict[str, Annotated[int, Field(ge=0)]]


def _wrap_in_list(raw: Any) -> Any:
    return [raw] if isinstance(raw, str | Path | dict | DatasetSource) else raw


def _parse_split(raw: Any) -> Any:
    if isinstance(raw, str):
        raw = [part.strip() for part in raw.split(",")]
    return [*raw, 0.0, 0.0, 0.0][: max(3, len(raw))] if isinstance(raw, list | tuple) else raw


Sources = Annotated[list[DatasetSource], BeforeValidator(_wrap_in_list), Field(min_length=1)]
Split = Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], BeforeValidator(_parse_split)]


class DataConfig(StrictConfig):
    """Training and validation data of a run, the order of its samples, and the treatment of document boundaries."""

    train: Sources
    valid: Sources | None = Field(None, description="data sets of their own; `split` then gives valid nothing")
    test: Sources | None = Field(None, description="data sets of their own; `split` then gives test nothing")
    split: Split = Field(
        [969.0, 30.0, 1.0], description="shares of train, valid and test in each of the train data sets, by sequences"
    )
    seq_length: PositiveInt = Field(1024, description="tokens the model sees at once")
    kind: KindName = Field(
        "text",
        description="text: windows of running text; documents: whole ones, packed; conversations: those, with the weights of "
        "their mask; pairs: a chosen and a rejected answer; fim: text with middles to fill in; bert: masked words of sentences "
        "in pairs; masked: running text with masked tokens; t5: spans for a decoder to tell; retro: text in chunks, with those "
        "that mega data retrieve found for each",
    )
    fim: FimConfig = FimConfig()
    bert: BertConfig = BertConfig()
    t5: T5Config = T5Config()
    long_documents: Literal["split", "drop"] = Field(
        "split", description="what kind documents does with those of more than seq_length + 1 tokens: cut or leave out"
    )
    order: Order | None = Field(
        None,
        description="shuffled: documents in an order drawn by the seed; stable: in that of the file; both functions of seed and "
        "sample number alone; megatron: as Megatron draws them; default: shuffled, and that of the run that is gone on with",
    )
    temperature: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="shares by weight times tokens ** (1 / temperature): 1 is by size, larger ones favour small data sets; "
        "default: by weight alone",
    )
    begun: BlendStart | None = Field(
        None, description="written by a run that is gone on with under another blend: where this one began"
    )
    image_folder: Path | None = Field(
        None,
        description="what the paths of images begin at, where that is no longer what it was when they were prepared",
    )
    on_bad_sample: Literal["stop", "skip"] = Field(
        "stop", description="where an image cannot be read; skip: nothing of that sample counts in the loss"
    )
    tokenizer: Path | None = None
    allow_other_tokenizer: bool = Field(
        False, description="start from weights that came with another tokenizer than that of the data"
    )
    reset_position_ids: bool = Field(False, description="positions begin again after each end-of-document token")
    reset_attention_mask: bool = Field(False, description="no attention across end-of-document tokens")
    eod_mask_loss: bool = Field(False, description="no loss where the input is an end-of-document token")
    cache: Path | None = Field(
        None,
        description="folder for the indices of packing and of orders shuffled and megatron, default: .cache beside the data, where"
        " writable; and for data sets that are URLs, default: ~/.cache/mega/data",
    )

    @property
    def sample_order(self) -> Order:
        """Sample order of a new run."""
        return self.order or "shuffled"

    @property
    def split_shares(self) -> list[float]:
        """Shares of train, valid and test by `split`; 0 for a split with data sets of its own."""
        own = (False, self.valid is not None, self.test is not None)
        return [0.0 if has else number for number, has in zip(self.split, own, strict=True)]

    @property
    def dataset_kinds(self) -> set[KindName]:
        """Kinds of all data sets of the run."""
        return {source.kind or self.kind for source in (*self.train, *(self.valid or []), *(self.test or []))}

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules of the split, of Megatron's order and of the dataset kinds."""
        yield from self._find_kind_problems()
        if len(self.split) != 3 or not math.fsum(self.split):
            yield ConfigProblem(
                "split", "must be up to three numbers, for train, valid and test", self.split, "969,30,1"
            )
        elif not self.split[0]:
            yield ConfigProblem("split", "gives nothing to train", self.split, "969,30,1")
        for name in ("train", "valid", "test"):
            yield from self._find_blend_problems(name, getattr(self, name) or [])

    def _find_blend_problems(self, name: str, sources: list[DatasetSource]) -> Iterator[ConfigProblem]:
        curricula = [source.weights_by_tokens for source in sources]
        for tokens in sorted({tokens for each in curricula for tokens in each}) if sources else []:
            if not any(lookup_curriculum_weight(each, tokens) for each in curricula):
                yield ConfigProblem(name, f"no data set has a weight from {tokens} tokens on")
        for i, source in enumerate(sources):
            if source.neighbors and (source.kind or self.kind) != "retro":
                yield ConfigProblem(f"{name}.{i}.neighbors", "is of the kind retro", source.neighbors, "kind: retro")
            elif source.neighbors and source.is_glob:
                rule = "is of one data set, and the path is a glob"
                yield ConfigProblem(f"{name}.{i}.neighbors", rule, source.neighbors, "PREFIX.neighbors beside each")
        if self.order != "megatron":
            return
        missing = [i for i, source in enumerate(sources) if source.weight is None]
        if len(sources) > 1 and missing:
            yield ConfigProblem(f"{name}.{missing[0]}.weight", "order megatron needs a weight for every data set")
        for i, source in enumerate(sources):
            for key in ("max_epochs", "curriculum"):
                if getattr(source, key):
                    yield ConfigProblem(
                        f"{name}.{i}.{key}", "order megatron has one blend for all of a run", getattr(source, key)
                    )

    def _find_kind_problems(self) -> Iterator[ConfigProblem]:
        if "fim" in self.dataset_kinds and self.fim.level == "document" and self.seq_length < 2 * ROOM:
            yield ConfigProblem("seq_length", "leaves no room for text beside the tokens of data.fim", self.seq_length)
        alone = self.dataset_kinds & {"bert", "masked", "t5"}
        if not alone:
            return
        if len(self.dataset_kinds) > 1:
            rule = f"{' and '.join(sorted(self.dataset_kinds))} make samples that no one model takes"
            yield ConfigProblem("kind", rule, self.kind, "bert, masked and t5 mix with no other kind")
        least = {"bert": 5, "masked": 1, "t5": 4}[min(alone)]
        if self.seq_length < least:
            yield ConfigProblem("seq_length", f"leaves no room for text in a sample of {min(alone)}", self.seq_length)
        for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, flag) and alone != {"masked"}:
                yield ConfigProblem(
                    flag, f"is of running text, and the kind {min(alone)} has no documents in a sample", True
                )
        if "t5" in alone and self.sample_order == "megatron" and self.t5.decoder_seq_length is None:
            yield ConfigProblem(
                "t5.decoder_seq_length", "order megatron needs it", None, "Megatron's --decoder-seq-length"
            )


def lookup_curriculum_weight(weights: Mapping[int, float], tokens: int) -> float:
    """Return the weight of a data set after `tokens` training tokens, from a mapping of start tokens (0 included) to
    weights.
    """
    return weights[max(begin for begin in weights if begin <= tokens)]
