"""What training would cost an H100, counted without one: kernels, bytes of memory and FLOPs of each operation.

    python benchmarks/traffic.py [--seq 8192] [--operations]

Nothing is computed. Under fake tensors the trainer's own code runs one Llama-3-8B layer, the head with its loss, the gradient
buckets, the gradient norm and the update, attention of context ranks and of documents, in bf16; a dispatch mode adds up what
each aten operation reads and writes. Times are predictions, by a simple model of the machine that is the same for all:

    product of matrices     FLOPs / (75 % of 989 TFLOP/s), at least its bytes
    the same in fp8         twice as fast
    fused attention         FLOPs of what is seen / (60 % of 989 TFLOP/s)
    all else                bytes / (80 % of 3.35 TB/s)
    every kernel            at least 5 us

A leaf function, which a GPU runs compiled, is counted where it is called: one kernel that reads its arguments and writes its
results, two where it also sums over rows. So is a matrix quantised for two products: a tile of it is read once for both.
Products add into fp32 as on a GPU. Views and empty allocations are free; host time is not modelled.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
from predict import Compute, predictions
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.kernels import blockwise_attention, gemm_accumulation, grouped_gemm
from mega_trainer.kernels import fp8_kernels as fp8_kernels
from mega_trainer.kernels.attention_masks import CAUSAL, PackedDocumentMask
from mega_trainer.kernels.flash_attention import TorchFlashKernel
from mega_trainer.kernels.fp8_kernels import (
    KINDS,
    Fp8Kernels,
    Fp8Matrix,
    fusible_quantize,
    fusible_quantize_with_transpose,
)
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model import expert_router, vocab_parallel_loss
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.expert_router import select_experts
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.mixture_of_experts import MixtureOfExperts
from mega_trainer.model.rotary_embedding import RotaryEmbedding
from mega_trainer.optim import gradient_clipping
from mega_trainer.optim.adamw import AdamWUpdateRule
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel import async_all_to_all, expert_parallel, nvshmem_dispatch
from mega_trainer.parallel import context_parallel as context
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.gradient_buckets import GradientBucket
from mega_trainer.parallel.nvshmem_dispatch import NvshmemDispatcher
from mega_trainer.parallel.te_dispatch import TransformerEngineDispatcher
from mega_trainer.parallel.zero_buffers import ZeroConfig, flatten_parameters

MATMUL, ATTENTION, FP32, MEMORY, LAUNCH = 0.75 * 989e12, 0.60 * 989e12, 67e12, 0.80 * 3.35e12, 5e-6
D, FFN, HEADS, KV, HEAD, VOCAB = 4096, 14_336, 32, 8, 128, 128_256
CPU = torch.device("cpu")
# Of a micro-batch that is not the first of its step; of weights that FSDP gathers, whose gradients it takes.
LATER, GATHERED = ", later micro-batches", ", gathered weights"

PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "_grouped_mm"})
SUMS = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})  # of rows: each is read once, and so is its number
FREE = frozenset(
    [
        "empty",
        "detach",
        "alias",
        "view",
        "_unsafe_view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "as_strided",
        "unbind",
        "narrow",
        "new_empty",
        "empty_like",
        "empty_strided",
        "_local_scalar_dense",
        "lift_fresh",
        "scalar_tensor",
        "is_same_size",
        "promote_types",
        "resize_",
        "set_",
        "unsafe_split",
        "unsafe_chunk",
        "chunk",
    ]
)
WRITES = frozenset(
    [
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
        "arange",
        "zero_",
        "fill_",
    ]
)
PICKS = frozenset({"gather", "index", "embedding", "index_select"})
PUTS = frozenset(
    ["scatter_add_", "scatter_add", "scatter_", "index_put_", "index_put", "_index_put_impl_", "index_add_"]
)
PASSES = {"logsumexp": 4, "sort": 4, "argsort": 4, "topk": 2, "embedding_dense_backward": 3}


@dataclass
class Count:
    """Of one region of the step."""

    kernels: int = 0
    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0  # bytes of what is neither a product nor attention
    seconds: float = 0.0
    by_operation: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def row(self) -> dict[str, float]:
        return {
            "kernels": self.kernels, "product_tflop": self.product_flops / 1e12,
            "attention_tflop": self.attention_flops / 1e12, "gb_moved": self.moved / 1e9, "ms": self.seconds * 1e3,
        }  # fmt: skip


class Traffic(TorchDispatchMode):
    """Adds up what runs, in the region at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[str, Count] = defaultdict(Count)
        self.region, self.quiet = "other", False

    @contextmanager
    def at(self, region: str) -> Iterator[None]:
        before, self.region = self.region, region
        yield
        self.region = before

    @contextmanager
    def silence(self) -> Iterator[None]:
        before, self.quiet = self.quiet, True
        yield
        self.quiet = before

    def add(
        self,
        name: str,
        *,
        product: float = 0.0,
        attention: float = 0.0,
        size: float = 0.0,
        kernels: int = 1,
        slow: float = 1,
    ) -> None:
        count = self.regions[self.region]
        count.kernels += kernels
        if product:
            count.product_flops += product
            count.seconds += max(product * slow / MATMUL, size / MEMORY, LAUNCH)
        elif attention:
            count.attention_flops += attention
            count.seconds += max(attention / ATTENTION, LAUNCH)
        else:
            count.moved += size
            count.seconds += max(size / MEMORY, kernels * LAUNCH)
            count.by_operation[name] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if self.quiet or namespace in ("prim", "profiler") or name in FREE or _is_view(func):
            return out
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}  # which is written, not read
        ins, outs = _tensors([args, given]), _tensors(out)
        if name.startswith("_scaled_dot_product_flash"):
            self._attention(name, args)
        elif name in PRODUCTS:
            self._product(name, args, [*_distinct(ins), *_distinct(outs)])
        else:
            self.add(name, size=_bytes(func, name, args, ins, outs), kernels=_kernels(name, ins))
        return out

    def _attention(self, name: str, args: Sequence[Any]) -> None:
        backward = "backward" in name
        q, k, v = args[1:4] if backward else args[:3]
        causal = args[7] if backward else len(args) > 4 and args[4]
        seen = 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * ((q.shape[2] + 1) / 2 if causal else k.shape[2])
        d, e = q.shape[-1], v.shape[-1]
        self.add(name, attention=seen * (3 * d + 2 * e if backward else d + e), kernels=3 if backward else 1)

    def _product(self, name: str, args: Sequence[Any], touched: Sequence[Tensor]) -> None:
        a, b = args[1:3] if name in ("addmm", "addmm_", "baddbmm") else args[:2]
        flops = 2.0 * a.numel() * b.shape[0 if name == "linear" else -1]
        size = sum(map(_nbytes, touched))  # what a product is added to is read and written
        thin = min(a.shape[-2], a.shape[-1], b.shape[-1]) < 16  # a batch of tiny products is bound by memory
        slow = MATMUL / FP32 if a.dtype in (torch.float32, torch.float64) else 1.0
        self.add(name, product=0.0 if thin else flops, size=size * (2 if thin else 1), slow=slow)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _bytes(func: Any, name: str, args: Sequence[Any], ins: list[Tensor], outs: list[Tensor]) -> float:
    """What an operation reads and writes."""
    written = [t for x, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
               for t in _tensors(x)]  # fmt: skip
    if name in WRITES:
        return sum(map(_nbytes, outs or ins))
    if name in PICKS:  # what is picked is read, not all there is
        return 2 * sum(map(_nbytes, outs)) + sum(_nbytes(t) for t in ins if not t.is_floating_point())
    if name in SUMS:
        rows, numbers = args[:2]
        return min(numbers.numel(), len(rows)) * _nbytes(rows) / len(rows) + _nbytes(numbers) + _nbytes(outs[0])
    if name in PUTS:
        put = 3 * max((_nbytes(t) for t in ins if t is not args[0]), default=0)
        return put + (0 if name.endswith("_") else 2 * _nbytes(args[0]))
    if name.startswith(("_foreach", "_fused_adam")):
        return sum(map(_nbytes, [*ins, *written, *outs]))
    read = _distinct(ins)
    if name == "copy_" or name.endswith("_out"):
        read = [t for t in read if t is not args[0]]
    return sum(map(_nbytes, read)) + sum(map(_nbytes, outs or written))


def _kernels(name: str, ins: list[Tensor]) -> int:
    return max(1, len(ins) // 64) if name.startswith(("_foreach", "_fused_adam")) else PASSES.get(name, 1)


def _tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [t for item in items for t in _tensors(item)]


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _nbytes(t: Tensor) -> int:
    """Bytes of distinct elements: an expanded axis is read once."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * t.element_size()


# --------------------------------------------------------------------------------- what is one kernel on a GPU, as one


def replace_function(
    place: object, function: Callable[..., Any], stand_in: Callable[..., Any]
) -> AbstractContextManager[object]:
    """Put `stand_in` in place of a function of a module or class, which is given itself: a stale name is an error here."""
    return mock.patch.object(place, function.__name__, stand_in)


@contextmanager
def as_on_a_gpu(traffic: Traffic) -> Iterator[None]:
    """Sizes of chunks as on a GPU, and its kernels for what a CPU makes of several."""

    def leaf(self: FusibleFunctionCompiler, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with traffic.silence():
            out = function(*args, **kwargs)
        outs = _tensors(out)
        # one that is returned is a place to write to
        ins = [t for t in _distinct(_tensors([args, kwargs])) if not any(t is other for other in outs)]
        # torch.compile makes a sum over rows, of a weight's gradient, a kernel of its own
        summed = any(t.dim() < max(x.dim() for x in ins) for t in outs)
        # nor is the scale of a tensor, or of a column, known before all of it is read
        across = function is fusible_quantize_with_transpose or not ins[0].is_contiguous()
        far = (
            function in (fusible_quantize, fusible_quantize_with_transpose)
            and args[2] == 0
            and (args[1] == 0 or across)
        )
        ahead = ins if far else []
        size = sum(map(_nbytes, [*ins, *ahead, *outs]))
        traffic.add(function.__name__, size=size, kernels=1 + (summed or bool(ahead)))
        return out

    def eight_bits(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        m, n, k = a.values.shape[0], *b.values.shape
        with traffic.silence():
            out = a.values.new_empty(m, n, dtype=dtype)
        traffic.add("scaled_mm", product=2.0 * m * n * k, size=sum(map(_nbytes, (*a[:2], *b[:2], out))), slow=0.5)
        return out

    def attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        assert how["is_causal"]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return blockwise_attention.blockwise_attention(
            TorchFlashKernel(), q, k, v, CAUSAL, AttentionScoreTransform(how["scale"])
        ).transpose(1, 2)

    with ExitStack() as stack:
        for table in (vocab_parallel_loss.CHUNK_ELEMENTS, gradient_clipping.WIDTHS, blockwise_attention.TILE_ELEMENTS):
            stack.enter_context(mock.patch.dict(table, cpu=table["cuda"]))
        stack.enter_context(
            mock.patch.dict(
                vocab_parallel_loss.LEAF_ELEMENTS,
                dict.fromkeys((True, False), vocab_parallel_loss.CHUNK_ELEMENTS["cuda"]),
            )
        )
        for place, function, stand_in in (
            (FusibleFunctionCompiler, FusibleFunctionCompiler.__call__, leaf),
            (gemm_accumulation, gemm_accumulation._is_gpu, lambda out: True),
            (F, F.scaled_dot_product_attention, attention), (fp8_kernels, fp8_kernels.scaled_gemm, eight_bits),
        ):  # fmt: skip
            stack.enter_context(replace_function(place, function, stand_in))
        yield


# ----------------------------------------------------------------------------------------------------- what is counted


def dense(traffic: Traffic, length: int) -> int:
    """One layer, embedding, head and loss, and what becomes of their gradients; returns the number of parameters."""
    config = _config(length)
    leaves = FusibleFunctionCompiler(compiled=True)
    with traffic.silence():
        model = Decoder(
            LayerBuilder(
                config, ParallelGroups(), TorchKernels(leaves), leaves=leaves, dtype=torch.bfloat16, device=CPU
            )
        )
        positions, ids = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.int64)
        weights = torch.zeros(1, length)
        shared = ForwardContext(
            SequenceMask(length, CPU),
            RotaryEmbedding.from_model_config(config, config.rope).compute_rotation(positions, torch.bfloat16),
        )

    def micro_batch(mark: str) -> None:
        _both_ways(traffic, "embedding" + mark, lambda: model.embed_inputs(ids, positions))
        x = _bf16(traffic, 1, length, D)
        _both_ways(traffic, "layer" + mark, lambda: model(x, shared))
        y = _bf16(traffic, 1, length, D)
        with traffic.at("head and loss" + mark):
            total, _ = model.compute_token_loss(y, ids, weights)
            (total * 0.5).backward()

    micro_batch(GATHERED)
    model.zero_grad()
    with traffic.silence():
        stage = flatten_parameters(model, ZeroConfig(shard_grads=True), model.list_parameter_units())
        optimizer = ShardedOptimizer(
            [stage], adamw=lambda slots: AdamWUpdateRule(slots, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        )
    with _buckets_apart(traffic):
        stage.begin_step()
        for mark in ("", LATER):
            with stage.backward_context(last=False):
                micro_batch(mark)
    with traffic.at("gradient norm"):
        optimizer.compute_grad_norm()
    with traffic.at("update"):
        optimizer.apply_update(1e-4, 0.5)
    return sum(parameter.numel() for parameter in model.parameters())


def fp8(traffic: Traffic, length: int, recipe: str) -> None:
    """A layer whose products are in eight bits, forward and backward."""
    config, leaves = _config(length), FusibleFunctionCompiler(compiled=True)
    with traffic.silence():
        build = LayerBuilder(config, ParallelGroups(), TorchKernels(leaves), dtype=torch.bfloat16, device=CPU)
        model = Decoder(replace(build, by_layer={0: Fp8Kernels(recipe, leaves=leaves)}))
        positions = torch.zeros(1, length, dtype=torch.int64)
        shared = ForwardContext(
            SequenceMask(length, CPU),
            RotaryEmbedding.from_model_config(config, config.rope).compute_rotation(positions, torch.bfloat16),
        )

    def micro_batch(mark: str) -> None:
        x = _bf16(traffic, 1, length, D)
        _both_ways(traffic, f"layer, fp8 {recipe}{mark}", lambda: model(x, shared))

    micro_batch(GATHERED)
    model.zero_grad()
    with traffic.silence():
        stage = flatten_parameters(
            model, ZeroConfig(shard_grads=True, cache_prepared_weights=True), model.list_parameter_units()
        )
    with _buckets_apart(traffic):
        stage.begin_step()
        for mark in ("", LATER):
            with stage.backward_context(last=False):
                micro_batch(mark)


@contextmanager
def _buckets_apart(traffic: Traffic) -> Iterator[None]:
    """Counts what puts gradients in their places as a region of its own; products add there themselves.

    And what is made of a weight once a step.
    """

    def counted(real: Callable[..., Any], what: str) -> Callable[..., Any]:
        def apart(*args: Any, **kwargs: Any) -> Any:
            with traffic.at(f"{traffic.region}: {what}"):
                return real(*args, **kwargs)

        return apart

    with ExitStack() as stack:
        for place, function, what in (
            (GradientBucket, GradientBucket.accumulate_grad, "gradient buckets"),
            (gemm_accumulation, gemm_accumulation.write_scaled_values, "gradient buckets"),
            (gemm_accumulation, gemm_accumulation.write_embedding_grad, "gradient buckets"),
            (Fp8Kernels, Fp8Kernels.prepare_weight, "weights"),
        ):  # fmt: skip
            stack.enter_context(replace_function(place, function, counted(function, what)))
        yield


def _config(length: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {"num_layers": 1, "hidden_size": D, "ffn_hidden_size": FFN, "num_attention_heads": HEADS, "num_kv_heads": KV,
         "vocab_size": VOCAB, "max_position": length, "rope": {"theta": 500_000.0}}
    )  # fmt: skip


def ring(traffic: Traffic, length: int, ranks: int) -> None:
    """Attention of the first of some context ranks, without its messages."""

    class Passage:
        def visit_all_ranks(self, mine: Tensor, work: Callable[[int, Tensor], None]) -> None:
            for rank in range(ranks):
                work(rank, mine)

        def collect_gradients(self, mine: Tensor, work: Callable[[int, Tensor], Tensor]) -> Tensor:
            first, *others = [work(rank, mine) for rank in range(ranks)]
            for other in others:
                first += other
            return first

    group = CommGroup("cp", tuple(range(ranks)), 0)
    kind, sight = context.BlockwiseAttention(Passage(), group, TorchKernels()), SequenceMask(length, CPU)
    q, k, v = _heads(traffic, length // ranks)
    _both_ways(
        traffic, f"attention, ring of {ranks}",
        lambda: kind.compute_attention(q, k, v, AttentionScoreTransform(HEAD**-0.5), lambda a, b: sight.list_mask_blocks(a, b, None), lambda *_: q),
    )  # fmt: skip


def attention(traffic: Traffic, length: int) -> None:
    """Of a whole sequence: plain, and in documents of an eighth of it."""
    documents = np.repeat(np.arange(8), length // 8)[None]
    for name, begins in (
        ("plain", None),
        ("eight documents", DocumentBounds.from_positions(documents, documents).document_starts),
    ):
        with traffic.silence():
            mask = SequenceMask(length, CPU, begins).mask_for_window(None)
        q, k, v = _heads(traffic, length)
        with (
            replace_function(blockwise_attention, blockwise_attention._split_documents, _as_one_kernel)
            if isinstance(mask, PackedDocumentMask)
            else ExitStack()
        ):
            _both_ways(traffic, f"attention, {name}", lambda q=q, k=k, v=v, mask=mask: TorchKernels().attention(
                q, k, v, mask, AttentionScoreTransform(HEAD**-0.5)))  # fmt: skip


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "Mixtral 8x7B": (8, {
        "hidden_size": 4096, "ffn_hidden_size": 14_336, "num_attention_heads": 32,
        "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 14_336, "aux_loss": 0.02},
    }),
    "DeepSeek-V3": (64, {
        "hidden_size": 7168, "ffn_hidden_size": 18_432, "num_attention_heads": 128,
        "moe": {
            "num_experts": 256, "top_k": 8, "ffn_hidden_size": 2048, "shared_ffn_hidden_size": 2048, "score": "sigmoid",
            "scaling": 2.5, "groups": 8, "top_groups": 4, "group_score": "top2", "selection_bias": True,
            "bias_rate": 0.001, "aux_loss": 0.0001,
        },
    }),
}  # fmt: skip


def experts(traffic: Traffic, length: int) -> dict[str, dict[str, float]]:
    """Layers of experts on one rank of several, an even load, by each way of dispatch.

    Returns, by region, GB that the rank sends to other ranks, those that one row for each token and rank would be, and
    waits of the host. Choices are of random scores. What Transformer Engine's kernels send is not seen here.
    """
    found = {}
    for name, (ranks, shape) in SHAPES.items():
        config = ModelConfig.model_validate({"num_layers": 1, "vocab_size": 512, **shape})
        moe = config.moe
        assert moe is not None
        with traffic.silence(), unset_fake_temporarily():
            chosen = select_experts(
                torch.rand(length, moe.num_experts, generator=torch.Generator().manual_seed(0)), moe, None
            )
            held = torch.zeros(length, ranks).scatter_(1, chosen * ranks // moe.num_experts, 1.0)
            rows = round(held.sum().item() / ranks)  # to each rank
        for way, bound in (("", None), ("", 1.25), ("nvshmem, ", 1.25), ("nvshmem, ", 1.1), ("te, ", 1.25)):
            region = f"experts, {name}, {ranks} ranks" + (f", {way}bound {bound}" if bound else "")
            wire = Wire(ranks, rows, length * moe.top_k)
            with traffic.silence():
                groups, own = ParallelGroups(ep=CommGroup("ep", tuple(range(ranks)))), None
                if bound and way:
                    by_te, by_nvshmem = (
                        TransformerEngineDispatcher,
                        partial(NvshmemDispatcher, parts=1, leaves=FusibleFunctionCompiler(compiled=True)),
                    )
                    own = (by_te if way == "te, " else by_nvshmem)(moe.num_experts, groups.ep, bound=bound)
                build = LayerBuilder(
                    config, groups, dtype=torch.bfloat16, device=CPU, dispatcher=own, dispatch_bound=bound
                )
                layer = MixtureOfExperts(build, 0)
                x = _bf16(traffic, 1, length, config.hidden_size)
                context = ForwardContext(SequenceMask(length, CPU), routing=MicroBatchRouting(None, None, 1.0, 1.0))
            with wire.instead(traffic):
                _both_ways(traffic, region, lambda layer=layer, x=x, context=context: layer(x, context))
            row = 4 * rows * (ranks - 1) * 2 * config.hidden_size
            found[region] = {"wire_gb_of_a_row_each": row / 1e9, "host_waits": wire.waits}
            found[region] |= {"wire_gb": wire.size / 1e9} if wire.size else {}
    return found


@dataclass
class Wire:
    """Ranks that are not there: each sends this one as much as it gets from it."""

    ranks: int
    rows: int
    choices: int
    size: float = 0.0
    waits: int = 0

    @contextmanager
    def instead(self, traffic: Traffic) -> Iterator[None]:
        """Takes the place of what sends; and of CUDA's kernels of several groups and of wide sums."""

        def send(out: Tensor, tensor: Tensor, *splits: Any, async_op: bool = False) -> Any:
            self.size += _nbytes(tensor) * (self.ranks - 1) / self.ranks  # the rest is this rank's own
            return SimpleNamespace(wait=lambda: None)

        def counts(table: Tensor, *splits: Any) -> Tensor:
            self.size += _nbytes(table)
            return torch.empty_like(table)

        def everyones(counts: Tensor, group: CommGroup) -> Tensor:
            self.size += _nbytes(counts) * (self.ranks - 1)
            return counts.repeat(self.ranks)

        def send_those_there_are(
            tables: nvshmem_dispatch.SymmetricMemoryTables, group: CommGroup, received: Tensor
        ) -> Any:
            self.size += self.rows * (self.ranks - 1) * _nbytes(tables.leaving[0])
            return SimpleNamespace(wait=lambda: None)

        def fetched(table: Tensor) -> Callable[[], Any]:
            self.waits += 1
            even = [[self.rows, self.choices // self.ranks]] * self.ranks
            return lambda: (even, even)

        def wide_product(a: Tensor, b: Tensor) -> Tensor:
            with traffic.silence():
                out = torch.empty(len(a), b.shape[1])
            traffic.add("wide product", product=2.0 * a.numel() * b.shape[1], size=sum(map(_nbytes, (out, a, b))))
            return out

        def by_library(made: Tensor, *given: Tensor) -> Tensor:
            traffic.add("library", size=sum(map(_nbytes, (made, *given))))
            return made

        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(sys.modules, transformer_engine(by_library)))
            for place, function, stand_in in (
                (async_all_to_all, async_all_to_all.all_to_all_into, send),
                (expert_parallel, expert_parallel.all_to_all, counts),
                (expert_parallel, expert_parallel.start_host_copy, fetched),
                (nvshmem_dispatch, nvshmem_dispatch.all_gather, everyones),
                (nvshmem_dispatch, nvshmem_dispatch.all_to_all_by_gloo, send_those_there_are),
                (expert_router, expert_router.gemm_in_fp32, wide_product),
                (grouped_gemm, grouped_gemm._has_grouped_kernel, lambda x, width: True),
                (grouped_gemm, grouped_gemm._zeroes_empty_groups, lambda device: True),
            ):  # fmt: skip
                stack.enter_context(replace_function(place, function, stand_in))
            yield


def transformer_engine(kernel: Callable[..., Tensor]) -> dict[str, ModuleType]:
    """Its dispatch and combine, one kernel each way."""

    class Dispatch(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weights: Tensor, room: int) -> tuple[Tensor, Tensor]:
            ctx.like = x, weights
            return kernel(x.new_empty(room, x.shape[1]), x), weights.new_empty(room)

        @staticmethod
        def backward(ctx: Any, dx: Tensor, dweights: Tensor) -> tuple[Tensor, Tensor, None]:
            x, weights = ctx.like
            return kernel(torch.empty_like(x), dx, dweights), torch.empty_like(weights), None

    class Combine(Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, tokens: int) -> Tensor:
            ctx.room = len(y)
            return kernel(y.new_empty(tokens, y.shape[1]), y)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
            return kernel(dy.new_empty(ctx.room, dy.shape[1]), dy), None

    def buffer(choices: int, tokens: int, width: int, own: int, *, recv_capacity_per_rank: int) -> SimpleNamespace:
        total = torch.empty(1, dtype=torch.int64)
        return SimpleNamespace(own=own, room=recv_capacity_per_rank, total_recv_tokens=total)

    def dispatch(buffer: SimpleNamespace, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows, came = Dispatch.apply(x, weights, buffer.room)  # type: ignore[no-untyped-call]
        return rows, came, torch.empty(buffer.own, dtype=torch.int64)

    def combine(buffer: SimpleNamespace, y: Tensor, *, num_local_tokens: int) -> Tensor:
        out: Tensor = Combine.apply(y, num_local_tokens)  # type: ignore[no-untyped-call]
        return out

    found = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    found["transformer_engine.pytorch"].ep = SimpleNamespace(  # type: ignore[attr-defined]
        is_ep_bootstrapped=lambda: True, EpBuffer=buffer, ep_dispatch=dispatch, ep_combine=combine
    )
    return found


def _as_one_kernel(mask: PackedDocumentMask, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A GPU takes all documents at once; here they are as long as each other, and so rows of a batch."""
    yield tuple(t.view(len(mask.lengths), -1, *t.shape[2:]) for t in tensors)


def _heads(traffic: Traffic, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (_bf16(traffic, 1, tokens, heads, HEAD) for heads in (HEADS, KV, KV))
    return q, k, v


def _bf16(traffic: Traffic, *shape: int) -> Tensor:
    with traffic.silence():
        return torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)


def _both_ways(traffic: Traffic, name: str, function: Callable[[], Tensor]) -> None:
    with traffic.at(name):
        y = function()
        with traffic.silence():
            dy = torch.empty_like(y)
        torch.autograd.backward(y, dy)


def count_all(length: int) -> tuple[Traffic, int, dict[str, dict[str, float]]]:
    """Count every region for a micro-batch of `length` tokens; return also the parameters of `dense`, and what `experts` does."""
    traffic = Traffic()
    with as_on_a_gpu(traffic), FakeTensorMode(allow_non_fake_inputs=True), traffic:
        parameters = dense(traffic, length)
        for recipe in KINDS:
            fp8(traffic, length, recipe)
        attention(traffic, length)
        for ranks in (2, 4):
            ring(traffic, length, ranks)
        sent = experts(traffic, length)
    return traffic, parameters, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--operations", action="store_true", help="print what moves most in each region")
    options = parser.parse_args()
    torch.set_num_threads(1)
    traffic, parameters, sent = count_all(options.seq)
    rows = {name: count.row() for name, count in traffic.regions.items() if name != "other"}
    print(f"{'':52} {'kernels':>8} {'TFLOP':>8} {'attn':>8} {'GB':>8} {'ms':>8}")
    for name, row in rows.items():
        print(f"{name:52} {row['kernels']:8.0f} " + " ".join(f"{value:8.2f}" for value in list(row.values())[1:]))
        if options.operations:
            largest = sorted(traffic.regions[name].by_operation.items(), key=lambda item: -item[1])[:8]
            print("    " + ", ".join(f"{operation} {size / 1e9:.2f}" for operation, size in largest))
    for name, numbers in sent.items():
        rows[name] |= numbers
        print(f"{name}: {numbers}")
    norm = rows["gradient norm"]["gb_moved"] * 1e9 / parameters
    print(f"gradient norm: {norm:.1f} bytes a parameter")
    foretold = {}
    for kind in ("", *(f", fp8 {recipe}" for recipe in KINDS)):
        compute = Compute(options.seq, rows, parameters, MEMORY, kind)
        foretold[kind.removeprefix(", ") or "bf16"] = {name: round(rate) for name, rate in predictions(compute).items()}
    print(f"\npredicted tokens/s and GPU, Llama-3-8B{'':21}" + " ".join(f"{kind:>15}" for kind in foretold))
    for name in foretold["bf16"]:
        print(f"{name:60}" + " ".join(f"{rates[name]:15,}" for rates in foretold.values()))
    found = {"tokens": options.seq, "norm_bytes_a_parameter": norm, "regions": rows, "predictions": foretold}
    record.write("traffic", found, ["torch"])


if __name__ == "__main__":
    main()
