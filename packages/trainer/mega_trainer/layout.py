"""Degrees of parallelism: which rank stands where, and which degrees a model and a number of ranks allow. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_common.config import Problem
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import make_schedule
from mega_trainer.pipeline.stages import stage_layers

if TYPE_CHECKING:
    from mega_trainer.config import RunConfig


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. The product of tp, pp, cp and dp is the number of ranks.

    Ranks are ordered pp, dp, cp, tp with tp fastest, so that the groups that talk most lie on one machine. For experts
    those of a stage are cut in another way, without regard to dp, cp and tp: in blocks of ep x expert_tp neighbours that
    hold all experts, expert_tp fastest.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    expert_tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    def rank(self, *, pp: int, dp: int, cp: int, tp: int) -> int:
        """The global rank at the given coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank stands on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """What of the degrees does not fit the model, whatever the number of ranks."""
    model, parallel = config.model, config.parallel
    if not _splits(model, parallel.tp):
        heads, shared = _told_heads(model, 1)
        widths = f"{heads} and the ffn_hidden_size {' and '.join(map(str, sorted(split_widths(model))))}"
        rule = f"must divide {widths if split_widths(model) else heads}, and divide or be a multiple of {shared}"
        yield Problem("parallel.tp", rule, parallel.tp, f"one of {_tensor_degrees(model)}")
    yield from context_problems(config)
    yield from expert_problems(config)
    try:
        stage_layers(model.num_layers, parallel.pp, parallel.virtual_stages, parallel.pipeline_layout)
    except ConfigError as error:
        yield Problem("parallel.pp", error.message, parallel.pp, error.hint or "")
    if parallel.pp == 1 and parallel.virtual_stages > 1:
        rule = "interleaves pipeline ranks, and there is one: parallel.pp = 1"
        yield Problem("parallel.virtual_stages", rule, parallel.virtual_stages, "1, or a larger pp")
    if parallel.pp == 1 and parallel.schedule != "1f1b":
        rule = "fills the waits of a pipeline, and there is none: parallel.pp = 1"
        yield Problem("parallel.schedule", rule, parallel.schedule, "1f1b, or a larger pp")
        return
    try:
        make_schedule(parallel.schedule, pp=parallel.pp, microbatches=1, virtual_stages=parallel.virtual_stages)
    except ConfigError as error:
        yield Problem("parallel.schedule", error.message, parallel.schedule, error.hint or "")


def check_degrees(model: ModelConfig, *, tp: int, ep: int) -> None:
    """Refuse degrees by which a model cannot be shared, where there is no run to check.

    Raises:
        ConfigError: naming the degree, with those that can be.
    """
    if not _splits(model, tp):
        hint = f"one of {_tensor_degrees(model)}"
        raise ConfigError(f"tp = {tp}: this model's heads and widths cannot be shared so", hint=hint)
    if ep not in _expert_degrees(model):
        raise ConfigError(
            f"ep = {ep}: this model's experts cannot be shared so", hint=f"one of {_expert_degrees(model)}"
        )


def context_problems(config: RunConfig) -> Iterator[Problem]:
    """What of the split of a sequence, over context ranks and under sequence parallelism, does not fit the model."""
    model, parallel, length = config.model, config.parallel, config.data.seq_length
    cp, tp = parallel.cp, parallel.tp
    unit = (2 * cp if cp > 1 else 1) * (tp if parallel.sp else 1)
    if length % unit:
        halves = [f"2 x parallel.cp {cp}"] if cp > 1 else []
        shares = [f"parallel.tp {tp} (with sp)"] if parallel.sp else []
        fits = f"{length // unit * unit or unit}" + (", or sp: false" if cp == 1 else "")
        yield Problem("data.seq_length", f"must be a multiple of {' x '.join(halves + shares)} = {unit}", length, fits)
    if cp == 1:
        return
    if model.attention_dropout and parallel.cp_kind != "alltoall":
        rule = f"{parallel.cp_kind} works block by block, and a head's dropout is drawn as a whole"
        yield Problem("parallel.cp_kind", rule, parallel.cp_kind, "alltoall, or model.attention_dropout: 0")
    if parallel.cp_kind == "alltoall" and _splits(model, tp) and not _shares_heads(model, tp, cp):
        heads, keys = _told_heads(model, tp)
        degrees = [n for n in range(1, _most_heads(model) // tp + 1) if _shares_heads(model, tp, n)]
        rule = f"alltoall splits the {heads} of a tensor rank, and its {keys}"
        yield Problem("parallel.cp", rule, cp, f"one of {degrees}, or cp_kind: {_blockwise(model)}")


def _blockwise(model: ModelConfig) -> str:
    return "ring, and model.attention_dropout: 0" if model.attention_dropout else "ring"


def _shares_heads(model: ModelConfig, tp: int, cp: int) -> bool:
    """Whether `cp` ranks can share the heads of a tensor rank: its key/value heads too, or each by equally many."""
    counts = [(heads // tp, max(1, shared // tp)) for heads, shared in model.heads.values()]
    return all(heads % cp == 0 and (shared % cp == 0 or cp % shared == 0) for heads, shared in counts)


def expert_problems(config: RunConfig) -> Iterator[Problem]:
    """What of the degrees of the experts does not fit the model."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        for name in ("ep", "expert_tp"):
            if getattr(parallel, name) > 1:
                yield Problem(
                    f"parallel.{name}", "splits experts, and the model has none", getattr(parallel, name), "1"
                )
        return
    if moe.num_experts % parallel.ep:
        rule = f"must divide the {moe.num_experts} experts"
        yield Problem("parallel.ep", rule, parallel.ep, f"one of {_expert_degrees(config.model)}")
    if moe.ffn_hidden_size % parallel.expert_tp:
        widths = [n for n in range(1, 17) if moe.ffn_hidden_size % n == 0]
        rule = f"must divide the experts' ffn_hidden_size {moe.ffn_hidden_size}"
        yield Problem("parallel.expert_tp", rule, parallel.expert_tp, f"one of {widths}")
    if parallel.dispatch in ("nvshmem", "te") and parallel.dispatch_bound is None:
        rule = f"says how much room there is, and dispatch = {parallel.dispatch} wants to know"
        yield Problem("parallel.dispatch_bound", rule, None, "1.25, or dispatch: alltoall")
    if unfit := _unfit_for_dispatch(config):
        yield Problem("parallel.dispatch", unfit, parallel.dispatch, "alltoall")


def _unfit_for_dispatch(config: RunConfig) -> str | None:
    """What of the run the library does not take that brings tokens to experts."""
    parallel, width = config.parallel, config.model.hidden_size
    ranks, way = parallel.ep * parallel.expert_tp, parallel.dispatch
    if way in ("deepep", "te") and (parallel.expert_tp > 1 or config.precision not in ("bf16", "fp8")):
        return (
            f"takes bf16 and whole experts: precision = {config.precision}, parallel.expert_tp = {parallel.expert_tp}"
        )
    if way == "nvshmem" and (ranks & (ranks - 1) or width % 32):  # its kernel shares bytes evenly among blocks
        return f"takes powers of two of ranks, and widths of a multiple of 32: ep x expert_tp = {ranks}, hidden_size = {width}"
    return None


def _expert_degrees(model: ModelConfig) -> list[int]:
    experts = model.moe.num_experts if model.moe else 1
    return [n for n in range(1, experts + 1) if experts % n == 0]


def world_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """What of the degrees and the batch does not fit `world_size` ranks."""
    parallel, batch = config.parallel, config.batch
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world_size % model_ranks:
        yield Problem(
            "parallel",
            f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = {model_ranks} ranks do not divide the {world_size} there are",
            hint=_suggestion(config, world_size),
        )
        return
    dp = world_size // model_ranks
    if parallel.dp not in (None, dp):
        hint = f"leave it out, or start {model_ranks * (parallel.dp or 1)} ranks"
        yield Problem("parallel.dp", f"{world_size} ranks make dp = {dp}", parallel.dp, hint)
    stage, block = dp * parallel.cp * parallel.tp, parallel.ep * parallel.expert_tp
    if stage % block:
        rule = f"ep {parallel.ep} x expert_tp {parallel.expert_tp} = {block} must divide the {stage} ranks of a stage"
        yield Problem("parallel.ep", rule, parallel.ep, _told(_fitting_experts(config, stage)))
    ranks, shard = dp * parallel.cp, parallel.zero3_shard
    if shard is not None and ranks % shard:
        fitting = [size for size in range(2, ranks + 1) if ranks % size == 0]
        hint = f"one of {fitting}" if fitting else "leave it out"
        yield Problem("parallel.zero3_shard", f"must divide the {ranks} data ranks", shard, hint)
    unit = batch.micro * dp
    for problem in batch.uneven(unit, f"batch.micro {batch.micro} x dp {dp} = {unit}"):
        yield replace(problem, path=f"batch.{problem.path}")


def _suggestion(config: RunConfig, world_size: int) -> str:
    """Degrees near the asked ones that this model, this batch and so many ranks allow.

    Those come first under which a rank holds no more weights and no more tokens than under the asked ones.
    """
    parallel = config.parallel
    near = sorted(
        (
            tp * pp < parallel.tp * parallel.pp or tp * cp < parallel.tp * parallel.cp,
            abs(tp - parallel.tp) + abs(pp - parallel.pp) + abs(cp - parallel.cp), tp, pp, cp,
        )
        for tp in range(1, min(world_size, _most_heads(config.model)) + 1)
        if _splits(config.model, tp)
        for pp in range(1, min(world_size // tp, config.model.num_layers) + 1)
        for cp in range(1, parallel.cp + 1)
        if world_size % (tp * pp * cp) == 0
    )  # fmt: skip
    for more, _, tp, pp, cp in near:
        split = {"cp": cp} if parallel.cp > 1 else {}
        degrees: dict[str, int | str] = {"tp": tp, "pp": pp, **split, "dp": world_size // (tp * pp * cp)}
        if pp == 1:
            alone: dict[str, int | str] = {"virtual_stages": 1, "schedule": "1f1b"}
            degrees |= {name: value for name, value in alone.items() if getattr(parallel, name) != value}
        degrees |= _fitting_experts(config, world_size // pp)
        changed = config.model_copy(update={"parallel": parallel.model_copy(update=degrees)})
        if not [*model_problems(changed), *world_problems(changed, world_size)]:
            return _told(degrees) + (_other_ranks(config, world_size) if more else "")
    return "no degrees fit; change batch.global or the number of ranks"


def _other_ranks(config: RunConfig, world_size: int) -> str:
    """What to do rather than take degrees under which a rank holds more: numbers of ranks that the asked ones divide."""
    unit = fewest_ranks(config)
    near = [n for n in (world_size // unit * unit, -(-world_size // unit) * unit) if n]
    fitting = [n for n in near if not list(world_problems(config, n))]
    told = f"; or start {' or '.join(map(str, fitting))} ranks" if fitting else ""
    return f", which needs more memory on each rank{told}"


def fewest_ranks(config: RunConfig) -> int:
    """The fewest ranks that the layout is made for: a stage of them divides into those that hold all experts."""
    parallel = config.parallel
    ranks, block = parallel.tp * parallel.cp * (parallel.dp or 1), parallel.ep * parallel.expert_tp
    return parallel.pp * (ranks if parallel.dp else math.lcm(ranks, block))


def _fitting_experts(config: RunConfig, stage: int) -> dict[str, int | str]:
    """What to change of ep and expert_tp so that they fit a stage of so many ranks: as little as can be."""
    parallel = config.parallel
    if stage % (parallel.ep * parallel.expert_tp) == 0:
        return {}
    parts = parallel.expert_tp if stage % parallel.expert_tp == 0 else 1
    ep = max(n for n in _expert_degrees(config.model) if n <= parallel.ep and stage % (n * parts) == 0)
    return {"ep": ep} if parts == parallel.expert_tp else {"ep": ep, "expert_tp": parts}


def _told(degrees: Mapping[str, int | str]) -> str:
    return ", ".join(f"{name}: {degree}" for name, degree in degrees.items())


def _splits(model: ModelConfig, tp: int) -> bool:
    """Whether `tp` ranks can share the heads and the feed-forward width."""
    counts = model.heads.values()
    return all(width % tp == 0 for width in split_widths(model)) and all(
        heads % tp == 0 and (shared % tp == 0 or tp % shared == 0) for heads, shared in counts
    )


def _tensor_degrees(model: ModelConfig) -> list[int]:
    return [tp for tp in range(1, _most_heads(model) + 1) if _splits(model, tp)]


def _most_heads(model: ModelConfig) -> int:
    """Heads of the kind of mixer that has the most."""
    return max((heads for heads, _ in model.heads.values()), default=1)


def _told_heads(model: ModelConfig, tp: int) -> tuple[str, str]:
    """A tensor rank's heads and what they share, of each kind of mixer, in words."""
    shared = {"attention": "key/value heads", "mamba": "mamba groups", "delta": "delta key heads"}
    heads = [f"{count // tp} {kind} heads" for kind, (count, _) in model.heads.items()]
    groups = [f"{max(1, count // tp)} {shared[kind]}" for kind, (_, count) in model.heads.items()]
    return " and ".join(heads), " and ".join(groups)


def split_widths(model: ModelConfig) -> set[int]:
    """Of the feed-forward blocks that the tensor ranks split: of layers without experts, and of shared experts."""
    shared = {model.moe.shared_ffn_hidden_size} if model.moe else set()
    dense = any(kind.feed == "mlp" for kind in model.kinds)
    return shared | {model.ffn_hidden_size} if dense else shared
