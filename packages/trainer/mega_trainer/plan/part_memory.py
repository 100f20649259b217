"""Memory of the parts of a model in training, counted on the trainer's own modules on the meta device.

A part is one layer of each kind, the embedding, or the head with its loss and the multi-token-prediction (MTP) layers. It
runs forward and backward on the meta device, with the run's recompute setting and parallel layout and with fake process
groups, while the bytes of all its tensors are counted. A part planned for a GPU runs as on a GPU: a leaf is one fused kernel,
attention saves no scores, and weight-gradient GEMMs accumulate into fp32 buffers in place.

Experts have an even load.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.lora_tensors import AdaptedModule, adapted_modules, list_quantized_tensor_names
from mega_common.lora_config import is_trainable_tensor
from mega_common.model_config import ModelConfig
from mega_trainer.config.extensions import load_extensions
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.data.micro_batch import (
    DocumentBounds,
    EncoderBatch,
    MicroBatch,
    MtpTargets,
    RetrievedNeighbors,
    SegmentOrderTargets,
)
from mega_trainer.distributed.process_groups import build_parallel_groups
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.model.activation_checkpointing import RecomputedModule, RecomputePolicy
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.encoder_decoder import EncoderDecoderModel, select_model_class
from mega_trainer.model.forward_context import ForwardContext, with_encoder_memory
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.layer_input_decoder import LayerInputDecoder
from mega_trainer.model.retro import NeighborEncodingLayer, RetroDecoder
from mega_trainer.optim.muon import is_hidden_matrix
from mega_trainer.parallel.context_parallel import residual_stream_token_ranges
from mega_trainer.parallel.expert_parallel import AllToAllDispatcher, ExpertDispatcher
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.parallel_linear import DeferredWgradQueue
from mega_trainer.parallel.parameter_info import (
    freeze_parameters,
    get_parameter_info,
    get_quantized_weight,
    is_trainable,
)
from mega_trainer.pipeline.schedules import V_SHAPED
from mega_trainer.plan.meta_counting import (
    BalancedAllToAll,
    FakeProcessGroupCache,
    FusedFunctionMemoryCounter,
    LiveTensorCounter,
    MetaActivation,
    MetaDropout,
    MetaFusedAttention,
    MetaKernels,
    MetaWeightQuantizer,
)
from mega_trainer.plan.trainable_parameters import parse_run_lora
from mega_trainer.plan.training_layout import RecomputeKind, TrainingLayout

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}


MatrixShape = tuple[int, int, int]


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of elements of one rank's parameters, by how they are reduced, trained and updated.

    Attributes:
        dense, experts: unquantised parameters, reduced over all data ranks or over expert-data ranks.
        trainable, trainable_experts: trainable ones of these.
        dense_matrices, expert_matrices: trainable ones that Muon or SOAP updates.
        dense_shapes, expert_shapes: of the canonical matrices among them, the number of whole matrices on this rank, and their
            rows and columns, from the last one on.
        largest: elements of the largest trainable parameter.
        packed: bytes of quantised parameters.
    """

    dense: int = 0
    experts: int = 0
    trainable: int = 0
    trainable_experts: int = 0
    dense_matrices: int = 0
    expert_matrices: int = 0
    dense_shapes: tuple[MatrixShape, ...] = ()
    expert_shapes: tuple[MatrixShape, ...] = ()
    largest: int = 0
    packed: int = 0

    @classmethod
    def from_parameters(cls, parameters: Sequence[nn.Parameter], build: LayerBuilder) -> WeightCounts:
        """Count the elements of given parameters: dense and expert, trainable, and updated by Muon or SOAP."""
        packed = [each for each in map(get_quantized_weight, parameters) if each is not None]
        parameters = [parameter for parameter in parameters if get_quantized_weight(parameter) is None]
        is_expert = [
            get_parameter_info(p).data is build.groups.expert_data and get_parameter_info(p).split is not None
            for p in parameters
        ]
        dense, experts = (
            [parameter for parameter, expert in zip(parameters, is_expert, strict=True) if expert is wanted]
            for wanted in (False, True)
        )
        trainable, trainable_experts = (list(filter(is_trainable, those)) for those in (dense, experts))
        return cls(
            _count_elements(dense), _count_elements(experts), _count_elements(trainable), _count_elements(trainable_experts),
            _count_elements(filter(is_hidden_matrix, trainable)), _count_elements(filter(is_hidden_matrix, trainable_experts)),
            _matrix_shapes(trainable), _matrix_shapes(trainable_experts),
            max((p.numel() for p in trainable + trainable_experts), default=0), sum(each.nbytes for each in packed),
        )  # fmt: skip

    def __add__(self, other: WeightCounts) -> WeightCounts:
        return WeightCounts(
            self.dense + other.dense, self.experts + other.experts, self.trainable + other.trainable,
            self.trainable_experts + other.trainable_experts, self.dense_matrices + other.dense_matrices,
            self.expert_matrices + other.expert_matrices, other.dense_shapes + self.dense_shapes,
            other.expert_shapes + self.expert_shapes, max(self.largest, other.largest), self.packed + other.packed,
        )  # fmt: skip


@dataclass(frozen=True)
class ModelPartMemoryBytes:
    """Memory in bytes of one part of a model (a layer, the embedding or the head) for one micro-batch on one rank.

    Attributes:
        kept: bytes held from forward to backward.
        small: bytes of these in tensors that are too small to be offloaded.
        forward: peak bytes of the forward, input and output included.
        backward: peak bytes of the backward, saved tensors and the incoming gradient included.
        deferred_wgrad: bytes that remain for deferred weight gradients.
        weights: parameters of the part.
    """

    kept: int
    small: int
    forward: int
    backward: int
    deferred_wgrad: int
    weights: WeightCounts


def _count_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Return the total number of elements of parameters."""
    return sum(parameter.numel() for parameter in parameters)


def _matrix_shapes(parameters: Sequence[nn.Parameter]) -> tuple[MatrixShape, ...]:
    """Return the number, rows and columns of the canonical hidden matrices of parameters, from the last parameter on."""
    pieces = [
        piece for p in reversed(parameters) if is_hidden_matrix(p) for piece in get_parameter_info(p).gathered_pieces
    ]
    return tuple((math.prod(piece.shape[:-2]), piece.global_shape[-2], piece.global_shape[-1]) for piece in pieces)


class PartMemoryCounter:
    """Counter of the memory of each part of one model in one layout, by running it on tensors without storage.

    Args:
        model: configuration of the model.
        run: shape of the run; micro-batches and pipeline ranks are ignored.
    """

    def __init__(self, model: ModelConfig, run: TrainingLayout) -> None:
        self.model, self.run, self.live, self.lora = model, run, LiveTensorCounter(), parse_run_lora(run)
        self.device = torch.device("cpu" if run.device == "cpu" else "meta")
        layout = ParallelLayout(tp=run.tp, cp=run.cp, dp=run.dp, ep=run.ep, expert_tp=run.expert_tp)
        self.groups = build_parallel_groups(
            layout, 0, heads=model.shared_head_counts, shard=run.zero3_shard, maker=FakeProcessGroupCache()
        )
        leaves = FusibleFunctionCompiler() if run.device == "cpu" else FusedFunctionMemoryCounter(self.live)
        kernels = MetaKernels(leaves) if run.device == "cpu" else MetaKernels(leaves, MetaFusedAttention())
        added = load_extensions(run.extensions)
        self.build = LayerBuilder(
            model, self.groups, kernels, leaves=leaves, sp=run.sp, cp_kind=run.cp_kind,
            dispatcher=self._make_dispatcher(), dtype=DTYPES.get(run.precision, torch.bfloat16), device=self.device,
            deferred=DeferredWgradQueue() if run.defers_wgrads else None, adapts={} if self.lora is None else adapted_modules(model, self.lora),
            packed=list_quantized_tensor_names(model, self.lora, partial(is_trainable_tensor, freeze=run.freeze, lora=self.lora)),
            packing=MetaWeightQuantizer(), blocks=added.make_block_factories(model), functions=added.bind_extension_functions(model),
        )  # fmt: skip

    def _make_dispatcher(self) -> ExpertDispatcher | None:
        """Return the expert dispatcher of the run, with an even load."""
        moe, run = self.model.moe, self.run
        if moe is None or self.groups.ep.size == 1:
            return None
        if run.dispatch_bound is not None:
            return AllToAllDispatcher(moe.num_experts, self.groups.ep, run.expert_tp, run.dispatch_bound)
        return BalancedAllToAll(moe.num_experts, self.groups.ep, run.expert_tp, 1.0)

    def fake_tensor_context(self) -> ExitStack:
        """Return a context for a `with` block in which tensors have no storage and nothing is computed."""
        stack = ExitStack()
        if self.device.type == "cpu":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return stack

    def count_layer_memory(self, index: int, *, whole: bool) -> ModelPartMemoryBytes:
        """Return the memory of layer `index`, recomputed as a `whole` or else only in the modules of `selective`."""
        with self.fake_tensor_context():
            kind: RecomputeKind = "full" if whole else "none" if self.run.recompute == "full" else self.run.recompute
            model = self._make_decoder(PipelineStageLayers(index, index + 1, embeds=False, heads=False), kind)
            context = self._make_context(model)
            if isinstance(model, RetroDecoder):
                return self._count_retrieval_layer(model, context)
            if not isinstance(model, EncoderDecoderModel):
                return self._count_decoder_layer(model, self._add_stand_ins(context, index), whole=whole)
            encodes, read = self.model.is_encoder_layer(index), self._stack_shape(encodes=True)
            rows, memory = (self._make_input(shape) for shape in ((1, model.bias_table_rows, read[-1]), read))
            own = model.split_encoder_decoder_contexts(context, rows)[0 if encodes else 1]
            forward = partial(model.saved.run_layer, 0, model.layers[0])
            context = own if encodes else with_encoder_memory(own, memory)
            shape = self._stack_shape(encodes=encodes)
            return self._count_part(model, lambda x: forward(x, context), shape, list(model.parameters()))

    def _count_decoder_layer(self, model: Decoder, context: ForwardContext, *, whole: bool) -> ModelPartMemoryBytes:
        """Count a layer of a decoder; recomputation keeps the layer's own input, where it has one."""
        forward = partial(Decoder.forward, model) if isinstance(model, LayerInputDecoder) else model
        part = self._count_part(model, lambda x: forward(x, context), self.residual_shape, list(model.parameters()))
        rows, length, _ = self.residual_shape
        more = rows * length * (self.model.per_layer_input_size or 0) * self.build.dtype.itemsize if whole else 0
        return replace(part, kept=part.kept + more, forward=part.forward + more, backward=part.backward + more)

    def _add_stand_ins(self, context: ForwardContext, index: int) -> ForwardContext:
        """Return the context with stand-ins for inputs of layers, and for keys and values of an earlier layer."""
        (rows, length, _), own = self.residual_shape, self.model.get_layer_config(index)
        if size := self.model.per_layer_input_size:
            context = replace(context, layer_inputs=[self._make_input((rows, length, size))] * self.model.num_layers)
        if not own.has_own_keys:
            heads = max(1, own.key_value_heads // self.run.tp)
            shape = (rows, self.tokens_per_context_rank, heads, own.query_key_head_dim)
            context.key_values[own.get_attention_window(index)] = (0, self._make_input(shape), self._make_input(shape))
        return context

    def _count_retrieval_layer(self, model: RetroDecoder, context: ForwardContext) -> ModelPartMemoryBytes:
        """Count a layer of a model with retrieval: a stage holds the neighbors once as given and once encoded."""
        assert context.source is not None
        rows, _, width = self.residual_shape
        neighbors = self._make_input((rows, context.source.length, width))
        own = with_encoder_memory(context, model.unpack_neighbors(neighbors))

        def run_retrieval_layer(x: Tensor) -> Tensor:
            output: Tensor | tuple[Tensor, Tensor] = model.saved.run_layer(0, model.layers[0], x, own)
            return output[0] if isinstance(output, tuple) else output

        part = self._count_part(model, run_retrieval_layer, self.residual_shape, list(model.parameters()))
        if not isinstance(model.layers[0], NeighborEncodingLayer):
            return part
        more = neighbors.numel() * neighbors.element_size()
        return replace(part, kept=part.kept + more, forward=part.forward + more, backward=part.backward + more)

    def count_embedding_memory(self, *, alone: bool) -> ModelPartMemoryBytes:
        """Return the memory of the first stage's embedding and of the vision encoder.
        The stage also has the head if `alone`; the vision encoder gets as many images as fit in a sequence.
        """
        with self.fake_tensor_context():
            model = self._make_decoder(PipelineStageLayers(0, 0, True, alone))
            parameters = [
                p for unit in model.list_parameter_units()[: 1 + (model.vision is not None)] for p in unit.parameters
            ]
            batch, context = self._make_batch(), self._make_context(model)

            def embed(_: Tensor) -> Tensor:
                return model.embed_micro_batch(replace(batch, images=model.encode_images(batch.images)), context)

            return self._count_part(model, embed, None, parameters)

    def count_head_memory(self, *, alone: bool, has_embedding_and_head: bool) -> ModelPartMemoryBytes:
        """Return the memory of the last norm, the output head and its loss, and the MTP layers.
        `alone` means that the stage also has the embedding. MTP is multi-token prediction.
        """
        with self.fake_tensor_context():
            kind = self.run.recompute if self.run.recompute_layers is None else "none"
            last = self.model.num_layers
            model = self._make_decoder(PipelineStageLayers(last, last, alone, True, has_embedding_and_head), kind)
            context, batch = self._make_context(model), self._make_batch()
            borrowed = self._make_tied_weight() if model.borrows else None
            before = int(alone) + (model.vision is not None)
            own = [p for unit in model.list_parameter_units()[before:] for p in unit.parameters]

            def compute_objective(x: Tensor) -> Tensor:
                return model.compute_objective(x, batch, context, borrowed)[0]

            rows, length, width = self.residual_shape
            width = self.model.hidden_size if self.model.has_shortcuts else width
            return self._count_part(model, compute_objective, (rows, length, width), own)

    def count_rotary_embedding_bytes(self) -> int:
        """Return the bytes of the rotary embeddings, which all layers of a micro-batch share."""
        with self.fake_tensor_context():
            model = self._make_decoder(PipelineStageLayers(0, 0, False, False))
            with self.live:
                before = self.live.now
                context = self._make_context(model)
                after = self.live.now
            del context
            return after - before

    @property
    def tokens_per_context_rank(self) -> int:
        """Tokens of one sample on one context-parallel rank, before sequence parallelism.
        In an encoder-decoder model, they are the decoder's tokens.
        """
        return (self.run.target_length or self.run.seq_length) // self.run.cp

    @property
    def residual_shape(self) -> tuple[int, ...]:
        """Shape of the hidden states of one micro-batch on one rank."""
        return (
            self.run.micro_batch,
            self.tokens_per_context_rank // (self.run.tp if self.run.sp else 1),
            self.model.stream_width,
        )

    def _stack_shape(self, *, encodes: bool) -> tuple[int, ...]:
        """Return the shape of the hidden states of the encoder, or of the decoder."""
        rows, length, width = self.residual_shape
        return (rows, length * self.run.seq_length // (self.run.target_length or 1) if encodes else length, width)

    def _make_decoder(self, stage: PipelineStageLayers, kind: RecomputeKind = "none") -> Decoder:
        """Return one pipeline stage of the model in training mode."""
        modules = cast("tuple[RecomputedModule, ...]", self.run.modules)
        decoder = select_model_class(self.model)(self.build, stage, RecomputePolicy(kind, modules=modules)).train()
        freeze_parameters(decoder, partial(is_trainable_tensor, freeze=self.run.freeze, lora=self.lora))
        return decoder

    def _make_batch(self) -> MicroBatch:
        """Return an empty micro-batch."""
        shape = (self.run.micro_batch, self.tokens_per_context_rank)
        ids, weights = torch.zeros(shape, dtype=torch.int64, device=self.device), torch.zeros(shape, device=self.device)
        ahead = [MtpTargets(ids, ids, weights)] * self.model.mtp_layers
        bounds = DocumentBounds([self.run.seq_length] * self.run.micro_batch)
        pairs = SegmentOrderTargets(ids[:, 0], weights[:, 0]) if self.model.sentence_pairs else None
        types = ids if self.model.token_types else None
        samples = list(range(self.run.micro_batch))
        whole = MicroBatch(
            ids,
            ids,
            weights,
            ids,
            bounds,
            samples,
            ahead,
            token_types=types,
            segment_order=pairs,
            images=self._make_images(ids),
        )
        if retro := self.model.retro:
            chunks = self.tokens_per_context_rank // retro.chunk_length, retro.neighbors, retro.neighbor_length
            found = torch.zeros(shape[0], *chunks, dtype=torch.int64, device=self.device)
            of_each = DocumentBounds([retro.neighbor_length] * (shape[0] * math.prod(chunks[:2])))
            return replace(whole, neighbors=RetrievedNeighbors(found, of_each, None))
        if not self.model.encoder:
            return whole
        read = torch.zeros(shape[0], self.run.seq_length // self.run.cp, dtype=torch.int64, device=self.device)
        return replace(whole, source=EncoderBatch(read, read, bounds, None))

    def _make_images(self, ids: Tensor) -> BatchImages | None:
        """Return as many images as fit in a sequence, or None.
        Activations of a module of transformers are not measured.
        """
        vision = self.model.vision
        if vision is None or vision.module is not None:
            return None
        count, size = self.run.micro_batch * (self.run.seq_length // vision.tokens_per_image), vision.image_size
        squares = torch.empty(count, 3, size, size, device=self.device)
        if vision.native is None:
            return BatchImages(squares, ids)
        return BatchImages(list(squares), ids, positions=torch.stack([ids] * 3))

    def _make_context(self, model: Decoder) -> ForwardContext:
        """Return the context of an empty micro-batch."""
        routing = MicroBatchRouting(None, None, 1.0, 1.0) if self.model.moe or self.model.trains_indexer else None
        return model.make_batch_context(self._make_batch(), self._make_dropout, routing)

    def _make_dropout(self, length: int, kind: int) -> SeededDropout | None:
        """Return dropout without masks, or None if the model has no dropout."""
        model = self.model
        adapters = self.lora is not None and self.lora.dropout
        if not (model.embedding_dropout or model.residual_dropout or model.attention_dropout or adapters):
            return None
        groups, whole = self.groups, length * self.run.cp
        ranges = [residual_stream_token_ranges(whole, groups.cp, groups.tp, sp=sp) for sp in (self.run.sp, False)]
        return MetaDropout(0, range(self.run.micro_batch), *ranges)

    def _make_tied_weight(self) -> Tensor:
        """Return a stand-in for the tied embedding of another stage."""
        rows = -(-self.model.vocab_size // self.run.tp)
        return self._make_input((rows, self.model.embedding_width))

    def _make_input(self, shape: Sequence[int]) -> Tensor:
        """Return an empty tensor that requires a gradient."""
        return torch.empty(tuple(shape), dtype=self.build.dtype, device=self.device, requires_grad=True)

    def _count_part(
        self, model: Decoder, forward: Callable[[Tensor], Tensor], shape: Sequence[int] | None, own: Sequence[nn.Parameter]
    ) -> ModelPartMemoryBytes:  # fmt: skip
        """Return the memory of a forward and backward of one part."""
        buffers = self._attach_gradients(model)
        seed, live = torch.empty(0, device=self.device, requires_grad=True), self.live
        with live:
            before = live.now
            x = None if shape is None else MetaActivation.apply(seed, shape, self.build.dtype)  # type: ignore[no-untyped-call]
            live.reset_peak()
            y = forward(x)  # type: ignore[arg-type]
            del x
            forward_peak, edge, like = live.peak, get_gradient_edge(y) if y.requires_grad else None, (y.shape, y.dtype)
            del y
            kept, sizes = live.now - before, list(live.storage_sizes)
            backward_peak = before if edge is None else self._backward_peak(edge, *like)
            del edge
            left = live.now - before
        del buffers
        small = sum(size for size in sizes if size < self.run.offload_min_bytes)
        deferred_wgrad = left if self.run.defers_wgrads else 0
        for parameter in model.parameters():
            parameter.grad = None
        if self.build.deferred is not None:
            self.build.deferred.take_all_wgrads()
        weights = WeightCounts.from_parameters(own, self.build)
        return ModelPartMemoryBytes(kept, small, forward_peak - before, backward_peak - before, deferred_wgrad, weights)

    def _backward_peak(self, edge: GradientEdge, shape: torch.Size, dtype: torch.dtype) -> int:
        """Return the peak bytes of a backward."""
        dy = torch.empty(shape, dtype=dtype, device=self.device)
        self.live.reset_peak()
        torch.autograd.backward([edge], [dy])
        return self.live.peak

    def _attach_gradients(self, model: Decoder) -> list[Tensor]:
        """Attach a gradient buffer to every parameter, or free its gradient as soon as it is complete."""
        buffers = []
        dtype = torch.promote_types(self.build.dtype, torch.float32)
        for parameter in filter(is_trainable, model.parameters()):
            if self.run.zero < 3 and get_parameter_info(parameter).accumulate_in_place:
                buffer = torch.empty(parameter.shape, dtype=dtype, device=self.device)
                buffers.append(buffer)
                parameter.main_grad = lambda buffer=buffer: (buffer, True)  # type: ignore[attr-defined]
            if not self.run.defers_wgrads and self.run.zero < 3:  # ZeRO-3 keeps them until their unit is complete
                parameter.register_post_accumulate_grad_hook(_free_gradient)  # type: ignore[no-untyped-call]
        return buffers


def _free_gradient(parameter: Tensor) -> None:
    """Free the gradient of a parameter."""
    parameter.grad = None


@dataclass(frozen=True)
class ModelPartMemory:
    """Memory of all parts of one model in one layout: layers, embedding and head.

    Attributes:
        layers: memory of each layer.
        whole: memory of each layer if it is recomputed as a whole.
        embedding, head: memory of the embedding on the first stage and of the head on the last.
        context: bytes that the layers of a micro-batch share, held until the end of a step.
    """

    layers: tuple[ModelPartMemoryBytes, ...]
    whole: tuple[ModelPartMemoryBytes, ...]
    embedding: ModelPartMemoryBytes
    head: ModelPartMemoryBytes
    context: int


def count_model_part_memory(model: ModelConfig, run: TrainingLayout) -> ModelPartMemory:
    """Return the memory of all parts of a model.
    The result is cached and shared by all layouts whose ranks hold equal parts.
    """
    alone, has_embedding_and_head = run.pp * run.virtual_stages == 1, run.schedule in V_SHAPED
    bare = replace(
        run, microbatches=1, pp=1, virtual_stages=1, schedule="zb-h1" if run.defers_wgrads else "1f1b", pipeline_layout=None,
        offload=0, offload_optimizer=False, fp8_layers=range(0), zero=3 if run.is_zero3_sharded else 0, zero3_layers=None,
        zero3_shard=None, zero3_gather="micro_batch", bucket_elements=None, muon=False, soap_width=None, overlap_expert_exchange=False, dp=_minimum_data_ranks(run),
    )  # fmt: skip
    return _count_parts(model.model_dump_json(exclude_unset=True), bare, alone, has_embedding_and_head)


def _minimum_data_ranks(run: TrainingLayout) -> int:
    """Return the smallest number of data ranks that holds the experts; more do not change a rank's micro-batch."""
    return math.lcm(run.ep * run.expert_tp, run.tp * run.cp) // (run.tp * run.cp)


def _trainable_by_layer(
    model: ModelConfig, run: TrainingLayout, adapts: Mapping[str, AdaptedModule]
) -> dict[int, list[object]]:
    """Return the trainable tensors and adapters of each layer, to distinguish layers that are only partly trained."""
    names: dict[int, list[object]] = defaultdict(list)
    if run.freeze or adapts:
        moving = [
            (name, None)
            for name in canonical_tensors(model)
            if is_trainable_tensor(name, run.freeze, parse_run_lora(run))
        ]
        for name, rank in [*moving, *((name, of.rank) for name, of in adapts.items())]:
            if found := re.match(r"model\.layers\.(\d+)\.(.+)", name):
                names[int(found[1])].append((found[2], rank))
    return names


@lru_cache(maxsize=4096)
def _count_parts(text: str, run: TrainingLayout, alone: bool, has_embedding_and_head: bool) -> ModelPartMemory:
    """Return the memory of all parts; layers of one kind are counted once."""
    model = ModelConfig.model_validate_json(text)
    counter = PartMemoryCounter(model, run)
    names = _trainable_by_layer(model, run, counter.build.adapts)
    kinds: dict[object, ModelPartMemoryBytes] = {}
    wholes: dict[object, ModelPartMemoryBytes] = {}
    layers, whole = [], []
    for index in range(model.num_layers):
        normed, own = index > 0 or model.first_norm, names[index] if names else ()
        kind = (
            model.get_layer_kind(index),
            model.get_attention_window(index),
            model.has_rotary_positions(index),
            model.is_encoder_layer(index),
            normed,
            *own,
        )
        kind += (
            model.shares_keys(index),
            model.has_cross_attention(index),
            index == min(model.retrieval_layers, default=None),
        )
        if kind not in kinds:
            kinds[kind] = counter.count_layer_memory(index, whole=False)
            wholes[kind] = counter.count_layer_memory(index, whole=True) if run.recompute == "full" else kinds[kind]
        layers.append(kinds[kind])
        whole.append(wholes[kind])
    embedding, head = (
        counter.count_embedding_memory(alone=alone),
        counter.count_head_memory(alone=alone, has_embedding_and_head=has_embedding_and_head),
    )
    return ModelPartMemory(tuple(layers), tuple(whole), embedding, head, counter.count_rotary_embedding_bytes())
