"""A training run as configuration: run.yaml, all of its sections. Checked whole before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mega_common.config import Config, Problem, apply_overrides, load_yaml, raise_problems
from mega_common.lora import LoraConfig, is_trained
from mega_common.model_config import ModelConfig
from mega_common.presets import preset
from mega_common.remote import Place, Remote, place
from mega_data.config import DataConfig
from mega_trainer.batch_size import BatchConfig
from mega_trainer.fp8 import Fp8Config, fp8_problems
from mega_trainer.layout import model_problems, world_problems
from mega_trainer.objectives.config import ObjectiveConfig
from mega_trainer.optim.lr import LRCurve, LRSchedule
from mega_trainer.sections import (
    CheckpointConfig,
    DebugConfig,
    EvalConfig,
    FaultConfig,
    Fp16Config,
    KernelsConfig,
    LogConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RecomputeConfig,
    TrainConfig,
)
from mega_trainer.source_rules import retrieval_problems, source_problems

UNFINISHED = re.compile(r"\$[A-Za-z_{(\d]|<[^<>]+>")


class RunConfig(Config):
    """Everything that decides a run: run.yaml."""

    model: ModelConfig
    data: DataConfig
    lora: LoraConfig | None = Field(
        None, description="train an adapter of low rank (LoRA) beside the weights of init_from, which stay as they are"
    )
    init_from: str | None = Field(
        None, description="start from the weights of this checkpoint, HuggingFace folder or GGUF file"
    )
    objective: ObjectiveConfig = ObjectiveConfig()
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
    eval: EvalConfig = EvalConfig()
    fault: FaultConfig = FaultConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig | None = None
    debug: DebugConfig = DebugConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    machine: str | None = Field(
        None,
        description="what step times are predicted for, and the layout of a run without `parallel` is chosen for: as `mega plan "
        "--machine` takes it; default: known by the GPU's name, or none",
    )
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

    @property
    def ranks_asked(self) -> int:
        """The fewest that the layout asks for."""
        parallel = self.parallel
        return parallel.tp * parallel.pp * parallel.cp * (parallel.dp or 1)

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

    @property
    def target_length(self) -> int:
        """Tokens of a sample that are asked for: all, or of an encoder-decoder those of the decoder."""
        return self.data.t5.decoder_length(self.data.seq_length) if self.model.encoder else self.data.seq_length

    @property
    def lengths(self) -> tuple[int, int | None]:
        """Tokens of a sample, or of an encoder-decoder those of the encoder and of the decoder."""
        return self.data.seq_length, self.target_length if self.model.encoder else None

    @property
    def sample_tokens(self) -> int:
        """Of a sample, both sequences of an encoder-decoder."""
        first, second = self.lengths
        return first + (second or 0)

    def trains(self, name: str) -> bool:
        """Whether a tensor, by its canonical name, is trained."""
        return self.model.computes(name) and is_trained(name, self.train.freeze, self.lora)

    def lr_factor(self, name: str) -> float:
        """The factor on the learning rate of a tensor, by its canonical name."""
        found = [value for pattern, value in self.optimizer.lr_factors.items() if fnmatchcase(name, pattern)]
        return found[-1] if found else 1.0

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
        if model.moe and model.moe.aux_loss and model.moe.aux_loss_scope == "batch":
            yield (
                "model.moe.aux_loss_scope = batch counts the load over one micro-batch of all data ranks: training depends on "
                "batch.micro x data ranks, and is the same in other layouts only where that product is; "
                "set model.moe.aux_loss_scope=sequence for training that does not depend on the layout"
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
        yield from self._objective_problems()
        yield from self._encoder_problems()
        for key, value in (
            ("train.early_stop", self.train.early_stop),
            ("checkpoint.best", self.checkpoint.best or None),
        ):
            if value is not None and not self.train.eval_every:
                yield Problem(key, "goes by validations, which there are none of", value, "set train.eval_every")
        if self.train.epochs is not None and self.data.sample_order == "megatron":
            rule = "in data.order: megatron, whose samples depend on the length of the run"
            yield Problem("train.epochs", rule, self.train.epochs, "train.steps, or data.order: stable")
        if self.lora is not None and self.init_from is None:
            yield Problem(
                "lora", "is an adapter of weights that are there", hint="set init_from, or model: {from: ...}"
            )
        if self.lora is not None and self.lora.quantize:
            if parallel.zero == 3:
                rule = "3 shares out weights in full, and lora.quantize keeps them in 4 bits"
                yield Problem("parallel.zero", rule, parallel.zero, "at most 2, or no lora.quantize")
            if self.precision == "fp8":
                rule = "packs weights whose products precision = fp8 quantises otherwise"
                yield Problem("lora.quantize", rule, self.lora.quantize, "precision: bf16")
        yield from model_problems(self)
        yield from fp8_problems(self)
        yield from source_problems(self)
        yield from retrieval_problems(self)
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
        if self.eval.tasks and self.model.encoder and (parallel.pp > 1 or parallel.zero == 3):
            rule = "are asked of a model with an encoder whose layers no parallel.pp and no parallel.zero = 3 share out"
            yield Problem("eval.tasks", rule, self.eval.tasks, "mega eval --tasks, on the checkpoints")
        if isinstance(place(self.output), Remote):
            rule = "must be a folder here: metrics and logs are written line by line"
            yield Problem("output", rule, self.output, f"checkpoint.path={self.output} for the checkpoints alone")
        if self.fault.recompute_every and parallel.zero > 1:
            rule = f"compares whole gradients, which parallel.zero = {parallel.zero} does not keep"
            yield Problem("fault.recompute_every", rule, self.fault.recompute_every, "parallel.zero=1, or 0")
        if self.fault.recompute_every and not self.deterministic and self.device != "cpu":
            rule = "compares bits, which a GPU promises only with deterministic = true"
            yield Problem(
                "fault.recompute_every", rule, self.fault.recompute_every, "deterministic: true, or device: cpu"
            )
        if data.sample_order == "megatron":
            for key in ("on_nan", "on_spike"):
                if getattr(self.train, key) == "rollback":
                    rule = "reads other samples, and data.order = megatron has only those of the run's steps"
                    yield Problem(f"train.{key}", rule, "rollback", "skip or stop")
        yield from self._unfinished()

    def _objective_problems(self) -> Iterator[Problem]:
        """Pairs and what compares them go together, and a reference is there."""
        objective, kinds, train = self.objective, self.data.kinds, self.train
        if objective.of_pairs and kinds != {"pairs"}:
            yield Problem("objective.kind", "compares preference pairs", objective.kind, "data.kind: pairs")
        if not objective.of_pairs and "pairs" in kinds:
            yield Problem("data.kind", "needs an objective that compares answers", "pairs", "objective.kind: dpo")
        if objective.kind == "distill":
            yield from self._teacher_problems()
        if self.model.score != (objective.kind == "reward"):
            rule = f"goes with model.score = {str(not self.model.score).lower()}"
            yield Problem(
                "objective.kind", rule, objective.kind, "kind: reward trains what scores, and nothing else does"
            )
        if objective.refers and objective.reference_model is None and self.init_from is None:
            rule = "compares with a reference model, and there is none"
            yield Problem("objective.kind", rule, objective.kind, "set init_from, or objective.reference_model")
        asked = {"reference": objective.refers, "teacher_logits": objective.kind == "distill"}
        for key, used in asked.items() if "rollback" in (train.on_nan, train.on_spike) else ():
            if used and getattr(objective, key) == "cached":
                rule = "has what is told of the run's samples alone, and a rollback goes on with others"
                yield Problem(f"objective.{key}", rule, "cached", "live, or no rollback in train.on_nan and on_spike")

    def _encoder_problems(self) -> Iterator[Problem]:
        """Encoders guess masked tokens, and nothing else does."""
        model, data = self.model, self.data
        if model.causal and (masked := sorted(data.kinds & {"bert", "masked"})):
            rule = "is data for an encoder, and a model that sees no token behind it is a decoder"
            yield Problem("data.kind", rule, masked[0], "text or fim; or model.causal: false")
        if not model.causal and not data.kinds & {"bert", "masked"}:
            rule = "is an encoder, which guesses masked tokens"
            yield Problem("model.causal", rule, False, "data.kind: masked for running text, or bert for sentences")
        if not model.causal and self.eval.tasks:
            yield Problem("eval.tasks", "are of decoders, which continue text", self.eval.tasks, "leave them out")
        if "bert" in data.kinds and data.bert.sentence_pairs and not (model.sentence_pairs and model.token_types > 1):
            rule = "makes two segments, which the model has no types or no head for"
            hint = "data.bert.sentence_pairs: false; or model.token_types: 2, pooler: true and sentence_pairs: true"
            yield Problem("data.bert.sentence_pairs", rule, True, hint)

    def _teacher_problems(self) -> Iterator[Problem]:
        """A teacher is there, tells tokens of the same vocabulary, and of the samples that the run reads."""
        objective = self.objective
        if objective.teacher is None:
            yield Problem("objective.teacher", "is not there, which kind: distill learns from", hint="a model's folder")
        if self.data.kinds & {"bert", "t5", "masked"} or not self.model.causal:
            yield Problem("objective.kind", "learns from a decoder's next tokens", "distill", "data of text")
        if objective.top_k > self.model.vocab_size:
            yield Problem(
                "objective.top_k", f"is more than model.vocab_size = {self.model.vocab_size}", objective.top_k
            )

    def _unfinished(self) -> Iterator[Problem]:
        """Texts that are not final, as those of a translated launch script whose variables it does not set."""
        rule = "holds a variable of a shell or a placeholder, which nothing fills in"
        for path, value in flat(self.model_dump(mode="json", by_alias=True)).items():
            if path == "data.fim.tokens":  # which are spelt like placeholders
                continue
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
    if isinstance(out.get("model"), Mapping) and out["model"].get("encoder") and isinstance(out.get("data"), Mapping):
        out["data"] = {"kind": "t5", **out["data"]}
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
