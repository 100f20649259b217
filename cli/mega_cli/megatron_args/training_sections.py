"""Sections of run.yaml other than `model:`, `data:`, `batch:` and `lr_schedule:`."""

from __future__ import annotations

from math import log2, prod

from mega_cli.megatron_args.experts_section import has_megatron_moe_flags
from mega_cli.megatron_args.hybrid_layers import translate_pipeline_layout_flags
from mega_cli.megatron_args.run_draft import RunYamlDraft

COPY = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
CONTEXT = {"p2p": "ring", "a2a": "alltoall", "all_gather": "allgather"}
SCALES = ("loss_scale", "initial_loss_scale", "loss_scale_window", "min_loss_scale")
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

# Modules of selective recompute: Megatron's name, mega's name.
RECOMPUTED = {"layernorm": "norm", "moe_act": "activation", "mlp": "mlp", "moe": "moe"}


def translate_parallel_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `parallel` section of a run.yaml, from Megatron-LM and DeepSpeed flags."""
    put, tp = draft.set_key, draft["tensor_model_parallel_size"]
    put("parallel.tp", tp, "tensor_model_parallel_size")
    if tp != 1:
        put("parallel.sp", draft["sequence_parallel"], "sequence_parallel")
    else:
        draft.add_note("not needed", "Megatron switches it off without tensor parallelism", "sequence_parallel")
    put("parallel.pp", draft["pipeline_model_parallel_size"], "pipeline_model_parallel_size")
    translate_pipeline_layout_flags(draft)
    if draft["context_parallel_size"] != 1:
        put("parallel.cp", draft["context_parallel_size"], "context_parallel_size")
        _context(draft)
    else:
        draft.add_note("translated", "parallel.cp, 1 by default", "context_parallel_size")
    if draft["expert_model_parallel_size"] != 1:
        put("parallel.ep", draft["expert_model_parallel_size"], "expert_model_parallel_size")
    else:
        draft.add_note("translated", "parallel.ep, 1 by default", "expert_model_parallel_size")
    if has_megatron_moe_flags(draft):
        _expert_parts(draft)
    _zero(draft)


def _context(draft: RunYamlDraft) -> None:
    """Write context parallelism; all kinds give the same numbers, but head-wise kinds draw dropout per head."""
    kinds = list(dict.fromkeys(draft["cp_comm_type"]))
    ours = [CONTEXT.get(kind, "ring") for kind in kinds] or ["ring"]
    if draft.is_megatron_setting_enabled("attention_dropout") and ours[0] != "alltoall":
        draft.set_key(
            "parallel.cp_kind", "alltoall", "cp_comm_type", because="the kind that supports attention dropout"
        )
    else:
        draft.set_key("parallel.cp_kind", ours[0], "cp_comm_type")
    if len(kinds) != 1 or not set(kinds) <= CONTEXT.keys():
        text = "mega uses one of ring, allgather and alltoall for all layers; all give the same results"
        draft.add_note("no equivalent", text, "cp_comm_type")


def _expert_parts(draft: RunYamlDraft) -> None:
    parts = draft["expert_tensor_parallel_size"]
    why = "" if parts else "Megatron's default: the size of tensor parallelism"
    if draft.is_megatron_deepspeed and not draft["enable_expert_tensor_parallelism"]:
        return
    if "expert_tensor_parallel_size" not in draft:
        parts = draft["tensor_model_parallel_size"]
    if parts != 1:
        draft.set_key("parallel.expert_tp", parts, "expert_tensor_parallel_size", because=why)
    else:
        draft.add_note("translated", "parallel.expert_tp, 1 by default", "expert_tensor_parallel_size")


def _zero(draft: RunYamlDraft) -> None:
    if draft["grad_reduce_in_bf16"]:
        draft.set_key("parallel.grad_reduce_dtype", "bf16", "grad_reduce_in_bf16")
    if draft.is_megatron_deepspeed:
        return _deepspeed_zero(draft)
    if draft["use_torch_fsdp2"]:
        return draft.set_key("parallel.zero", 3, "use_torch_fsdp2")
    if draft["use_megatron_fsdp"]:
        level, flags = STRATEGIES.get(draft["data_parallel_sharding_strategy"]), ("data_parallel_sharding_strategy",)
        draft.set_key("parallel.zero", level, *flags, "use_megatron_fsdp", "use_distributed_optimizer")
        return _copies(draft) if level == 3 and draft["num_distributed_optimizer_instances"] != 1 else None
    return draft.set_key("parallel.zero", int(draft["use_distributed_optimizer"]), "use_distributed_optimizer")


def _deepspeed_zero(draft: RunYamlDraft) -> None:
    """Write the ZeRO level of DeepSpeed's own file; every level gives the same numbers."""
    level = draft.deepspeed_file.get_integer("zero_optimization.stage")
    if level is not None:
        flags = draft["zero_stage"]
        return draft.set_key_from_deepspeed_file(
            "parallel.zero", "zero_optimization.stage", level, "zero_stage", flags=flags
        )
    if "zero_stage" in draft:
        return draft.set_key("parallel.zero", draft["zero_stage"], "zero_stage")
    return draft.set_key(
        "parallel.zero", 1, because="mega's default; the level is set in DeepSpeed's file, which was not read"
    )


def _copies(draft: RunYamlDraft) -> None:
    """Write the replicas: Megatron counts copies of the weights, mega the data ranks that share one."""
    ranks, flag = draft.ranks, "num_distributed_optimizer_instances"
    sizes = [draft[name] for name in (*COPY[:2], flag)]
    share = ranks // prod(sizes) if ranks and all(sizes) else None
    ask = "depends on the number of ranks, which the script does not set"
    draft.set_key("parallel.zero3_shard", share, flag, ask=ask, instead="ranks of a copy")


def ranks_per_model(draft: RunYamlDraft) -> int | None:
    """Return the number of ranks that share one copy of the model by Megatron-LM flags; None if a size is unknown."""
    sizes = [draft[name] for name in COPY]
    return prod(sizes) if all(sizes) else None


def translate_optimizer_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `optimizer` section of a run.yaml, from Megatron-LM flags."""
    put, name = draft.set_key, draft["optimizer"]
    ours = {"adam": "adamw", "muon": "muon", "dist_muon": "muon", "soap": "soap", "sgd": "sgd", "lion": "lion"}
    put("optimizer.name", ours.get(name), "optimizer", ask=f"the optimizer {name} is not supported")
    if name == "sgd":
        put("optimizer.sgd.momentum", draft["sgd_momentum"], "sgd_momentum")
    put("optimizer.lr", draft["lr"], "lr")
    if "decoupled_lr" in draft:
        put("optimizer.decoupled_lr", draft["decoupled_lr"], "decoupled_lr")
    betas = [f"{'lion' if name == 'lion' else 'adam'}_beta{i}" for i in (1, 2)]
    put("optimizer.betas", [draft[flag] for flag in betas], *betas)
    put("optimizer.eps", draft["adam_eps"], "adam_eps")
    put("optimizer.weight_decay", draft["weight_decay"], "weight_decay")
    _clip(draft)
    if draft.deepspeed_file.offloads_optimizer:
        put("optimizer.offload", True, because=f"zero_optimization of {draft.deepspeed_file.name}")
    if draft["optimizer_cpu_offload"]:
        put("optimizer.offload", True, "optimizer_cpu_offload")
        if draft["optimizer_offload_fraction"] != 1.0:
            text = "mega keeps the whole optimizer state in host memory"
            draft.add_note("changes meaning", text, "optimizer_offload_fraction")
    if ours.get(name) == "muon":
        _muon(draft)


def _clip(draft: RunYamlDraft) -> None:
    """Write gradient clipping; DeepSpeed's engine follows its own file."""
    file, clip = draft.deepspeed_file, draft["clip_grad"]
    filed = file.get_number("gradient_clipping")
    if filed is not None:
        return draft.set_key_from_deepspeed_file(
            "optimizer.clip_grad", "gradient_clipping", filed, "clip_grad", flags=clip
        )
    draft.set_key("optimizer.clip_grad", clip, "clip_grad")
    if file.name and "gradient_clipping" not in file.values and clip:
        text = (
            f"{file.name} does not set gradient_clipping, so DeepSpeed up to 0.19.2 does not clip, and from 0.19.3 on clips "
            "at 1, independent of --clip-grad; set 0 or 1 for the same result"
        )
        draft.add_note("open", text, key="optimizer.clip_grad")
    return None


def _muon(draft: RunYamlDraft) -> None:
    """Write Muon: Megatron scales an orthogonal [M, N] update by sqrt(max(M, N)), mega by 0.2 of that."""
    put, scale, decay = draft.set_key, draft["muon_extra_scale_factor"], draft["weight_decay"]
    factor = scale and scale / 0.2
    put("optimizer.muon.momentum", draft["muon_momentum"], "muon_momentum")
    put("optimizer.muon.nesterov", draft["muon_nesterov"], "muon_nesterov")
    why = "Megatron's updates are 5 x --muon-extra-scale-factor times mega's"
    put("optimizer.muon.lr_factor", factor, "muon_extra_scale_factor", because=why)
    why = "weight_decay of the optimizer / lr_factor, which multiplies it too"
    own = None if decay is None or not factor else decay / factor
    put("optimizer.muon.weight_decay", own, because=why, instead="weight_decay / lr_factor")
    put("optimizer.muon.rounds", draft["muon_num_ns_steps"], "muon_num_ns_steps")
    if draft["muon_scale_mode"] != "spectral":
        draft.add_note("no equivalent", "mega scales updates as with `spectral`", "muon_scale_mode")
    text = "muon: mega orthogonalises gate and up projections separately, Megatron as one matrix"
    draft.add_note("changes meaning", text)


def translate_precision_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the keys `precision`, `fp8` and `fp16` of a run.yaml, from Megatron-LM flags."""
    if draft.is_megatron_setting_enabled("fp8") or draft.is_megatron_setting_enabled("fp4"):
        translate = _fp8 if draft.is_megatron_setting_enabled("fp8") else _fp4
        translate(draft)
        if draft["first_last_layers_bf16"]:
            for key, dest in (("first", "num_layers_at_start_in_bf16"), ("last", "num_layers_at_end_in_bf16")):
                draft.set_key(f"fp8.bf16_{key}", draft[dest], "first_last_layers_bf16", dest)
        if draft["fp16"]:
            draft.add_note("changes meaning", "with fp8, mega computes everything else in bf16", "fp16")
        return
    kind: str | None = "bf16" if draft["bf16"] else "fp16" if draft["fp16"] else "fp32"
    if kind == "fp32" and draft.arguments.unread:
        kind = None  # fp32 is unlikely if flags are missing
    ask = f"{', '.join(draft.arguments.unread)} may contain --bf16 or --fp16"
    file = draft.deepspeed_file
    filed = next((name for name in ("bf16", "bfloat16", "fp16") if file.is_section_enabled(name)), None)
    if filed is None:
        draft.set_key("precision", kind, "bf16", "fp16", ask=ask)
    else:
        flags, kind = kind, "fp16" if filed == "fp16" else "bf16"
        draft.set_key_from_deepspeed_file("precision", f"{filed}.enabled", kind, "bf16", "fp16", flags=flags)
    if kind == "fp16":
        _loss_scale(draft)


def _fp8(draft: RunYamlDraft) -> None:
    draft.set_key("precision", "fp8", "fp8", "bf16")
    recipe, delayed = draft["fp8_recipe"], draft["fp8_recipe"] == "delayed"
    ask = "custom recipes are not supported; mega has tensorwise, rowwise, blockwise and mxfp8"
    draft.set_key(
        "fp8.recipe", "tensorwise" if delayed else None if recipe == "custom" else recipe, "fp8_recipe", ask=ask
    )
    if delayed:
        text = "fp8.recipe is tensorwise, which scales by the current values instead of the history of earlier steps"
        draft.add_note("changes meaning", text, "fp8_recipe" if "fp8_recipe" in draft else "fp8")
    draft.set_key("fp8.format", draft["fp8"], "fp8")


def _fp4(draft: RunYamlDraft) -> None:
    draft.set_key("precision", "fp8", "fp4", "bf16")
    recipe = None if draft["fp4_recipe"] == "custom" else draft["fp4_recipe"]
    draft.set_key("fp8.recipe", recipe, "fp4_recipe", ask="custom recipes are not supported; mega has nvfp4")
    draft.set_key("kernels.linear", "te", "fp4")


def _loss_scale(draft: RunYamlDraft) -> None:
    put, note = draft.set_key, draft.add_note
    if draft.is_megatron_deepspeed:
        return _deepspeed_scale(draft)
    dest = "loss_scale" if draft.is_megatron_setting_enabled("loss_scale") else "initial_loss_scale"
    scale, window = draft[dest], draft["loss_scale_window"]
    whole = 2.0 ** round(log2(scale)) if scale and scale > 0 else None
    put("fp16.initial_scale", whole, dest)
    put("fp16.growth_interval", None if window is None else int(window), "loss_scale_window")
    put("fp16.min_scale", draft["min_loss_scale"], "min_loss_scale")
    note(
        "changes meaning", "fp16.initial_scale is the initial value; mega's loss scale is always dynamic", "loss_scale"
    )
    if whole and whole != scale and dest == "initial_loss_scale":
        note("changes meaning", "mega's scales are powers of two", dest)
    if draft["hysteresis"] != 1:
        text = (
            f"mega halves the loss scale at every overflow, Megatron tolerates {(draft['hysteresis'] or 2) - 1} before"
        )
        named = ["hysteresis"] if "hysteresis" in draft else []
        note("changes meaning", text if named else f"{text}, the default of --hysteresis", *named)
    return None


def _deepspeed_scale(draft: RunYamlDraft) -> None:
    """Write DeepSpeed's loss scale, which has its own defaults; 0 means dynamic."""
    file, note = draft.deepspeed_file, draft.add_note
    note("changes meaning", "DeepSpeed takes it from its own file of settings", *SCALES, "hysteresis")
    if not file.is_section_enabled("fp16"):
        because = "DeepSpeed's default; fp16 in its own file of settings counts"
        return draft.set_key("fp16.initial_scale", 65_536.0, because=because)
    power, fixed = file.get_integer("fp16.initial_scale_power"), file.get_number("fp16.loss_scale")
    scale, origin = (fixed, "loss_scale") if fixed else (2.0 ** (16 if power is None else power), "initial_scale_power")
    draft.set_key("fp16.initial_scale", 2.0 ** round(log2(scale)), because=f"fp16.{origin} of {file.name}")
    if fixed:
        note(
            "changes meaning",
            f"fp16.loss_scale of {file.name} is the initial value; mega's loss scale is always dynamic",
        )
    for key, path, default in (("growth_interval", "loss_scale_window", 1000), ("min_scale", "min_loss_scale", 1)):
        value = file.get_number(f"fp16.{path}")
        draft.set_key(f"fp16.{key}", default if value is None else value, because=f"fp16.{path} of {file.name}")
    spared = (file.get_integer("fp16.hysteresis") or 2) - 1
    if spared:
        note("changes meaning", f"mega halves the loss scale at every overflow, DeepSpeed tolerates {spared} before")
    return None


def note_deepspeed_file(draft: RunYamlDraft) -> None:
    """Add notes to `draft` on the sections of DeepSpeed's configuration file.
    They are on the translated settings, and on enabled sections that mega does not support.
    """
    file = draft.deepspeed_file
    if file.name:
        draft.add_note(
            "translated", "read: batch, precision, fp16, parallel.zero, optimizer.clip_grad", "deepspeed_config"
        )
    for name in file.untranslated_sections:
        draft.add_note("no equivalent", f"{name} of {file.name} is enabled, but not supported")


def translate_recompute_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `recompute` section of a run.yaml (activation recomputation), from Megatron-LM flags."""
    if draft.is_megatron_setting_unknown("recompute_granularity"):
        return draft.set_key("recompute.kind", None, "recompute_granularity")
    granularity = draft["recompute_granularity"]
    selective = granularity == "selective" or draft["recompute_activations"]
    full = granularity == "full" or (not selective and (draft["checkpoint_activations"] or "recompute_method" in draft))
    if not (full or selective):
        return None
    flags = ("recompute_activations", "recompute_granularity", "checkpoint_activations", "recompute_method")
    draft.set_key("recompute.kind", "full" if full else "selective", *flags)
    method = draft["recompute_method"]
    if (
        full
        and (method == "block" or draft.is_megatron_setting_unknown("recompute_method"))
        and draft.is_megatron_setting_enabled("recompute_num_layers")
    ):
        count = draft["recompute_num_layers"] if method else None
        draft.set_key("recompute.layers", count, "recompute_num_layers", "recompute_method")
    if selective and draft.is_megatron_setting_enabled("recompute_modules"):
        _recomputed_modules(draft)
    return None


def _recomputed_modules(draft: RunYamlDraft) -> None:
    requested = draft["recompute_modules"] or []
    modules = [RECOMPUTED[name] for name in requested if name in RECOMPUTED]
    if modules or draft.is_megatron_setting_unknown("recompute_modules"):
        draft.set_key("recompute.modules", modules or None, "recompute_modules")
    if kept := [name for name in requested if name not in RECOMPUTED]:
        why = ", because fused attention does not store scores" if kept == ["core_attn"] else ""
        draft.add_note(
            "changes meaning",
            f"mega does not recompute {', '.join(kept)}{why}; the results are the same",
            "recompute_modules",
        )


def translate_checkpoint_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `checkpoint` section and `init_from` of a run.yaml, from Megatron-LM flags."""
    put, save, load = draft.set_key, draft["save"], draft["load"]
    put("checkpoint.every", draft.get_megatron_setting("save_interval", 0), "save_interval")
    if draft.is_megatron_setting_enabled("save_retain_interval"):
        put("checkpoint.keep_every", draft["save_retain_interval"], "save_retain_interval")
    weights = draft["pretrained_checkpoint"] or (load if draft["finetune"] else None)
    convert = "a Megatron checkpoint goes through `mega ckpt convert` first"
    if weights:
        put("init_from", weights, "pretrained_checkpoint" if draft["pretrained_checkpoint"] else "load", "finetune")
        draft.add_note(
            "changes meaning",
            f"init_from takes a mega checkpoint or a HuggingFace folder; {convert}",
            "pretrained_checkpoint",
        )
    if load and weights != load and load != save:
        put("checkpoint.load", load, "load")
    if load and load == save and weights != load:
        draft.add_note(
            "changes meaning", f"checkpoint.resume, the default, finds mega's own checkpoints there; {convert}", "load"
        )
    elif load:
        text = f"mega requires a complete checkpoint there, where Megatron would start from scratch; {convert}"
        draft.add_note("changes meaning", text, "load")
    if draft["async_save"]:
        put("checkpoint.async", True, "async_save")


def translate_log_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `log` section and `output` of a run.yaml, from Megatron-LM flags."""
    draft.set_key("log.every", draft["log_interval"], "log_interval")
    draft.set_key("log.tensorboard", "tensorboard_dir" in draft, "tensorboard_dir")
    draft.add_note("changes meaning", "log.tensorboard is on; mega writes into `output`/tensorboard", "tensorboard_dir")
    if draft["wandb_project"]:
        draft.set_key("log.wandb", draft["wandb_project"], "wandb_project")
    if draft["save"]:
        draft.set_key("output", draft["save"], "save")
