"""Layout of a training run: parallel degrees, batch and memory options, the input of all predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_trainer.pipeline.schedules import SPLIT_BACKWARD

RecomputeKind = Literal["none", "selective", "full"]
_ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "nvfp4": 2}


@dataclass(frozen=True)
class TrainingLayout:
    """Layout of a training run for predictions of time and memory.
    It has parallel degrees, batch sizes, and memory options such as ZeRO and recomputation.

    Attributes:
        seq_length: tokens of a sample, before context parallelism splits them; of the encoder in an encoder-decoder model.
        document_length: tokens of the documents of a packed sample that do not attend to each other; None: one document.
        micro_batch: samples of a micro-batch.
        tp_comm_overlap: GEMMs of tensor-parallel layers overlap with their collectives piece by piece.
        microbatches: micro-batches of a step, per data-parallel rank.
        zero: ZeRO level: data-parallel ranks shard 1 optimizer states, 2 also gradients, 3 also weights.
        zero3_shard: number of data and context ranks that share one copy under ZeRO-3; None: all.
        zero3_layers: number of layers that ZeRO-3 gathers together; None: enough for an efficient message size.
        zero3_gather: ZeRO-3 gathers weights for each micro-batch's forward and again for its backward, or once a step.
        overlap_expert_exchange: hide each expert exchange under another micro-batch's computation.
        bucket_elements: elements of a gradient bucket; None: the trainer's default.
        modules: modules of each layer that `selective` recomputes.
        recompute_layers: number of layers of each stage, from its first, that `full` recomputes; None: all.
        offload: number of layers of each stage, from its first, whose activations are offloaded to host memory.
        offload_min_bytes: size of the smallest tensor that is offloaded.
        offload_optimizer: keep optimizer states and main weights in host memory.
        moments: number of state values of the optimizer for each weight.
        muon: Muon optimizer, with one moment instead of two for hidden matrices.
        soap_width: SOAP optimizer, which keeps square matrices for sides of hidden matrices up to this; None: another one.
        fp8_layers: layers whose linear weights are also kept quantised during a step, in two layouts.
        freeze: patterns of tensors that are not trained.
        lora: LoRA settings as JSON; if set, only adapters are trained.
        ema: keep an exponential moving average (EMA) of the weights.
        device: device to plan for. A GPU fuses operations that a CPU runs as several kernels.
        target_length: tokens of the decoder in an encoder-decoder model.
        extensions: extensions with the code of the model's own blocks.
    """

    seq_length: int
    micro_batch: int = 1
    microbatches: int = 1
    tp: int = 1
    sp: bool = False
    tp_comm_overlap: bool = False
    pp: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    pipeline_layout: tuple[int, ...] | None = None
    cp: int = 1
    cp_kind: Literal["ring", "allgather", "alltoall"] = "ring"
    ep: int = 1
    expert_tp: int = 1
    dispatch_bound: float | None = None
    overlap_expert_exchange: bool = False
    dp: int = 1
    zero: int = 0
    zero3_shard: int | None = None
    zero3_layers: int | None = None
    zero3_gather: Literal["micro_batch", "step"] = "micro_batch"
    bucket_elements: int | None = None
    precision: str = "bf16"
    recompute: RecomputeKind = "none"
    modules: tuple[str, ...] = ("norm", "activation")
    recompute_layers: int | None = None
    offload: int = 0
    offload_min_bytes: int = 1 << 20
    offload_optimizer: bool = False
    moments: float = 2
    muon: bool = False
    soap_width: int | None = None
    fp8_layers: range = range(0)
    freeze: tuple[str, ...] = ()
    lora: str | None = None
    ema: bool = False
    device: Literal["gpu", "cpu"] = "gpu"
    target_length: int | None = None
    document_length: int | None = None
    extensions: tuple[str, ...] = ()

    @property
    def sample_tokens(self) -> int:
        """Tokens per sample; for an encoder-decoder, encoder and decoder tokens together."""
        return self.seq_length + (self.target_length or 0)

    @property
    def zero3_shard_ranks(self) -> int:
        """Number of ranks over which one copy of the weights is sharded under ZeRO-3."""
        return self.zero3_shard or self.dp * self.cp

    @property
    def is_zero3_sharded(self) -> bool:
        """True if weights are sharded and gathered on use (ZeRO-3)."""
        return self.zero == 3 and self.dp * self.cp > 1

    @property
    def defers_wgrads(self) -> bool:
        """True if the pipeline schedule defers weight-gradient GEMMs (zero-bubble schedules)."""
        return self.schedule in SPLIT_BACKWARD

    @property
    def weight_bytes(self) -> int:
        """Bytes per element of the model's weights in the run's precision."""
        return _ELEMENT[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of the gradient buffers: at least 4, since gradients are summed in fp32 or wider."""
        return max(4, self.weight_bytes)
