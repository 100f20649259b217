"""CUDA graphs of layers: the kernels of a layer's forward, and of its backward, are launched as one.

The graphs of all layers of a model are captured at once, in the first forward of training, by
`torch.cuda.make_graphed_callables`. They read and write fixed addresses:

    input and output of a layer, and their gradients    of the graph; copied from and to the layers around it
    rotary angles                                       one copy for all layers, written once a micro-batch
    weights, main gradients                             those of the flat buffers

A captured backward adds to the main gradients. Before the first one of a step they are set to zero, which gives the same sums.
Calls of another kind (validation, other shapes) run the layer itself.

This module has not run on a GPU yet.

Legend: B batch, S sequence, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.parallel.parameter_info import get_main_grad_function

GradViews = Mapping[nn.Parameter, Tensor]  # main gradients by parameter


@dataclass(eq=False)
class LayerGraphs:
    """CUDA graphs of some layers of a model, which are captured together.

    Attributes:
        layers: in the order of the forward.
    """

    layers: list[GraphedLayer] = field(default_factory=list)
    _static: ForwardContext | None = None  # read by the graphs
    _loaded: ForwardContext | None = None  # copied to `_static`
    _shape: torch.Size | None = None
    _calls: dict[GraphedLayer, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def prepare_replay(self, x: Tensor, context: ForwardContext) -> bool:
        """Return whether the CUDA graphs, captured by the first call, can run for x; if so, copy the context's values in."""
        if not (torch.is_grad_enabled() and has_static_shapes(context)):
            return False
        if self._static is None and not self._capture(x, context):
            return False
        assert self._static is not None
        if x.shape != self._shape or _context_shapes(context) != _context_shapes(self._static):
            return False
        if context is not self._loaded:
            for static, value in zip(_context_tensors(self._static), _context_tensors(context), strict=True):
                static.copy_(value)
            self._loaded = context
        return True

    def replay_layer(self, layer: GraphedLayer, x: Tensor) -> Tensor:
        """Return the output [B, S, D] of a layer by its graph; its backward is a graph too."""
        y: Tensor = _BeginBackward.apply(self._calls[layer](x), layer.main_grad_parameters)  # type: ignore[no-untyped-call]
        return y

    def _capture(self, x: Tensor, context: ForwardContext) -> bool:
        """Capture the graphs of all layers; return False, and capture none, if a step has gradients already."""
        parameters = [parameter for layer in self.layers for parameter in layer.main_grad_parameters]
        views, fresh = _take_main_grads(parameters)
        if len(fresh) == len(views):
            self._shape, self._static = x.shape, _copy_context(context)
            calls = tuple(_LayerCall(layer.layer, self._static) for layer in self.layers)
            samples = tuple((x.detach().clone().requires_grad_(),) for _ in calls)
            with _added_main_grads(views):
                graphed = torch.cuda.make_graphed_callables(calls, samples, allow_unused_input=True)
            self._calls = dict(zip(self.layers, cast("Sequence[Callable[[Tensor], Tensor]]", graphed), strict=True))
        _set_to_zero(fresh)  # also what the passes before the capture have added
        return len(fresh) == len(views)


class GraphedLayer(nn.Module):
    """Layer whose forward and backward run as CUDA graphs in training on inputs of the captured shape."""

    def __init__(self, layer: nn.Module, graphs: LayerGraphs) -> None:
        super().__init__()
        self.layer, self.graphs = layer, graphs
        graphs.layers.append(self)

    @property
    def main_grad_parameters(self) -> list[nn.Parameter]:
        """Parameters of the layer with a main gradient in a flat buffer."""
        return [parameter for parameter in self.parameters() if hasattr(parameter, "main_grad")]

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the residual stream [B, S, D] after this layer, by its CUDA graph in training if it can run."""
        if self.training and self.graphs.prepare_replay(x, context):
            return self.graphs.replay_layer(self, x)
        y: Tensor = self.layer(x, context)
        return y


def graph_layers(layers: nn.ModuleList, indices: Sequence[int]) -> None:
    """Replace the layers with these indices by layers that run as CUDA graphs, captured together."""
    graphs = LayerGraphs()
    for index in indices:
        layers[index] = GraphedLayer(layers[index], graphs)


def has_static_shapes(context: ForwardContext) -> bool:
    """Return whether layers do the same for each micro-batch of equal size: no documents, cache or shared state."""
    mask = context.attention_mask
    whole = isinstance(mask, SequenceMask) and mask.document_starts is None and not mask.bidirectional_blocks
    others = (
        context.cache, context.relative, context.source, context.routes, context.positions,
        context.images, context.layer_inputs,
    )  # fmt: skip
    return whole and all(other is None for other in others)


class _LayerCall(nn.Module):
    """Layer as a function of its input alone, for the capture."""

    def __init__(self, layer: nn.Module, static: ForwardContext) -> None:
        super().__init__()
        self.layer, self.static = layer, static

    def forward(self, x: Tensor) -> Tensor:
        # new angles, as these keep what is computed from them, which the graph has to compute each time
        y: Tensor = self.layer(x, _with_angles(self.static, lambda tensor: tensor))
        return y


def _with_angles(context: ForwardContext, change: Callable[[Tensor], Tensor]) -> ForwardContext:
    rotations = [
        angles and RotaryAngles(change(angles.cos), change(angles.sin), angles.interleaved)
        for angles in (context.rotation, context.local_rotation)
    ]
    return replace(context, rotation=rotations[0], local_rotation=rotations[1])


def _copy_context(context: ForwardContext) -> ForwardContext:
    """Return a context with tensors of its own, and without the routing and dropout of a micro-batch."""
    scale = None if context.query_scale is None else context.query_scale.clone()
    return replace(_with_angles(context, torch.clone), query_scale=scale, routing=None, dropout=None)


def _context_tensors(context: ForwardContext) -> list[Tensor]:
    angles = [each for each in (context.rotation, context.local_rotation) if each is not None]
    scale = [] if context.query_scale is None else [context.query_scale]
    return [tensor for each in angles for tensor in (each.cos, each.sin)] + scale


def _context_shapes(context: ForwardContext) -> list[object]:
    mask = context.attention_mask
    assert isinstance(mask, SequenceMask)
    return [mask.length, mask.causal, *(tensor.shape for tensor in _context_tensors(context))]


def _take_main_grads(parameters: Sequence[nn.Parameter]) -> tuple[GradViews, list[Tensor]]:
    """Return the main gradients to which a backward adds, and those of them that still have the values of an earlier step."""
    views, fresh = {}, []
    for parameter in parameters:
        view, add = parameter.main_grad()  # type: ignore[attr-defined]
        views[parameter] = view
        fresh += [] if add else [view]
    return views, fresh


def _set_to_zero(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)


@contextmanager
def _added_main_grads(views: GradViews) -> Iterator[None]:
    """Context in which backwards add to main gradients without a call of the buckets, as in a graph.

    The hooks of the buckets keep the parameters' nodes, which would run on the stream on which they were made.
    """
    writers = {parameter: get_main_grad_function(parameter) for parameter in views}
    for parameter, view in views.items():
        parameter.main_grad = lambda view=view: (view, True)  # type: ignore[attr-defined]
    graph = torch.autograd.graph
    graph.set_override_stale_capture_stream(True)
    graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        graph.set_override_stale_capture_stream(False)
        graph.set_warn_on_accumulate_grad_stream_mismatch(True)
        for parameter, writer in writers.items():
            parameter.main_grad = writer  # type: ignore[attr-defined]


class _BeginBackward(Function):
    """Identity, whose backward makes the main gradients of a layer ready for the backward of its graph."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        ctx.parameters = parameters
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        _set_to_zero(_take_main_grads(ctx.parameters)[1])
        return dy, None
