"""The `lr_schedule:` section."""

from __future__ import annotations

from mega_cli.megatron_args.batch_section import RAMPUP, STEPWISE, describe_length, samples_to_steps, tokens_to_samples
from mega_cli.megatron_args.run_draft import RunDraft

SCHEDULES = {
    "constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse-sqrt", "WSD": "wsd",
}  # fmt: skip
DECAY = ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
COOLDOWN = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")


def write_schedule_section(draft: RunDraft) -> None:
    """Write the `lr_schedule` section of run.yaml from Megatron-LM flags."""
    put, steps = draft.set_key, draft.run["train"]["steps"]
    name = SCHEDULES.get(draft["lr_decay_style"])
    if name == "wsd" and any(draft.get_setting(dest, None) == 0 for dest in COOLDOWN):
        name = "constant"  # WSD without a cooldown
    put("lr_schedule.name", name, "lr_decay_style", *(COOLDOWN if name == "constant" else ()))
    given = any(dest in draft for dest in DECAY)
    decay = _length_in_steps(draft, *DECAY) if given else steps
    _warmup(draft, decay)
    put("lr_schedule.min_lr", draft["min_lr"], "min_lr")
    for key, dest in (("warmup_init", "lr_warmup_init"), ("decoupled_min_lr", "decoupled_min_lr")):
        if draft.is_enabled(dest):
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


def _length(draft: RunDraft, key: str, steps: int | None, dests: tuple[str, ...]) -> None:
    formula = describe_length(draft, *dests)
    ask = f"{formula}, which the script does not set" if formula else "not in the script"
    draft.set_key(f"lr_schedule.{key}", steps, *dests, ask=ask, instead=formula)


def _warmup(draft: RunDraft, decay: int | None) -> None:
    put, tokens = draft.set_key, "lr_warmup_tokens"
    if "lr_warmup_fraction" in draft:
        return _warmup_fraction(draft, draft["lr_warmup_fraction"], decay)
    if tokens in draft:
        formula = describe_length(draft, tokens, steps=False)
        return put("lr_schedule.warmup_samples", tokens_to_samples(draft, tokens), tokens, instead=formula)
    if draft.is_enabled("lr_warmup_samples"):
        return put("lr_schedule.warmup_samples", draft["lr_warmup_samples"], "lr_warmup_samples")
    return put("lr_schedule.warmup_steps", draft["lr_warmup_iters"], "lr_warmup_iters", "lr_warmup_samples")


def _warmup_fraction(draft: RunDraft, share: float | None, decay: int | None) -> None:
    """Write a warm-up that is a fraction of the decay."""
    batch = draft.run["batch"]["global"]
    length = tokens_to_samples(draft, DECAY[2]) or draft[DECAY[1]] or draft["train_samples"]
    length = length or (decay and batch and decay * batch)
    if share is None or not length or not batch:
        ask = f"{share} of the decay steps, which the script does not set"
        return draft.set_key("lr_schedule.warmup_steps", None, "lr_warmup_fraction", ask=ask)
    samples = round(share * length)
    if samples % batch == 0 and RAMPUP not in draft and STEPWISE not in draft:
        return draft.set_key("lr_schedule.warmup_steps", samples // batch, "lr_warmup_fraction")
    return draft.set_key("lr_schedule.warmup_samples", samples, "lr_warmup_fraction")


def _cooldown(draft: RunDraft) -> int | None:
    """Write the cooldown steps before the end, all with the full batch."""
    steps: int | None = draft[COOLDOWN[0]]
    count: int | None = draft[COOLDOWN[1]]
    batch: int | None = draft.run["batch"]["global"]
    if steps or not count or not batch:
        return steps
    if count % batch:
        draft.add_note("changes meaning", "rounded to whole steps", COOLDOWN[1])
    return max(1, round(count / batch))


def _length_in_steps(draft: RunDraft, iters: str, samples: str, tokens: str) -> int | None:
    """Return a length given in steps, samples or tokens as steps, or None without one or with an unknown batch."""
    steps: int | None = draft[iters]
    dest = tokens if tokens in draft else samples
    count: int | None = tokens_to_samples(draft, dest) if dest == tokens else draft[dest]
    if steps or not count:
        return steps
    whole = samples_to_steps(draft, count)
    if whole and samples_to_steps(draft, count, up=True) != whole:
        draft.add_note("changes meaning", "rounded to whole steps", dest)
    return max(1, whole) if whole is not None else None
