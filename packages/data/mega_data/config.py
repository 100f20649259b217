"""The `data:` section of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from mega_common.config import Config, Problem
from mega_data.objectives import ROOM, BertConfig, FimConfig, T5Config

Order = Literal["shuffled", "stable", "megatron"]
KindName = Literal["text", "documents", "conversations", "pairs", "fim", "bert", "masked", "t5", "retro"]


class Source(Config):
    """One data set of a blend: a path without `.bin` and `.idx`, its weight and kind. A bare string is a path,
    and a URL is fetched.

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
    def weights(self) -> dict[int, float]:
        """The weight from each number of tokens on, 0 among them."""
        return {0: self.weight or 1.0, **self.curriculum}

    @property
    def is_glob(self) -> bool:
        """Whether it stands for the data sets that match."""
        return any(sign in str(self.path) for sign in "*?[")

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, raw: Any) -> Any:
        return {"path": raw} if isinstance(raw, str | Path) else raw


class Begun(Config):
    """Where a blend began that was changed at a resume, and how far each data set had been read by then, by path."""

    samples: int = Field(ge=0)
    read: dict[str, Annotated[int, Field(ge=0)]]


def _listed(raw: Any) -> Any:
    return [raw] if isinstance(raw, str | Path | dict | Source) else raw


def _split_numbers(raw: Any) -> Any:
    if isinstance(raw, str):
        raw = [part.strip() for part in raw.split(",")]
    return [*raw, 0.0, 0.0, 0.0][: max(3, len(raw))] if isinstance(raw, list | tuple) else raw


Sources = Annotated[list[Source], BeforeValidator(_listed), Field(min_length=1)]
Split = Annotated[list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], BeforeValidator(_split_numbers)]


class DataConfig(Config):
    """Which tokens a run trains and validates on, in which order, and what the model is told of documents."""

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
    begun: Begun | None = Field(
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
        """The order of the samples of a new run."""
        return self.order or "shuffled"

    @property
    def shares(self) -> list[float]:
        """What `split` gives train, valid and test, the ones with data sets of their own left out."""
        own = (False, self.valid is not None, self.test is not None)
        return [0.0 if has else number for number, has in zip(self.split, own, strict=True)]

    @property
    def kinds(self) -> set[KindName]:
        """Those of all its data sets."""
        return {source.kind or self.kind for source in (*self.train, *(self.valid or []), *(self.test or []))}

    def problems(self) -> Iterator[Problem]:
        """Rules of the split, of Megatron's order and of the kinds of data."""
        yield from self._kind_problems()
        if len(self.split) != 3 or not math.fsum(self.split):
            yield Problem("split", "must be up to three numbers, for train, valid and test", self.split, "969,30,1")
        elif not self.split[0]:
            yield Problem("split", "gives nothing to train", self.split, "969,30,1")
        for name in ("train", "valid", "test"):
            yield from self._blend_problems(name, getattr(self, name) or [])

    def _blend_problems(self, name: str, sources: list[Source]) -> Iterator[Problem]:
        curricula = [source.weights for source in sources]
        for tokens in sorted({tokens for each in curricula for tokens in each}) if sources else []:
            if not any(weight_at(each, tokens) for each in curricula):
                yield Problem(name, f"no data set has a weight from {tokens} tokens on")
        for i, source in enumerate(sources):
            if source.neighbors and (source.kind or self.kind) != "retro":
                yield Problem(f"{name}.{i}.neighbors", "is of the kind retro", source.neighbors, "kind: retro")
            elif source.neighbors and source.is_glob:
                rule = "is of one data set, and the path is a glob"
                yield Problem(f"{name}.{i}.neighbors", rule, source.neighbors, "PREFIX.neighbors beside each")
        if self.order != "megatron":
            return
        missing = [i for i, source in enumerate(sources) if source.weight is None]
        if len(sources) > 1 and missing:
            yield Problem(f"{name}.{missing[0]}.weight", "order megatron needs a weight for every data set")
        for i, source in enumerate(sources):
            for key in ("max_epochs", "curriculum"):
                if getattr(source, key):
                    yield Problem(
                        f"{name}.{i}.{key}", "order megatron has one blend for all of a run", getattr(source, key)
                    )

    def _kind_problems(self) -> Iterator[Problem]:
        if "fim" in self.kinds and self.fim.level == "document" and self.seq_length < 2 * ROOM:
            yield Problem("seq_length", "leaves no room for text beside the tokens of data.fim", self.seq_length)
        alone = self.kinds & {"bert", "masked", "t5"}
        if not alone:
            return
        if len(self.kinds) > 1:
            rule = f"{' and '.join(sorted(self.kinds))} make samples that no one model takes"
            yield Problem("kind", rule, self.kind, "bert, masked and t5 mix with no other kind")
        least = {"bert": 5, "masked": 1, "t5": 4}[min(alone)]
        if self.seq_length < least:
            yield Problem("seq_length", f"leaves no room for text in a sample of {min(alone)}", self.seq_length)
        for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, flag) and alone != {"masked"}:
                yield Problem(flag, f"is of running text, and the kind {min(alone)} has no documents in a sample", True)
        if "t5" in alone and self.sample_order == "megatron" and self.t5.decoder_seq_length is None:
            yield Problem("t5.decoder_seq_length", "order megatron needs it", None, "Megatron's --decoder-seq-length")


def weight_at(weights: Mapping[int, float], tokens: int) -> float:
    """The weight after so many training tokens of a data set that says its own from some numbers on, 0 among them."""
    return weights[max(begin for begin in weights if begin <= tokens)]
