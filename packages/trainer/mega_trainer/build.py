"""The parts of a run, made from its configuration: groups, stages, buffers, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from mega_ckpt.lora import adapted, packed_tensors
from mega_common.errors import ConfigError
from mega_data.dataset import BlendedDataset, build_datasets
from mega_data.tokenizer import Tokenizer
from mega_trainer.comm import CommLog
from mega_trainer.config import RunConfig
from mega_trainer.fp8 import check_device, layers_kept
from mega_trainer.kernels.base import Kernels
from mega_trainer.kernels.choice import Choice, Facts, choose, installed
from mega_trainer.kernels.flash import Flash, Flash2, Flash3, TorchFlash
from mega_trainer.kernels.flex import FlexFlash
from mega_trainer.kernels.fp8 import Fp8Kernels
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.nf4 import Nf4
from mega_trainer.kernels.quantise import E4M3, E5M2
from mega_trainer.kernels.recurrent import CausalConv1d, FlaDelta, MambaScan, RecurrentLibraries
from mega_trainer.kernels.te import TeAttention, TeLinearKernels
from mega_trainer.kernels.torch import TorchKernels
from mega_trainer.layout import Layout
from mega_trainer.mesh import GroupMaker, Groups, build_groups
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import model_class
from mega_trainer.model.offload import Offload
from mega_trainer.model.recompute import Recompute
from mega_trainer.model.stage import Stage
from mega_trainer.optim.adamw import AdamW
from mega_trainer.optim.muon import Muon, is_hidden_matrix
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel.deepep import DeepEp
from mega_trainer.parallel.deferred import Deferred
from mega_trainer.parallel.expert import Dispatcher
from mega_trainer.parallel.fsdp import FullyShardedStage, shard_fully
from mega_trainer.parallel.grads import Sharing, flatten
from mega_trainer.parallel.nvshmem import Nvshmem
from mega_trainer.parallel.param import freeze, trains
from mega_trainer.parallel.shared import SharedStage
from mega_trainer.parallel.te import TeDispatch
from mega_trainer.pipeline.schedules import Schedule, make_schedule
from mega_trainer.pipeline.stages import stage_layers
from mega_trainer.plan.advice import run_shape
from mega_trainer.plan.flops import head_cost, layer_costs
from mega_trainer.plan.memory import unit_layers
from mega_trainer.precision import LossScale
from mega_trainer.ranks import Ranks


def connect(config: RunConfig, ranks: Ranks, maker: GroupMaker | None = None, log: CommLog | None = None) -> Groups:
    """This rank's groups under the configured degrees.

    Raises:
        ConfigError: when they do not fit the number of ranks.
    """
    config.check_ranks(ranks.world_size)
    parallel = config.parallel
    layout = Layout(
        tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, dp=config.data_parallel(ranks.world_size),
        ep=parallel.ep, expert_tp=parallel.expert_tp,
    )  # fmt: skip
    return build_groups(
        layout,
        ranks.rank,
        heads=config.model.shared_heads,
        shard=parallel.zero3_shard,
        maker=maker or GroupMaker(timedelta(seconds=2 * config.timeout_seconds)),  # as `ranks.joined`
        ordered=config.debug.ordered_reductions,
        log=log,
    )


def build_dispatcher(config: RunConfig, groups: Groups, leaves: Leaves) -> Dispatcher | None:
    """What brings tokens to experts on other ranks, where that is not the usual way."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None or groups.ep.size == 1 or parallel.dispatch == "alltoall":
        return None
    bound = parallel.dispatch_bound
    if parallel.dispatch == "deepep":
        return DeepEp(moe.num_experts, groups.ep, bound)
    assert bound is not None
    if parallel.dispatch == "te":
        return TeDispatch(moe.num_experts, groups.ep, bound)
    return Nvshmem(moe.num_experts, groups.ep, groups.expert_tp.size, bound, leaves)


def choose_kernels(config: RunConfig, device: torch.device) -> Choice:
    """The back ends of a run on this kind of device.

    Raises:
        ConfigError: when one is asked for that cannot be used here.
    """
    model, gpu = config.model, device.type == "cuda"
    facts = Facts(
        installed=installed(),
        capability=torch.cuda.get_device_capability(device) if gpu else None,
        cudnn=torch.backends.cudnn.version() if gpu else None,  # type: ignore[no-untyped-call]
        half=dtype_of(config) in (torch.bfloat16, torch.float16),
        head=(model.head_size, model.value_size),
        softcap=model.attention_softcap is not None,
        biased=model.position == "relative",
        taps=frozenset(recurrence.conv_kernel for recurrence in (model.mamba, model.delta) if recurrence),
    )
    parts = {"mamba": ("conv", "scan"), "delta": ("conv", "delta")}
    used = {part: getattr(config.kernels, part) for kind in model.heads for part in parts.get(kind, ())}
    return choose(config.kernels.linear, config.kernels.attention, facts, used)


def make_kernels(choice: Choice, leaves: Leaves) -> Kernels:
    """The chosen back ends as one; libraries are imported here."""
    makers: dict[str, Callable[[], Flash]] = {
        "varlen": TorchFlash, "flash 2": Flash2, "flash 3": Flash3, "flex": FlexFlash
    }  # fmt: skip
    flash = makers[choice.attention]() if choice.attention in makers else None
    whole = TeAttention() if choice.attention == "te" else None
    libraries: dict[str, Callable[[], Any]] = {"conv": CausalConv1d, "scan": MambaScan, "delta": FlaDelta}
    chosen = {part: libraries[part]() for part, name in choice.recurrent.items() if name != "torch"}
    recurrent = RecurrentLibraries(**chosen)
    return (TeLinearKernels if choice.linear == "te" else TorchKernels)(leaves, flash, whole, recurrent)


def make_builder(config: RunConfig, groups: Groups, device: torch.device, choice: Choice, leaves: Leaves) -> Builder:
    """What every layer of the run's model is made from."""
    return Builder(
        config.model, groups, make_kernels(choice, leaves), leaves,
        sp=config.parallel.sp, cp_kind=config.parallel.cp_kind, dispatcher=build_dispatcher(config, groups, leaves),
        dispatch_bound=config.parallel.dispatch_bound, dtype=dtype_of(config), device=device,
        adapts={} if config.lora is None else adapted(config.model, config.lora),
        packed=packed_tensors(config.model, config.lora, config.trains),
        packing=Nf4() if config.lora is not None and config.lora.quantize else None,
    )  # fmt: skip


def build_schedule(config: RunConfig, groups: Groups) -> Schedule:
    """The pipeline's operations for one step of this configuration."""
    parallel = config.parallel
    microbatches = config.microbatches(groups.dp.size)
    return make_schedule(
        parallel.schedule, pp=parallel.pp, microbatches=microbatches, virtual_stages=parallel.virtual_stages
    )


def build_stages(
    config: RunConfig, build: Builder, schedule: Schedule, kind: type[Decoder] | None = None
) -> dict[int, Decoder]:
    """This rank's parts of the model, by stage number, not initialised; their weights sharded when ZeRO-3 asks for it.

    Args:
        kind: what they are instances of, where that is not for the configuration to say.

    Raises:
        ConfigError: when nothing of it is to be trained.
    """
    parallel, last = config.parallel, len(schedule.owners) - 1
    layers = stage_layers(
        config.model.num_layers, parallel.pp, parallel.virtual_stages, parallel.pipeline_layout,
        head_cost=head_cost(config.model, *config.lengths),
        layer_costs=layer_costs(config.model, *config.lengths),
    )  # fmt: skip
    again, away = config.recompute, config.offload
    recompute = Recompute(again.kind, again.layers, tuple(again.modules))
    offload = Offload(away.activations, away.min_bytes) if away.activations else None
    build = replace(build, by_layer=fp8_layers(config, build.device, build.leaves))
    device, sharded = build.device, parallel.zero == 3 and build.groups.dp_cp.size > 1
    if sharded:
        kept = torch.float64 if build.dtype == torch.float64 else torch.float32
        build = replace(build, dtype=kept, device=torch.device("meta"))
    ends_meet = schedule.owner(0) == schedule.owner(last)
    stages = {}
    for index in schedule.stages(build.groups.pp.rank):
        part = Stage(layers[index].start, layers[index].stop, index == 0, index == last, ends_meet)
        own = replace(build, deferred=Deferred()) if schedule.splits_backward else build
        stages[index] = (kind or model_class(config.model))(own, part, recompute, offload)
        freeze(stages[index], config.trains)
    if not any(trains(parameter) for stage in stages.values() for parameter in stage.parameters()):
        raise ConfigError(
            f"everything is frozen in layers {', '.join(f'{s.stage.first} to {s.stage.last - 1}' for s in stages.values())}, "
            "which are a rank's share of the pipeline",
            hint="freeze less, or set parallel.pipeline_layout so that each stage has something to train",
        )
    if sharded:
        for stage in stages.values():
            shard_fully(
                stage, dtype=dtype_of(config), device=device, reduce_dtype=reduce_dtype_of(config),
                layers=gathered_layers(config, build.groups),
            )  # fmt: skip
    return stages


def gathered_layers(config: RunConfig, groups: Groups) -> int:
    """Layers of a unit of ZeRO-3."""
    return unit_layers(config.model, run_shape(config, groups.world.size))


def fp8_layers(config: RunConfig, device: torch.device, leaves: Leaves | None = None) -> dict[int, Kernels]:
    """The back end of each layer that multiplies in fp8.

    Raises:
        ConfigError: when the device has no kernels for the recipe.
    """
    if config.precision != "fp8":
        return {}
    if device.type == "cuda":
        check_device(torch.cuda.get_device_capability(device), config.fp8.recipe, experts=config.model.moe is not None)
    recipe, wide = config.fp8.recipe, config.fp8.wide_gradients
    kernels: Kernels = (
        TeLinearKernels(leaves, recipe=recipe, wide_gradients=wide)
        if config.kernels.linear == "te"
        else Fp8Kernels(recipe, E5M2 if wide else E4M3, leaves)
    )
    return dict.fromkeys(config.fp8.layers(config.model.num_layers), kernels)


def build_optimizer(
    config: RunConfig, shared: Mapping[int, SharedStage], groups: Groups, leaves: Leaves | None = None
) -> Optimizer:
    """The configured optimizer over all stages."""
    settings, muon = config.optimizer, config.optimizer.muon
    decay = settings.weight_decay
    adamw = partial(AdamW, betas=settings.betas, eps=settings.eps, weight_decay=decay)
    own_decay = decay if muon.weight_decay is None else muon.weight_decay
    apart = partial(
        Muon, tensor_group=groups.tp, momentum=muon.momentum, nesterov=muon.nesterov, lr_factor=muon.lr_factor,
        weight_decay=own_decay, rounds=muon.rounds,
    )  # fmt: skip
    return Optimizer(
        list(shared.values()),
        adamw=adamw,
        apart=apart if settings.name == "muon" else None,
        model_groups=(groups.pp,),
        offload=settings.offload,
        leaves=leaves,
        ema=config.train.ema,
    )


def share_stages(config: RunConfig, stages: Mapping[int, Decoder]) -> dict[int, SharedStage]:
    """Weights and gradients of each stage, shared among the data ranks as the ZeRO level says."""
    level = config.parallel.zero
    sharing = Sharing(
        slices=level > 0,
        each_backward=level == 2 or config.debug.reduce_every_microbatch,
        apart=is_hidden_matrix if config.optimizer.name == "muon" else None,
        decoupled=config.optimizer.decoupled_lr is not None,
        lr_factor=config.lr_factor,
        reduce_dtype=reduce_dtype_of(config),
        bucket_elements=config.parallel.bucket_elements,
        prepares=bool(layers_kept(config)),
    )
    return {index: _shared(config, stage, sharing) for index, stage in stages.items()}


def _shared(config: RunConfig, stage: Decoder, sharing: Sharing) -> SharedStage:
    if not isinstance(stage, FSDPModule):
        return flatten(stage, sharing, stage.units())
    layers = gathered_layers(config, stage.groups)
    return FullyShardedStage(
        stage,
        decoupled=sharing.decoupled,
        lr_factor=sharing.lr_factor,
        reduce_dtype=sharing.reduce_dtype,
        layers=layers,
    )


def load_data(config: RunConfig, tokenizer: Tokenizer | None) -> tuple[BlendedDataset, BlendedDataset | None]:
    """The train set, and the validation set where validation is asked for. `tokenizer` is that of the data."""
    eod = None if tokenizer is None else tokenizer.eos_id
    training, valid, _ = build_datasets(
        config.data,
        seed=config.train.seed,
        samples=config.samples,
        eod=eod,
        tokenizer=tokenizer,
        vision=config.model.vision,
    )
    return training, valid


def dtype_of(config: RunConfig) -> torch.dtype:
    """The type of weights and activations; gradients and main weights are fp32, or fp64 in an fp64 run."""
    names = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
    return names.get(config.precision, torch.bfloat16)


def reduce_dtype_of(config: RunConfig) -> torch.dtype | None:
    """The type that gradients are summed over data ranks in, where that is not their own."""
    return torch.bfloat16 if config.parallel.grad_reduce_dtype == "bf16" else None


def loss_scale_of(config: RunConfig) -> LossScale | None:
    """The loss scale that a run starts with; none where the range of the numbers needs none."""
    fp16 = config.fp16
    return LossScale(fp16.initial_scale, fp16.growth_interval, fp16.min_scale) if config.precision == "fp16" else None
