"""HuggingFace's TrainingArguments, what TRL, Axolotl and Accelerate write beside them, as a run.yaml.

Facts: transformers 5.23 (training_args.py), TRL 1.16 (SFTConfig), Accelerate 1.15 (`accelerate config`), Axolotl's reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mega_cli.megatron_args.draft import Kind
from mega_cli.megatron_args.translate import Translation
from mega_cli.moving_in.given import Given, Reasons, batch

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-sqrt", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
SHARDING = {
    "FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0, "full_shard": 3,
    "shard_grad_op": 2,
}  # fmt: skip
SAME = {
    "optimizer.lr": "learning_rate",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.clip_grad": "max_grad_norm gradient_clipping",
    "lr_schedule.min_lr": "lr_scheduler_kwargs.min_lr min_lr",
    "train.seed": "seed",
    "checkpoint.keep": "save_total_limit",
    "log.every": "logging_steps",
    "log.wandb": "wandb_project",
    "log.mlflow": "mlflow_experiment_name",
    "output": "output_dir",
    "data.seq_length": "max_length max_seq_length sequence_len model_max_length block_size",
    "lora.rank": "lora_r peft_config.r",
    "lora.alpha": "lora_alpha peft_config.lora_alpha",
    "lora.dropout": "lora_dropout peft_config.lora_dropout",
    "parallel.tp": "tensor_parallel_size parallelism_config.tp_size",
    "parallel.cp": "context_parallel_size parallelism_config.cp_size",
}
DEFAULTS = {
    "optimizer.lr": 5e-5, "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "optimizer.clip_grad": 1.0,
    "lr_schedule.name": "linear", "train.seed": 42, "parallel.zero": 1,
}  # fmt: skip
REASONS: Mapping[Kind, Reasons] = {
    "not needed": {
        "data are read by their index, without workers that could be lost": "dataloader_* num_workers data_seed group_by_length"
        " length_column_name pad_to_sequence_len eval_sample_packing sample_packing packing packing_strategy dataset_num_proc"
        " dataset_prepared_path",
        "ranks are started by mega train, torchrun or mega launch": "local_rank ddp_* num_processes num_machines machine_rank"
        " main_* rdzv_backend same_network compute_environment use_cpu distributed_type main_training_function debug"
        " full_determinism",
        "a run resumes by the same command": "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir do_train"
        " do_eval do_predict save_strategy save_safetensors save_only_model restore_callback_states_from_checkpoint save_on_each_node",
        "kernels are chosen by `kernels`": "flash_attention attn_implementation torch_compile* use_liger_kernel tf32"
        " xformers_attention sdp_attention liger_*",
        "is of the program": "remove_unused_columns label_names include_* skip_memory_metrics push_to_hub hub_* report_to run_name"
        " logging_* log_level* disable_tqdm prediction_loss_only past_index use_legacy_prediction_loop eval_on_start batch_eval_metrics",
        "FSDP wraps each layer": "fsdp_config.* fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    },
    "changes meaning": {
        "the best by validation loss is kept with checkpoint.best": "load_best_model_at_end metric_for_best_model greater_is_better",
        "a chat is rendered by the tokenizer's own template, as mega data preprocess does": "chat_template* train_on_inputs"
        " datasets dataset_* assistant_only_loss completion_only_loss",
    },
    "no equivalent": {
        "changes the loss": "label_smoothing_factor neftune_noise_alpha",
        "weights are trained as they are, or an adapter beside them": "load_in_8bit load_in_4bit",
    },
}  # fmt: skip


def from_hf_args(path: Path, ranks: int | None = None) -> Translation:
    """What TrainingArguments, or a file with their names, say of a run on so many ranks.

    Raises:
        ConfigError: when it is no such file.
    """
    given = Given(path, "TrainingArguments as JSON, or a configuration of Axolotl or Accelerate")
    model = given.get("model_name_or_path", "base_model", "model_id")
    if model is None:
        given.ask("model.from", "a folder of the hub or a checkpoint, which the program has loaded by itself")
    given.put("model.from", model, "the model's folder")
    if model is not None and not Path(model).exists():
        given.tell("open", f"mega ckpt pull {model} models/{Path(model).name}, and name that folder", "model.from")
    given.ask("data.train", "a token data set, as `mega data preprocess` makes it, with --kind conversations of chats")
    if given.get("assistant_only_loss", "completion_only_loss") or given.get("train_on_inputs") is False:
        given.put("data.kind", "conversations", "a loss of answers alone")
    processes = given.number("num_processes")
    ranks = ranks if processes is None or ranks is not None else int(processes)
    micro = given.number("per_device_train_batch_size", "micro_batch_size")
    batch(given, micro, given.number("gradient_accumulation_steps"), None, ranks)
    given.rows(SAME)
    _length(given)
    _optimizer(given)
    _schedule(given)
    _savings(given)
    _sharding(given)
    given.defaults(DEFAULTS, "HuggingFace's")
    return given.finish(REASONS, f"{ranks} ranks" if ranks else "")


def _length(given: Given) -> None:
    steps, epochs = given.number("max_steps"), given.number("num_train_epochs", "num_epochs")
    if steps is not None and steps > 0:
        given.put("train.steps", int(steps), "max_steps")
    elif epochs is not None:
        given.put("train.epochs", epochs, "num_train_epochs")
    if given.get("eval_strategy", "evaluation_strategy") == "epoch":
        given.tell("changes meaning", "validations are counted in steps: train.eval_every", "eval_strategy")
    every = given.number("eval_steps")
    given.put("train.eval_every", int(every) if every is not None and every >= 1 else None, "eval_steps")


def _optimizer(given: Given) -> None:
    betas = [given.number("adam_beta1"), given.number("adam_beta2")]
    if any(beta is not None for beta in betas):
        given.put(
            "optimizer.betas",
            [one if one is not None else other for one, other in zip(betas, (0.9, 0.999), strict=True)],
            "adam_beta1, adam_beta2",
        )
    name = given.get("optim", "optimizer")
    if name is not None and "adamw" not in str(name):
        given.tell("open", f"mega has adamw and muon, and not {name}", "optim")
    elif name is not None and "8bit" in str(name):
        given.tell("changes meaning", "moments are kept in fp32, by all data ranks together", f"optim: {name}")


def _schedule(given: Given) -> None:
    name = given.get("lr_scheduler_type", "lr_scheduler")
    if name is not None and name not in SCHEDULES:
        given.tell(
            "open", f"mega has {', '.join(sorted(set(SCHEDULES.values())))}, and not {name}", "lr_scheduler_type"
        )
    given.put("lr_schedule.name", SCHEDULES.get(str(name)), f"lr_scheduler_type {name}")
    steps, share = given.number("warmup_steps"), given.number("warmup_ratio")
    if steps is not None and 0 < steps < 1:  # as transformers 5 takes it
        steps, share = None, steps
    given.put("lr_schedule.warmup_steps", None if steps is None else int(steps), "warmup_steps")
    if share:
        given.tell(
            "open", f"is {share:g} of all steps: count them, for mega takes a number", "lr_schedule.warmup_steps"
        )


def _savings(given: Given) -> None:
    every = given.number("save_steps")
    given.put("checkpoint.every", int(every) if every is not None and every >= 1 else None, "save_steps")
    if given.get("gradient_checkpointing") in (True, "true", "unsloth", "offload"):
        given.put("recompute", "full", "gradient_checkpointing")
    mixed = given.get("mixed_precision")
    bf16, fp16 = (given.get(name) in (True, "true", "full") or mixed == name for name in ("bf16", "fp16"))
    bf16 = bf16 or given.automatic("bf16")
    given.put("precision", "bf16" if bf16 else "fp16" if fp16 else "fp32", "bf16, fp16, mixed_precision")


def _sharding(given: Given) -> None:
    kind = given.get("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward", "fsdp")
    if isinstance(kind, list):
        kind = next(iter(kind), None)
    if kind is not None:
        word = str(kind).split()[0]
        given.put("parallel.zero", 3 if kind is True else SHARDING.get(word, 3), f"FSDP: {kind}")
    stage = given.number("deepspeed_config.zero_stage")
    given.put("parallel.zero", stage, "deepspeed_config.zero_stage")
    other = given.get("deepspeed", "deepspeed_config.deepspeed_config_file")
    if other is not None:
        given.tell("open", f"says more: mega train --from-deepspeed {other}", "deepspeed")
    modules = given.get("lora_target_modules", "peft_config.target_modules")
    linear = given.get("lora_target_linear")
    if isinstance(modules, list):
        given.put("lora.modules", [f".*{module}" for module in modules], "lora_target_modules")
    elif modules is not None or linear:
        given.put("lora.modules", [".*_proj"], "all linear layers")
    adapter = given.get("adapter")
    if adapter not in (None, "lora"):
        given.tell("no equivalent", "the weights beside the adapter stay in the run's precision", f"adapter: {adapter}")
