"""What the parts of a model hold while they are trained, counted on the trainer's own modules, which compute nothing.

A part is one layer of each kind that a model has, the embedding, or the head with its loss and what predicts further tokens.
It goes forward and backward on the meta device, under the run's recomputation and split as the run splits it, in groups where
nobody is there, while the bytes of all tensors that it makes are counted. A part that is planned for a GPU goes as one does:
a leaf is one kernel, attention keeps no scores, products are added into fp32 where they belong.

Experts are given an even load.
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

from mega_ckpt.lora import Adapted, adapted, packed_tensors
from mega_ckpt.names import tensors_of
from mega_common.lora import is_trained
from mega_common.model_config import ModelConfig
from mega_trainer.batch import Ahead, MicroBatch, NeighborBatch, Outline, Pairs, SourceBatch
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.layout import Layout
from mega_trainer.mesh import build_groups
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.cross import remembering
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import EncoderDecoder, model_class
from mega_trainer.model.recompute import Module, Recompute
from mega_trainer.model.retro import EncodingBlock, Retro
from mega_trainer.model.routing import Routing
from mega_trainer.model.stage import Stage
from mega_trainer.model.vision.images import Images
from mega_trainer.optim.muon import is_hidden_matrix
from mega_trainer.parallel.context import places_of_residual
from mega_trainer.parallel.deferred import Deferred
from mega_trainer.parallel.expert import AllToAll, Dispatcher
from mega_trainer.parallel.param import freeze, info_of, packed_of, trains
from mega_trainer.plan.live import FusedLeaves, Live
from mega_trainer.plan.shape import RecomputeKind, RunShape
from mega_trainer.plan.stand_ins import (
    EvenAllToAll,
    FusedAttention,
    HollowKernels,
    HollowPacking,
    Nobody,
    Source,
    UndrawnDropout,
)
from mega_trainer.plan.trained import lora_of
from mega_trainer.rng import Dropout

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Weights:
    """Numbers of elements of a rank's parameters.

    Attributes:
        dense, experts: all that are kept in full, by whom their gradients are summed over.
        packed: bytes of those that are kept in few bits.
        moved, moved_experts: of them, those that are trained.
        dense_matrices, expert_matrices: of these, those that Muon is for.
        largest: of one parameter that is trained.
    """

    dense: int = 0
    experts: int = 0
    moved: int = 0
    moved_experts: int = 0
    dense_matrices: int = 0
    expert_matrices: int = 0
    largest: int = 0
    packed: int = 0

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], build: Builder) -> Weights:
        """Of some parameters."""
        packed = [each for each in map(packed_of, parameters) if each is not None]
        parameters = [parameter for parameter in parameters if packed_of(parameter) is None]
        apart = [info_of(p).data is build.groups.expert_data and info_of(p).split is not None for p in parameters]
        dense, experts = (
            [parameter for parameter, expert in zip(parameters, apart, strict=True) if expert is which]
            for which in (False, True)
        )
        moved, moved_experts = (list(filter(trains, those)) for those in (dense, experts))
        return cls(
            _elements(dense), _elements(experts), _elements(moved), _elements(moved_experts),
            _elements(filter(is_hidden_matrix, moved)), _elements(filter(is_hidden_matrix, moved_experts)),
            max((p.numel() for p in moved + moved_experts), default=0), sum(each.nbytes for each in packed),
        )  # fmt: skip

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.dense + other.dense, self.experts + other.experts, self.moved + other.moved,
            self.moved_experts + other.moved_experts, self.dense_matrices + other.dense_matrices,
            self.expert_matrices + other.expert_matrices, max(self.largest, other.largest), self.packed + other.packed,
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Bytes of one micro-batch on one rank.

    Attributes:
        kept: from forward to backward.
        small: of these, what is too small to be offloaded.
        forward: the most at a time in its forward, its input and output with it.
        backward: the most at a time in its backward, what it kept and the gradient that it is given with it.
        put_off: what is left where products for weight gradients are put off.
        weights: its parameters.
    """

    kept: int
    small: int
    forward: int
    backward: int
    put_off: int
    weights: Weights


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


class Counter:
    """Counts the parts of one model in one layout.

    Args:
        model: which.
        run: its split; micro-batches and pipeline ranks do not matter.
    """

    def __init__(self, model: ModelConfig, run: RunShape) -> None:
        self.model, self.run, self.live, self.lora = model, run, Live(), lora_of(run)
        self.device = torch.device("cpu" if run.device == "cpu" else "meta")
        layout = Layout(tp=run.tp, cp=run.cp, dp=run.dp, ep=run.ep, expert_tp=run.expert_tp)
        self.groups = build_groups(layout, 0, heads=model.shared_heads, shard=run.zero3_shard, maker=Nobody())
        leaves = Leaves() if run.device == "cpu" else FusedLeaves(self.live)
        kernels = HollowKernels(leaves) if run.device == "cpu" else HollowKernels(leaves, FusedAttention())
        self.build = Builder(
            model, self.groups, kernels, leaves, sp=run.sp, cp_kind=run.cp_kind,
            dispatcher=self._dispatcher(), dtype=DTYPES.get(run.precision, torch.bfloat16), device=self.device,
            deferred=Deferred() if run.puts_off else None, adapts={} if self.lora is None else adapted(model, self.lora),
            packed=packed_tensors(model, self.lora, partial(is_trained, freeze=run.freeze, lora=self.lora)),
            packing=HollowPacking(),
        )  # fmt: skip

    def _dispatcher(self) -> Dispatcher | None:
        moe, run = self.model.moe, self.run
        if moe is None or self.groups.ep.size == 1:
            return None
        if run.dispatch_bound is not None:
            return AllToAll(moe.num_experts, self.groups.ep, run.expert_tp, run.dispatch_bound)
        return EvenAllToAll(moe.num_experts, self.groups.ep, run.expert_tp, 1.0)

    def stack(self) -> ExitStack:
        """Within which tensors hold nothing."""
        stack = ExitStack()
        if self.device.type == "cpu":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return stack

    def layer(self, index: int, *, whole: bool) -> Part:
        """The model's layer `index`, computed again as a `whole` or as the run says otherwise."""
        with self.stack():
            kind: RecomputeKind = "full" if whole else "none" if self.run.recompute == "full" else self.run.recompute
            model = self._decoder(Stage(index, index + 1, embeds=False, heads=False), kind)
            context = self._context(model)
            if isinstance(model, Retro):
                return self._reading_layer(model, context)
            if not isinstance(model, EncoderDecoder):
                return self._count(model, lambda x: model(x, context), self.residual, list(model.parameters()))
            encodes, read = self.model.encodes(index), self._stream(encodes=True)
            rows, memory = (self._given(shape) for shape in ((1, model.table_rows, read[-1]), read))
            own = model.contexts(context, rows)[0 if encodes else 1]
            forward = partial(model.saved.layer, 0, model.layers[0])
            context = own if encodes else remembering(own, memory)
            shape = self._stream(encodes=encodes)
            return self._count(model, lambda x: forward(x, context), shape, list(model.parameters()))

    def _reading_layer(self, model: Retro, context: Context) -> Part:
        """Of a model with retrieval: a stage has the neighbours once, as it is given them and as they are encoded."""
        assert context.source is not None
        rows, _, width = self.residual
        given = self._given((rows, context.source.length, width))
        own = remembering(context, model.rows(given))

        def forward(x: Tensor) -> Tensor:
            made: Tensor | tuple[Tensor, Tensor] = model.saved.layer(0, model.layers[0], x, own)
            return made[0] if isinstance(made, tuple) else made

        part = self._count(model, forward, self.residual, list(model.parameters()))
        if not isinstance(model.layers[0], EncodingBlock):
            return part
        more = given.numel() * given.element_size()
        return replace(part, kept=part.kept + more, forward=part.forward + more, backward=part.backward + more)

    def embedding(self, *, alone: bool) -> Part:
        """Of the stage with the embedding, which has the head too where it is `alone`; and with what sees images.

        Of these there are as many as a sequence has room for.
        """
        with self.stack():
            model = self._decoder(Stage(0, 0, True, alone))
            parameters = [p for unit in model.units()[: 1 + (model.vision is not None)] for p in unit.parameters]
            begin = partial(model.begin, self._batch(), self._context(model))
            return self._count(model, lambda x: begin(), None, parameters)

    def head(self, *, alone: bool, ends_meet: bool) -> Part:
        """The last norm, the head and its loss, and the layers that predict further tokens."""
        with self.stack():
            kind = self.run.recompute if self.run.recompute_layers is None else "none"
            last = self.model.num_layers
            model = self._decoder(Stage(last, last, alone, True, ends_meet), kind)
            context, batch = self._context(model), self._batch()
            borrowed = self._borrowed() if model.borrows else None
            before = int(alone) + (model.vision is not None)
            own = [p for unit in model.units()[before:] for p in unit.parameters]

            def objective(x: Tensor) -> Tensor:
                return model.objective(x, batch, context, borrowed)[0]

            return self._count(model, objective, self.residual, own)

    def context_bytes(self) -> int:
        """What a micro-batch's layers share: the rotation."""
        with self.stack():
            model = self._decoder(Stage(0, 0, False, False))
            with self.live:
                before = self.live.now
                context = self._context(model)
                after = self.live.now
            del context
            return after - before

    @property
    def tokens(self) -> int:
        """S of a rank, the decoder's of an encoder-decoder."""
        return (self.run.target_length or self.run.seq_length) // self.run.cp

    @property
    def residual(self) -> tuple[int, ...]:
        """The shape of the residual stream."""
        return self.run.micro_batch, self.tokens // (self.run.tp if self.run.sp else 1), self.model.hidden_size

    def _stream(self, *, encodes: bool) -> tuple[int, ...]:
        """The shape of what a layer of the encoder works on, or one of the decoder."""
        rows, length, width = self.residual
        return (rows, length * self.run.seq_length // (self.run.target_length or 1) if encodes else length, width)

    def _decoder(self, stage: Stage, kind: RecomputeKind = "none") -> Decoder:
        modules = cast("tuple[Module, ...]", self.run.modules)
        decoder = model_class(self.model)(self.build, stage, Recompute(kind, modules=modules)).train()
        freeze(decoder, partial(is_trained, freeze=self.run.freeze, lora=self.lora))
        return decoder

    def _batch(self) -> MicroBatch:
        shape = (self.run.micro_batch, self.tokens)
        ids, weights = torch.zeros(shape, dtype=torch.int64, device=self.device), torch.zeros(shape, device=self.device)
        ahead = [Ahead(ids, ids, weights)] * self.model.mtp_layers
        outline = Outline([self.run.seq_length] * self.run.micro_batch)
        pairs = Pairs(ids[:, 0], weights[:, 0]) if self.model.sentence_pairs else None
        types = ids if self.model.token_types else None
        samples = list(range(self.run.micro_batch))
        whole = MicroBatch(
            ids, ids, weights, ids, outline, samples, ahead, types=types, pairs=pairs, images=self._images(ids)
        )
        if retro := self.model.retro:
            chunks = self.tokens // retro.chunk_length, retro.neighbors, retro.neighbor_length
            found = torch.zeros(shape[0], *chunks, dtype=torch.int64, device=self.device)
            of_each = Outline([retro.neighbor_length] * (shape[0] * math.prod(chunks[:2])))
            return replace(whole, neighbors=NeighborBatch(found, of_each, None))
        if not self.model.encoder:
            return whole
        read = torch.zeros(shape[0], self.run.seq_length // self.run.cp, dtype=torch.int64, device=self.device)
        return replace(whole, source=SourceBatch(read, read, outline, None))

    def _images(self, ids: Tensor) -> Images | None:
        vision = self.model.vision
        if vision is None:
            return None
        count, size = self.run.micro_batch * (self.run.seq_length // vision.tokens), vision.image_size
        squares = torch.empty(count, 3, size, size, device=self.device)
        if vision.native is None:
            return Images(squares, ids)
        return Images(list(squares), ids, positions=torch.stack([ids] * 3))

    def _context(self, model: Decoder) -> Context:
        routing = Routing(None, None, 1.0, 1.0) if self.model.moe else None
        return model.context_of(self._batch(), self._dropout, routing)

    def _dropout(self, length: int, kind: int) -> Dropout | None:
        model = self.model
        beside = self.lora is not None and self.lora.dropout
        if not (model.embedding_dropout or model.residual_dropout or model.attention_dropout or beside):
            return None
        groups, whole = self.groups, length * self.run.cp
        places = [places_of_residual(whole, groups.cp, groups.tp, sp=sp) for sp in (self.run.sp, False)]
        return UndrawnDropout(0, range(self.run.micro_batch), *places)

    def _borrowed(self) -> Tensor:
        rows = -(-self.model.vocab_size // self.run.tp)
        return self._given((rows, self.model.hidden_size))

    def _given(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.build.dtype, device=self.device, requires_grad=True)

    def _count(
        self, model: Decoder, forward: Callable[[Tensor], Tensor], shape: Sequence[int] | None, own: Sequence[nn.Parameter]
    ) -> Part:  # fmt: skip
        places = self._place_gradients(model)
        seed, live = torch.empty(0, device=self.device, requires_grad=True), self.live
        with live:
            before = live.now
            x = None if shape is None else Source.apply(seed, shape, self.build.dtype)  # type: ignore[no-untyped-call]
            live.mark()
            y = forward(x)  # type: ignore[arg-type]
            del x
            forward_peak, edge, like = live.peak, get_gradient_edge(y) if y.requires_grad else None, (y.shape, y.dtype)
            del y
            kept, sizes = live.now - before, list(live.sizes)
            backward_peak = before if edge is None else self._backward(edge, *like)
            del edge
            left = live.now - before
        del places
        small = sum(size for size in sizes if size < self.run.offload_min_bytes)
        put_off = left if self.run.puts_off else 0
        for parameter in model.parameters():
            parameter.grad = None
        if self.build.deferred is not None:
            self.build.deferred.take()
        weights = Weights.of(own, self.build)
        return Part(kept, small, forward_peak - before, backward_peak - before, put_off, weights)

    def _backward(self, edge: GradientEdge, shape: torch.Size, dtype: torch.dtype) -> int:
        dy = torch.empty(shape, dtype=dtype, device=self.device)
        self.live.mark()
        torch.autograd.backward([edge], [dy])
        return self.live.peak

    def _place_gradients(self, model: Decoder) -> list[Tensor]:
        """Give every gradient the place that a bucket has for it, or drop it when it is there, as one that has taken it."""
        places = []
        for parameter in filter(trains, model.parameters()):
            if self.run.zero < 3 and info_of(parameter).straight:
                place = torch.empty(
                    parameter.shape, dtype=torch.promote_types(self.build.dtype, torch.float32), device=self.device
                )
                places.append(place)
                parameter.main_grad = lambda place=place: (place, True)  # type: ignore[attr-defined]
            if not self.run.puts_off and self.run.zero < 3:  # there they wait for those of their unit
                parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        return places


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


@dataclass(frozen=True)
class Parts:
    """All parts of a model in one layout.

    Attributes:
        layers: of each, behind the model's own.
        whole: the same, computed again as a whole.
        embedding, head: of the first stage and the last.
        context: bytes that the layers of a micro-batch share, to the end of a step.
    """

    layers: tuple[Part, ...]
    whole: tuple[Part, ...]
    embedding: Part
    head: Part
    context: int


def parts_of(model: ModelConfig, run: RunShape) -> Parts:
    """Count them, once for all layouts whose ranks have the same."""
    alone, ends_meet = run.pp * run.virtual_stages == 1, run.schedule == "zbv"
    bare = replace(
        run, microbatches=1, pp=1, virtual_stages=1, schedule="zb-h1" if run.puts_off else "1f1b", pipeline_layout=None,
        offload=0, offload_optimizer=False, eight_bits=range(0), zero=3 if run.sharded else 0, zero3_layers=None,
        zero3_shard=None, bucket_elements=None, muon=False, dp=_fewest(run),
    )  # fmt: skip
    return _parts(model.model_dump_json(exclude_unset=True), bare, alone, ends_meet)


def _fewest(run: RunShape) -> int:
    """Data ranks enough for the experts: more do not change what a rank holds of a micro-batch."""
    return math.lcm(run.ep * run.expert_tp, run.tp * run.cp) // (run.tp * run.cp)


def _trained(model: ModelConfig, run: RunShape, adapts: Mapping[str, Adapted]) -> dict[int, list[object]]:
    """What distinguishes layers of a kind, where not all of a model is trained: which of their tensors are, and their adapters."""
    names: dict[int, list[object]] = defaultdict(list)
    if run.freeze or adapts:
        moving = [(name, None) for name in tensors_of(model) if is_trained(name, run.freeze, lora_of(run))]
        for name, rank in [*moving, *((name, of.rank) for name, of in adapts.items())]:
            if found := re.match(r"model\.layers\.(\d+)\.(.+)", name):
                names[int(found[1])].append((found[2], rank))
    return names


@lru_cache(maxsize=4096)
def _parts(text: str, run: RunShape, alone: bool, ends_meet: bool) -> Parts:
    model = ModelConfig.model_validate_json(text)
    counter = Counter(model, run)
    names = _trained(model, run, counter.build.adapts)
    kinds: dict[object, Part] = {}
    wholes: dict[object, Part] = {}
    layers, whole = [], []
    for index in range(model.num_layers):
        normed, own = index > 0 or model.first_norm, names[index] if names else ()
        kind = (model.kind(index), model.window(index), model.rotates(index), model.encodes(index), normed, *own)
        kind += (model.crosses(index), index == min(model.retro_layers, default=None))
        if kind not in kinds:
            kinds[kind] = counter.layer(index, whole=False)
            wholes[kind] = counter.layer(index, whole=True) if run.recompute == "full" else kinds[kind]
        layers.append(kinds[kind])
        whole.append(wholes[kind])
    embedding, head = counter.embedding(alone=alone), counter.head(alone=alone, ends_meet=ends_meet)
    return Parts(tuple(layers), tuple(whole), embedding, head, counter.context_bytes())
