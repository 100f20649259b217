"""Layout of a run of transformers, Accelerate or Axolotl: model parallelism, and sharding over data ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_cli.megatron_args.run_draft import NoteKind
from mega_cli.megatron_args.translate import RunYamlTranslation
from mega_cli.moving_in.batch_and_layout import (
    WEIGHTS_STAY,
    ModelParallelSizes,
    compute_data_parallel_size,
    set_batch_sizes,
    set_fsdp_offload,
    set_optimizer_offload,
    set_parallel_sizes,
    set_zero_stage,
)
from mega_cli.moving_in.hf_objective import (
    LEARNING_RATES,
    TrainingProgramDefaults,
    detect_training_program,
    translate_hf_lora_settings,
    translate_hf_objective,
)
from mega_cli.moving_in.hf_schedule import translate_hf_lr_schedule
from mega_cli.moving_in.settings_file import ForeignSettingsFile, Reasons

SHARDING = {
    "FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0,
    "4": 3, "5": 2, "full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0,
    "True": 3, "true": 3, "False": 2, "false": 2,
}  # fmt: skip
CONFIG = "parallelism_config."
FSDP_OFFLOAD = (
    "fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "fsdp_config.cpu_offload", "fsdp_config.fsdp_cpu_offload",
)  # fmt: skip
MEGATRON = "megatron_lm_config.megatron_lm_"


def _parallel_size(given: ForeignSettingsFile, name: str, *others: str) -> int:
    """Return a size that Accelerate's parallelism_config or one of the other keys gives, by default 1."""
    return given.take_integer(*others, f"{CONFIG}{name}_size", f"{CONFIG}{CONFIG[:-1]}_{name}_size") or 1


def read_model_parallel_sizes(given: ForeignSettingsFile) -> ModelParallelSizes:
    """Return a settings file's tensor, pipeline and context parallel sizes, and set `parallel` of run.yaml to them."""
    tp = _parallel_size(
        given, "tp", "tensor_parallel_size", f"{MEGATRON}tp_degree", "deepspeed.tensor_parallel.autotp_size"
    )
    cp = _parallel_size(given, "cp", "context_parallel_size", "sequence_parallel_degree")
    ulysses = _parallel_size(given, "sp", "deepspeed.sequence_parallel_size")
    split = ModelParallelSizes(tp=tp, pp=given.take_integer(f"{MEGATRON}pp_degree") or 1, cp=cp * ulysses)
    set_parallel_sizes(
        given, split, {"tp": "tensor parallel size", "pp": "pp_degree", "cp": "context and sequence parallel size"}
    )
    given.set_key("parallel.cp_kind", "alltoall" if ulysses > 1 and cp == 1 else None, "as Ulysses exchanges heads")
    return split


def read_world_size(given: ForeignSettingsFile, ranks: int | None, split: ModelParallelSizes) -> int | None:
    """Return a run's number of ranks by its settings file, None if unknown; also set `parallel.zero` if the file shards.
    It is `ranks` if given, else the file's `num_processes`, else the number by its data-parallel sizes.

    Raises:
        ConfigError: if the sizes in the file are for another number of ranks.
    """
    processes = given.take_integer("num_processes")
    ranks = processes if ranks is None else ranks
    shard, copies = (
        _parallel_size(given, "dp_shard", "dp_shard_size"),
        _parallel_size(given, "dp_replicate", "dp_replicate_size"),
    )
    sized = shard * copies * split.ranks_per_model
    if shard * copies > 1:
        if ranks is not None and ranks != sized:
            shown = f"{shard} x {copies} data ranks x {split.ranks_per_model} ranks per model"
            given.refuse_combination(
                f"its parallel sizes require {sized} ranks ({shown}), found {ranks}", f"use --nproc {sized}"
            )
        ranks = sized
    if shard > 1:
        given.set_key("parallel.zero", 3, "dp_shard_size")
        given.set_key("parallel.zero3_shard", shard if copies > 1 else None, "dp_shard_size")
    return ranks


def set_zero_level(given: ForeignSettingsFile) -> None:
    """Set `parallel.zero` and `optimizer.offload` of run.yaml from a settings file's FSDP and DeepSpeed settings."""
    kind = given.take_value("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward", "fsdp")
    kind = _fsdp_kind(given, kind)
    kind = given.take_value("fsdp_config.reshard_after_forward") if kind is None else kind
    if kind is not None:
        zero = 3 if kind is True else SHARDING.get(str(kind).split()[0], 3)
        given.set_key("parallel.zero", zero, f"FSDP: {kind}")
    set_zero_stage(given, "deepspeed_config.zero_stage")
    set_zero_stage(given, "deepspeed.zero_optimization.stage")
    set_fsdp_offload(given, *FSDP_OFFLOAD)
    set_optimizer_offload(
        given,
        "deepspeed_config.offload_optimizer_device",
        "deepspeed.zero_optimization.offload_optimizer.device",
        f"{MEGATRON}optimizer_cpu_offload",
    )
    if str(given.take_value("deepspeed_config.offload_param_device")).lower() in ("cpu", "nvme"):
        given.add_note("no equivalent", "weights stay on the device", "deepspeed_config.offload_param_device")


def _fsdp_kind(given: ForeignSettingsFile, value: Any) -> Any:
    """Return the sharding strategy in FSDP's value, which may have several words: full_shard auto_wrap offload."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
    if "offload" in words:
        given.set_key("optimizer.offload", True, "fsdp: offload")
        given.add_note("changes meaning", WEIGHTS_STAY, "fsdp: offload")
    return next((word for word in words if word not in ("auto_wrap", "offload")), None)


def include_deepspeed_file(given: ForeignSettingsFile) -> None:
    """Add the settings of the DeepSpeed configuration file that a settings file names, if any, and a note on it."""
    other = given.take_value("deepspeed", "deepspeed_config.deepspeed_config_file")
    if other is None:
        return
    if given.include_file(str(other), "deepspeed.", "a file of DeepSpeed's settings"):
        text = f"its sizes and stage are read; for the rest see mega train --from-deepspeed {other}"
    else:
        text = f"{other} does not exist: if it sets autotp_size or sequence_parallel_size, divide batch.global by them"
    given.add_note("open", text, "deepspeed")


SAME = {
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.clip_grad": "max_grad_norm gradient_clipping deepspeed_config.gradient_clipping",
    "train.seed": "seed",
    "checkpoint.keep": "save_total_limit",
    "log.wandb": "wandb_project",
    "log.mlflow": "mlflow_experiment_name",
    "output": "output_dir",
    "data.seq_length": "max_length max_seq_length sequence_len cutoff_len model_max_length block_size",
}
DEFAULTS = {
    "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "optimizer.clip_grad": 1.0, "train.seed": 42,
    "parallel.zero": 1,
}  # fmt: skip
# Names of AdamW; other names that contain it are other algorithms (stable_adamw, schedule_free_adamw).
ADAMW = re.compile(
    r"adamw_torch(_fused|_xla|_npu_fused|_4bit|_8bit)?|adamw_(hf|apex_fused|bnb_8bit|8bit)|adamw|paged_adamw(_32bit|_8bit)?"
    r"|ao_adamw_(4bit|8bit|fp8)"
)
REASONS: Mapping[NoteKind, Reasons] = {
    "not needed": {
        "data are read by index, without worker processes": "dataloader_* num_workers data_seed group_by_length"
        " length_column_name pad_to_sequence_len eval_sample_packing sample_packing packing packing_strategy dataset_num_proc"
        " dataset_prepared_path",
        "ranks are started by mega train, torchrun or mega launch": "local_rank ddp_* num_processes num_machines machine_rank"
        " main_* rdzv_backend same_network compute_environment use_cpu distributed_type main_training_function debug"
        " full_determinism",
        "a run resumes by the same command": "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir do_train"
        " do_eval do_predict save_strategy save_safetensors save_only_model restore_callback_states_from_checkpoint save_on_each_node",
        "kernels are chosen by `kernels`": "flash_attention attn_implementation torch_compile* use_liger_kernel tf32"
        " xformers_attention sdp_attention liger_*",
        "is specific to the training program": "remove_unused_columns label_names include_* skip_memory_metrics push_to_hub hub_* report_to run_name"
        " logging_* log_level* disable_tqdm prediction_loss_only past_index use_legacy_prediction_loop eval_on_start batch_eval_metrics",
        "is of Accelerate's start of DeepSpeed": "deepspeed_config.zero3_* deepspeed_config.deepspeed_* *nvme_path"
        " deepspeed_config.offload_*_device",
        "FSDP wraps each layer": "fsdp_config.* fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    },
    "changes meaning": {
        "checkpoint.best keeps the checkpoint with the best validation loss": "load_best_model_at_end metric_for_best_model greater_is_better",
        "a chat is rendered by the tokenizer's own template, as mega data preprocess does": "chat_template* train_on_inputs"
        " datasets dataset_* assistant_only_loss completion_only_loss",
    },
    "open": {"is in DeepSpeed's file: see mega train --from-deepspeed": "deepspeed.*"},
    "no equivalent": {
        "changes the loss": "label_smoothing_factor neftune_noise_alpha router_aux_loss_coef",
        "the frozen weights of an adapter have the run's precision, or 4 bits": "load_in_8bit",
    },
}  # fmt: skip


def translate_hf_training_args(path: Path, ranks: int | None = None) -> RunYamlTranslation:
    """Translate the settings file `path` of HuggingFace TrainingArguments, of a run on `ranks` ranks, to a run.yaml.
    The file may also be another settings file with their names.

    Raises:
        ConfigError: if it is not such a file, its sizes do not match the ranks, or its objective is not supported.
    """
    given = ForeignSettingsFile(path, "TrainingArguments as JSON, or a configuration of Axolotl or Accelerate")
    dialect = detect_training_program(given)
    _model_and_data(given, dialect)
    objective = translate_hf_objective(given, dialect)
    include_deepspeed_file(given)
    split = read_model_parallel_sizes(given)
    ranks = read_world_size(given, ranks, split)
    _set_batch(given, dialect, compute_data_parallel_size(given, ranks, split))
    given.copy_settings(SAME)
    clips_by_default = dialect.program not in ("transformers", "TRL") or not given.has_key("max_grad_norm")
    if not clips_by_default and given.get_run_yaml_value("optimizer.clip_grad") is None:
        given.set_key("optimizer.clip_grad", 0, "max_grad_norm: null does not clip")
    if not given.has_key(*SAME["data.seq_length"].split()):
        given.set_key("data.seq_length", dialect.seq_length, f"{dialect.program}'s default")
    translate_hf_lr_schedule(given, dialect, _set_learning_rate(given, dialect, objective), _set_length(given, dialect))
    _optimizer(given)
    _savings(given, dialect)
    set_zero_level(given)
    translate_hf_lora_settings(given, dialect)
    given.set_missing_keys_to_defaults(DEFAULTS, "HuggingFace's")
    return given.finish_translation(REASONS, f"{ranks} ranks" if ranks else "")


def _model_and_data(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> None:
    model = given.take_value("model_name_or_path", "base_model", "model_id")
    if model is None:
        given.leave_open("model.from", "the folder of the model or checkpoint that the training program loads")
    given.set_key("model.from", model, "the model's folder")
    if model is not None and not Path(model).exists():
        given.add_note(
            "open",
            f"run mega ckpt pull {model} models/{Path(model).name}, and set model.from to this folder",
            "model.from",
        )
    given.leave_open(
        "data.train", "a token data set, written by `mega data preprocess`, for chats with --kind conversations"
    )
    on_inputs = given.take_value("train_on_inputs")
    answers = given.take_value("assistant_only_loss", "completion_only_loss") or on_inputs is False
    if dialect.program == "Axolotl" and on_inputs is None:
        answers = _masks_prompts(given.peek_value("datasets"))
    if dialect.program == "LLaMA-Factory":
        answers = given.take_value("train_on_prompt") is not True and given.peek_value("stage") != "pt"
    given.set_key("data.kind", "conversations" if answers else None, "loss on assistant turns only")


def _masks_prompts(datasets: Any) -> bool:
    """Return True if all of Axolotl's datasets have prompts, which are masked in its loss by default."""
    listed = datasets if isinstance(datasets, list) else []
    types = [str(one.get("type")) for one in listed if isinstance(one, Mapping) and one.get("type")]
    return bool(types) and not any(kind.startswith(("completion", "pretrain", "{")) for kind in types)


def _set_batch(given: ForeignSettingsFile, dialect: TrainingProgramDefaults, data_ranks: int | None) -> None:
    """Set `batch`; Axolotl's batch_size is the batch of one data rank, split into micro-batches."""
    micro = given.take_integer("per_device_train_batch_size", "micro_batch_size", "per_gpu_train_batch_size")
    accumulation = given.take_integer("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
    if micro is None and dialect.micro is None:
        text = "is set by the training program, as are learning rate and length; HuggingFace's defaults are used here"
        given.add_note("open", text, "batch.micro, batch.global")
        return
    micro = dialect.micro if micro is None else micro
    assert micro is not None
    whole = given.take_integer("batch_size") if dialect.program == "Axolotl" else None
    if whole is not None and accumulation is None:
        if whole % micro:
            given.refuse_value("batch_size", f"must be a multiple of micro_batch_size = {micro}")
        accumulation = whole // micro
    set_batch_sizes(given, micro, micro * (accumulation or 1), data_ranks)


def _set_learning_rate(given: ForeignSettingsFile, dialect: TrainingProgramDefaults, objective: str) -> float:
    """Set and return the peak learning rate; the default depends on program and objective."""
    lr = given.take_number("learning_rate")
    if lr is None and dialect.lr is None:
        given.refuse_combination("Axolotl requires learning_rate, which is missing", "add learning_rate")
    default = LEARNING_RATES.get(objective, 1e-6) if dialect.program == "TRL" else dialect.lr
    rate = float(lr if lr is not None else default or 0.0)
    given.set_key("optimizer.lr", rate, "learning_rate" if lr is not None else f"{dialect.program}'s default")
    return rate


def _set_length(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> int | None:
    """Set the length of the run, and return its steps if the file has them."""
    steps, epochs = given.take_integer("max_steps"), given.take_number("num_train_epochs", "num_epochs")
    if steps is not None and steps > 0:
        given.set_key("train.steps", steps, "max_steps")
    else:
        origin = f"{dialect.program}'s default" if epochs is None else "num_train_epochs"
        given.set_key("train.epochs", dialect.epochs if epochs is None else epochs, origin)
    if given.take_value("eval_strategy", "evaluation_strategy") == "epoch":
        given.add_note("changes meaning", "the interval of validations is in steps: train.eval_every", "eval_strategy")
    steps = steps if steps is not None and steps > 0 else None
    for key, name in {
        "train.eval_every": "eval_steps",
        "checkpoint.every": "save_steps",
        "log.every": "logging_steps",
    }.items():
        _set_interval(given, key, name, steps)
    return steps


def _set_interval(given: ForeignSettingsFile, key: str, name: str, steps: int | None) -> None:
    """Set an interval in steps, which is a fraction of the run's steps if below 1."""
    every = given.take_number(name)
    if every is not None and 0 < every < 1:
        if steps is None:
            given.add_note(
                "changes meaning", "is a fraction of the run's steps, which are not in the file", f"{name}: {every}"
            )
            return
        every = math.ceil(steps * every)
    given.set_key(key, int(every) if every is not None and every >= 1 else None, name)


def _optimizer(given: ForeignSettingsFile) -> None:
    betas = [given.take_number("adam_beta1"), given.take_number("adam_beta2")]
    if any(beta is not None for beta in betas):
        given.set_key(
            "optimizer.betas",
            [one if one is not None else other for one, other in zip(betas, (0.9, 0.999), strict=True)],
            "adam_beta1, adam_beta2",
        )
    name = given.take_value("optim", "optimizer")
    if name is not None and not ADAMW.fullmatch(str(name)):
        given.note_untranslated_optimizer(name, "optim")
    elif name is not None and re.search(r"[48]bit|fp8", str(name)):
        text = "moments are in fp32, sharded over the data ranks; optimizer.name: adamw8bit has them in 8 bits"
        given.add_note("changes meaning", text, f"optim: {name}")
    if name is None or (ADAMW.fullmatch(str(name)) and not str(name).startswith("ao_")):
        text = "HuggingFace's AdamW does not read it; betas and eps are adam_beta1, adam_beta2 and adam_epsilon"
        given.add_notes_on_matching_keys("not needed", text, "optim_args optim_args.*")
    else:
        text = "is of an optimizer that is not translated; betas, eps and weight decay in it are for optimizer.*"
        given.add_notes_on_matching_keys("open", text, "optim_args optim_args.*")


def _savings(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> None:
    saved = given.take_value("gradient_checkpointing")
    wrapped = given.take_value("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")
    enabled = saved in (True, "true", "unsloth", "offload") or (saved is None and dialect.program == "TRL")
    if enabled or wrapped in (True, "true"):
        given.set_key("recompute", "full", "gradient_checkpointing")
    mixed = given.take_value("mixed_precision")
    bf16, fp16 = (
        mixed == names[0] or not {True, "true", "full"}.isdisjoint({given.take_value(name) for name in names})
        for names in (("bf16", "bfloat16", "pure_bf16"), ("fp16", "float16"))
    )
    if bf16 and fp16:
        given.refuse_combination("bf16 and fp16 are both set", "keep one of them")
    if mixed is not None and mixed not in ("no", "bf16", "fp16"):
        given.add_note("open", f"{mixed} is not translated; bf16 is set here: see precision and fp8", "mixed_precision")
        bf16 = True
    by_default = dialect.program in ("TRL", "Axolotl") and not fp16 and not given.has_key("bf16")
    bf16 = bf16 or given.has_auto_value("bf16") or by_default
    given.set_key("precision", "bf16" if bf16 else "fp16" if fp16 else "fp32", "bf16, fp16, mixed_precision")
