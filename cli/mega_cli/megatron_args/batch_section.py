"""The `batch:`, `train:` and `lr_schedule:` sections, and conversion of samples and tokens to steps."""

from __future__ import annotations

from itertools import pairwise

from mega_cli.megatron_args.run_draft import RunYamlDraft
from mega_cli.megatron_args.shell_words import format_unknown_placeholders
from mega_cli.megatron_args.training_sections import ranks_per_model
from mega_trainer.config.batch_size import BatchConfig

RAMPUP, STEPWISE = "rampup_batch_size", "step_batch_size_schedule"
POWERS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def translate_batch_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `batch` section of a run.yaml, from flags of Megatron-LM and DeepSpeed's configuration file."""
    _batch_size(draft, "batch.micro", "train_micro_batch_size_per_gpu", "micro_batch_size")
    micro, copies = draft.run["batch"]["micro"], ranks_per_model(draft)
    dp = max(1, draft.ranks // copies) if draft.ranks and copies else None
    file = draft.deepspeed_file
    if STEPWISE in draft:
        return _write_stepwise_batch(draft)
    if "global_batch_size" in draft or file.get_integer("train_batch_size") or not micro or not dp:
        _batch_size(draft, "batch.global", "train_batch_size", "global_batch_size")
    elif rounds := file.get_integer("gradient_accumulation_steps"):
        why = f"micro x dp = {dp} x gradient_accumulation_steps = {rounds} of {file.name}"
        draft.set_key("batch.global", micro * dp * rounds, because=why)
    else:
        draft.set_key("batch.global", micro * dp, because=f"Megatron's default: micro x dp = {dp}")
    if RAMPUP in draft:
        for name, value in zip(("start", "increment", "samples"), draft[RAMPUP] or [None] * 3, strict=True):
            draft.set_key(f"batch.rampup.{name}", value, RAMPUP)
    return None


def _write_stepwise_batch(draft: RunYamlDraft) -> None:
    """Write the sizes of `--step-batch-size-schedule`, whose thresholds are tokens: "0:768 250B:1536"."""
    given = draft.arguments.given[STEPWISE]
    length = draft["seq_length"] or draft["encoder_seq_length"]
    if given.unset_shell_variables or not length:
        draft.set_key(
            "batch.global", None, STEPWISE, ask="the last size of the schedule, with batch.stages for those before"
        )
        return
    sizes = _parse_batch_schedule(" ".join(given.values), length)
    both = next((name for name in (RAMPUP, "decrease_batch_size_if_needed") if name in draft), None)
    if "global_batch_size" in draft and sizes and draft["global_batch_size"] != sizes[-1][1]:
        both = "global_batch_size"
    rule = ""
    if not sizes:
        rule = 'must be "0:SIZE TOKENS:SIZE ...", each threshold above the one before'
    elif both:
        rule = f"conflicts with --{both.replace('_', '-')}"
    elif max(size for _, size in sizes) > sizes[-1][1]:
        rule = "is not supported with a batch that becomes smaller during the run"
    if rule:
        draft.add_problem(STEPWISE, rule)
    draft.set_key("batch.global", None if rule else sizes[-1][1], STEPWISE, "global_batch_size")
    if not rule and len(sizes) > 1:
        stages = [{"until": until, "size": size} for (_, size), (until, _) in pairwise(sizes)]
        draft.set_key("batch.stages", stages, STEPWISE)


def _parse_batch_schedule(text: str, length: int) -> list[tuple[int, int]]:
    """Return (first sample, samples of a step) of a schedule in tokens; empty if Megatron-LM would not accept it."""
    try:
        entries = [entry.split(":") for entry in text.replace(",", " ").split()]
        found = sorted(
            (_parse_suffixed_number(tokens) // length, _parse_suffixed_number(size)) for tokens, size in entries
        )
    except (ValueError, OverflowError):
        return []
    starts = [start for start, _ in found]
    fits = starts[:1] == [0] and len(set(starts)) == len(starts) and all(size > 0 for _, size in found)
    return found if fits else []


def _parse_suffixed_number(text: str) -> int:
    """Return a number with one of the suffixes K, M, B and T, rounded down."""
    power = POWERS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if power > 1 else text) * power)


def _batch_size(draft: RunYamlDraft, key: str, path: str, dest: str) -> None:
    """Write a batch size: the flags' value, by which Megatron reads data, else the value of DeepSpeed's file."""
    filed, given = draft.deepspeed_file.get_integer(path), draft[dest]
    if filed is not None and (dest not in draft or draft.is_megatron_setting_unknown(dest)):
        return draft.set_key_from_deepspeed_file(key, path, filed, dest, flags=filed)
    draft.set_key(key, given, dest)
    if filed is not None and filed != given:
        draft.add_note("open", f"{path} of {draft.deepspeed_file.name} is {filed}, and the flags say {given}", key=key)
    return None


def translate_train_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `train` section of a run.yaml (steps, evaluation, seed, exit), from Megatron-LM flags."""
    put = draft.set_key
    steps, formula = _last_step(draft), format_training_length_formula(draft, "train_tokens", "train_samples")
    put("train.steps", steps, "train_iters", "train_samples", "train_tokens", ask=formula or "not in the script")
    evaluates = draft.is_megatron_setting_enabled("eval_interval") and draft.is_megatron_setting_enabled("eval_iters")
    every = draft["eval_interval"] if evaluates else 0
    put("train.eval_every", every, "eval_interval", *([] if evaluates else ["eval_iters"]))
    if evaluates and draft["eval_iters"] == -1:
        text = "validation on the whole data set is not supported; train.eval_steps has its default"
        draft.add_note("no equivalent", text, "eval_iters")
    elif evaluates:
        put("train.eval_steps", draft["eval_iters"], "eval_iters")
    put("train.seed", draft["seed"], "seed")
    for key, dest in (("exit_after_minutes", "exit_duration_in_mins"), ("exit_interval", "exit_interval")):
        if draft.is_megatron_setting_enabled(dest):
            put(f"train.{key}", draft[dest], dest)


def _last_step(draft: RunYamlDraft) -> int | None:
    """Return the last step: after --train-iters or --train-samples, or earlier when the number of tokens is reached."""
    samples: int | None = draft["train_samples"]
    steps: int | None = draft["train_iters"] or convert_sample_count_to_steps(draft, samples)
    if "train_tokens" not in draft:
        return steps
    enough = convert_sample_count_to_steps(draft, convert_token_count_to_samples(draft, "train_tokens"), up=True)
    return min(enough, steps) if enough and steps else enough


def convert_token_count_to_samples(draft: RunYamlDraft, dest: str) -> int | None:
    """Return the tokens in the Megatron setting `dest` as samples of data.seq_length tokens, rounded up; None if unknown."""
    tokens, length = draft[dest], draft.run["data"]["seq_length"]
    return -(-tokens // length) if tokens and length else None


def convert_sample_count_to_steps(draft: RunYamlDraft, samples: int | None, *, up: bool = False) -> int | None:
    """Return the whole optimizer steps in a number of samples, rounded up with `up`; None if a size is unknown.
    The batch sizes are those translated so far.
    """
    sizes = draft.run["batch"]
    if not samples or any(
        (number or 0) < 1 for number in (samples, sizes["global"], *sizes.get("rampup", {}).values())
    ):
        return None
    batch = BatchConfig.model_validate(
        {"global": sizes["global"], "rampup": sizes.get("rampup"), "stages": sizes.get("stages", [])}
    )
    steps = batch.steps_for_samples(samples)
    return steps + 1 if up and batch.samples_after_steps(steps) < samples else steps


def format_training_length_formula(draft: RunYamlDraft, *dests: str, steps: bool = True) -> str:
    """Return a formula such as `$SAMPLES / batch.global` for a length given by an unset variable; "" if not given.
    The launch script gives the length in samples or tokens, by one of the flags `dests`.
    """
    for dest in dests:
        given = draft.arguments.given.get(dest)
        if given is not None and given.values:
            per = " / data.seq_length" if dest.endswith("tokens") else ""
            return (
                format_unknown_placeholders(given.values[0])
                + per
                + (" / batch.global" if steps and not dest.endswith("iters") else "")
            )
    return ""


SCHEDULES = {
    "constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse-sqrt", "WSD": "wsd",
}  # fmt: skip
DECAY = ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
COOLDOWN = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")


def translate_lr_schedule_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the `lr_schedule` section of a run.yaml, from Megatron-LM flags."""
    put, steps = draft.set_key, draft.run["train"]["steps"]
    name = SCHEDULES.get(draft["lr_decay_style"])
    if name == "wsd" and any(draft.get_megatron_setting(dest, None) == 0 for dest in COOLDOWN):
        name = "constant"  # WSD without a cooldown
    put("lr_schedule.name", name, "lr_decay_style", *(COOLDOWN if name == "constant" else ()))
    given = any(dest in draft for dest in DECAY)
    decay = _length_in_steps(draft, *DECAY) if given else steps
    _warmup(draft, decay)
    put("lr_schedule.min_lr", draft["min_lr"], "min_lr")
    for key, dest in (("warmup_init", "lr_warmup_init"), ("decoupled_min_lr", "decoupled_min_lr")):
        if draft.is_megatron_setting_enabled(dest):
            put(f"lr_schedule.{key}", draft[dest], dest)
    if given:
        _length(draft, "decay_steps", decay, DECAY)
    if name == "wsd":
        _length(draft, "cooldown_steps", _cooldown(draft), COOLDOWN)
        shape = draft["lr_wsd_decay_style"]
        put("lr_schedule.cooldown_shape", shape and shape.replace("_", "-"), "lr_wsd_decay_style")
    elif name == "inverse-sqrt" and decay and steps and steps > decay:
        text = "after the decay Megatron drops to min_lr, mega continues the inverse square root"
        draft.add_note("changes meaning", text, "lr_decay_style")


def _length(draft: RunYamlDraft, key: str, steps: int | None, dests: tuple[str, ...]) -> None:
    formula = format_training_length_formula(draft, *dests)
    ask = f"{formula}, which the script does not set" if formula else "not in the script"
    draft.set_key(f"lr_schedule.{key}", steps, *dests, ask=ask, instead=formula)


def _warmup(draft: RunYamlDraft, decay: int | None) -> None:
    put, tokens = draft.set_key, "lr_warmup_tokens"
    if "lr_warmup_fraction" in draft:
        return _warmup_fraction(draft, draft["lr_warmup_fraction"], decay)
    if tokens in draft:
        formula = format_training_length_formula(draft, tokens, steps=False)
        return put("lr_schedule.warmup_samples", convert_token_count_to_samples(draft, tokens), tokens, instead=formula)
    if draft.is_megatron_setting_enabled("lr_warmup_samples"):
        return put("lr_schedule.warmup_samples", draft["lr_warmup_samples"], "lr_warmup_samples")
    return put("lr_schedule.warmup_steps", draft["lr_warmup_iters"], "lr_warmup_iters", "lr_warmup_samples")


def _warmup_fraction(draft: RunYamlDraft, share: float | None, decay: int | None) -> None:
    """Write a warm-up that is a fraction of the decay."""
    batch = draft.run["batch"]["global"]
    length = convert_token_count_to_samples(draft, DECAY[2]) or draft[DECAY[1]] or draft["train_samples"]
    length = length or (decay and batch and decay * batch)
    if share is None or not length or not batch:
        ask = f"{share} of the decay steps, which the script does not set"
        return draft.set_key("lr_schedule.warmup_steps", None, "lr_warmup_fraction", ask=ask)
    samples = round(share * length)
    if samples % batch == 0 and RAMPUP not in draft and STEPWISE not in draft:
        return draft.set_key("lr_schedule.warmup_steps", samples // batch, "lr_warmup_fraction")
    return draft.set_key("lr_schedule.warmup_samples", samples, "lr_warmup_fraction")


def _cooldown(draft: RunYamlDraft) -> int | None:
    """Write the cooldown steps before the end, all with the full batch."""
    steps: int | None = draft[COOLDOWN[0]]
    count: int | None = draft[COOLDOWN[1]]
    batch: int | None = draft.run["batch"]["global"]
    if steps or not count or not batch:
        return steps
    if count % batch:
        draft.add_note("changes meaning", "rounded to whole steps", COOLDOWN[1])
    return max(1, round(count / batch))


def _length_in_steps(draft: RunYamlDraft, iters: str, samples: str, tokens: str) -> int | None:
    """Return a length given in steps, samples or tokens as steps, or None without one or with an unknown batch."""
    steps: int | None = draft[iters]
    dest = tokens if tokens in draft else samples
    count: int | None = convert_token_count_to_samples(draft, dest) if dest == tokens else draft[dest]
    if steps or not count:
        return steps
    whole = convert_sample_count_to_steps(draft, count)
    if whole and convert_sample_count_to_steps(draft, count, up=True) != whole:
        draft.add_note("changes meaning", "rounded to whole steps", dest)
    return max(1, whole) if whole is not None else None
