"""Configuration of a training run: all sections of run.yaml, checked as a whole before torch is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from math import isclose
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mega_common.errors import ConfigError
from mega_common.extension_loader import is_extension_path
from mega_common.lora_config import LoraConfig, is_trainable_tensor
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_common.object_store import Location, RemotePath, parse_location
from mega_common.strict_config import (
    ConfigProblem,
    StrictConfig,
    apply_config_overrides,
    load_yaml_mapping,
    raise_config_error,
)
from mega_data.data_config import DataConfig, list_raw_paths
from mega_trainer.config.architecture_rules import find_architecture_problems
from mega_trainer.config.batch_size import BatchConfig
from mega_trainer.config.cuda_graph_rules import find_cuda_graph_problems
from mega_trainer.config.extensions import (
    ExtensionRegistry,
    add_block_declarations,
    add_function_declarations,
    find_extension_entry_problems,
    load_extensions,
)
from mega_trainer.config.fp8_config import FOUR_BITS, Fp8Config, find_fp8_problems
from mega_trainer.config.lr_schedule import LearningRateCurve, LRSchedule
from mega_trainer.config.objective_config import ObjectiveConfig
from mega_trainer.config.parallel_rules import (
    ParallelRules,
    find_comm_overlap_problems,
    find_zero_problems,
)
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
from mega_trainer.config.transformers_rules import find_transformers_problems, pop_implementation

UNFINISHED = re.compile(r"\$[A-Za-z_{(\d]|<[^<>]+>")


class RunConfig(StrictConfig):
    """Complete configuration of a training run: the content of run.yaml."""

    extensions: list[str] = Field(
        [], description="extensions to load: files and folders of Python code, installed extensions, or modules"
    )
    model: ModelConfig
    data: DataConfig
    lora: LoraConfig | None = Field(
        None, description="train a low-rank adapter (LoRA) on the frozen weights of init_from"
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
        "bf16", description="fp8: bf16, with the GEMMs of linear layers in FP8"
    )
    fp16: Fp16Config = Fp16Config()
    fp8: Fp8Config = Fp8Config()
    deterministic: bool = Field(
        False,
        description="bitwise reproducible in the same layout, on a GPU by deterministic kernels, which are slower",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="compile elementwise and row-wise operations; auto: on a GPU"
    )
    cuda_graphs: Literal["auto", "layers", "off"] = Field(
        "off",
        description="layers: launch the kernels of a layer of attention and MLP as one CUDA graph, in the forward and in the "
        "backward; auto: if the run allows it",
    )
    recompute: RecomputeConfig = RecomputeConfig()
    offload: ActivationOffloadConfig = ActivationOffloadConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    kernels: KernelsConfig = KernelsConfig()
    eval: InTrainingEvalConfig = InTrainingEvalConfig()
    fault: CorruptionCheckConfig = CorruptionCheckConfig()
    log: TrackingConfig = TrackingConfig()
    callbacks: dict[str, dict[str, Any]] = Field(
        {}, description="callbacks of extensions that are called after each step, by name, with the settings of each"
    )
    profile: ProfileConfig | None = None
    debug: DebugConfig = DebugConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    machine: str | None = Field(
        None,
        description="machine for predicted step times and for the layout of a run without `parallel`, as for `mega plan "
        "--machine`; default: by the GPU's name, if known",
    )
    timeout_seconds: float = Field(600, gt=0, description="longest time that a rank may keep the others waiting")
    output: str = "runs/default"

    @classmethod
    def load_foreign_keys(cls) -> Mapping[str, str]:
        """Return the fix for each key of other trainers' settings, from the table `foreign_keys.yaml`."""
        return _load_foreign_key_table()

    @property
    def registry(self) -> ExtensionRegistry:
        """Registry of what the run's extensions add to mega; the first access imports their modules."""
        return load_extensions(self.extensions)

    @property
    def extension_sample_builders(self) -> dict[str, Callable[..., Any]]:
        """Sample builder of each data kind of an extension that the run uses, by name, with options bound."""
        from mega_data.kinds.extension_samples import ExtensionSampleBuilder  # imports numpy

        found: dict[str, Callable[..., Any]] = {}
        for name, entry in self.registry.entries("data_kinds").items():
            if name in self.data.dataset_kinds:
                title = f"extension {self.registry.find_extension('data_kinds', name).name}: {name} in data_kinds"
                found[name] = ExtensionSampleBuilder(title, entry, entry.options.parse(self.data.options))
        return found

    @property
    def checkpoint_root(self) -> Location:
        """Folder or URL that holds the run's checkpoints."""
        path = self.checkpoint.path
        return Path(self.output) / "checkpoints" if path is None else parse_location(path)

    def check_world_size(self, world_size: int) -> None:
        """Raise `ConfigError` if `world_size` ranks do not fit the parallel degrees and the batch.

        Raises:
            ConfigError: with every problem, and degrees that would fit.
        """
        found = list(self.parallel_rules.find_world_size_problems(world_size))
        if found:
            raise_config_error(found, f"{world_size} rank(s)")

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks among `world_size` ranks.
        `world_size` must have passed `check_world_size`.
        """
        parallel = self.parallel
        return world_size // (parallel.tp * parallel.pp * parallel.cp)

    @property
    def minimum_world_size(self) -> int:
        """Product of the configured degrees tp, pp, cp and dp (1 if unset); expert parallelism may need more ranks."""
        parallel = self.parallel
        return parallel.tp * parallel.pp * parallel.cp * (parallel.dp or 1)

    def micro_batches_per_step(self, dp: int) -> int:
        """Return the number of micro-batches of a full-size step (`batch.global`) on each of `dp` data-parallel ranks."""
        return self.batch.global_ // (self.batch.micro * dp)

    @property
    def samples_per_split(self) -> dict[str, int]:
        """Number of samples that the run reads of each data split, `train` and `valid`."""
        train = self.train
        evaluations = train.steps // train.eval_every + 1 if train.eval_every else 0
        return {
            "train": self.batch.samples_after_steps(train.steps),
            "valid": evaluations and train.eval_steps * self.batch.global_,
        }

    def build_lr_curve(self) -> LearningRateCurve:
        """Return the run's learning rate as a function of consumed samples."""
        curve = self.lr_schedule.make_learning_rate_curve(
            lr=self.optimizer.lr, steps=self.train.steps, batch=self.batch
        )
        added = self.registry.entries("schedules").get(self.lr_schedule.name)
        if added is None:
            return curve
        return replace(curve, share=partial(added.share, options=added.options.parse(self.lr_schedule.options)))

    def build_decoupled_lr_curve(self) -> LearningRateCurve | None:
        """Return the separate learning-rate curve of the input embedding and output layer, or None if not configured."""
        highest, lowest = self.optimizer.decoupled_lr, self.lr_schedule.decoupled_min_lr
        if highest is None:
            return None
        return replace(
            self.build_lr_curve(), highest=highest, lowest=self.lr_schedule.min_lr if lowest is None else lowest
        )

    @property
    def gemm_precision(self) -> str:
        """Precision of the GEMMs of linear layers: `nvfp4` with that recipe, else that of the run."""
        return FOUR_BITS if self.precision == "fp8" and self.fp8.recipe == FOUR_BITS else self.precision

    @property
    def layers_with_cached_fp8_weights(self) -> range:
        """Indices of the layers whose FP8 weights are kept from one micro-batch of a step to the next.
        The range is empty without FP8.
        """
        keeps = self.precision == "fp8" and self.fp8.keep_weights
        return self.fp8.fp8_layer_range(self.model.num_layers) if keeps else range(0)

    @property
    def target_length(self) -> int:
        """Number of target tokens of a sample: `data.seq_length`, or the decoder's length of an encoder-decoder."""
        return self.data.t5.get_decoder_length(self.data.seq_length) if self.model.encoder else self.data.seq_length

    @property
    def sequence_lengths(self) -> tuple[int, int | None]:
        """Tokens per sample: (`data.seq_length`, None), or (encoder tokens, decoder tokens) of an encoder-decoder."""
        return self.data.seq_length, self.target_length if self.model.encoder else None

    @property
    def tokens_per_sample(self) -> int:
        """Tokens per sample; for an encoder-decoder, encoder and decoder tokens together."""
        first, second = self.sequence_lengths
        return first + (second or 0)

    def is_trainable(self, name: str) -> bool:
        """Return whether the tensor with a given canonical name is trained, not frozen."""
        return self.model.trains_tensor(name) and is_trainable_tensor(name, self.train.freeze, self.lora)

    def lr_factor_of(self, name: str) -> float:
        """Return the factor on the learning rate of the tensor with a given canonical name."""
        found = [value for pattern, value in self.optimizer.lr_factors.items() if fnmatchcase(name, pattern)]
        factor = found[-1] if found else 1.0
        return factor / self.mup_width_multiplier if self.is_mup_matrix(name) else factor

    @property
    def mup_width_multiplier(self) -> float:
        """Width of the model as a multiple of `optimizer.mup.base_width`; 1 without muP."""
        mup = self.optimizer.mup
        return 1.0 if mup is None else self.model.hidden_size / mup.base_width

    def is_mup_matrix(self, name: str) -> bool:
        """Return whether muP scales a tensor's learning rate and initial values: a hidden matrix, by its canonical name."""
        return self.optimizer.mup is not None and name.endswith("_proj.weight") and name.startswith("model.layers.")

    def init_factor_of(self, name: str) -> float:
        """Return the factor on the initial standard deviation of the tensor with a given canonical name."""
        return float(self.mup_width_multiplier**-0.5) if self.is_mup_matrix(name) else 1.0

    def _mup_problems(self) -> Iterator[ConfigProblem]:
        """Yield settings for which muP has no rule here."""
        if self.optimizer.mup is None:
            return
        model, scale = self.model, 1 / self.mup_width_multiplier
        if self.optimizer.name != "adamw":
            rule = f"requires optimizer.name = adamw, not {self.optimizer.name}, whose learning rates scale otherwise"
            yield ConfigProblem("optimizer.mup", rule, hint="set optimizer.name=adamw, or remove optimizer.mup")
        parts = ("moe", "mla", "encoder", "retro", "vision", "masked_lm", "transformers")
        other = [part for part in parts if getattr(model, part) is not None]
        other += [key for key in ("mtp_layers", "score", "task_head") if getattr(model, key)]
        other += sorted(model.heads_by_mixer.keys() - {"attention"}) + sorted(model.feed_forwards)
        if other:
            rule = f"requires a decoder of attention and MLP layers, and the model has {', '.join(other)}"
            yield ConfigProblem("optimizer.mup", rule, hint="remove optimizer.mup")
        if not isclose(model.logit_scale, scale):
            rule = f"must be optimizer.mup.base_width / model.hidden_size = {scale:g} with optimizer.mup"
            hint = f"set model.logit_scale={scale!r}"
            yield ConfigProblem("model.logit_scale", rule, model.logit_scale, hint)

    def _optimizer_problems(self) -> Iterator[ConfigProblem]:
        """Yield settings that conflict with optimizer state other than one value for each weight: AdamW in 8 bits, SOAP."""
        name = self.optimizer.name
        if name == "adamw8bit" and self.precision == "fp64":
            rule = "requires fp32 main weights, and precision = fp64 has fp64 weights"
            yield ConfigProblem("optimizer.name", rule, name, "set optimizer.name=adamw, or set precision=fp32")
        if name == "soap" and self.lora is not None:
            rule = "is not supported with lora, as parts of an adapter are no whole matrices"
            yield ConfigProblem("optimizer.name", rule, name, "set optimizer.name=adamw, or remove lora")
        if name in ("adamw8bit", "soap") and (every := self.fault.hash_every):
            rule = f"is not supported with optimizer.name = {name}, whose state is not compared among ranks"
            yield ConfigProblem("fault.hash_every", rule, every, "set fault.hash_every=0, or set optimizer.name=adamw")

    def is_periodic_action_due(self, step: int, every: int) -> bool:
        """Return whether an action done every `every` steps and after the last step is due after `step`.
        `every` = 0 means that it is due only after the last step.
        """
        return step == self.train.steps or bool(every and step % every == 0)

    def find_warnings(self) -> Iterator[str]:
        """Yield warnings about questionable but valid settings of this configuration."""
        model, length = self.model, self.data.seq_length
        if model.num_score_outputs and self.lora is not None and not self.is_trainable("score.weight"):
            yield (
                "lora.modules_to_save does not name the head that scores texts, so it keeps its initial weights, which are "
                "random unless init_from has a head; set lora.modules_to_save: [score]"
            )
        if model.position == "rope" and length > model.max_position:
            yield (
                f"data.seq_length = {length} is larger than model.max_position = {model.max_position}, which an exported model "
                f"declares as its longest context; set model.max_position={length}"
            )
        if self.data.valid is not None and self.data.split[1] not in (0.0, DataConfig.model_fields["split"].default[1]):
            yield "data.split has a share for validation, which is not used, as data.valid names separate data sets; set it to 0"
        if model.moe and model.moe.aux_loss and model.moe.aux_loss_scope == "batch":
            yield (
                "model.moe.aux_loss_scope = batch counts the load over one micro-batch of all data ranks, so training depends "
                "on batch.micro x data ranks; set model.moe.aux_loss_scope=sequence for training that does not depend on the "
                "layout"
            )
        if model.compressed and model.compressed.indexer and "csa" in model.heads_by_mixer:
            yield (
                "the indexer of model.compressed is not trained: it keeps its present weights while the attention that it selects "
                "for changes; start from a published model (init_from)"
            )
        if model.mla and model.mla.indexer and not model.mla.indexer.kl_loss:
            yield (
                "model.mla.indexer.kl_loss = 0 does not train the indexer: it keeps its present weights while the attention "
                "that it selects for changes; set model.mla.indexer.kl_loss=1"
            )
        last = self.build_lr_curve()(self.batch.samples_after_steps(self.train.steps - 1))
        ended = self.lr_schedule.decay_steps
        if not last and ended and self.train.steps - ended > 1:
            yield (
                f"lr_schedule.decay_steps = {ended} ends the decay before the run: the learning rate is 0 in the last "
                f"{self.train.steps - ended} steps, which train nothing; set lr_schedule.min_lr, or remove "
                "lr_schedule.decay_steps"
            )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violations of the rules between sections of run.yaml.
        The rules of a section get only the settings that they read.
        """
        model, data, parallel, lora, train = self.model, self.data, self.parallel, self.lora, self.train
        yield from self._extension_problems()
        yield from find_architecture_problems(
            model, data, parallel, precision=self.precision, tasks=self.eval.tasks, lora=lora
        )
        yield from find_transformers_problems(self) if model.transformers else ()
        yield from self.objective.find_run_problems(
            model=model, data=data, train=train, batch=self.batch, init_from=self.init_from
        )
        yield from train.find_run_problems(data)
        yield from self.checkpoint.find_run_problems(train.eval_every)
        yield from self.parallel_rules.find_parallel_degree_problems()
        yield from find_zero_problems(parallel, lora)
        yield from find_cuda_graph_problems(self)
        yield from find_comm_overlap_problems(
            parallel, self.precision, self.kernels.linear, ordered=self.debug.ordered_reductions
        )
        if self.precision == "fp8":
            yield from find_fp8_problems(self.fp8, model, parallel, data.seq_length, linear=self.kernels.linear)
        yield from find_lora_problems(lora, self.init_from, self.precision) if lora else ()
        schedule = self.lr_schedule.find_run_problems(lr=self.optimizer.lr, steps=train.steps, batch=self.batch)
        yield from (replace(problem, path=f"lr_schedule.{problem.path}") for problem in schedule)
        yield from self._decoupled_problems()
        yield from self._mup_problems()
        yield from self._optimizer_problems()
        yield from self.profile.find_run_problems(train.steps) if self.profile else ()
        yield from self.fault.find_run_problems(
            zero=parallel.zero, deterministic=self.deterministic, device=self.device
        )
        if isinstance(parse_location(self.output), RemotePath):
            rule = "must be a local folder, as metrics and logs are appended line by line"
            hint = f"set output=runs/NAME and checkpoint.path={self.output}"
            yield ConfigProblem("output", rule, self.output, hint)
        yield from find_placeholder_problems(self.model_dump(mode="json", by_alias=True))

    def _extension_problems(self) -> Iterator[ConfigProblem]:
        """Yield settings that name an entry of no loaded extension, and options that the entry does not accept."""
        objective, optimizer, schedule, data = self.objective, self.optimizer, self.lr_schedule, self.data
        find = partial(find_extension_entry_problems, self.registry)
        yield from find("objectives", "objective.kind", objective.kind, objective.options, "objective.options")
        yield from find("optimizers", "optimizer.name", optimizer.name, optimizer.options, "optimizer.options")
        yield from find("schedules", "lr_schedule.name", schedule.name, schedule.options, "lr_schedule.options")
        added = data.dataset_kinds & self.registry.entries("data_kinds").keys()
        for kind in sorted(data.dataset_kinds):
            options = data.options if kind in added or not added else {}
            yield from find("data_kinds", "data.kind", kind, options, "data.options")
        yield from self.registry.find_kernel_problems(self.kernels.functions)
        for name, options in self.callbacks.items():
            yield from find("callbacks", f"callbacks.{name}", name, options, f"callbacks.{name}")

    @property
    def parallel_rules(self) -> ParallelRules:
        """Rules of the parallel degrees for this run's model, batch, sequence length and precision."""
        return ParallelRules(self.parallel, self.model, self.batch, self.data.seq_length, self.precision)

    def _decoupled_problems(self) -> Iterator[ConfigProblem]:
        """Check the separate learning rates of the input embedding and the output layer."""
        key, curve = "lr_schedule.decoupled_min_lr", self.build_decoupled_lr_curve()
        lowest = self.lr_schedule.decoupled_min_lr
        if curve is None and lowest is not None:
            hint = f"set optimizer.decoupled_lr={max(self.optimizer.lr, lowest)}, or remove {key}"
            yield ConfigProblem(key, "requires optimizer.decoupled_lr", lowest, hint)
        if curve is not None and curve.lowest > curve.highest:
            rule = f"must be at most optimizer.decoupled_lr = {curve.highest:g}"
            yield ConfigProblem(key, rule, curve.lowest, f"set {key}={curve.highest}")


def find_lora_problems(lora: LoraConfig, init_from: str | None, precision: str) -> Iterator[ConfigProblem]:
    """Yield problems of the LoRA settings with the run's initial weights and precision.
    A LoRA adapter needs pretrained base weights, and the precision must support quantised base weights.
    """
    if init_from is None:
        yield ConfigProblem("lora", "requires pretrained weights", hint="set init_from=FOLDER")
    if lora.quantize and precision == "fp8":
        hint = "set precision=bf16, or remove lora.quantize"
        yield ConfigProblem("lora.quantize", "is not supported with precision = fp8", lora.quantize, hint)


MODEL_ORIGINS = ("preset", "from", "implementation")
MODEL_HINT = "set model.preset=NAME, such as tiny, or model.from=FOLDER"
_OF_TRANSFORMERS = ("model.transformers.", "model.vision.module.")


def find_placeholder_problems(settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield settings that still contain a shell variable or a placeholder.
    A run.yaml may contain them after its translation from a launch script.
    """
    rule = "must not contain a shell variable or a placeholder"
    for path, value in flatten_settings(settings).items():
        if path == "data.fim.tokens" or path.startswith(_OF_TRANSFORMERS):  # tokens spelt like placeholders
            continue
        for text in filter(UNFINISHED.search, _iterate_texts(value)):
            yield ConfigProblem(path, rule, text, "replace it by its value")


def flatten_settings(value: object, path: str = "") -> dict[str, object]:
    """Return nested settings as a flat {dotted path: value}; an empty section is kept as a value."""
    if isinstance(value, Mapping) and value:
        return {
            k: v for key, item in value.items() for k, v in flatten_settings(item, f"{path}.{key}".strip(".")).items()
        }
    return {path: value}


@cache
def _load_foreign_key_table() -> Mapping[str, str]:
    table = load_yaml_mapping(Path(__file__).with_name("foreign_keys.yaml"))
    return {key: fix for fix, keys in table.items() for key in keys.split()}


def format_overrides(settings: Mapping[str, object]) -> list[str]:
    """Return settings, {dotted path: value}, as arguments PATH=VALUE of the option `--set`, with values as JSON."""
    return [f"{path}={json.dumps(value)}" for path, value in settings.items()]


def _iterate_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(list(item.values()) if isinstance(item, Mapping) else item)


def resolve_run_config(raw: Mapping[str, Any], *, base: Path = Path(), warn_unread: bool = False) -> dict[str, Any]:
    """Return the content of a run.yaml with its abbreviations expanded, such as `model: {preset: name}`.
    The result needs no other file and can be parsed as `RunConfig`.

    `model: {preset: name, ...}` and `model: {from: path, ...}` become the model's own fields, with further fields on
    top. `from` a folder also starts from that folder's weights; from a config.json itself it is the shape alone. With
    `implementation: transformers` the model is the module of the transformers library. `recompute: selective` becomes a
    section. Raw data gets the tokenizer of the folder `init_from`. With `warn_unread`, log a warning about unused keys of
    a config.json.

    Raises:
        ConfigError: for an unknown preset, or a path that holds no model.
    """
    out = dict(raw)
    named = [given] if isinstance(given := raw.get("extensions"), str) else given if isinstance(given, list) else []
    names = [str(base / name) if is_extension_path(name) else name for name in map(str, named)]
    if isinstance(given, str) or (
        base != Path() and names
    ):  # a workflow's run is checked from another folder than it runs in
        out["extensions"] = names
    registry = load_extensions(names)
    model = dict(raw["model"]) if isinstance(raw.get("model"), Mapping) else {}
    model = {key: value for key, value in model.items() if value is not None or key not in ("preset", "from")}
    _check_model_origin(raw.get("model"), model)
    if "preset" in model:
        out["model"] = load_model_preset(str(model.pop("preset"))) | model
    elif "from" in model:
        from mega_ckpt.source import read_model_config  # imports torch, which checking a run.yaml does not need

        given, implementation = str(model.pop("from")), pop_implementation(model)
        found = parse_location(given)
        where = base / found if isinstance(found, Path) else found
        there = read_model_config(where, warn=warn_unread, implementation=implementation, families=registry.families)
        out["model"] = there.model_dump(mode="json", exclude_unset=True) | model
        if not given.endswith(".json"):
            out.setdefault("init_from", given)
    optimizer = raw.get("optimizer")
    mup = optimizer.get("mup") if isinstance(optimizer, Mapping) else None
    if isinstance(out.get("model"), Mapping) and isinstance(mup, Mapping):
        narrow, width = mup.get("base_width"), out["model"].get("hidden_size")
        if isinstance(narrow, int) and isinstance(width, int) and width > 0:
            out["model"] = {"logit_scale": narrow / width, **out["model"]}
    if isinstance(out.get("model"), Mapping):
        out["model"] = add_block_declarations(add_function_declarations(out["model"], registry), registry)
    if isinstance(raw.get("recompute"), str):
        out["recompute"] = {"kind": raw["recompute"]}
    if isinstance(out.get("model"), Mapping) and out["model"].get("encoder") and isinstance(out.get("data"), Mapping):
        out["data"] = {"kind": "t5", **out["data"]}
    data, start = out.get("data"), out.get("init_from")
    if isinstance(data, Mapping) and isinstance(start, str) and list_raw_paths(data) and has_tokenizer(base / start):
        out["data"] = {"tokenizer": start, **data}
    return out


def _check_model_origin(given: object, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if `model` is a name, has a misspelled key of its origin, or has two origins."""
    if isinstance(given, str):
        raise ConfigError(f"model = {given!r} must be a section of keys with values", hint=MODEL_HINT)
    for key in model.keys() - ModelConfig.model_fields.keys() - {*MODEL_ORIGINS}:
        if near := get_close_matches(str(key), MODEL_ORIGINS, n=1, cutoff=0.75):
            raise ConfigError(f"model.{key}: unknown key", hint=f"did you mean {near[0]!r}?")
    if "preset" in model and "from" in model:
        raise ConfigError(
            "model.preset conflicts with model.from",
            hint="remove one of them; on the command line: --set model.preset=null",
        )


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has a `tokenizer.json`, with which raw data can be encoded."""
    return (folder / "tokenizer.json").is_file()


def load_run_config(path: Path, overrides: Sequence[str] = (), *, warn_unread: bool = False) -> RunConfig:
    """Read and check a run.yaml with `--set` overrides on top of its settings.
    With `warn_unread`, log a warning about unused keys of a config.json that `model: {from: path}` names.

    Raises:
        ConfigError: with every problem at once.
    """
    raw = apply_config_overrides(load_yaml_mapping(path), overrides)
    return RunConfig.parse(resolve_run_config(raw, warn_unread=warn_unread), source=str(path))


def load_plan_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run for `mega plan` from a run.yaml, or make one without data from a model alone: its folder or config.json.

    Raises:
        ConfigError: with every problem at once.
        CheckpointError: when the folder holds no model.
    """
    if not path.is_dir() and "model_type" not in load_yaml_mapping(path):
        return load_run_config(path, overrides, warn_unread=True)
    raw = apply_config_overrides({"model": {"from": str(path)}, "data": {"train": ["none"]}}, overrides)
    return RunConfig.parse(resolve_run_config(raw, warn_unread=True), source=str(path))
