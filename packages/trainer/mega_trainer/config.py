"""A training run as configuration: the sections of run.yaml. Checked whole before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import frexp
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.config import Config, Problem, apply_overrides, load_yaml, raise_problems
from mega_common.model_config import ModelConfig
from mega_common.presets import preset
from mega_common.remote import Place, Remote, place
from mega_data.config import DataConfig
from mega_trainer.batch_size import BatchConfig
from mega_trainer.fp8 import Fp8Config, fp8_problems
from mega_trainer.layout import model_problems, world_problems
from mega_trainer.optim.lr import LRCurve, LRSchedule

UNFINISHED = re.compile(r"\$[A-Za-z_{(\d]|<[^<>]+>")


class ParallelConfig(Config):
    """Degrees of parallelism; their product times dp is the number of ranks."""

    tp: PositiveInt = 1
    sp: bool = Field(False, description="split the residual stream over the sequence among the tensor ranks")
    pp: PositiveInt = 1
    virtual_stages: PositiveInt = 1
    schedule: Literal["1f1b", "zb-h1", "zbv"] = Field(
        "1f1b", description="zb-h1 and zbv (which has 2 virtual stages) fill waits with weight gradients put off"
    )
    pipeline_layout: list[NonNegativeInt] | None = Field(None, description="layers of each stage, in stage order")
    cp: PositiveInt = Field(1, description="ranks that share the tokens of each sequence")
    cp_kind: Literal["ring", "allgather", "alltoall"] = Field(
        "ring",
        description="how attention reaches the tokens of other cp ranks: keys and values passed on, or gathered, or heads "
        "exchanged for tokens",
    )
    ep: PositiveInt = Field(
        1, description="split the experts among so many ranks, of all data, context and tensor ranks"
    )
    expert_tp: PositiveInt = Field(1, description="split each expert among so many ranks, besides ep")
    dispatch: Literal["alltoall", "deepep"] = Field(
        "alltoall", description="what brings tokens to experts on other ranks; deepep is a library for NVLink and RDMA"
    )
    dispatch_bound: float | None = Field(
        None,
        ge=1,
        description="room for tokens on their way to each rank's experts, as a multiple of an even load: the host then waits "
        "in no layer, and a step that needs more ends the run; default: as much as there is",
    )
    dp: PositiveInt | None = Field(None, description="follows from the number of ranks when left out")
    zero: Literal[0, 1, 2, 3] = Field(
        1, description="what data ranks share: 1 optimizer state, 2 also gradients, 3 also weights"
    )
    zero3_shard: int | None = Field(
        None, ge=2, description="under zero 3, neighbouring data ranks that share one copy; default: all of them"
    )
    zero3_layers: PositiveInt | None = Field(
        None, description="under zero 3, layers gathered at once; default: more, the more ranks share smaller layers"
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="what gradients are summed over data ranks in; bf16 sends half as much, and sums lose bits"
    )
    bucket_elements: PositiveInt | None = Field(
        None,
        description="gradients that are summed over data ranks at once, in elements; default: 40M, or 1M a rank from 40 ranks on",
    )


class TrainConfig(Config):
    """How long, how often to validate, and what to do when the numbers go wrong."""

    steps: PositiveInt = 1000
    eval_every: int = Field(0, ge=0, description="steps between validations; 0 for none")
    eval_steps: PositiveInt = Field(10, description="global batches of one validation")
    seed: int = Field(1234, ge=0)
    exit_after_minutes: float | None = Field(
        None, gt=0, description="save and end with status 75 after so long; the same command goes on"
    )
    exit_interval: PositiveInt | None = Field(None, description="the same after each step that is a multiple of this")
    on_nan: Literal["stop", "skip"] = Field("stop", description="on a loss or gradient that is not finite")
    max_skips: PositiveInt = Field(10, description="skipped steps in a row after which `skip` stops too")
    gc_every: int = Field(
        50,
        ge=0,
        description="steps between collections of Python's garbage, on all ranks at once; 0: when Python likes",
    )
    spike_factor: float = Field(0.0, ge=0, description="a loss this many times the recent average is a spike; 0: never")
    on_spike: Literal["warn", "stop"] = "warn"


class MuonConfig(Config):
    """Muon, for hidden matrices; the rest is AdamW's. Its updates have the size of AdamW's, so that lr can be shared."""

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    lr_factor: float = Field(1.0, gt=0, description="its learning rate, as a multiple of optimizer.lr")
    weight_decay: float | None = Field(None, ge=0, description="default: optimizer.weight_decay")
    rounds: PositiveInt = Field(5, description="rounds of the Newton-Schulz iteration")


class OptimizerConfig(Config):
    """AdamW or Muon beside it, and the clip of the global gradient norm."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(3e-4, gt=0)
    decoupled_lr: float | None = Field(
        None, gt=0, description="learning rate of the input embedding and the output layer; default: lr"
    )
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clip")
    offload: bool = Field(False, description="keep main weights and moments in host memory, and update them there")
    muon: MuonConfig = MuonConfig()

    def problems(self) -> Iterator[Problem]:
        """Betas lie in [0, 1)."""
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                yield Problem(f"betas.{index}", "must be at least 0 and below 1", beta)


class Fp16Config(Config):
    """The loss scale under fp16: powers of two, so that scaling changes no bits."""

    initial_scale: float = 65536.0
    growth_interval: PositiveInt = Field(1000, description="steps without overflow after which it doubles")
    min_scale: float = Field(1.0, description="an overflow at this scale counts as a number that is not finite")

    def problems(self) -> Iterator[Problem]:
        """Powers of two, the smallest first."""
        for name in ("initial_scale", "min_scale"):
            value = getattr(self, name)
            if not value > 0 or frexp(value)[0] != 0.5:
                yield Problem(name, "must be a power of two", value)
        if self.initial_scale < self.min_scale:
            yield Problem("initial_scale", f"must not be below min_scale = {self.min_scale:g}", self.initial_scale)


class RecomputeConfig(Config):
    """What the backward computes again: nothing, some `modules` of each layer, or whole layers (the first `layers`)."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: PositiveInt | None = None
    modules: list[Literal["norm", "activation", "attention", "mlp", "moe"]] = Field(
        ["norm", "activation"],
        min_length=1,
        description="of selective: norms and what stands between the projections of a feed-forward block or an expert cost "
        "little; the core of attention pays where it is not fused; mlp and moe are whole blocks",
    )

    def problems(self) -> Iterator[Problem]:
        """Modules are those of `selective`."""
        if self.kind != "selective" and self.modules != RecomputeConfig().modules:
            yield Problem(
                "modules", f"says what selective recomputes, and kind = {self.kind}", self.modules, "kind: selective"
            )


class OffloadConfig(Config):
    """Activations in host memory from forward to backward, copied beside the work."""

    activations: int = Field(
        0,
        ge=0,
        description="of so many layers of each stage, the first ones; not the inputs of layers that are recomputed whole",
    )
    min_bytes: int = Field(1 << 20, ge=0, description="smaller tensors stay on the device")


class KernelsConfig(Config):
    """Which library computes what. `auto` takes the best that is there; a run says at its start what that is, and why."""

    linear: Literal["auto", "torch", "te"] = Field(
        "auto", description="products of linear layers; te: Transformer Engine"
    )
    attention: Literal["auto", "sdpa", "varlen", "flash", "flex", "te"] = Field(
        "auto",
        description="sdpa: torch's choice of a kernel, and its flash attention for blocks, documents and windows; varlen: that "
        "one always; flash: flash-attn 3 or 2; flex: FlexAttention; te: Transformer Engine, which is cuDNN",
    )


class CheckpointConfig(Config):
    """When to save, what to keep, where to go on from."""

    save: bool = Field(True, description="false: none is written, not even at the end, as for a measurement")
    every: int = Field(0, ge=0, description="steps between saves; 0: only at the end")
    keep: PositiveInt | None = Field(None, description="newest checkpoints to keep; default: all")
    keep_every: PositiveInt | None = Field(None, description="keep each checkpoint whose step is a multiple of this")
    async_: bool = Field(True, alias="async", description="write in the background")
    path: str | None = Field(
        None,
        description="where they are kept, a folder or a URL such as s3://bucket/run; default: `output`/checkpoints",
    )
    load: str | None = Field(None, description="go on from this checkpoint, a folder or a URL; it must exist")
    resume: bool = Field(
        True, description="go on from the newest checkpoint of this run, if any; false refuses a used folder"
    )
    allow_changes: bool = Field(False, description="resume although settings that change the model differ")
    allow_lr_jump: bool = Field(False, description="resume although the learning rate jumps by changed settings")


class LogConfig(Config):
    """Where the numbers go, besides the screen and metrics.jsonl."""

    every: PositiveInt = 1
    tensorboard: bool = True
    wandb: str | None = Field(None, description="project name for Weights & Biases")


class ProfileConfig(Config):
    """Steps whose time and memory are looked at, into `output`/profile."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="the first and the last one")
    trace: bool = Field(True, description="a trace of torch's profiler, for chrome://tracing or Perfetto")
    memory: bool = Field(True, description="a snapshot of a GPU's memory, for pytorch.org/memory_viz")
    ranks: list[NonNegativeInt] = Field([0], description="that are looked at")

    def problems(self) -> Iterator[Problem]:
        """The first is not behind the last."""
        if self.steps[0] > self.steps[1]:
            yield Problem("steps", "are the first and the last one, in this order", list(self.steps))


class DebugConfig(Config):
    """Slow checks and reproducible sums, for finding faults."""

    ordered_reductions: bool = Field(False, description="sum over ranks in rank order, bit for bit reproducible")
    reduce_every_microbatch: bool = Field(
        False, description="sum gradients over ranks after each micro-batch at every ZeRO level, as level 2 must"
    )


class RunConfig(Config):
    """Everything that decides a run: run.yaml."""

    model: ModelConfig
    data: DataConfig
    init_from: str | None = Field(
        None, description="start from the weights of this checkpoint, HuggingFace folder or GGUF file"
    )
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig = BatchConfig.model_validate({"global": 8})
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRSchedule = LRSchedule()
    precision: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] = Field(
        "bf16", description="fp8: bf16, but for the products of linear layers"
    )
    fp16: Fp16Config = Fp16Config()
    fp8: Fp8Config = Fp8Config()
    deterministic: bool = Field(
        False, description="the same bits each time in the same layout, on a GPU too: deterministic kernels, slower"
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="compile what is computed element by element or row by row; auto: on a GPU"
    )
    recompute: RecomputeConfig = RecomputeConfig()
    offload: OffloadConfig = OffloadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    kernels: KernelsConfig = KernelsConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig | None = None
    debug: DebugConfig = DebugConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_seconds: float = Field(600, gt=0, description="how long a rank may keep the others waiting")
    output: str = "runs/default"

    @property
    def checkpoints(self) -> Place:
        """Where the run's checkpoints are kept."""
        path = self.checkpoint.path
        return Path(self.output) / "checkpoints" if path is None else place(path)

    def check_ranks(self, world_size: int) -> None:
        """Refuse a number of ranks that does not fit.

        Raises:
            ConfigError: with every problem, and degrees that would fit.
        """
        found = list(world_problems(self, world_size))
        if found:
            raise_problems(found, f"{world_size} rank(s)")

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel ranks in a world of that size, as `check_ranks` allows."""
        parallel = self.parallel
        return world_size // (parallel.tp * parallel.pp * parallel.cp)

    def microbatches(self, dp: int) -> int:
        """Micro-batches of a step on each of `dp` data-parallel ranks, of the largest steps."""
        return self.batch.global_ // (self.batch.micro * dp)

    @property
    def samples(self) -> dict[str, int]:
        """How many samples the run reads of each split."""
        train = self.train
        evaluations = train.steps // train.eval_every + 1 if train.eval_every else 0
        return {
            "train": self.batch.consumed(train.steps),
            "valid": evaluations and train.eval_steps * self.batch.global_,
        }

    def lr_curve(self) -> LRCurve:
        """The learning rate as a function of consumed samples."""
        return self.lr_schedule.curve(lr=self.optimizer.lr, steps=self.train.steps, batch=self.batch)

    def decoupled_lr_curve(self) -> LRCurve | None:
        """That of the input embedding and the output layer, where they have one of their own."""
        highest, lowest = self.optimizer.decoupled_lr, self.lr_schedule.decoupled_min_lr
        if highest is None:
            return None
        return replace(self.lr_curve(), highest=highest, lowest=self.lr_schedule.min_lr if lowest is None else lowest)

    def due(self, step: int, every: int) -> bool:
        """Whether something done `every` steps (0: only at the end) is due after `step`."""
        return step == self.train.steps or bool(every and step % every == 0)

    def notes(self) -> Iterator[str]:
        """What is no mistake, but should be known before the run."""
        model, length = self.model, self.data.seq_length
        if model.position == "rope" and length > model.max_position:
            yield (
                f"data.seq_length = {length} is past model.max_position = {model.max_position}: rope goes on, but an export "
                f"says that positions end at {model.max_position}; set model.max_position={length}"
            )
        last, ended = self.lr_curve()(self.batch.consumed(self.train.steps - 1)), self.lr_schedule.decay_steps
        if not last and ended and self.train.steps - ended > 1:
            yield (
                f"the learning rate is 0 from step {ended + 1} on, where lr_schedule.decay_steps ends the decay: the last "
                f"{self.train.steps - ended} steps train nothing; set lr_schedule.min_lr, or another end"
            )

    def problems(self) -> Iterator[Problem]:
        """Rules between sections."""
        model, data, parallel = self.model, self.data, self.parallel
        if model.position == "learned" and data.seq_length > model.max_position:
            yield Problem("data.seq_length", f"longer than model.max_position = {model.max_position}", data.seq_length)
        if "pairs" in (data.kind, *(source.kind for source in (*data.train, *(data.valid or []), *(data.test or [])))):
            rule = "has no loss to train with yet: preference pairs can be made and shown"
            yield Problem("data.kind", rule, "pairs", "conversations, made of the chosen answers")
        yield from model_problems(self)
        yield from fp8_problems(self)
        if self.kernels.linear == "te" and self.precision == "fp8":
            if self.fp8.recipe == "rowwise":
                rule = "is no recipe of Transformer Engine, which kernels.linear = te asks for"
                yield Problem("fp8.recipe", rule, "rowwise", "tensorwise, or kernels.linear: torch")
            if model.moe is not None:
                yield Problem("kernels.linear", "has no fp8 for experts, which are multiplied by groups", "te", "torch")
        if parallel.zero == 3 and parallel.pp > 1:
            rule = "3 gathers weights for every micro-batch, which a pipeline has many of"
            yield Problem("parallel.zero", rule, parallel.zero, "at most 2, or parallel.pp=1")
        if parallel.zero == 3 and self.optimizer.name == "muon":
            yield Problem("parallel.zero", "3 has only AdamW; Muon needs whole matrices", parallel.zero, "at most 2")
        for key in ("zero3_shard", "zero3_layers"):
            if (value := getattr(parallel, key)) is not None and parallel.zero != 3:
                rule = f"shards weights, which parallel.zero = {parallel.zero} does not"
                yield Problem(f"parallel.{key}", rule, value, "leave it out, or parallel.zero=3")
        for problem in self.lr_schedule.run_problems(lr=self.optimizer.lr, steps=self.train.steps, batch=self.batch):
            yield replace(problem, path=f"lr_schedule.{problem.path}")
        yield from self._decoupled_problems()
        if self.profile is not None and self.profile.steps[0] > self.train.steps:
            yield Problem("profile.steps", f"are past train.steps = {self.train.steps}", list(self.profile.steps))
        if isinstance(place(self.output), Remote):
            rule = "must be a folder here: metrics and logs are written line by line"
            yield Problem("output", rule, self.output, f"checkpoint.path={self.output} for the checkpoints alone")
        yield from self._unfinished()

    def _unfinished(self) -> Iterator[Problem]:
        """Texts that are not final, as those of a translated launch script whose variables it does not set."""
        rule = "holds a variable of a shell or a placeholder, which nothing fills in"
        for path, value in flat(self.model_dump(mode="json", by_alias=True)).items():
            for text in filter(UNFINISHED.search, _texts(value)):
                yield Problem(path, rule, text, "write its value")

    def _decoupled_problems(self) -> Iterator[Problem]:
        """Rates of their own for the input embedding and the output layer."""
        curve, key, lowest = (
            self.decoupled_lr_curve(),
            "lr_schedule.decoupled_min_lr",
            self.lr_schedule.decoupled_min_lr,
        )
        if curve is None:
            if lowest is not None:
                yield Problem(
                    key, "ends a decay that is not there", lowest, "set optimizer.decoupled_lr, or leave it out"
                )
        elif curve.lowest > curve.highest:
            yield Problem(key, f"must be at most optimizer.decoupled_lr = {curve.highest:g}", curve.lowest)


def flat(value: object, path: str = "") -> dict[str, object]:
    """Nested settings as {dotted path: value}; an empty section is a value."""
    if isinstance(value, Mapping) and value:
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}".strip(".")).items()}
    return {path: value}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(list(item.values()) if isinstance(item, Mapping) else item)


def resolve(raw: Mapping[str, Any], *, base: Path = Path(), tell: bool = False) -> dict[str, Any]:
    """Fill in what run.yaml abbreviates, so that the result stands alone and can be parsed as `RunConfig`.

    `model: {preset: name, ...}` and `model: {from: path, ...}` become the model's own fields, with further fields on
    top. `from` a folder also starts from that folder's weights; from a config.json itself it is the shape alone.
    `recompute: selective` becomes a section. With `tell`, keys of a config.json that nothing reads are warned of.

    Raises:
        ConfigError: for an unknown preset or a path that holds no model.
    """
    out = dict(raw)
    model = dict(raw["model"]) if isinstance(raw.get("model"), Mapping) else {}
    if "preset" in model:
        out["model"] = preset(str(model.pop("preset"))) | model
    elif "from" in model:
        from mega_ckpt.source import model_at  # here: reading weights needs torch, checking a run.yaml does not

        given = str(model.pop("from"))
        found = place(given)
        there = model_at(base / found if isinstance(found, Path) else found, tell=tell)
        out["model"] = there.model_dump(mode="json", exclude_unset=True) | model
        if not given.endswith(".json"):
            out.setdefault("init_from", given)
    if isinstance(raw.get("recompute"), str):
        out["recompute"] = {"kind": raw["recompute"]}
    return out


def load_run(path: Path, overrides: Sequence[str] = (), *, tell: bool = False) -> RunConfig:
    """Read run.yaml with `--set` overrides on top; `tell` as `resolve` has it.

    Raises:
        ConfigError: with every problem at once.
    """
    raw = apply_overrides(load_yaml(path), overrides)
    return RunConfig.parse(resolve(raw, tell=tell), source=str(path))


def load_plan(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """As `load_run`, and of a model alone too: a folder of weights, or a config.json of HuggingFace's, fed by no data.

    Raises:
        ConfigError: with every problem at once.
        CheckpointError: when the folder holds no model.
    """
    if not path.is_dir() and "model_type" not in load_yaml(path):
        return load_run(path, overrides, tell=True)
    raw = apply_overrides({"model": {"from": str(path)}, "data": {"train": ["none"]}}, overrides)
    return RunConfig.parse(resolve(raw, tell=True), source=str(path))
