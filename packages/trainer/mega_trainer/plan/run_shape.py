"""Shape of a run: model split and batch, the input of all predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RecomputeKind = Literal["none", "selective", "full"]
_ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class RunShape:
    """Split of a model over ranks, and sizes of its batches.

    Attributes:
        seq_length: tokens of a sample, before context parallelism splits them.
        micro_batch: samples of a microbatch.
        microbatches: microbatches of a step, per data-parallel rank.
        zero: what data-parallel ranks share: 1 optimizer states, 2 also gradients, 3 also weights.
        zero3_shard: data and context ranks that share one copy at level 3; None for all.
        zero3_layers: that are gathered together at level 3; None for as many as make a message worth while.
        bucket_elements: gradients that are summed at once; None for the trainer's own choice.
        modules: of each layer that `selective` recomputes.
        recompute_layers: of each stage, the first ones, that `full` recomputes; None for all.
        offload: layers of each stage, the first ones, whose activations wait in host memory.
        offload_min_bytes: smaller tensors of theirs stay.
        offload_optimizer: what the optimizer works on lies in host memory.
        muon: hidden matrices have one moment, not two.
        eight_bits: the layers whose linear weights are kept quantised for a step, too, in two forms.
        freeze: patterns of tensors that are not trained.
        lora: the settings of an adapter, as JSON: then nothing else is trained.
        ema: an average of the weights is kept.
        device: what it is planned for. A GPU makes one kernel of what a CPU makes of several.
        target_length: of the decoder, where `seq_length` are those of an encoder.
    """

    seq_length: int
    micro_batch: int = 1
    microbatches: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    pipeline_layout: tuple[int, ...] | None = None
    cp: int = 1
    cp_kind: Literal["ring", "allgather", "alltoall"] = "ring"
    ep: int = 1
    expert_tp: int = 1
    dispatch_bound: float | None = None
    dp: int = 1
    zero: int = 0
    zero3_shard: int | None = None
    zero3_layers: int | None = None
    bucket_elements: int | None = None
    precision: str = "bf16"
    recompute: RecomputeKind = "none"
    modules: tuple[str, ...] = ("norm", "activation")
    recompute_layers: int | None = None
    offload: int = 0
    offload_min_bytes: int = 1 << 20
    offload_optimizer: bool = False
    muon: bool = False
    eight_bits: range = range(0)
    freeze: tuple[str, ...] = ()
    lora: str | None = None
    ema: bool = False
    device: Literal["gpu", "cpu"] = "gpu"
    target_length: int | None = None

    @property
    def sample_tokens(self) -> int:
        """Tokens per sample (encoder + decoder)."""
        return self.seq_length + (self.target_length or 0)

    @property
    def zero3_shard_ranks(self) -> int:
        """Number of ranks that share one copy of the weights under ZeRO-3."""
        return self.zero3_shard or self.dp * self.cp

    @property
    def is_zero3_sharded(self) -> bool:
        """True if weights are gathered on use (ZeRO-3)."""
        return self.zero == 3 and self.dp * self.cp > 1

    @property
    def defers_wgrads(self) -> bool:
        """True if weight-gradient GEMMs are deferred (zero-bubble schedules)."""
        return self.schedule.startswith("zb")

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return _ELEMENT[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return max(4, self.weight_bytes)
