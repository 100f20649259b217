"""Configuration of a training run: all sections of run.yaml, checked as a whole before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mega_common.lora_config import LoraConfig, is_trainable_tensor
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_common.object_store import Location, RemotePath, parse_location
from mega_common.strict_config import (
    ConfigProblem,
    StrictConfig,
    apply_overrides,
    load_yaml_mapping,
    raise_config_error,
)
from mega_data.data_config import DataConfig
from mega_trainer.config.batch_size import BatchConfig
from mega_trainer.config.encoder_retrieval_rules import find_encoder_decoder_problems, find_retrieval_problems
from mega_trainer.config.fp8_config import Fp8Config, find_fp8_problems
from mega_trainer.config.lr_schedule import LearningRateCurve, LRSchedule
from mega_trainer.config.objective_config import ObjectiveConfig
from mega_trainer.config.parallel_layout import find_degree_problems, find_world_size_problems
from mega_trainer.config.sections import (
    ActivationOffloadConfig,
    CheckpointConfig,
    CorruptionCheckConfig,
    DebugConfig,
    Fp16Config,
    InTrainingEvalConfig,
    KernelsConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RecomputeConfig,
    TrackingConfig,
    TrainConfig,
)

UNFINISHED = re.compile(r"\$[A-Za-z_{(\d]|<[^<>]+>")


class RunConfig(StrictConfig):
    """Complete configuration of a run: run.yaml."""

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
    offload: ActivationOffloadConfig = ActivationOffloadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    kernels: KernelsConfig = KernelsConfig()
    eval: InTrainingEvalConfig = InTrainingEvalConfig()
    fault: CorruptionCheckConfig = CorruptionCheckConfig()
    log: TrackingConfig = TrackingConfig()
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
    def checkpoint_root(self) -> Location:
        """Folder or URL that holds the run's checkpoints."""
        path = self.checkpoint.path
        return Path(self.output) / "checkpoints" if path is None else parse_location(path)

    def check_world_size(self, world_size: int) -> None:
        """Check that a number of ranks fits the parallel degrees and the batch.

        Raises:
            ConfigError: with every problem, and degrees that would fit.
        """
        found = list(find_world_size_problems(self, world_size))
        if found:
            raise_config_error(found, f"{world_size} rank(s)")

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks in a world of a size that passes `check_world_size`."""
        parallel = self.parallel
        return world_size // (parallel.tp * parallel.pp * parallel.cp)

    @property
    def minimum_world_size(self) -> int:
        """Smallest number of ranks that the parallel degrees allow."""
        parallel = self.parallel
        return parallel.tp * parallel.pp * parallel.cp * (parallel.dp or 1)

    def micro_batches_per_step(self, dp: int) -> int:
        """Return the micro-batches of one of the largest steps on each of `dp` data-parallel ranks."""
        return self.batch.global_ // (self.batch.micro * dp)

    @property
    def samples_per_split(self) -> dict[str, int]:
        """Number of samples the run reads of each split."""
        train = self.train
        evaluations = train.steps // train.eval_every + 1 if train.eval_every else 0
        return {
            "train": self.batch.samples_after_steps(train.steps),
            "valid": evaluations and train.eval_steps * self.batch.global_,
        }

    def build_lr_curve(self) -> LearningRateCurve:
        """Return the learning rate as a function of consumed samples."""
        return self.lr_schedule.make_curve(lr=self.optimizer.lr, steps=self.train.steps, batch=self.batch)

    def build_decoupled_lr_curve(self) -> LearningRateCurve | None:
        """Return the learning rate of the input embedding and the output layer, or None if they have no rate of their
        own.
        """
        highest, lowest = self.optimizer.decoupled_lr, self.lr_schedule.decoupled_min_lr
        if highest is None:
            return None
        return replace(
            self.build_lr_curve(), highest=highest, lowest=self.lr_schedule.min_lr if lowest is None else lowest
        )

    @property
    def target_length(self) -> int:
        """Number of target tokens of a sample: all, or for an encoder-decoder those of the decoder."""
        return self.data.t5.get_decoder_length(self.data.seq_length) if self.model.encoder else self.data.seq_length

    @property
    def sequence_lengths(self) -> tuple[int, int | None]:
        """Tokens of a sample, or for an encoder-decoder those of the encoder and of the decoder."""
        return self.data.seq_length, self.target_length if self.model.encoder else None

    @property
    def tokens_per_sample(self) -> int:
        """Tokens per sample (encoder + decoder)."""
        first, second = self.sequence_lengths
        return first + (second or 0)

    def is_trainable(self, name: str) -> bool:
        """Return whether a tensor, by its canonical name, is trained."""
        return self.model.uses_tensor(name) and is_trainable_tensor(name, self.train.freeze, self.lora)

    def lr_factor_of(self, name: str) -> float:
        """Return the learning-rate factor of a tensor, by its canonical name."""
        found = [value for pattern, value in self.optimizer.lr_factors.items() if fnmatchcase(name, pattern)]
        return found[-1] if found else 1.0

    def is_due(self, step: int, every: int) -> bool:
        """Return whether an action done `every` steps (0: only at the end) is due after `step`."""
        return step == self.train.steps or bool(every and step % every == 0)

    def find_warnings(self) -> Iterator[str]:
        """Yield warnings about a valid configuration."""
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
        last, ended = (
            self.build_lr_curve()(self.batch.samples_after_steps(self.train.steps - 1)),
            self.lr_schedule.decay_steps,
        )
        if not last and ended and self.train.steps - ended > 1:
            yield (
                f"the learning rate is 0 from step {ended + 1} on, where lr_schedule.decay_steps ends the decay: the last "
                f"{self.train.steps - ended} steps train nothing; set lr_schedule.min_lr, or another end"
            )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violations of rules between sections."""
        model, data, parallel = self.model, self.data, self.parallel
        if model.position == "learned" and data.seq_length > model.max_position:
            yield ConfigProblem(
                "data.seq_length", f"longer than model.max_position = {model.max_position}", data.seq_length
            )
        yield from self._objective_problems()
        yield from self._encoder_problems()
        for key, value in (
            ("train.early_stop", self.train.early_stop),
            ("checkpoint.best", self.checkpoint.best or None),
        ):
            if value is not None and not self.train.eval_every:
                yield ConfigProblem(key, "goes by validations, which there are none of", value, "set train.eval_every")
        if self.train.epochs is not None and self.data.sample_order == "megatron":
            rule = "in data.order: megatron, whose samples depend on the length of the run"
            yield ConfigProblem("train.epochs", rule, self.train.epochs, "train.steps, or data.order: stable")
        if self.lora is not None and self.init_from is None:
            yield ConfigProblem(
                "lora", "is an adapter of weights that are there", hint="set init_from, or model: {from: ...}"
            )
        if self.lora is not None and self.lora.quantize:
            if parallel.zero == 3:
                rule = "3 shares out weights in full, and lora.quantize keeps them in 4 bits"
                yield ConfigProblem("parallel.zero", rule, parallel.zero, "at most 2, or no lora.quantize")
            if self.precision == "fp8":
                rule = "packs weights whose products precision = fp8 quantises otherwise"
                yield ConfigProblem("lora.quantize", rule, self.lora.quantize, "precision: bf16")
        yield from find_degree_problems(self)
        yield from find_fp8_problems(self)
        yield from find_encoder_decoder_problems(self)
        yield from find_retrieval_problems(self)
        if self.kernels.linear == "te" and self.precision == "fp8":
            if self.fp8.recipe == "rowwise":
                rule = "is no recipe of Transformer Engine, which kernels.linear = te asks for"
                yield ConfigProblem("fp8.recipe", rule, "rowwise", "tensorwise, or kernels.linear: torch")
            if model.moe is not None:
                yield ConfigProblem(
                    "kernels.linear", "has no fp8 for experts, which are multiplied by groups", "te", "torch"
                )
        if parallel.zero == 3 and parallel.pp > 1:
            rule = "3 gathers weights for every micro-batch, which a pipeline has many of"
            yield ConfigProblem("parallel.zero", rule, parallel.zero, "at most 2, or parallel.pp=1")
        if parallel.zero == 3 and self.optimizer.name == "muon":
            yield ConfigProblem(
                "parallel.zero", "3 has only AdamW; Muon needs whole matrices", parallel.zero, "at most 2"
            )
        for key in ("zero3_shard", "zero3_layers"):
            if (value := getattr(parallel, key)) is not None and parallel.zero != 3:
                rule = f"shards weights, which parallel.zero = {parallel.zero} does not"
                yield ConfigProblem(f"parallel.{key}", rule, value, "leave it out, or parallel.zero=3")
        for problem in self.lr_schedule.find_run_problems(
            lr=self.optimizer.lr, steps=self.train.steps, batch=self.batch
        ):
            yield replace(problem, path=f"lr_schedule.{problem.path}")
        yield from self._decoupled_problems()
        if self.profile is not None and self.profile.steps[0] > self.train.steps:
            yield ConfigProblem("profile.steps", f"are past train.steps = {self.train.steps}", list(self.profile.steps))
        if self.eval.tasks and self.model.encoder and (parallel.pp > 1 or parallel.zero == 3):
            rule = "are asked of a model with an encoder whose layers no parallel.pp and no parallel.zero = 3 share out"
            yield ConfigProblem("eval.tasks", rule, self.eval.tasks, "mega eval --tasks, on the checkpoints")
        if isinstance(parse_location(self.output), RemotePath):
            rule = "must be a folder here: metrics and logs are written line by line"
            yield ConfigProblem("output", rule, self.output, f"checkpoint.path={self.output} for the checkpoints alone")
        if self.fault.recompute_every and parallel.zero > 1:
            rule = f"compares whole gradients, which parallel.zero = {parallel.zero} does not keep"
            yield ConfigProblem("fault.recompute_every", rule, self.fault.recompute_every, "parallel.zero=1, or 0")
        if self.fault.recompute_every and not self.deterministic and self.device != "cpu":
            rule = "compares bits, which a GPU promises only with deterministic = true"
            yield ConfigProblem(
                "fault.recompute_every", rule, self.fault.recompute_every, "deterministic: true, or device: cpu"
            )
        if data.sample_order == "megatron":
            for key in ("on_nan", "on_spike"):
                if getattr(self.train, key) == "rollback":
                    rule = "reads other samples, and data.order = megatron has only those of the run's steps"
                    yield ConfigProblem(f"train.{key}", rule, "rollback", "skip or stop")
        yield from self._placeholder_problems()

    def _objective_problems(self) -> Iterator[ConfigProblem]:
        """Check that preference pairs go with an objective that compares them, and that a reference model exists."""
        objective, kinds, train = self.objective, self.data.dataset_kinds, self.train
        if objective.is_pairwise and kinds != {"pairs"}:
            yield ConfigProblem("objective.kind", "compares preference pairs", objective.kind, "data.kind: pairs")
        if not objective.is_pairwise and "pairs" in kinds:
            yield ConfigProblem("data.kind", "needs an objective that compares answers", "pairs", "objective.kind: dpo")
        if objective.kind == "distill":
            yield from self._teacher_problems()
        if self.model.score != (objective.kind == "reward"):
            rule = f"goes with model.score = {str(not self.model.score).lower()}"
            yield ConfigProblem(
                "objective.kind", rule, objective.kind, "kind: reward trains what scores, and nothing else does"
            )
        if objective.needs_reference and objective.reference_model is None and self.init_from is None:
            rule = "compares with a reference model, and there is none"
            yield ConfigProblem("objective.kind", rule, objective.kind, "set init_from, or objective.reference_model")
        asked = {"reference": objective.needs_reference, "teacher_logits": objective.kind == "distill"}
        for key, used in asked.items() if "rollback" in (train.on_nan, train.on_spike) else ():
            if used and getattr(objective, key) == "cached":
                rule = "has what is told of the run's samples alone, and a rollback goes on with others"
                yield ConfigProblem(
                    f"objective.{key}", rule, "cached", "live, or no rollback in train.on_nan and on_spike"
                )

    def _encoder_problems(self) -> Iterator[ConfigProblem]:
        """Check that bidirectional models are trained on masked tokens, and only they are."""
        model, data = self.model, self.data
        if model.causal and (masked := sorted(data.dataset_kinds & {"bert", "masked"})):
            rule = "is data for an encoder, and a model that sees no token behind it is a decoder"
            yield ConfigProblem("data.kind", rule, masked[0], "text or fim; or model.causal: false")
        if not model.causal and not data.dataset_kinds & {"bert", "masked"}:
            rule = "is an encoder, which guesses masked tokens"
            yield ConfigProblem(
                "model.causal", rule, False, "data.kind: masked for running text, or bert for sentences"
            )
        if not model.causal and self.eval.tasks:
            yield ConfigProblem("eval.tasks", "are of decoders, which continue text", self.eval.tasks, "leave them out")
        if (
            "bert" in data.dataset_kinds
            and data.bert.sentence_pairs
            and not (model.sentence_pairs and model.token_types > 1)
        ):
            rule = "makes two segments, which the model has no types or no head for"
            hint = "data.bert.sentence_pairs: false; or model.token_types: 2, pooler: true and sentence_pairs: true"
            yield ConfigProblem("data.bert.sentence_pairs", rule, True, hint)

    def _teacher_problems(self) -> Iterator[ConfigProblem]:
        """Check that a teacher is given, predicts the same vocabulary, and fits the run's data."""
        objective = self.objective
        if objective.teacher is None:
            yield ConfigProblem(
                "objective.teacher", "is not there, which kind: distill learns from", hint="a model's folder"
            )
        if self.data.dataset_kinds & {"bert", "t5", "masked"} or not self.model.causal:
            yield ConfigProblem("objective.kind", "learns from a decoder's next tokens", "distill", "data of text")
        if objective.top_k > self.model.vocab_size:
            yield ConfigProblem(
                "objective.top_k", f"is more than model.vocab_size = {self.model.vocab_size}", objective.top_k
            )

    def _placeholder_problems(self) -> Iterator[ConfigProblem]:
        """Yield settings that still hold a shell variable or placeholder, as in a translated launch script."""
        rule = "holds a variable of a shell or a placeholder, which nothing fills in"
        for path, value in flatten_settings(self.model_dump(mode="json", by_alias=True)).items():
            if path == "data.fim.tokens":  # which are spelt like placeholders
                continue
            for text in filter(UNFINISHED.search, _iterate_texts(value)):
                yield ConfigProblem(path, rule, text, "write its value")

    def _decoupled_problems(self) -> Iterator[ConfigProblem]:
        """Check the separate learning rates of the input embedding and the output layer."""
        curve, key, lowest = (
            self.build_decoupled_lr_curve(),
            "lr_schedule.decoupled_min_lr",
            self.lr_schedule.decoupled_min_lr,
        )
        if curve is None:
            if lowest is not None:
                yield ConfigProblem(
                    key, "ends a decay that is not there", lowest, "set optimizer.decoupled_lr, or leave it out"
                )
        elif curve.lowest > curve.highest:
            yield ConfigProblem(key, f"must be at most optimizer.decoupled_lr = {curve.highest:g}", curve.lowest)


def flatten_settings(value: object, path: str = "") -> dict[str, object]:
    """Return nested settings as {dotted path: value}; an empty section is a value."""
    if isinstance(value, Mapping) and value:
        return {
            k: v for key, item in value.items() for k, v in flatten_settings(item, f"{path}.{key}".strip(".")).items()
        }
    return {path: value}


def _iterate_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(list(item.values()) if isinstance(item, Mapping) else item)


def resolve_run_config(raw: Mapping[str, Any], *, base: Path = Path(), warn_unread: bool = False) -> dict[str, Any]:
    """Expand the abbreviations of run.yaml, so that the result stands alone and can be parsed as `RunConfig`.

    `model: {preset: name, ...}` and `model: {from: path, ...}` become the model's own fields, with further fields on
    top. `from` a folder also starts from that folder's weights; from a config.json itself it is the shape alone.
    `recompute: selective` becomes a section. With `warn_unread`, keys of a config.json that nothing reads are warned of.

    Raises:
        ConfigError: for an unknown preset or a path that holds no model.
    """
    out = dict(raw)
    model = dict(raw["model"]) if isinstance(raw.get("model"), Mapping) else {}
    if "preset" in model:
        out["model"] = load_model_preset(str(model.pop("preset"))) | model
    elif "from" in model:
        from mega_ckpt.source import (
            read_model_config,
        )  # here: reading weights needs torch, checking a run.yaml does not

        given = str(model.pop("from"))
        found = parse_location(given)
        there = read_model_config(base / found if isinstance(found, Path) else found, warn=warn_unread)
        out["model"] = there.model_dump(mode="json", exclude_unset=True) | model
        if not given.endswith(".json"):
            out.setdefault("init_from", given)
    if isinstance(raw.get("recompute"), str):
        out["recompute"] = {"kind": raw["recompute"]}
    if isinstance(out.get("model"), Mapping) and out["model"].get("encoder") and isinstance(out.get("data"), Mapping):
        out["data"] = {"kind": "t5", **out["data"]}
    return out


def load_run_config(path: Path, overrides: Sequence[str] = (), *, warn_unread: bool = False) -> RunConfig:
    """Read run.yaml with `--set` overrides on top; `warn_unread` is as in `resolve_run_config`.

    Raises:
        ConfigError: with every problem at once.
    """
    raw = apply_overrides(load_yaml_mapping(path), overrides)
    return RunConfig.parse(resolve_run_config(raw, warn_unread=warn_unread), source=str(path))


def load_plan_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run.yaml, or a model alone (a folder of weights or a HuggingFace config.json), which has no data.

    Raises:
        ConfigError: with every problem at once.
        CheckpointError: when the folder holds no model.
    """
    if not path.is_dir() and "model_type" not in load_yaml_mapping(path):
        return load_run_config(path, overrides, warn_unread=True)
    raw = apply_overrides({"model": {"from": str(path)}, "data": {"train": ["none"]}}, overrides)
    return RunConfig.parse(resolve_run_config(raw, warn_unread=True), source=str(path))
