"""Trainer sections of run.yaml, each with the rules that need no other section."""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, DimensionSize, RankCount, StageCount, StrictConfig


class ParallelConfig(StrictConfig):
    """Degrees of parallelism; their product times dp is the number of ranks."""

    tp: RankCount = 1
    sp: bool = Field(False, description="split the residual stream over the sequence among the tensor ranks")
    pp: StageCount = 1
    virtual_stages: StageCount = 1
    schedule: Literal["1f1b", "zb-h1", "zbv"] = Field(
        "1f1b", description="zb-h1 and zbv (which has 2 virtual stages) fill waits with weight gradients put off"
    )
    pipeline_layout: list[NonNegativeInt] | None = Field(None, description="layers of each stage, in stage order")
    cp: StageCount = Field(1, description="ranks that share the tokens of each sequence")
    cp_kind: Literal["ring", "allgather", "alltoall"] = Field(
        "ring",
        description="how attention reaches the tokens of other cp ranks: keys and values passed on, or gathered, or heads "
        "exchanged for tokens",
    )
    ep: RankCount = Field(1, description="split the experts among so many ranks, of all data, context and tensor ranks")
    expert_tp: RankCount = Field(1, description="split each expert among so many ranks, besides ep")
    dispatch: Literal["alltoall", "deepep", "nvshmem", "te"] = Field(
        "alltoall",
        description="what brings tokens to experts on other ranks: deepep is a library for NVLink and RDMA; nvshmem, torch's "
        "exchange, and te, NCCL's kernels in Transformer Engine, have room for dispatch_bound, and send what there is",
    )
    dispatch_bound: float | None = Field(
        None,
        ge=1,
        description="room for tokens on their way to each rank's experts, as a multiple of an even load: the host then waits "
        "in no layer, and a step that needs more ends the run; default: as much as there is",
    )
    dp: RankCount | None = Field(None, description="follows from the number of ranks when left out")
    zero: Literal[0, 1, 2, 3] = Field(
        1, description="what data ranks share: 1 optimizer state, 2 also gradients, 3 also weights"
    )
    zero3_shard: int | None = Field(
        None, ge=2, description="under zero 3, neighbouring data ranks that share one copy; default: all of them"
    )
    zero3_layers: PositiveInt | None = Field(
        None, description="under zero 3, layers gathered at once; default: more, the more ranks share smaller layers"
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="what gradients are summed over data ranks in; bf16 sends half as much, and sums lose bits"
    )
    bucket_elements: PositiveInt | None = Field(
        None,
        description="gradients that are summed over data ranks at once, in elements; default: 40M, or 1M a rank from 40 ranks on",
    )


class TrainConfig(StrictConfig):
    """Length of the run, validation interval, and policies for bad numbers."""

    steps: DimensionSize = 1000
    epochs: float | None = Field(
        None, gt=0, description="in place of steps: so many passes over the training data, in whole steps"
    )
    eval_every: int = Field(0, ge=0, description="steps between validations; 0 for none")
    eval_steps: PositiveInt = Field(10, description="global batches of one validation")
    seed: int = Field(1234, ge=0)
    freeze: list[str] = Field(
        [], description="tensors that stay as they are, by patterns of their names such as model.embed_tokens.*"
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="keep an average of the weights, of which each step leaves this share; convert --ema exports it",
    )
    early_stop: PositiveInt | None = Field(
        None, description="end after so many validations in a row without a lower loss than before"
    )
    exit_after_minutes: float | None = Field(
        None, gt=0, description="save and end with status 75 after so long; the same command goes on"
    )
    exit_interval: PositiveInt | None = Field(None, description="the same after each step that is a multiple of this")
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="on a loss or gradient that is not finite: rollback goes back to an earlier checkpoint, and past all "
        "samples since then",
    )
    max_skips: PositiveInt = Field(
        10, description="skipped steps in a row, or rollbacks to one checkpoint, after which these stop too"
    )
    rollback_steps: PositiveInt = Field(
        1, description="a rollback goes to the newest checkpoint at least so many steps before the bad one"
    )
    gc_every: int = Field(
        50,
        ge=0,
        description="steps between collections of Python's garbage, on all ranks at once; 0: when Python likes",
    )
    spike_factor: float = Field(
        0.0,
        ge=0,
        description="a loss this many times the average of about the last 50 steps is a spike, from step 50 on; 0: never",
    )
    on_spike: Literal["warn", "stop", "skip", "rollback"] = Field(
        "warn", description="as on_nan; all but warn leave the weights as they were before the spike"
    )


class MuonConfig(StrictConfig):
    """Muon settings for hidden matrices; the rest uses AdamW. Updates have the size of AdamW's, so that lr can be
    shared.
    """

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    lr_factor: float = Field(1.0, gt=0, description="its learning rate, as a multiple of optimizer.lr")
    weight_decay: float | None = Field(None, ge=0, description="default: optimizer.weight_decay")
    rounds: PositiveInt = Field(5, description="rounds of the Newton-Schulz iteration")


class OptimizerConfig(StrictConfig):
    """AdamW, optionally with Muon, and the clip of the global gradient norm."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(3e-4, gt=0)
    decoupled_lr: float | None = Field(
        None, gt=0, description="learning rate of the input embedding and the output layer; default: lr"
    )
    lr_factors: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {},
        description="factors on the learning rate of tensors, by patterns of their names such as model.vision_tower.*; of "
        "several that match the last one counts",
    )
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clip")
    offload: bool = Field(False, description="keep main weights and moments in host memory, and update them there")
    muon: MuonConfig = MuonConfig()

    def problems(self) -> Iterator[ConfigProblem]:
        """Check that betas lie in [0, 1)."""
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                yield ConfigProblem(f"betas.{index}", "must be at least 0 and below 1", beta)


class Fp16Config(StrictConfig):
    """Loss scale under fp16: powers of two, so that scaling changes no bits."""

    initial_scale: float = 65536.0
    growth_interval: PositiveInt = Field(1000, description="steps without overflow after which it doubles")
    min_scale: float = Field(1.0, description="an overflow at this scale counts as a number that is not finite")

    def problems(self) -> Iterator[ConfigProblem]:
        """Check that scales are powers of two, the smallest first."""
        for name in ("initial_scale", "min_scale"):
            value = getattr(self, name)
            if not value > 0 or frexp(value)[0] != 0.5:
                yield ConfigProblem(name, "must be a power of two", value)
        if self.initial_scale < self.min_scale:
            yield ConfigProblem(
                "initial_scale", f"must not be below min_scale = {self.min_scale:g}", self.initial_scale
            )


class RecomputeConfig(StrictConfig):
    """Activation checkpointing: no recomputation, some `modules` of each layer, or whole layers (the first `layers`)."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: PositiveInt | None = None
    modules: list[Literal["norm", "activation", "attention", "mlp", "moe"]] = Field(
        ["norm", "activation"],
        min_length=1,
        description="of selective: norms and what stands between the projections of a feed-forward block or an expert cost "
        "little; the core of attention pays where it is not fused; mlp and moe are whole blocks",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Check that `modules` is only set for `kind: selective`."""
        if self.kind != "selective" and self.modules != RecomputeConfig().modules:
            yield ConfigProblem(
                "modules", f"says what selective recomputes, and kind = {self.kind}", self.modules, "kind: selective"
            )


class ActivationOffloadConfig(StrictConfig):
    """Activations kept in host memory from forward to backward, copied while the device computes."""

    activations: int = Field(
        0,
        ge=0,
        description="of so many layers of each stage, the first ones; not the inputs of layers that are recomputed whole",
    )
    min_bytes: int = Field(1 << 20, ge=0, description="smaller tensors stay on the device")


class KernelsConfig(StrictConfig):
    """Kernel libraries. `auto` takes the best that is installed; a run logs its choice and the reason at the start."""

    linear: Literal["auto", "torch", "te"] = Field(
        "auto", description="products of linear layers; te: Transformer Engine"
    )
    attention: Literal["auto", "sdpa", "varlen", "flash", "flex", "te"] = Field(
        "auto",
        description="sdpa: torch's choice of a kernel, and its flash attention for blocks, documents and windows; varlen: that "
        "one always; flash: flash-attn 3 or 2; flex: FlexAttention; te: Transformer Engine, which is cuDNN",
    )
    conv: Literal["auto", "torch", "causal_conv1d"] = Field(
        "auto", description="short convolutions of recurrent mixers"
    )
    scan: Literal["auto", "torch", "mamba_ssm"] = Field(
        "auto", description="Mamba-2's scan, where context ranks pass no states"
    )
    delta: Literal["auto", "torch", "fla"] = Field(
        "auto", description="gated delta rule, where context ranks pass no states; fla: flash-linear-attention"
    )


class CheckpointConfig(StrictConfig):
    """Save interval, retention and resume settings."""

    save: bool = Field(True, description="false: none is written, not even at the end, as for a measurement")
    every: int = Field(0, ge=0, description="steps between saves; 0: only at the end")
    keep: PositiveInt | None = Field(None, description="newest checkpoints to keep; default: all")
    keep_every: PositiveInt | None = Field(None, description="keep each checkpoint whose step is a multiple of this")
    best: bool = Field(False, description="save after each validation with the lowest loss so far, and keep that one")
    memory_every: int = Field(
        0,
        ge=0,
        description="steps between copies of the state in host memory, from which ranks go on that torchrun --max-restarts "
        "starts again; of several machines also in the next one's. Costs two copies of what a rank holds in /dev/shm (four "
        "with several machines) and the time to make one (and to send it); 0: none",
    )
    async_: bool = Field(True, alias="async", description="write in the background")
    path: str | None = Field(
        None,
        description="where they are kept, a folder or a URL such as s3://bucket/run; default: `output`/checkpoints",
    )
    load: str | None = Field(None, description="go on from this checkpoint, a folder or a URL; it must exist")
    resume: bool = Field(
        True, description="go on from the newest checkpoint of this run, if any; false refuses a used folder"
    )
    allow_changes: bool = Field(False, description="resume although settings that change the model differ")
    allow_lr_jump: bool = Field(False, description="resume although the learning rate jumps by changed settings")


def _split_commas(raw: Any) -> Any:
    return raw.split(",") if isinstance(raw, str) else raw


class InTrainingEvalConfig(StrictConfig):
    """Downstream tasks by lm-evaluation-harness while a run trains; the scores are `eval/TASK/METRIC` in metrics.jsonl."""

    tasks: Annotated[list[str], BeforeValidator(_split_commas)] = Field(
        [], description="names of the harness's tasks, or paths of YAML files of one's own"
    )
    every: PositiveInt = Field(1000, description="steps between evaluations, with one at the end")
    limit: float | None = Field(
        100, gt=0, description="so many samples of each task, or below 1 such a share of them; null: all"
    )
    num_fewshot: NonNegativeInt | None = Field(
        None, description="solved examples before each question; default: the task's"
    )
    include_path: Path | None = Field(None, description="a folder with further tasks")
    max_share: float = Field(
        0.01, gt=0, le=1, description="of the run's time: where those before have taken more, one is left out"
    )


class CorruptionCheckConfig(StrictConfig):
    """Checks for devices and memory that change bits silently."""

    hash_every: int = Field(
        0,
        ge=0,
        description="steps between comparisons of what ranks hold alike (weights; optimizer state where zero leaves copies), "
        "also before each save, and of what each rank holds with what it held after the update before: with 1, whatever flips "
        "between two updates is found; costs two readings of weights and state, and 8 bytes sent a tensor; 0: never",
    )
    recompute_every: int = Field(
        0,
        ge=0,
        description="steps between comparisons of how ranks compute: all data ranks do the same micro-batch (with a pipeline, as "
        "many as its ranks) besides their own, which is what it costs; up to zero 1; 0: never",
    )


class TrackingConfig(StrictConfig):
    """Destinations of metrics, besides the screen and metrics.jsonl."""

    every: PositiveInt = 1
    tensorboard: bool = True
    wandb: str | None = Field(None, description="project name for Weights & Biases")
    mlflow: str | None = Field(None, description="experiment of MLflow; where that is, MLFLOW_TRACKING_URI says")
    trackio: str | None = Field(None, description="project name for Trackio")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="rank 0 answers here what Prometheus asks: the numbers of the last step"
    )
    prometheus_address: str = Field("127.0.0.1", description="where it listens; 0.0.0.0: on every network of its host")


class ProfileConfig(StrictConfig):
    """Steps whose time and memory are profiled, into `output`/profile."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="the first and the last one")
    trace: bool = Field(True, description="a trace of torch's profiler, for chrome://tracing or Perfetto")
    memory: bool = Field(True, description="a snapshot of a GPU's memory, for pytorch.org/memory_viz")
    ranks: list[NonNegativeInt] = Field([0], description="that are looked at")

    def problems(self) -> Iterator[ConfigProblem]:
        """Check that the first step is not after the last."""
        if self.steps[0] > self.steps[1]:
            yield ConfigProblem("steps", "are the first and the last one, in this order", list(self.steps))


class DebugConfig(StrictConfig):
    """Slow checks and reproducible sums, for finding faults."""

    ordered_reductions: bool = Field(False, description="sum over ranks in rank order, bit for bit reproducible")
    layer_norms_every: int = Field(
        0, ge=0, description="steps between lines with the norms of gradient and weights of each layer; 0: never"
    )
    reduce_every_microbatch: bool = Field(
        False, description="sum gradients over ranks after each micro-batch at every ZeRO level, as level 2 must"
    )
