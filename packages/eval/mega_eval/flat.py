"""A decoder's layers as calls of kernels alone, for generation on a CPU.

There a step for one text waits for calls of modules, and for their parameters to be looked up, a sixth of its time with 135
million weights and more with fewer. These are the same operations in the same order, so the results are the same bits.
Layers that are more than plain norms, attention and a gated feed-forward stay the modules that they are.

Legend: N tokens, each a batch row of its own, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mega_trainer.kernels.fused import gated_leaf, inverse_rms, rms_norm_leaf, wide
from mega_trainer.kernels.torch import TorchKernels
from mega_trainer.model.attention import Attention
from mega_trainer.model.block import Block, Half
from mega_trainer.model.cached import CachedAttention
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.mlp import Mlp
from mega_trainer.model.norms import Norm
from mega_trainer.parallel.param import keeper_of
from mega_trainer.parallel.tensor import ColumnLinear, RowLinear

Layer = Callable[[Tensor, Context], Tensor]  # the stream, or what is normed of it, [N, D] -> the same shape


def flat(model: Decoder) -> Layer:
    """The model's layers as a function of the stream [N, 1, D] and a context with a cache; or the model, where that is as fast.

    Weights are looked up now: a model whose weights are replaced by others wants another one.
    """
    if type(model) is not Decoder or model.device.type != "cpu" or model.groups.tp.size > 1:
        return model
    layers = [_layer(layer) for layer in model.layers]

    def run(x: Tensor, context: Context) -> Tensor:
        x = x.squeeze(1)
        for layer in layers:
            x = layer(x, context)
        return x.unsqueeze(1)

    return run


def _layer(layer: nn.Module) -> Layer:
    if type(layer) is not Block or layer.mixer is None or layer.feed is None or layer.cross or layer.parallel:
        return _module(layer)
    first, second = _norm(layer.mixer), _norm(layer.feed)
    if first is None or second is None:
        return _module(layer)
    mix, feed = _work(layer.mixer.work), _work(layer.feed.work)

    def run(x: Tensor, context: Context) -> Tensor:
        x = x + mix(first(x), context)
        return x + feed(second(x), context)

    return run


def _module(module: nn.Module) -> Callable[..., Tensor]:
    """A module as it is, which takes [N, 1, D]."""

    def run(x: Tensor, *context: Context) -> Tensor:
        y: Tensor = module(x.unsqueeze(1), *context)
        return y.squeeze(1)

    return run


def _norm(half: Half) -> Callable[[Tensor], Tensor] | None:
    """The norm before a half that has no other and no factor, as a leaf of plain torch."""
    norm = half.before
    if not isinstance(norm, Norm) or norm.layer or half.after is not None or half.multiplier != 1:
        return None
    if type(norm.kernels) is not TorchKernels or norm.kernels.leaves.compiled:
        return None
    weight, eps = norm.weight, norm.eps
    if norm.zero_centered or wide(weight) is not weight:
        return lambda x: rms_norm_leaf(x, weight, eps, norm.zero_centered)[0]
    count, added = weight.new_tensor(len(weight)), weight.new_tensor(eps)
    return lambda x: (x * inverse_rms(x, count, added)).mul_(weight)


def _work(work: nn.Module) -> Layer:
    if (
        isinstance(work, Attention)
        and work.rotates
        and not work.gated
        and work.relative is None
        and work.q_norm is None
    ):
        return _attention(work)
    if isinstance(work, Mlp) and work.config.gated:
        up, down, activation = _product(work.up), _product(work.down), work.config.activation
        limit = work.config.activation_limit
        return lambda x, context: down(gated_leaf(up(x), activation, limit))
    return _module(work)


def _attention(work: Attention) -> Layer:
    qkv, out, core, size = _product(work.qkv), _product(work.out), work.core, work.size
    layer, window, heads, kv_heads, rotate = core.layer, core.window, work.heads, work.kv_heads, core.kernels.rotate_qkv
    attend = CachedAttention(core.kernels, core.how)

    def run(x: Tensor, context: Context) -> Tensor:
        rotation, cache = context.rotation_within(window), context.cache
        assert rotation is not None
        assert cache is not None
        q, k, v = rotate(qkv(x).view(len(x), 1, -1, size), rotation, heads, kv_heads)
        return out(cache.attend(layer, q, k, v, window, attend).flatten(1))

    return run


def _product(linear: ColumnLinear | RowLinear) -> Callable[[Tensor], Tensor]:
    """A linear layer as torch's product alone, where it has no adapter and its weight is one that lies there as it is."""
    if isinstance(linear, RowLinear):
        weights, bias = [linear.weight], linear.bias
    else:
        weights, bias = [*linear.weights], next(iter(linear.biases), None)
    plain = type(linear.linear.products) is TorchKernels and linear.adapter is None
    if not plain or len(weights) > 1 or keeper_of(weights[0]) is not None:
        return _module(linear)
    factor = weights[0].t()
    return partial(torch.mm, mat2=factor) if bias is None else lambda x: torch.addmm(bias, x, factor)
