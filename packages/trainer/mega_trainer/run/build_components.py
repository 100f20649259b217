"""Components of a run, made from its configuration: groups, stages, buffers, optimizer, data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from mega_ckpt.lora_tensors import adapted_modules, list_quantized_tensor_names
from mega_common.errors import ConfigError
from mega_common.extension_entries import Kernel
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.cuda_graph_rules import list_graphed_layers, list_unmet_graph_needs
from mega_trainer.config.fp8_config import FOUR_BITS, check_fp8_device
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import open_prompt_dataset
from mega_trainer.distributed.comm import CommTrafficCounter
from mega_trainer.distributed.process_groups import ParallelGroups, ProcessGroupCache, RankInfo, build_parallel_groups
from mega_trainer.kernels.backend_choice import (
    BackendChoice,
    BackendFacts,
    choose_kernel_backends,
    installed_kernel_versions,
)
from mega_trainer.kernels.extension_kernels import ExtensionKernels
from mega_trainer.kernels.flash_attention import FlashAttention2, FlashAttention3, FlashKernel, TorchFlashKernel
from mega_trainer.kernels.flex_attention import FlexAttentionKernel
from mega_trainer.kernels.fp8_kernels import E4M3, E5M2, Fp8Kernels, Nvfp4Kernels
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler, find_compiler_problem
from mega_trainer.kernels.nf4_quantizer import Nf4Quantizer
from mega_trainer.kernels.recurrent_libraries import (
    CausalConvKernel,
    FlaDeltaRuleKernel,
    MambaScanKernel,
    RecurrentLibraries,
)
from mega_trainer.kernels.te_kernels import TeAttention, TeLinearKernels
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model.activation_checkpointing import ActivationOffloadPool, RecomputePolicy
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.layer_graphs import graph_layers
from mega_trainer.optim.adamw import AdamWUpdateRule
from mega_trainer.optim.adamw8bit import AdamW8bitUpdateRule
from mega_trainer.optim.elementwise import ElementwiseUpdate, ElementwiseUpdateRule, LionUpdate, SgdUpdate
from mega_trainer.optim.gradient_clipping import LossScale
from mega_trainer.optim.muon import MuonUpdateRule, is_hidden_matrix
from mega_trainer.optim.optimizer_slots import OptimizerSlot, UpdateRule
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.optim.soap import SoapUpdateRule
from mega_trainer.parallel.deepep_dispatch import DeepEpDispatcher
from mega_trainer.parallel.expert_parallel import ExpertDispatcher
from mega_trainer.parallel.fsdp import FullyShardedStage, fully_shard_stage
from mega_trainer.parallel.nvshmem_dispatch import NvshmemDispatcher
from mega_trainer.parallel.overlapped_linear import choose_overlapped_gemms
from mega_trainer.parallel.parallel_linear import DeferredWgradQueue
from mega_trainer.parallel.parameter_info import freeze_parameters, is_trainable
from mega_trainer.parallel.parameter_shards import ShardedStage
from mega_trainer.parallel.pass_interleaver import PassInterleaver
from mega_trainer.parallel.te_dispatch import TransformerEngineDispatcher
from mega_trainer.parallel.zero_buffers import ZeroConfig, flatten_parameters
from mega_trainer.pipeline.layer_partition import split_stage_layers
from mega_trainer.pipeline.schedules import PipelineSchedule, make_pipeline_schedule
from mega_trainer.plan.flops import head_cost_in_layers, relative_layer_costs
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.zero3_memory import count_zero3_unit_layers

logger = logging.getLogger(__name__)


def connect_parallel_groups(
    config: RunConfig, ranks: RankInfo, maker: ProcessGroupCache | None = None, log: CommTrafficCounter | None = None
) -> ParallelGroups:
    """Return this rank's communication groups for the configured degrees of parallelism.
    `maker` caches process groups, `log` counts traffic. A collective call of all ranks.

    Raises:
        ConfigError: when they do not fit the number of ranks.
    """
    config.check_world_size(ranks.world_size)
    parallel = config.parallel
    layout = ParallelLayout(
        tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, dp=config.data_parallel_size(ranks.world_size),
        ep=parallel.ep, expert_tp=parallel.expert_tp,
    )  # fmt: skip
    return build_parallel_groups(
        layout,
        ranks.rank,
        heads=config.model.shared_head_counts,
        shard=parallel.zero3_shard,
        maker=maker
        or ProcessGroupCache(timedelta(seconds=2 * config.timeout_seconds)),  # as for the default process group
        ordered=config.debug.ordered_reductions,
        log=log,
    )


def build_expert_dispatcher(
    config: RunConfig,
    groups: ParallelGroups,
    leaves: FusibleFunctionCompiler,
    interleaver: PassInterleaver | None = None,
) -> ExpertDispatcher | None:
    """Return the configured expert dispatcher, such as DeepEP's; None: default all-to-all, or no expert parallelism.
    An `interleaver` runs another pass before a wait of DeepEP's exchange.
    """
    moe, parallel = config.model.moe, config.parallel
    if moe is None or groups.ep.size == 1 or parallel.dispatch == "alltoall":
        return None
    bound = parallel.dispatch_bound
    if parallel.dispatch == "deepep":
        return DeepEpDispatcher(moe.num_experts, groups.ep, bound, interleaver=interleaver)
    assert bound is not None
    if parallel.dispatch == "te":
        return TransformerEngineDispatcher(moe.num_experts, groups.ep, bound)
    return NvshmemDispatcher(moe.num_experts, groups.ep, groups.expert_tp.size, bound, leaves)


def choose_kernels(config: RunConfig, device: torch.device) -> BackendChoice:
    """Choose the kernel back ends of a run (linear layers, attention, recurrent mixers) for this kind of device.

    Raises:
        ConfigError: when a configured one cannot be used on this device.
    """
    model, gpu = config.model, device.type == "cuda"
    facts = BackendFacts(
        installed=installed_kernel_versions(),
        capability=torch.cuda.get_device_capability(device) if gpu else None,
        cudnn=torch.backends.cudnn.version() if gpu else None,  # type: ignore[no-untyped-call]
        half=get_compute_dtype(config) in (torch.bfloat16, torch.float16),
        head=max(
            (each.query_key_head_dim, each.attention_value_dim) for each in (model, model.full_attention_layer_config)
        ),
        softcap=model.attention_softcap is not None,
        biased=model.has_position_bias,
        taps=frozenset(
            recurrence.conv_kernel for recurrence in (model.mamba, model.mamba1, model.delta, model.kda) if recurrence
        )
        | ({model.conv.kernel} if model.conv else frozenset()),
        compiler_problem=find_compiler_problem(device) if gpu else None,
        fp8=config.precision == "fp8",
    )
    parts = {
        "mamba": ("conv", "scan"),
        "mamba1": ("conv", "scan"),
        "delta": ("conv", "delta"),
        "kda": ("conv", "delta"),
        "lightning": ("scan",),
        "conv": ("conv",),
    }
    used = {part: getattr(config.kernels, part) for kind in model.heads_by_mixer for part in parts.get(kind, ())}
    return choose_kernel_backends(config.kernels.linear, config.kernels.attention, facts, used)


def create_kernels(choice: BackendChoice, leaves: FusibleFunctionCompiler) -> Kernels:
    """Return the chosen kernel back ends as one `Kernels` object; libraries are imported here."""
    makers: dict[str, Callable[[], FlashKernel]] = {
        "varlen": TorchFlashKernel, "flash 2": FlashAttention2, "flash 3": FlashAttention3, "flex": FlexAttentionKernel
    }  # fmt: skip
    flash = makers[choice.attention]() if choice.attention in makers else None
    whole = TeAttention() if choice.attention == "te" else None
    libraries: dict[str, Callable[[], Any]] = {
        "conv": CausalConvKernel,
        "scan": MambaScanKernel,
        "delta": FlaDeltaRuleKernel,
    }
    chosen = {part: libraries[part]() for part, name in choice.recurrent.items() if name != "torch"}
    recurrent = RecurrentLibraries(**chosen)
    return (TeLinearKernels if choice.linear == "te" else TorchKernels)(leaves, flash, whole, recurrent)


def select_extension_kernels(config: RunConfig) -> Sequence[Kernel]:
    """Return the kernels of extensions that a run uses (`kernels.functions`)."""
    return config.registry.select_kernels(config.kernels.functions)


def make_layer_builder(
    config: RunConfig,
    groups: ParallelGroups,
    device: torch.device,
    choice: BackendChoice,
    leaves: FusibleFunctionCompiler,
) -> LayerBuilder:
    """Return the factory of all layers of a run's model, with its kernels, parallel groups, LoRA and quantization."""
    kernels, added = create_kernels(choice, leaves), select_extension_kernels(config)
    interleaver = PassInterleaver() if config.parallel.overlap_expert_exchange else None
    return LayerBuilder(
        config.model, groups, cast("Kernels", ExtensionKernels(kernels, added)) if added else kernels, leaves=leaves,
        sp=config.parallel.sp, cp_kind=config.parallel.cp_kind,
        overlapped=choose_overlapped_gemms(device, groups.tp) if config.parallel.tp_comm_overlap else None,
        dispatcher=build_expert_dispatcher(config, groups, leaves, interleaver), dispatch_bound=config.parallel.dispatch_bound,
        interleaver=interleaver, dtype=get_compute_dtype(config), device=device,
        adapts={} if config.lora is None else adapted_modules(config.model, config.lora),
        packed=list_quantized_tensor_names(config.model, config.lora, config.is_trainable),
        packing=Nf4Quantizer() if config.lora is not None and config.lora.quantize else None,
        blocks=config.registry.make_block_factories(config.model), functions=config.registry.bind_extension_functions(config.model),
    )  # fmt: skip


def build_schedule(config: RunConfig, groups: ParallelGroups) -> PipelineSchedule:
    """Return the pipeline schedule (order of forwards and backwards per rank) of one step of this configuration."""
    parallel = config.parallel
    microbatches = config.micro_batches_per_step(groups.dp.size)
    return make_pipeline_schedule(
        parallel.schedule, pp=parallel.pp, microbatches=microbatches, virtual_stages=parallel.virtual_stages,
        pairs_passes=parallel.overlap_expert_exchange,
    )  # fmt: skip


def choose_graphed_layers(config: RunConfig, device: torch.device) -> list[int]:
    """Return the numbers of the layers that are to be CUDA graphs on this device; log why there are none, if asked for.

    Raises:
        ConfigError: when `cuda_graphs` is `layers` and the device is not a GPU.
    """
    if config.cuda_graphs == "off":
        return []
    gpu = device.type == "cuda"
    if not gpu and config.cuda_graphs == "layers":
        raise ConfigError(f"cuda_graphs = layers requires a GPU, found {device}", hint="set cuda_graphs=auto or off")
    unmet = list_unmet_graph_needs(config) if gpu else ["a GPU"]
    chosen = [] if unmet else list_graphed_layers(config)
    state = "off: requires " + "; ".join(unmet) if unmet else f"{len(chosen)} of {config.model.num_layers} layers"
    logger.info("CUDA graphs: %s", state)
    return chosen


def build_pipeline_stages(
    config: RunConfig, build: LayerBuilder, schedule: PipelineSchedule, stage_class: type[Decoder] | None = None
) -> dict[int, Decoder]:
    """Return this rank's pipeline stages of the model by stage number, with uninitialised weights.
    The weights are sharded under ZeRO-3.

    Args:
        stage_class: class of the stages; None: by the model.

    Raises:
        ConfigError: when all weights of this rank are frozen.
    """
    parallel, last = config.parallel, len(schedule.owners) - 1
    layers = split_stage_layers(
        config.model.num_layers, parallel.pp, parallel.virtual_stages, parallel.pipeline_layout,
        head_cost=head_cost_in_layers(config.model, *config.sequence_lengths),
        layer_costs=relative_layer_costs(config.model, *config.sequence_lengths),
        first_stage_layers=config.model.first_stage_layers,
        last_stage_layers=config.model.last_stage_layers,
    )  # fmt: skip
    recompute = RecomputePolicy(config.recompute.kind, config.recompute.layers, tuple(config.recompute.modules))
    offload = (
        ActivationOffloadPool(config.offload.activations, config.offload.min_bytes)
        if config.offload.activations
        else None
    )
    build = replace(build, by_layer=make_fp8_kernels(config, build.device, build.leaves))
    graphed = choose_graphed_layers(config, build.device)
    device, sharded = build.device, parallel.zero == 3 and build.groups.dp_cp.size > 1
    if sharded:
        stored = torch.float64 if build.dtype == torch.float64 else torch.float32
        build = replace(build, stored_dtype=stored, device=torch.device("meta"))
    has_both_ends = schedule.owners[0] == schedule.owners[last]
    stages = {}
    for index in schedule.stages_of_rank(build.groups.pp.rank):
        part = PipelineStageLayers(layers[index].start, layers[index].stop, index == 0, index == last, has_both_ends)
        own = replace(build, deferred=DeferredWgradQueue()) if schedule.splits_backward else build
        stages[index] = (stage_class or select_model_class(config.model))(own, part, recompute, offload)
        freeze_parameters(stages[index], config.is_trainable)
        graph_layers(stages[index].layers, graphed)
    if not any(is_trainable(parameter) for stage in stages.values() for parameter in stage.parameters()):
        raise ConfigError(
            "train.freeze must leave trainable weights on each pipeline rank, found none in layers "
            f"{', '.join(f'{s.stage.first} to {s.stage.last - 1}' for s in stages.values())}",
            hint="freeze fewer tensors, or set parallel.pipeline_layout so that each stage has trainable weights",
        )
    if sharded:
        for stage in stages.values():
            fully_shard_stage(
                stage, dtype=get_compute_dtype(config), device=device, reduce_dtype=get_gradient_reduce_dtype(config),
                layers=resolve_zero3_layers(config, build.groups), gather=parallel.zero3_gather or "micro_batch",
            )  # fmt: skip
    return stages


def resolve_zero3_layers(config: RunConfig, groups: ParallelGroups) -> int:
    """Return the number of layers whose weights ZeRO-3 gathers together as one unit, configured or chosen by size."""
    if config.model.transformers is not None:
        return config.parallel.zero3_layers or 1
    return count_zero3_unit_layers(config.model, make_training_layout(config, groups.world.size))


def make_fp8_kernels(
    config: RunConfig, device: torch.device, leaves: FusibleFunctionCompiler | None = None
) -> dict[int, Kernels]:
    """Return the FP8 kernel back end of each layer whose linear layers run in FP8, by layer number.

    Raises:
        ConfigError: when the device has no kernels for the recipe.
    """
    if config.precision != "fp8":
        return {}
    if device.type == "cuda":
        check_fp8_device(
            torch.cuda.get_device_capability(device), config.fp8.recipe, experts=config.model.moe is not None
        )
    recipe, wide = config.fp8.recipe, config.fp8.uses_e5m2_gradients
    kernels: Kernels
    if config.kernels.linear == "te":
        kernels = TeLinearKernels(leaves, recipe=recipe, wide_gradients=wide)
    elif recipe != FOUR_BITS:
        kernels = Fp8Kernels(recipe, E5M2 if wide else E4M3, leaves)
    elif device.type == "cuda":
        raise ConfigError("fp8.recipe = nvfp4 requires Transformer Engine on a GPU", hint="set kernels.linear=te")
    else:
        kernels = Nvfp4Kernels(leaves)
    return dict.fromkeys(config.fp8.fp8_layer_range(config.model.num_layers), kernels)


def build_optimizer(
    config: RunConfig,
    shared: Mapping[int, ShardedStage],
    groups: ParallelGroups,
    leaves: FusibleFunctionCompiler | None = None,
) -> ShardedOptimizer:
    """Return the configured optimizer over the trainable weights of all of this rank's stages."""
    settings, muon, soap = config.optimizer, config.optimizer.muon, config.optimizer.soap
    decay, elementwise = settings.weight_decay, build_elementwise_update(config)
    adamw: Callable[[list[OptimizerSlot]], UpdateRule] = partial(
        AdamW8bitUpdateRule if settings.name == "adamw8bit" else AdamWUpdateRule,
        betas=settings.betas, eps=settings.eps, weight_decay=decay,
    )  # fmt: skip
    if elementwise is not None:
        adamw = partial(ElementwiseUpdateRule, rule=elementwise, weight_decay=decay)
    own_decay = decay if muon.weight_decay is None else muon.weight_decay
    soap_rule = partial(
        SoapUpdateRule, tensor_group=groups.tp, weight_decay=decay, betas=settings.betas, eps=settings.eps,
        gram_beta=settings.betas[1] if soap.gram_beta is None else soap.gram_beta, frequency=soap.frequency,
        max_width=soap.max_width,
    )  # fmt: skip
    muon_rule = partial(
        MuonUpdateRule, tensor_group=groups.tp, momentum=muon.momentum, nesterov=muon.nesterov, lr_factor=muon.lr_factor,
        weight_decay=own_decay, rounds=muon.rounds,
    )  # fmt: skip
    return ShardedOptimizer(
        list(shared.values()),
        adamw=adamw,
        separate=muon_rule if settings.name == "muon" else soap_rule if settings.name == "soap" else None,
        model_groups=(groups.pp,),
        offload=settings.offload,
        leaves=leaves,
        ema=config.train.ema,
    )


def build_elementwise_update(config: RunConfig) -> ElementwiseUpdate | None:
    """Return the elementwise optimizer of a run: Lion, SGD or an extension's; None for all others."""
    settings = config.optimizer
    if settings.name == "lion":
        return LionUpdate(settings.betas)
    if settings.name == "sgd":
        return SgdUpdate(settings.sgd.momentum, nesterov=settings.sgd.nesterov)
    added = config.registry.entries("optimizers").get(settings.name)
    if added is None:
        return None
    rule: ElementwiseUpdate = added.build(settings, added.options.parse(settings.options))
    return rule


def shard_pipeline_stages(config: RunConfig, stages: Mapping[int, Decoder]) -> dict[int, ShardedStage]:
    """Shard the parameters of each stage over data ranks by the ZeRO level, in place; return the shards by stage number."""
    level = config.parallel.zero
    zero_config = ZeroConfig(
        shard_grads=level > 0,
        reduce_every_microbatch=level == 2 or config.debug.reduce_every_microbatch,
        separate=is_hidden_matrix if config.optimizer.name in ("muon", "soap") else None,
        decoupled=config.optimizer.decoupled_lr is not None,
        lr_factor=config.lr_factor_of,
        reduce_dtype=get_gradient_reduce_dtype(config),
        bucket_elements=config.parallel.bucket_elements,
        cache_prepared_weights=bool(config.layers_with_cached_fp8_weights),
    )
    return {index: _shard_stage(config, stage, zero_config) for index, stage in stages.items()}


def _shard_stage(config: RunConfig, stage: Decoder, zero_config: ZeroConfig) -> ShardedStage:
    if not isinstance(stage, FSDPModule):
        return flatten_parameters(stage, zero_config, stage.list_parameter_units())
    layers = resolve_zero3_layers(config, stage.groups)
    return FullyShardedStage(
        stage,
        separate=zero_config.separate,
        decoupled=zero_config.decoupled,
        lr_factor=zero_config.lr_factor,
        reduce_dtype=zero_config.reduce_dtype,
        layers=layers,
    )


def load_datasets(config: RunConfig, tokenizer: Tokenizer | None) -> tuple[BlendedDataset, BlendedDataset | None]:
    """Return the training data set and, if the run validates, the validation data set, else None.
    `tokenizer` is the data's tokenizer.
    """
    if config.objective.kind == "grpo":
        assert tokenizer is not None  # the rules of the configuration require data.tokenizer
        return open_prompt_dataset(config, tokenizer), None
    eod = None if tokenizer is None else tokenizer.eos_id
    training, valid, _ = build_blended_datasets(
        config.data,
        seed=config.train.seed,
        samples=config.samples_per_split,
        eod=eod,
        tokenizer=tokenizer,
        vision=config.model.vision,
        added_kinds=config.extension_sample_builders,
    )
    return training, valid


def get_compute_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of weights and activations in forward and backward.
    Gradients and main weights are fp32, or fp64 in an fp64 run.
    """
    names = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
    return names.get(config.precision, torch.bfloat16)


def get_gradient_reduce_dtype(config: RunConfig) -> torch.dtype | None:
    """Return the dtype in which gradients are reduced over data ranks; None: that in which they are kept."""
    return torch.bfloat16 if config.parallel.grad_reduce_dtype == "bf16" else None


def initial_loss_scale(config: RunConfig) -> LossScale | None:
    """Return the loss scale with which a run starts, or None if the precision is not fp16."""
    fp16 = config.fp16
    return LossScale(fp16.initial_scale, fp16.growth_interval, fp16.min_scale) if config.precision == "fp16" else None
