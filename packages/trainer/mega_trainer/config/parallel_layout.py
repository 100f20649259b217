"""Degrees of parallelism: coordinates of each rank, and the degrees that can split a model. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism and the order of ranks; the product of tp, pp, cp and dp is the number of ranks.

    Ranks are ordered pp, dp, cp, tp with tp fastest, so that the groups that communicate most lie on one machine. Expert
    parallelism splits the ranks of a stage independently of dp, cp and tp: in blocks of ep x expert_tp neighboring ranks
    that hold all experts, expert_tp fastest.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    expert_tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks: tp x pp x cp x dp."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks of one pipeline stage: tp x cp x dp."""
        return self.tp * self.cp * self.dp

    def rank_at(self, *, pp: int, dp: int, cp: int, tp: int) -> int:
        """Return the global rank at the given coordinates: its index on the pipeline, data, context and tensor axes."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank: its index on each axis by name."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}


def can_split_model(model: ModelConfig, tp: int) -> bool:
    """Return whether tensor parallelism of degree `tp` can split a model.
    The tensor ranks must divide the attention (or recurrent) heads, index heads and the feed-forward width evenly.
    """
    if model.indexer and model.indexer.num_heads % tp:
        return False
    # a feed-forward block of an extension has one head unless it declares more
    if any(
        block.declares and block.declares.heads > 1 and block.declares.heads % tp
        for block in model.feed_forwards.values()
    ):
        return False
    return all(width % tp == 0 for width in list_sharded_ffn_widths(model)) and all(
        heads % tp == 0 and (shared % tp == 0 or tp % shared == 0) for heads, shared in model.head_counts
    )


def can_split_heads(model: ModelConfig, tp: int, cp: int) -> bool:
    """Return whether `cp` context ranks can split the attention heads of one of `tp` tensor ranks evenly.
    They split its query heads, and either its key/value heads too, or equally many ranks share each key/value head.
    """
    counts = [(heads // tp, max(1, shared // tp)) for heads, shared in model.head_counts]
    return all(heads % cp == 0 and (shared % cp == 0 or cp % shared == 0) for heads, shared in counts)


def list_tensor_degrees(model: ModelConfig) -> list[int]:
    """Return all tensor-parallel degrees that can split a model."""
    return [tp for tp in range(1, max_head_count(model) + 1) if can_split_model(model, tp)]


def list_expert_degrees(model: ModelConfig) -> list[int]:
    """Return all expert-parallel degrees that can split a model; only 1 for a model without experts."""
    experts = model.moe.num_experts if model.moe else 1
    return [n for n in range(1, experts + 1) if experts % n == 0]


def max_head_count(model: ModelConfig) -> int:
    """Return the largest number of heads of any mixer kind (attention, Mamba, delta rule); 1 for a model without heads."""
    return max((heads for heads, _ in model.heads_by_mixer.values()), default=1)


def list_sharded_ffn_widths(model: ModelConfig) -> set[int]:
    """Return the feed-forward widths that tensor ranks split: the width of dense layers and of shared experts."""
    shared = {model.moe.shared_ffn_hidden_size} if model.moe else set()
    dense = any(kind.feed_forward == "mlp" for kind in model.layer_kinds)
    wide = {model.shared_kv_ffn_hidden_size} if model.shared_kv_ffn_hidden_size else set()
    return shared | wide | {model.ffn_hidden_size} if dense else shared


def tensor_degree_rule(model: ModelConfig) -> str:
    """Return the rule that a tensor-parallel degree of a model must follow, as text for an error message."""
    heads, shared = format_head_counts(model, 1)
    if model.indexer:
        heads += f" and {model.indexer.num_heads} index heads"
    widths = " and ".join(map(str, sorted(list_sharded_ffn_widths(model))))
    split = f"{heads} and the ffn_hidden_size {widths}" if widths else heads
    return f"must divide {split}, and divide or be a multiple of {shared}"


def format_head_counts(model: ModelConfig, tp: int) -> tuple[str, str]:
    """Return two texts with the head counts on one of `tp` ranks: '8 attention heads' and '2 key/value heads'."""
    names = {
        "attention": "key/value heads",
        "mamba": "mamba groups",
        "delta": "delta key heads",
        "conv": "channels",
        "mamba1": "channels",
    }
    heads = [f"{count // tp} {kind} heads" for kind, (count, _) in model.heads_by_mixer.items()]
    groups = [
        f"{max(1, count // tp)} {names.get(kind, f'shared {kind} heads')}"
        for kind, (_, count) in model.heads_by_mixer.items()
    ]
    return " and ".join(heads), " and ".join(groups)


def suggest_parallel_degree(key: str, asked: int, degrees: Sequence[int]) -> str:
    """Return a hint for an error message: set `key` to the largest of `degrees` up to the requested one, `asked`."""
    nearest = max((degree for degree in degrees if degree <= asked), default=min(degrees))
    return f"set {key}={nearest} (one of {list(degrees)})"


def check_parallel_degrees(model: ModelConfig, *, tp: int, ep: int) -> None:
    """Raise `ConfigError` for tensor-parallel and expert-parallel degrees that cannot split a model.
    This check is for callers without a run configuration.

    Raises:
        ConfigError: naming the degree, with those that are possible.
    """
    if not can_split_model(model, tp):
        raise ConfigError(
            f"tp = {tp} {tensor_degree_rule(model)}", hint=suggest_parallel_degree("tp", tp, list_tensor_degrees(model))
        )
    if ep not in list_expert_degrees(model):
        experts = model.moe.num_experts if model.moe else 0
        rule = f"must divide the {experts} experts" if experts else "requires a model with experts"
        raise ConfigError(f"ep = {ep} {rule}", hint=suggest_parallel_degree("ep", ep, list_expert_degrees(model)))
