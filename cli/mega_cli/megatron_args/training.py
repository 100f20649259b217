"""The sections of a run beside `model:` and `data:`."""

from __future__ import annotations

from mega_cli.megatron_args.draft import Draft
from mega_cli.megatron_args.stages import layout_of_flags

CONTEXT = {"p2p": "ring", "a2a": "alltoall", "all_gather": "allgather"}
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
SCHEDULES = {
    "constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse-sqrt", "WSD": "wsd",
}  # fmt: skip


def parallel_section(draft: Draft) -> None:
    """Write the keys of `parallel:`."""
    put, tp = draft.put, draft["tensor_model_parallel_size"]
    put("parallel.tp", tp, "tensor_model_parallel_size")
    if tp > 1:
        put("parallel.sp", draft["sequence_parallel"], "sequence_parallel")
    else:
        draft.tell("not needed", "Megatron itself switches it off without tensor parallelism", "sequence_parallel")
    put("parallel.pp", draft["pipeline_model_parallel_size"], "pipeline_model_parallel_size")
    layout_of_flags(draft)
    if draft["context_parallel_size"] > 1:
        put("parallel.cp", draft["context_parallel_size"], "context_parallel_size")
        kinds = set(draft["cp_comm_type"])
        put("parallel.cp_kind", CONTEXT.get(draft["cp_comm_type"][0], "ring"), "cp_comm_type")
        if len(kinds) > 1 or not kinds <= CONTEXT.keys():
            text = "mega has one of ring, allgather and alltoall for all layers, which give the same numbers"
            draft.tell("no equivalent", text, "cp_comm_type")
    else:
        draft.tell("translated", "parallel.cp, 1 by default", "context_parallel_size")
    if draft["expert_model_parallel_size"] > 1:
        put("parallel.ep", draft["expert_model_parallel_size"], "expert_model_parallel_size")
    else:
        draft.tell("translated", "parallel.ep, 1 by default", "expert_model_parallel_size")
    if draft["num_experts"]:
        _expert_parts(draft)
    _zero(draft)


def _expert_parts(draft: Draft) -> None:
    parts = draft["expert_tensor_parallel_size"]
    why = "" if parts else "Megatron's default: the size of tensor parallelism"
    parts = parts or draft["tensor_model_parallel_size"]
    if parts > 1:
        draft.put("parallel.expert_tp", parts, "expert_tensor_parallel_size", because=why)
    else:
        draft.tell("translated", "parallel.expert_tp, 1 by default", "expert_tensor_parallel_size")


def _zero(draft: Draft) -> None:
    if draft["use_torch_fsdp2"]:
        return draft.put("parallel.zero", 3, "use_torch_fsdp2")
    if draft["use_megatron_fsdp"]:
        level, flags = STRATEGIES[draft["data_parallel_sharding_strategy"]], ("data_parallel_sharding_strategy",)
        draft.put("parallel.zero", level, "use_megatron_fsdp", *flags, "use_distributed_optimizer")
        return _copies(draft) if level == 3 and draft["num_distributed_optimizer_instances"] > 1 else None
    return draft.put("parallel.zero", int(draft["use_distributed_optimizer"]), "use_distributed_optimizer")


def _copies(draft: Draft) -> None:
    """Megatron counts the copies of the weights, mega the data ranks that share one."""
    ranks, flag = draft.ranks, "num_distributed_optimizer_instances"
    stage = draft["tensor_model_parallel_size"] * draft["pipeline_model_parallel_size"]
    share = ranks // stage // draft[flag] if ranks else None
    ask = "follows from the number of ranks, which the script does not say"
    draft.put("parallel.zero3_shard", share, flag, ask=ask)


def model_ranks(draft: Draft) -> int:
    """Ranks that hold one copy of the model."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    tp, pp, cp = (int(draft[name]) for name in names)
    return tp * pp * cp


def batch_section(draft: Draft) -> None:
    """Write the keys of `batch:`."""
    draft.put("batch.micro", draft["micro_batch_size"], "micro_batch_size")
    if "global_batch_size" in draft or not draft["micro_batch_size"] or not draft.ranks:
        draft.put("batch.global", draft["global_batch_size"], "global_batch_size")
        return
    dp = max(1, draft.ranks // model_ranks(draft))
    draft.put("batch.global", draft["micro_batch_size"] * dp, because=f"Megatron's default: micro x dp = {dp}")


def train_section(draft: Draft) -> None:
    """Write the keys of `train:`."""
    put = draft.put
    put("train.steps", _steps(draft), "train_iters", "train_samples")
    evaluates = bool(draft["eval_interval"] and draft["eval_iters"])
    put(
        "train.eval_every",
        draft["eval_interval"] if evaluates else 0,
        "eval_interval",
        *([] if evaluates else ["eval_iters"]),
    )
    if evaluates:
        put("train.eval_steps", draft["eval_iters"], "eval_iters")
    put("train.seed", draft["seed"], "seed")


def _steps(draft: Draft) -> int | None:
    steps: int | None = draft["train_iters"]
    batch = draft.run["batch"]["global"]
    if steps or not draft["train_samples"] or not batch:
        return steps
    return int(draft["train_samples"] // batch)


def optimizer_section(draft: Draft) -> None:
    """Write the keys of `optimizer:`."""
    put, name = draft.put, draft["optimizer"]
    ours = {"adam": "adamw", "muon": "muon", "dist_muon": "muon"}
    put("optimizer.name", ours.get(name, "adamw"), "optimizer")
    if name not in ours:
        draft.tell("no equivalent", f"the optimizer {name} is missing; run.yaml has adamw", "optimizer")
    put("optimizer.lr", draft["lr"], "lr")
    put("optimizer.betas", [draft["adam_beta1"], draft["adam_beta2"]], "adam_beta1", "adam_beta2")
    put("optimizer.eps", draft["adam_eps"], "adam_eps")
    put("optimizer.weight_decay", draft["weight_decay"], "weight_decay")
    put("optimizer.clip_grad", draft["clip_grad"], "clip_grad")
    if draft["optimizer_cpu_offload"]:
        put("optimizer.offload", True, "optimizer_cpu_offload")
        if draft["optimizer_offload_fraction"] != 1.0:
            text = "mega keeps the whole optimizer state in host memory"
            draft.tell("changes meaning", text, "optimizer_offload_fraction")
    if ours.get(name) == "muon":
        _muon(draft)


def _muon(draft: Draft) -> None:
    """Megatron scales an orthogonal [M, N] update by sqrt(max(M, N)), mega by 0.2 of that."""
    put, factor = draft.put, draft["muon_extra_scale_factor"] / 0.2
    put("optimizer.muon.momentum", draft["muon_momentum"], "muon_momentum")
    put("optimizer.muon.nesterov", draft["muon_nesterov"], "muon_nesterov")
    why = "Megatron's updates are 5 x --muon-extra-scale-factor times mega's"
    put("optimizer.muon.lr_factor", factor, "muon_extra_scale_factor", because=why)
    why = "that of the optimizer, / lr_factor, which multiplies it too"
    put("optimizer.muon.weight_decay", draft["weight_decay"] / factor, because=why)
    put("optimizer.muon.rounds", draft["muon_num_ns_steps"], "muon_num_ns_steps")
    if draft["muon_scale_mode"] != "spectral":
        draft.tell("no equivalent", "updates are scaled as by spectral", "muon_scale_mode")
    text = "muon: mega orthogonalises gate and up projections apart, Megatron as one matrix"
    draft.tell("changes meaning", text)


def schedule_section(draft: Draft) -> None:
    """Write the keys of `lr_schedule:`."""
    put, steps = draft.put, draft.run["train"]["steps"]
    name = SCHEDULES[draft["lr_decay_style"]]
    put("lr_schedule.name", name, "lr_decay_style")
    decay = _as_steps(draft, "lr_decay_iters", "lr_decay_samples") or steps
    _warmup(draft, decay)
    put("lr_schedule.min_lr", draft["min_lr"], "min_lr")
    if decay and (decay != steps or "lr_decay_iters" in draft or "lr_decay_samples" in draft):
        put("lr_schedule.decay_steps", decay, "lr_decay_iters", "lr_decay_samples")
    if name == "wsd":
        cooldown = _as_steps(draft, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        put("lr_schedule.cooldown_steps", cooldown, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        shape = draft["lr_wsd_decay_style"].replace("_", "-")
        put("lr_schedule.cooldown_shape", shape, "lr_wsd_decay_style")
    elif name == "inverse-sqrt" and decay and steps and steps > decay:
        text = "Megatron falls to min_lr at the end of the decay, mega goes on along the root"
        draft.tell("changes meaning", text, "lr_decay_style")


def _warmup(draft: Draft, decay: int | None) -> None:
    batch, share = draft.run["batch"]["global"], draft["lr_warmup_fraction"]
    if share is not None and decay and batch:
        samples = draft["lr_decay_samples"] or decay * batch
        if round(share * samples) % batch == 0:
            return draft.put("lr_schedule.warmup_steps", round(share * samples) // batch, "lr_warmup_fraction")
        return draft.put("lr_schedule.warmup_samples", round(share * samples), "lr_warmup_fraction")
    if draft["lr_warmup_samples"]:
        return draft.put("lr_schedule.warmup_samples", draft["lr_warmup_samples"], "lr_warmup_samples")
    return draft.put("lr_schedule.warmup_steps", draft["lr_warmup_iters"], "lr_warmup_iters", "lr_warmup_samples")


def _as_steps(draft: Draft, iters: str, samples: str) -> int | None:
    """A length given in steps or in samples, in steps."""
    steps: int | None = draft[iters]
    count: int | None = draft[samples]
    batch: int | None = draft.run["batch"]["global"]
    if steps or not count or not batch:
        return steps
    if count % batch:
        draft.tell("changes meaning", f"rounded to whole steps of {batch} samples", samples)
    return max(1, round(count / batch))


def precision_section(draft: Draft) -> None:
    """Write `precision:` and `fp16:`."""
    kind = "bf16" if draft["bf16"] else "fp16" if draft["fp16"] else "fp32"
    draft.put("precision", kind, "bf16", "fp16")
    if kind == "fp16":
        _loss_scale(draft)


def _loss_scale(draft: Draft) -> None:
    draft.put(
        "fp16.initial_scale",
        draft["loss_scale"] or float(draft["initial_loss_scale"]),
        "loss_scale",
        "initial_loss_scale",
    )
    draft.put("fp16.growth_interval", int(draft["loss_scale_window"]), "loss_scale_window")
    draft.put("fp16.min_scale", draft["min_loss_scale"], "min_loss_scale")
    draft.tell("changes meaning", "fp16.initial_scale is where it starts; it is always dynamic", "loss_scale")


def recompute_section(draft: Draft) -> None:
    """Write the keys of `recompute:`."""
    selective = draft["recompute_activations"] or draft["recompute_granularity"] == "selective"
    full = draft["checkpoint_activations"] or draft["recompute_granularity"] == "full" or (
        "recompute_method" in draft and not selective
    )  # fmt: skip
    if not (full or selective):
        return
    flags = ("recompute_activations", "recompute_granularity", "checkpoint_activations", "recompute_method")
    draft.put("recompute.kind", "full" if full else "selective", *flags)
    if full and draft["recompute_method"] == "block" and draft["recompute_num_layers"]:
        draft.put("recompute.layers", draft["recompute_num_layers"], "recompute_num_layers")


def checkpoint_section(draft: Draft) -> None:
    """Write the keys of `checkpoint:`, and `init_from`."""
    put, save, load = draft.put, draft["save"], draft["load"]
    put("checkpoint.every", draft["save_interval"] or 0, "save_interval")
    if draft["save_retain_interval"]:
        put("checkpoint.keep_every", draft["save_retain_interval"], "save_retain_interval")
    weights = draft["pretrained_checkpoint"] or (load if draft["finetune"] else None)
    convert = "a Megatron checkpoint goes through `mega ckpt convert` first"
    if weights:
        put("init_from", weights, "pretrained_checkpoint" if draft["pretrained_checkpoint"] else "load", "finetune")
        draft.tell(
            "changes meaning",
            f"init_from takes a mega checkpoint or a HuggingFace folder; {convert}",
            "pretrained_checkpoint",
        )
    if load and weights != load and load != save:
        put("checkpoint.load", load, "load")
    if load and load == save and weights != load:
        draft.tell(
            "changes meaning", f"checkpoint.resume, the default, finds mega's own checkpoints there; {convert}", "load"
        )
    elif load:
        text = f"must be there and complete, else it is an error, where Megatron would start anew; {convert}"
        draft.tell("changes meaning", text, "load")
    if draft["async_save"]:
        put("checkpoint.async", True, "async_save")


def log_section(draft: Draft) -> None:
    """Write the keys of `log:` and `output`."""
    draft.put("log.every", draft["log_interval"], "log_interval")
    draft.put("log.tensorboard", "tensorboard_dir" in draft, "tensorboard_dir")
    draft.tell("changes meaning", "log.tensorboard is on; mega writes into `output`/tensorboard", "tensorboard_dir")
    if draft["wandb_project"]:
        draft.put("log.wandb", draft["wandb_project"], "wandb_project")
    if draft["save"]:
        draft.put("output", draft["save"], "save")
