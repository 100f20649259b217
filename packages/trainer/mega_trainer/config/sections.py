"""Trainer sections of run.yaml, each with the rules that need no other section."""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp, inf, ldexp
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import (
    ConfigProblem,
    DimensionSize,
    ExtensionName,
    RankCount,
    StageCount,
    StrictConfig,
)
from mega_data.data_config import DataConfig


def validation_required_problem(key: str, value: object) -> ConfigProblem:
    """Return the problem that setting `key` needs validation, in a run without validation (`train.eval_every` = 0)."""
    return ConfigProblem(key, "requires validation", value, "set train.eval_every=100")


class ParallelConfig(StrictConfig):
    """Degrees of parallelism, pipeline schedule and ZeRO level of a run; tp x pp x cp x dp is the number of ranks."""

    tp: RankCount = 1
    sp: bool = Field(
        False, description="sequence parallelism: split the residual stream over the sequence among tensor ranks"
    )
    tp_comm_overlap: bool = Field(
        False,
        description="with sp, split the GEMMs of linear layers into a piece for each tensor rank, and compute one piece while "
        "another is sent; by torch's symmetric memory between GPUs with peer access, else by a ring of sends and receives",
    )
    pp: StageCount = 1
    virtual_stages: StageCount = 1
    schedule: Literal["1f1b", "zb-h1", "zbv", "dualpipev"] = Field(
        "1f1b",
        description="zb-h1, zbv and dualpipev (these two with 2 virtual stages) fill pipeline bubbles with deferred weight "
        "gradients; dualpipev (DualPipeV) pairs each forward with a backward",
    )
    pipeline_layout: list[NonNegativeInt] | None = Field(None, description="layers of each stage, in stage order")
    cp: StageCount = Field(
        1, description="context parallelism: number of ranks among which the tokens of each sequence are split"
    )
    cp_kind: Literal["ring", "allgather", "alltoall"] = Field(
        "ring",
        description="attention over the tokens of other cp ranks: keys and values passed around a ring, or all-gathered, or "
        "heads exchanged for tokens (all-to-all)",
    )
    ep: RankCount = Field(
        1, description="expert parallelism: number of data, context and tensor ranks among which experts are split"
    )
    expert_tp: RankCount = Field(1, description="number of ranks that split each expert, in addition to ep")
    dispatch: Literal["alltoall", "deepep", "nvshmem", "te"] = Field(
        "alltoall",
        description="dispatch of tokens to experts on other ranks: deepep is a library for NVLink and RDMA; nvshmem (torch) "
        "and te (Transformer Engine's NCCL kernels) need a capacity, dispatch_bound",
    )
    dispatch_bound: float | None = Field(
        None,
        ge=1,
        description="capacity of expert dispatch to each rank, as a multiple of an even load: the host then never waits for the "
        "device within a layer, and a step that exceeds the capacity ends the run; default: unbounded",
    )
    overlap_expert_exchange: bool = Field(
        False,
        description="run the forward of a micro-batch and the backward of another in turn, so that the expert exchange of each "
        "is hidden under the computation of the other; 1f1b without virtual stages then keeps up to twice the activations",
    )
    dp: RankCount | None = Field(None, description="number of data-parallel ranks; default: from the number of ranks")
    zero: Literal[0, 1, 2, 3] = Field(
        1, description="ZeRO level: shard 1 optimizer state, 2 also gradients, 3 also weights over data ranks"
    )
    zero3_shard: int | None = Field(
        None,
        ge=2,
        description="under zero 3, number of neighboring data ranks that shard one copy (HSDP); default: all",
    )
    zero3_layers: PositiveInt | None = Field(
        None, description="under zero 3, layers all-gathered at once; default: by layer size and number of ranks"
    )
    zero3_gather: Literal["micro_batch", "step"] | None = Field(
        None,
        description="under zero 3, gather weights for the forward and again for the backward of each micro_batch, or once a "
        "step, which keeps all gathered weights of a rank in memory during the step; default: micro_batch",
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="dtype of the gradient all-reduce over data ranks; bf16 halves the traffic and loses precision",
    )
    bucket_elements: PositiveInt | None = Field(
        None,
        description="elements of a gradient bucket; default: 40M, or 1M per rank with 40 ranks or more",
    )


class TrainConfig(StrictConfig):
    """Length of the run, validation interval, frozen tensors, and policies for non-finite losses and loss spikes."""

    steps: DimensionSize = 1000
    epochs: float | None = Field(None, gt=0, description="passes over the training data, in place of steps")
    eval_every: int = Field(0, ge=0, description="steps between validations; 0 for none")
    eval_steps: PositiveInt = Field(10, description="global batches of one validation")
    eval_first: bool = Field(
        False, description="also validate before the first step: initial_valid_loss of step 1 in metrics.jsonl"
    )
    seed: int = Field(1234, ge=0)
    freeze: list[str] = Field([], description="frozen tensors, by patterns of their names such as model.embed_tokens.*")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of an exponential moving average of the weights; convert --ema exports it",
    )
    early_stop: PositiveInt | None = Field(
        None, description="stop after this many consecutive validations without a new lowest loss"
    )
    exit_after_minutes: float | None = Field(
        None, gt=0, description="save and exit with status 75 after this time; the same command resumes"
    )
    exit_interval: PositiveInt | None = Field(
        None, description="save and exit with status 75 after each step that is a multiple of this"
    )
    on_nan: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="policy for a loss or gradient that is not finite; rollback: return to an earlier checkpoint and skip all "
        "samples since then",
    )
    max_skips: PositiveInt = Field(
        10, description="consecutive skipped steps, or rollbacks to one checkpoint, after which the run stops"
    )
    rollback_steps: PositiveInt = Field(
        1, description="a rollback returns to the newest checkpoint at least this many steps before the bad step"
    )
    gc_every: int = Field(
        50,
        ge=0,
        description="steps between garbage collections of Python, on all ranks together; 0: leave it to Python",
    )
    spike_factor: float = Field(
        0.0,
        ge=0,
        description="a loss above this multiple of the average of about the last 50 steps is a spike, from step 50 on; 0: never",
    )
    on_spike: Literal["warn", "stop", "skip", "rollback"] = Field(
        "warn", description="policy for a loss spike, as on_nan; all but warn leave the weights unchanged"
    )

    def find_run_problems(self, data: DataConfig) -> Iterator[ConfigProblem]:
        """Yield `train` settings that conflict with the data's order or streaming, or require validation that is off."""
        if self.early_stop is not None and not self.eval_every:
            yield validation_required_problem("train.early_stop", self.early_stop)
        if self.eval_first and not self.eval_every:
            yield validation_required_problem("train.eval_first", True)
        if data.stream and self.eval_every and data.valid is None:
            rule = "requires data.valid with data.stream, as no part of a stream is held out"
            yield ConfigProblem("train.eval_every", rule, self.eval_every, "set data.valid=held-out.jsonl")
        if data.stream and self.epochs is not None:
            rule = "is not supported with data.stream, which does not know the size of an epoch"
            yield ConfigProblem("train.epochs", rule, self.epochs, "remove train.epochs and set train.steps=1000")
        if data.sample_order != "megatron":
            return
        if self.epochs is not None:
            rule = "is not supported with data.order = megatron, whose samples depend on the number of steps"
            hint = "remove train.epochs and set train.steps, or set data.order=stable"
            yield ConfigProblem("train.epochs", rule, self.epochs, hint)
        for key in ("on_nan", "on_spike"):
            if getattr(self, key) == "rollback":
                rule = "is not supported with data.order = megatron, which has samples for train.steps steps only"
                hint = f"set train.{key}=skip, or set data.order=stable"
                yield ConfigProblem(f"train.{key}", rule, "rollback", hint)


class MuonConfig(StrictConfig):
    """Settings of the Muon optimizer, which updates hidden matrices; other parameters use AdamW.
    Updates are scaled to the size of AdamW's, so that both can use one lr.
    """

    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    lr_factor: float = Field(1.0, gt=0, description="learning rate of Muon, as a multiple of optimizer.lr")
    weight_decay: float | None = Field(None, ge=0, description="default: optimizer.weight_decay")
    rounds: PositiveInt = Field(5, description="steps of the Newton-Schulz iteration")


class SoapConfig(StrictConfig):
    """Settings of the SOAP optimizer: Adam on hidden matrices in the eigenbasis of Shampoo's preconditioners.
    Other parameters use AdamW; lr, betas, eps and weight_decay are common.
    """

    gram_beta: float | None = Field(
        None, ge=0, lt=1, description="decay of the averages of G G^T and G^T G; default: the second of optimizer.betas"
    )
    frequency: PositiveInt = Field(10, description="updates between changes of the eigenvectors")
    max_width: PositiveInt = Field(10_000, description="largest side of a matrix that is rotated into eigenvectors")


class SgdConfig(StrictConfig):
    """Settings of stochastic gradient descent with momentum, as in torch.optim.SGD."""

    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem for Nesterov's update without momentum."""
        if self.nesterov and not self.momentum:
            yield ConfigProblem("nesterov", "requires momentum above 0", True, "set optimizer.sgd.momentum=0.9")


OptimizerName = Literal["adamw", "adamw8bit", "muon", "soap", "lion", "sgd"]


class MupConfig(StrictConfig):
    """Maximal update parametrization (muP, arXiv:2203.03466): the best lr of Adam does not change with the width.

    With m = model.hidden_size / base_width, hidden matrices have the learning rate lr / m and the initial standard
    deviation init_std / sqrt(m), and logits the factor 1 / m (`model.logit_scale`). At m = 1 nothing changes. Heads and
    feed-forward width are to grow with the hidden size; the head size stays.
    """

    base_width: PositiveInt = Field(description="hidden size of the model on which the learning rate was chosen")


class OptimizerConfig(StrictConfig):
    """Optimizer settings: AdamW, Muon or SOAP for hidden matrices, Lion or SGD, and the clip of the global gradient norm."""

    name: OptimizerName | ExtensionName = Field(
        "adamw",
        description="adamw, adamw8bit (moments in 8 bits, by bitsandbytes), muon, soap, lion, sgd, or an optimizer of an extension",
    )
    options: dict[str, Any] = Field({}, description="settings of an extension's optimizer")
    lr: float = Field(3e-4, gt=0)
    decoupled_lr: float | None = Field(
        None, gt=0, description="learning rate of the input embedding and the output layer; default: lr"
    )
    lr_factors: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {},
        description="factors on the learning rate of tensors, by patterns of their names such as model.vision_tower.*; the last "
        "matching pattern applies",
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="of AdamW and Lion, whose authors use 0.9 and 0.99")
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clipping")
    offload: bool = Field(False, description="keep and update main weights and moments in host memory")
    mup: MupConfig | None = Field(
        None, description="maximal update parametrization: learning rates, initial scales and logits follow the width"
    )
    muon: MuonConfig = MuonConfig()
    soap: SoapConfig = SoapConfig()
    sgd: SgdConfig = SgdConfig()

    @property
    def moments(self) -> float:
        """Number of fp32-size values of optimizer state per weight: 1 for Lion, 0 or 1 for SGD, 1/2 in 8 bits, else 2.

        An extension's optimizer is taken to have two; a value in 8 bits is a quarter, and its share of a scale.
        """
        return {"lion": 1, "sgd": int(self.sgd.momentum > 0), "adamw8bit": 2 * (1 / 4 + 1 / 256)}.get(self.name, 2)

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem for Adam betas outside [0, 1)."""
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                hint = f"set optimizer.betas.{index}={OptimizerConfig().betas[index]}"
                yield ConfigProblem(f"betas.{index}", "must be at least 0 and below 1", beta, hint)


class Fp16Config(StrictConfig):
    """Dynamic loss scale under `precision: fp16`: powers of two, so that scaling changes no bits of the mantissa."""

    initial_scale: float = 65536.0
    growth_interval: PositiveInt = Field(1000, description="steps without overflow after which the scale doubles")
    min_scale: float = Field(1.0, description="smallest scale; an overflow at this scale is handled by train.on_nan")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem for loss scales that are not powers of two, or a smallest scale above the initial one."""
        for name in ("initial_scale", "min_scale"):
            value = getattr(self, name)
            if not value > 0 or frexp(value)[0] != 0.5:
                power = ldexp(0.5, frexp(value)[1]) if 0 < value < inf else getattr(Fp16Config(), name)
                yield ConfigProblem(name, "must be a power of two", value, f"set fp16.{name}={power}")
        if self.initial_scale < self.min_scale:
            rule = f"must be at least fp16.min_scale = {self.min_scale:g}"
            hint = f"set fp16.initial_scale={self.min_scale}"
            yield ConfigProblem("initial_scale", rule, self.initial_scale, hint)


class RecomputeConfig(StrictConfig):
    """Activation checkpointing: no recomputation, some `modules` of each layer, or whole layers (the first `layers`)."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: PositiveInt | None = None
    modules: list[Literal["norm", "activation", "attention", "mlp", "moe"]] = Field(
        ["norm", "activation"],
        min_length=1,
        description="modules that selective recomputes: norm and activation (between the projections of a feed-forward block or "
        "an expert) are cheap; attention (the core) pays off where it is not fused; mlp and moe are whole blocks",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem if `modules` is set without `kind: selective`."""
        if self.kind != "selective" and self.modules != RecomputeConfig().modules:
            rule = f"requires recompute.kind = selective, found {self.kind}"
            yield ConfigProblem(
                "modules", rule, self.modules, "set recompute.kind=selective, or remove recompute.modules"
            )


class ActivationOffloadConfig(StrictConfig):
    """Offload of activations to host memory between forward and backward, copied while the device computes."""

    activations: int = Field(
        0,
        ge=0,
        description="number of first layers of each stage whose activations are offloaded, except inputs of fully recomputed layers",
    )
    min_bytes: int = Field(1 << 20, ge=0, description="smaller tensors stay on the device")


def _split_commas(raw: Any) -> Any:
    return raw.split(",") if isinstance(raw, str) else raw


class KernelsConfig(StrictConfig):
    """Choice of the kernel library for each operation, such as attention and linear layers.
    `auto` selects the best that is installed; a run logs the choice and its reason at the start.
    """

    linear: Literal["auto", "torch", "te"] = Field("auto", description="GEMMs of linear layers; te: Transformer Engine")
    attention: Literal["auto", "sdpa", "varlen", "flash", "flex", "te"] = Field(
        "auto",
        description="sdpa: torch's scaled_dot_product_attention, and its flash attention for blocks, documents and windows; varlen: "
        "torch's flash attention always; flash: flash-attn 3 or 2; flex: FlexAttention; te: Transformer Engine (cuDNN)",
    )
    conv: Literal["auto", "torch", "causal_conv1d"] = Field(
        "auto", description="short convolutions of recurrent mixers"
    )
    scan: Literal["auto", "torch", "mamba_ssm"] = Field(
        "auto",
        description="scan of Mamba and of lightning attention, without context parallelism, of Mamba-1 without documents",
    )
    delta: Literal["auto", "torch", "fla"] = Field(
        "auto",
        description="delta rule of gated delta nets and of Kimi Delta Attention, without context parallelism; fla: flash-linear-attention",
    )
    functions: Annotated[list[str], BeforeValidator(_split_commas)] = Field(
        [], description="kernels of extensions, by name, each for one operation; used for the calls that they support"
    )


class CheckpointConfig(StrictConfig):
    """Checkpoint settings: save interval, retention and resume."""

    save: bool = Field(True, description="false: write no checkpoints, not even at the end, as for a benchmark")
    every: int = Field(0, ge=0, description="steps between saves; 0: only at the end")
    keep: PositiveInt | None = Field(None, description="number of newest checkpoints to keep; default: all")
    keep_every: PositiveInt | None = Field(None, description="keep each checkpoint whose step is a multiple of this")
    best: bool = Field(False, description="save after each validation with a new lowest loss, and keep that checkpoint")
    memory_every: int = Field(
        0,
        ge=0,
        description="steps between copies of the state in host memory, from which ranks resume after a restart by torchrun "
        "--max-restarts; with several machines also in the memory of the next one. Costs two copies of a rank's state in "
        "/dev/shm (four with several machines) and the time to copy (and send) it; 0: none",
    )
    async_: bool = Field(True, alias="async", description="write in the background")
    path: str | None = Field(
        None,
        description="folder or URL (such as s3://bucket/run) of the checkpoints; default: `output`/checkpoints",
    )
    load: str | None = Field(None, description="resume from this checkpoint, a folder or a URL; it must exist")
    resume: bool = Field(
        True, description="resume from the newest checkpoint of this run, if any; false: reject a folder that has some"
    )
    allow_changes: bool = Field(False, description="resume even if settings that change the model differ")
    allow_lr_jump: bool = Field(False, description="resume even if changed settings make the learning rate jump")

    def find_run_problems(self, eval_every: int) -> Iterator[ConfigProblem]:
        """Yield a problem if `checkpoint.best` is set in a run without validation."""
        if self.best and not eval_every:
            yield validation_required_problem("checkpoint.best", True)


class InTrainingEvalConfig(StrictConfig):
    """Evaluation on lm-evaluation-harness tasks while a run trains; the scores are `eval/TASK/METRIC` in metrics.jsonl."""

    tasks: Annotated[list[str], BeforeValidator(_split_commas)] = Field(
        [], description="task names of lm-evaluation-harness, or paths of your own YAML files"
    )
    every: PositiveInt = Field(1000, description="steps between evaluations; one more at the end")
    limit: float | None = Field(100, gt=0, description="samples of each task, or a share of them if below 1; null: all")
    num_fewshot: NonNegativeInt | None = Field(
        None, description="few-shot examples before each question; default: the task's"
    )
    include_path: Path | None = Field(None, description="folder with more tasks")
    max_share: float = Field(
        0.01,
        gt=0,
        le=1,
        description="largest share of the run's time; an evaluation is skipped while earlier ones exceed it",
    )


class CorruptionCheckConfig(StrictConfig):
    """Intervals of the checks for silent data corruption: devices and memory that change bits without an error."""

    hash_every: int = Field(
        0,
        ge=0,
        description="steps between comparisons of replicated tensors among ranks (weights; optimizer state unless zero shards "
        "it), also before each save, and of each rank's tensors with those after its last update: 1 finds every bit that flips "
        "between two updates; costs two reads of weights and state, and 8 bytes sent per tensor; 0: never",
    )
    recompute_every: int = Field(
        0,
        ge=0,
        description="steps between comparisons of the ranks' computation: all data ranks compute the same micro-batch (with a "
        "pipeline, one per stage) in addition to their own; up to zero 1; 0: never",
    )

    def find_run_problems(self, *, zero: int, deterministic: bool, device: str) -> Iterator[ConfigProblem]:
        """Yield a problem if `fault.recompute_every` is set in a run whose gradients are sharded or not reproducible."""
        key, every = "fault.recompute_every", self.recompute_every
        if every and zero > 1:
            rule = f"is not supported with parallel.zero = {zero}, which shards gradients"
            yield ConfigProblem(key, rule, every, f"set parallel.zero=1, or set {key}=0")
        if every and not deterministic and device != "cpu":
            rule = "requires deterministic = true on a GPU, as it compares bits"
            yield ConfigProblem(key, rule, every, "set deterministic=true, or set device=cpu")


class TrackingConfig(StrictConfig):
    """Destinations of a run's metrics in addition to the screen and metrics.jsonl.
    They are TensorBoard, Weights & Biases, MLflow, Trackio and Prometheus.
    """

    every: PositiveInt = 1
    tensorboard: bool = True
    wandb: str | None = Field(None, description="project name for Weights & Biases")
    mlflow: str | None = Field(None, description="experiment of MLflow, on the server of MLFLOW_TRACKING_URI")
    trackio: str | None = Field(None, description="project name for Trackio")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="port at which rank 0 serves the metrics of the last step to Prometheus"
    )
    prometheus_address: str = Field("127.0.0.1", description="address of the Prometheus port; 0.0.0.0: all interfaces")


class ProfileConfig(StrictConfig):
    """Range of steps whose time and memory are profiled, into the folder `output`/profile."""

    steps: tuple[PositiveInt, PositiveInt] = Field(description="first and last profiled step")
    trace: bool = Field(True, description="write a trace of torch's profiler, for chrome://tracing or Perfetto")
    memory: bool = Field(True, description="write a snapshot of GPU memory, for pytorch.org/memory_viz")
    ranks: list[NonNegativeInt] = Field([0], description="profiled ranks")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem if the first profiled step is after the last."""
        if self.steps[0] > self.steps[1]:
            last, first = self.steps
            rule = "must be the first and the last step, in this order"
            yield ConfigProblem("steps", rule, list(self.steps), f"set profile.steps=[{first}, {last}]")

    def find_run_problems(self, steps: int) -> Iterator[ConfigProblem]:
        """Yield a problem if the profile starts after the last of `steps` steps."""
        if self.steps[0] > steps:
            rule, hint = f"must start at or before train.steps = {steps}", f"set profile.steps=[{steps}, {steps}]"
            yield ConfigProblem("profile.steps", rule, list(self.steps), hint)


class DebugConfig(StrictConfig):
    """Slow checks and reproducible sums over ranks, for finding faults."""

    ordered_reductions: bool = Field(False, description="reduce over ranks in rank order, bitwise reproducible")
    layer_norms_every: int = Field(
        0, ge=0, description="steps between logs of the gradient and weight norms of each layer; 0: never"
    )
    reduce_every_microbatch: bool = Field(
        False, description="reduce gradients after each micro-batch at every ZeRO level, as level 2 does"
    )
