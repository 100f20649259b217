"""The `lr_schedule:` section."""

from __future__ import annotations

from mega_cli.megatron_args.draft import Draft

SCHEDULES = {
    "constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse-sqrt", "WSD": "wsd",
}  # fmt: skip
DECAY = ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
COOLDOWN = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")


def schedule_section(draft: Draft) -> None:
    """Write the keys of `lr_schedule:`."""
    put, steps = draft.put, draft.run["train"]["steps"]
    name = SCHEDULES.get(draft["lr_decay_style"])
    if name == "wsd" and any(dest in draft and draft[dest] == 0 for dest in COOLDOWN):
        name = "constant"  # the part of it without a cooldown
    put("lr_schedule.name", name, "lr_decay_style", *(COOLDOWN if name == "constant" else ()))
    given = any(dest in draft for dest in DECAY)
    decay = _as_steps(draft, *DECAY) if given else steps
    _warmup(draft, decay)
    put("lr_schedule.min_lr", draft["min_lr"], "min_lr")
    for key, dest in (("warmup_init", "lr_warmup_init"), ("decoupled_min_lr", "decoupled_min_lr")):
        if draft.wants(dest):
            put(f"lr_schedule.{key}", draft[dest], dest)
    if given:
        put("lr_schedule.decay_steps", decay, *DECAY, ask=_ask(draft, DECAY), instead=_formula(draft, DECAY))
    if name == "wsd":
        cooldown, formula = _as_steps(draft, *COOLDOWN), _formula(draft, COOLDOWN)
        put("lr_schedule.cooldown_steps", cooldown, *COOLDOWN, ask=_ask(draft, COOLDOWN), instead=formula)
        shape = draft["lr_wsd_decay_style"]
        put("lr_schedule.cooldown_shape", shape and shape.replace("_", "-"), "lr_wsd_decay_style")
    elif name == "inverse-sqrt" and decay and steps and steps > decay:
        text = "Megatron falls to min_lr at the end of the decay, mega goes on along the root"
        draft.tell("changes meaning", text, "lr_decay_style")


def _warmup(draft: Draft, decay: int | None) -> None:
    put, batch, share = draft.put, draft.run["batch"]["global"], draft["lr_warmup_fraction"]
    if "lr_warmup_fraction" in draft:
        return _share(draft, share, decay, batch)
    if "lr_warmup_tokens" in draft:
        samples = _samples(draft, "lr_warmup_tokens")
        return put(
            "lr_schedule.warmup_samples", samples, "lr_warmup_tokens", instead=_formula(draft, ("lr_warmup_tokens",))
        )
    if draft.wants("lr_warmup_samples"):
        return put("lr_schedule.warmup_samples", draft["lr_warmup_samples"], "lr_warmup_samples")
    return put("lr_schedule.warmup_steps", draft["lr_warmup_iters"], "lr_warmup_iters", "lr_warmup_samples")


def _share(draft: Draft, share: float | None, decay: int | None, batch: int | None) -> None:
    """A warmup that is a share of the decay."""
    length = _samples(draft, "lr_decay_tokens") or draft["lr_decay_samples"] or (decay and batch and decay * batch)
    if share is None or not length or not batch:
        ask = f"{share} of the steps of the decay, which the script does not say"
        return draft.put("lr_schedule.warmup_steps", None, "lr_warmup_fraction", ask=ask)
    samples = round(share * length)
    if samples % batch == 0 and "rampup_batch_size" not in draft:
        return draft.put("lr_schedule.warmup_steps", samples // batch, "lr_warmup_fraction")
    return draft.put("lr_schedule.warmup_samples", samples, "lr_warmup_fraction")


def _samples(draft: Draft, dest: str) -> int | None:
    """A number of tokens, in samples."""
    tokens, length = draft[dest], draft.run["data"]["seq_length"]
    return round(tokens / length) if tokens and length else None


def _as_steps(draft: Draft, iters: str, samples: str, tokens: str = "") -> int | None:
    """A length given in steps, in samples or in tokens, in steps; None without one, or where the batch is not known.

    A schedule counts samples, so with a batch that ramps up its steps are those of the whole batch.
    """
    steps: int | None = draft[iters]
    count: int | None = _samples(draft, tokens) if tokens and tokens in draft else draft[samples]
    batch: int | None = draft.run["batch"]["global"]
    if steps or not count or not batch:
        return steps
    if count % batch:
        dest = tokens if tokens and tokens in draft else samples
        draft.tell("changes meaning", f"rounded to whole steps of {batch} samples", dest)
    return max(1, round(count / batch))


def _ask(draft: Draft, dests: tuple[str, ...]) -> str:
    return f"{_formula(draft, dests)}, which the script does not say" if _formula(draft, dests) else "not in the script"


def _formula(draft: Draft, dests: tuple[str, ...]) -> str:
    """What steps there are, in words for the user, where the script leaves a part open."""
    for dest in dests:
        if draft.get(dest, None):
            per = " / data.seq_length" if dest.endswith("tokens") else ""
            return f"{draft[dest]}{per}" + ("" if dest.startswith("lr_warmup") else " / batch.global")
    return ""
