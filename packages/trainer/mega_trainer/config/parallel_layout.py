"""Degrees of parallelism: coordinates of each rank, and the degrees that a model and a number of ranks allow. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.strict_config import ConfigProblem
from mega_trainer.pipeline.layer_partition import split_stage_layers
from mega_trainer.pipeline.schedules import make_schedule

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig


@dataclass(frozen=True)
class ParallelLayout:
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
    def ranks_per_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    def rank_at(self, *, pp: int, dp: int, cp: int, tp: int) -> int:
        """Return the global rank at the given coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}


def find_degree_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield degrees that do not fit the model, whatever the number of ranks."""
    model, parallel = config.model, config.parallel
    if not _can_split_model(model, parallel.tp):
        heads, shared = _format_heads(model, 1)
        widths = f"{heads} and the ffn_hidden_size {' and '.join(map(str, sorted(tensor_split_widths(model))))}"
        rule = f"must divide {widths if tensor_split_widths(model) else heads}, and divide or be a multiple of {shared}"
        yield ConfigProblem("parallel.tp", rule, parallel.tp, f"one of {_tensor_degrees(model)}")
    yield from find_context_problems(config)
    yield from find_expert_problems(config)
    try:
        split_stage_layers(model.num_layers, parallel.pp, parallel.virtual_stages, parallel.pipeline_layout)
    except ConfigError as error:
        yield ConfigProblem("parallel.pp", error.message, parallel.pp, error.hint or "")
    if parallel.pp == 1 and parallel.virtual_stages > 1:
        rule = "interleaves pipeline ranks, and there is one: parallel.pp = 1"
        yield ConfigProblem("parallel.virtual_stages", rule, parallel.virtual_stages, "1, or a larger pp")
    if parallel.pp == 1 and parallel.schedule != "1f1b":
        rule = "fills the waits of a pipeline, and there is none: parallel.pp = 1"
        yield ConfigProblem("parallel.schedule", rule, parallel.schedule, "1f1b, or a larger pp")
        return
    try:
        make_schedule(parallel.schedule, pp=parallel.pp, microbatches=1, virtual_stages=parallel.virtual_stages)
    except ConfigError as error:
        yield ConfigProblem("parallel.schedule", error.message, parallel.schedule, error.hint or "")


def check_parallel_degrees(model: ModelConfig, *, tp: int, ep: int) -> None:
    """Reject tensor and expert degrees that cannot split a model, for callers without a run configuration.

    Raises:
        ConfigError: naming the degree, with those that can be.
    """
    if not _can_split_model(model, tp):
        hint = f"one of {_tensor_degrees(model)}"
        raise ConfigError(f"tp = {tp}: this model's heads and widths cannot be shared so", hint=hint)
    if ep not in _expert_degrees(model):
        raise ConfigError(
            f"ep = {ep}: this model's experts cannot be shared so", hint=f"one of {_expert_degrees(model)}"
        )


def find_context_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield splits of the sequence, over context ranks and under sequence parallelism, that do not fit the model."""
    model, parallel, length = config.model, config.parallel, config.data.seq_length
    cp, tp = parallel.cp, parallel.tp
    unit = (2 * cp if cp > 1 else 1) * (tp if parallel.sp else 1)
    if length % unit:
        halves = [f"2 x parallel.cp {cp}"] if cp > 1 else []
        shares = [f"parallel.tp {tp} (with sp)"] if parallel.sp else []
        fits = f"{length // unit * unit or unit}" + (", or sp: false" if cp == 1 else "")
        yield ConfigProblem(
            "data.seq_length", f"must be a multiple of {' x '.join(halves + shares)} = {unit}", length, fits
        )
    if cp == 1:
        return
    if model.attention_dropout and parallel.cp_kind != "alltoall":
        rule = f"{parallel.cp_kind} works block by block, and a head's dropout is drawn as a whole"
        yield ConfigProblem("parallel.cp_kind", rule, parallel.cp_kind, "alltoall, or model.attention_dropout: 0")
    if parallel.cp_kind == "alltoall" and _can_split_model(model, tp) and not _can_split_heads(model, tp, cp):
        heads, keys = _format_heads(model, tp)
        degrees = [n for n in range(1, _max_heads(model) // tp + 1) if _can_split_heads(model, tp, n)]
        rule = f"alltoall splits the {heads} of a tensor rank, and its {keys}"
        yield ConfigProblem("parallel.cp", rule, cp, f"one of {degrees}, or cp_kind: {_suggest_ring(model)}")


def _suggest_ring(model: ModelConfig) -> str:
    return "ring, and model.attention_dropout: 0" if model.attention_dropout else "ring"


def _can_split_heads(model: ModelConfig, tp: int, cp: int) -> bool:
    """Return whether `cp` ranks can split the heads of a tensor rank: its key/value heads too, or each shared by
    equally many.
    """
    counts = [(heads // tp, max(1, shared // tp)) for heads, shared in model.heads_by_mixer.values()]
    return all(heads % cp == 0 and (shared % cp == 0 or cp % shared == 0) for heads, shared in counts)


def find_expert_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield expert-parallel degrees that do not fit the model."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        for name in ("ep", "expert_tp"):
            if getattr(parallel, name) > 1:
                yield ConfigProblem(
                    f"parallel.{name}", "splits experts, and the model has none", getattr(parallel, name), "1"
                )
        return
    if moe.num_experts % parallel.ep:
        rule = f"must divide the {moe.num_experts} experts"
        yield ConfigProblem("parallel.ep", rule, parallel.ep, f"one of {_expert_degrees(config.model)}")
    if moe.ffn_hidden_size % parallel.expert_tp:
        widths = [n for n in range(1, 17) if moe.ffn_hidden_size % n == 0]
        rule = f"must divide the experts' ffn_hidden_size {moe.ffn_hidden_size}"
        yield ConfigProblem("parallel.expert_tp", rule, parallel.expert_tp, f"one of {widths}")
    if parallel.dispatch in ("nvshmem", "te") and parallel.dispatch_bound is None:
        rule = f"says how much room there is, and dispatch = {parallel.dispatch} wants to know"
        yield ConfigProblem("parallel.dispatch_bound", rule, None, "1.25, or dispatch: alltoall")
    if unfit := _dispatch_problem(config):
        yield ConfigProblem("parallel.dispatch", unfit, parallel.dispatch, "alltoall")


def _dispatch_problem(config: RunConfig) -> str | None:
    """Return the setting of the run that the expert dispatch library does not support, or None."""
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


def find_world_size_problems(config: RunConfig, world_size: int) -> Iterator[ConfigProblem]:
    """Yield degrees and batch sizes that do not fit `world_size` ranks."""
    parallel, batch = config.parallel, config.batch
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world_size % model_ranks:
        yield ConfigProblem(
            "parallel",
            f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = {model_ranks} ranks do not divide the {world_size} there are",
            hint=_suggest_degrees(config, world_size),
        )
        return
    dp = world_size // model_ranks
    if parallel.dp not in (None, dp):
        hint = f"leave it out, or start {model_ranks * (parallel.dp or 1)} ranks"
        yield ConfigProblem("parallel.dp", f"{world_size} ranks make dp = {dp}", parallel.dp, hint)
    stage, block = dp * parallel.cp * parallel.tp, parallel.ep * parallel.expert_tp
    if stage % block:
        rule = f"ep {parallel.ep} x expert_tp {parallel.expert_tp} = {block} must divide the {stage} ranks of a stage"
        yield ConfigProblem("parallel.ep", rule, parallel.ep, _format_degrees(_fit_expert_degrees(config, stage)))
    ranks, shard = dp * parallel.cp, parallel.zero3_shard
    if shard is not None and ranks % shard:
        fitting = [size for size in range(2, ranks + 1) if ranks % size == 0]
        hint = f"one of {fitting}" if fitting else "leave it out"
        yield ConfigProblem("parallel.zero3_shard", f"must divide the {ranks} data ranks", shard, hint)
    unit = batch.micro * dp
    for problem in batch.find_uneven_sizes(unit, f"batch.micro {batch.micro} x dp {dp} = {unit}"):
        yield replace(problem, path=f"batch.{problem.path}")


def _suggest_degrees(config: RunConfig, world_size: int) -> str:
    """Return degrees near the given ones that fit this model, this batch and the number of ranks.

    Those come first under which a rank holds no more weights and no more tokens than under the asked ones.
    """
    parallel = config.parallel
    near = sorted(
        (
            tp * pp < parallel.tp * parallel.pp or tp * cp < parallel.tp * parallel.cp,
            abs(tp - parallel.tp) + abs(pp - parallel.pp) + abs(cp - parallel.cp), tp, pp, cp,
        )
        for tp in range(1, min(world_size, _max_heads(config.model)) + 1)
        if _can_split_model(config.model, tp)
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
        degrees |= _fit_expert_degrees(config, world_size // pp)
        changed = config.model_copy(update={"parallel": parallel.model_copy(update=degrees)})
        if not [*find_degree_problems(changed), *find_world_size_problems(changed, world_size)]:
            return _format_degrees(degrees) + (_suggest_world_sizes(config, world_size) if more else "")
    return "no degrees fit; change batch.global or the number of ranks"


def _suggest_world_sizes(config: RunConfig, world_size: int) -> str:
    """Return a hint with numbers of ranks that the given degrees fit, as other degrees need more memory on each rank."""
    unit = minimum_ranks(config)
    near = [n for n in (world_size // unit * unit, -(-world_size // unit) * unit) if n]
    fitting = [n for n in near if not list(find_world_size_problems(config, n))]
    told = f"; or start {' or '.join(map(str, fitting))} ranks" if fitting else ""
    return f", which needs more memory on each rank{told}"


def minimum_ranks(config: RunConfig) -> int:
    """Return the smallest number of ranks for the degrees: a stage must divide into blocks that hold all experts."""
    parallel = config.parallel
    ranks, block = parallel.tp * parallel.cp * (parallel.dp or 1), parallel.ep * parallel.expert_tp
    return parallel.pp * (ranks if parallel.dp else math.lcm(ranks, block))


def _fit_expert_degrees(config: RunConfig, stage: int) -> dict[str, int | str]:
    """Return the smallest changes of ep and expert_tp that fit a stage of `stage` ranks."""
    parallel = config.parallel
    if stage % (parallel.ep * parallel.expert_tp) == 0:
        return {}
    parts = parallel.expert_tp if stage % parallel.expert_tp == 0 else 1
    ep = max(n for n in _expert_degrees(config.model) if n <= parallel.ep and stage % (n * parts) == 0)
    return {"ep": ep} if parts == parallel.expert_tp else {"ep": ep, "expert_tp": parts}


def _format_degrees(degrees: Mapping[str, int | str]) -> str:
    return ", ".join(f"{name}: {degree}" for name, degree in degrees.items())


def _can_split_model(model: ModelConfig, tp: int) -> bool:
    """Return whether `tp` ranks can split the heads and the feed-forward width."""
    counts = model.heads_by_mixer.values()
    return all(width % tp == 0 for width in tensor_split_widths(model)) and all(
        heads % tp == 0 and (shared % tp == 0 or tp % shared == 0) for heads, shared in counts
    )


def _tensor_degrees(model: ModelConfig) -> list[int]:
    return [tp for tp in range(1, _max_heads(model) + 1) if _can_split_model(model, tp)]


def _max_heads(model: ModelConfig) -> int:
    """Return the number of heads of the mixer kind that has the most."""
    return max((heads for heads, _ in model.heads_by_mixer.values()), default=1)


def _format_heads(model: ModelConfig, tp: int) -> tuple[str, str]:
    """Return a tensor rank's heads and shared groups of each kind of mixer, in words."""
    shared = {"attention": "key/value heads", "mamba": "mamba groups", "delta": "delta key heads"}
    heads = [f"{count // tp} {kind} heads" for kind, (count, _) in model.heads_by_mixer.items()]
    groups = [f"{max(1, count // tp)} {shared[kind]}" for kind, (_, count) in model.heads_by_mixer.items()]
    return " and ".join(heads), " and ".join(groups)


def tensor_split_widths(model: ModelConfig) -> set[int]:
    """Return the feed-forward widths that tensor ranks split: of dense layers and of shared experts."""
    shared = {model.moe.shared_ffn_hidden_size} if model.moe else set()
    dense = any(kind.feed_forward == "mlp" for kind in model.layer_kinds)
    return shared | {model.ffn_hidden_size} if dense else shared
