"""Entries of extensions: dataclasses with which a module outside of mega adds mixers, objectives and more. No torch.

`mega_trainer.extend` exports them; docs/extensions.md explains each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig

KernelOperation = Literal["rms_norm", "layer_norm", "attention", "gated_activation", "short_convolution"]


class NoOptions(StrictConfig):
    """Empty options, for what an extension adds without settings."""


@dataclass(frozen=True)
class BlockTraits:
    """Facts that the trainer may assume of an extension's block, see `BlockDeclaration`.

    Attributes:
        heads: heads, which tensor ranks split.
        shared_heads: heads that others share, such as key/value heads; None: `heads`.
        recurrent: the block carries a state from token to token.
        context_parallel: the block computes its part of a sequence that is split over context ranks; otherwise parallel.cp > 1
            is refused.
        flops_per_token: forward FLOPs per token in addition to those of its matrices.
        flops_per_key: forward FLOPs for each pair of a query and a visible key.
        keys: most keys that a query sees, such as a chunk; None: all.
    """

    heads: int = 1
    shared_heads: int | None = None
    recurrent: bool = False
    context_parallel: bool = False
    flops_per_token: float = 0.0
    flops_per_key: float = 0.0
    keys: int | None = None


@dataclass(frozen=True)
class Block:
    """Token mixer or feed-forward block that an extension provides.

    Attributes:
        build: class or function `(build: LayerBuilder, layer: int, options) -> nn.Module`.
        options: the settings of its section in `model.mixers` or `model.feed_forwards`.
        declares: function `(model: ModelConfig, options) -> BlockTraits`.
    """

    build: Callable[[Any, int, Any], Any]
    options: type[StrictConfig] = NoOptions
    declares: Callable[[ModelConfig, Any], BlockTraits] = lambda model, options: BlockTraits()


@dataclass(frozen=True)
class NormFunction:
    """Norm of the residual stream that an extension provides, as a function and its traits.

    Attributes:
        normalize: differentiable function `(x, weight, eps, *, options) -> y` of x [.., D] and the weight [D], 1 at first, or
            None with `model.norm_weight: false`. It works on one token at a time: over the last axis only.
        options: the settings of its section in `model.functions`.
    """

    normalize: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class ActivationFunction:
    """Elementwise activation of feed-forward blocks and experts that an extension provides.

    Attributes:
        activate: differentiable elementwise function `(x, *, options) -> y`, or `(gate, up, *, options) -> y` if it is gated.
        gated: the feed-forward block has a gate projection.
        options: the settings of its section in `model.functions`.
    """

    activate: Callable[..., Any]
    gated: bool = False
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class PositionFunction:
    """Position encoding of queries and keys that an extension provides, in place of the rotary one.

    Attributes:
        encode: differentiable function `(x, positions, *, options) -> y` of queries or keys x [B, S, H, d] and their positions
            int64 [B or 1, S], which begin at 0 in each document. Heads and tokens may be parts: it works on each alone.
        options: the settings of its section in `model.functions`.
    """

    encode: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class ScoreFunction:
    """Modification of attention scores that an extension provides, as in torch's FlexAttention (arXiv:2412.05496).

    Attributes:
        modify: differentiable function `(score, batch, head, query, key, *, options) -> score` of the scaled scores and int64
            indices that broadcast; -inf masks a pair. `head` counts all heads of the model. Keys after a query, of another
            document or outside a window are masked afterwards. Query and key are positions in the row, of which
            only the difference is meaningful. Each query must keep a key.
        options: the settings of its section in `model.functions`.
    """

    modify: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Objective:
    """Training objective that an extension provides: the mean of a loss over all unmasked tokens.

    Attributes:
        token_loss: function `(log_probs, log_normalizers, *, options) -> losses` of fp32 or fp64 tensors [n], one element for
            each token: the log-probability of its label, and the logarithm of the sum of all exponentials of its logits.
            It must be differentiable and elementwise.
        options: the settings of `objective.options`.
    """

    token_loss: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Optimizer:
    """Elementwise optimizer that an extension provides.

    Attributes:
        build: class or function `(settings: OptimizerConfig, options) -> ElementwiseUpdate`.
        options: the settings of `optimizer.options`.
    """

    build: Callable[[Any, Any], Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Schedule:
    """Learning-rate decay that an extension provides, as a function of the progress of the run.

    Attributes:
        share: function `(done, *, options) -> share` from the part of the decay that has passed, 0 to 1, to the part of
            `optimizer.lr - lr_schedule.min_lr` that remains, usually 1 to 0.
        options: the settings of `lr_schedule.options`.
    """

    share: Callable[..., float]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Callback:
    """Extension's function that a run calls after each training step, to measure or record.

    Attributes:
        build: class or function `(options) -> after_step`, where `after_step(FinishedStep)` is called on all ranks after each
            step and returns numbers for metrics.jsonl, by name; they are logged as `CALLBACK/NAME`.
        options: the settings of its section in `callbacks`.
    """

    build: Callable[[Any], Callable[[Any], Mapping[str, float]]]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class DataKind:
    """Kind of data set that an extension provides.

    Attributes:
        build: function `(part: DatasetPart, context: DatasetContext, num_samples: int, *, options) -> DatasetSamples`.
        options: the settings of `data.options`.
    """

    build: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Sampler:
    """Sampler that an extension provides: it changes the scores of the next token in generation.

    Attributes:
        adjust: function `(scores, prompt, generated, *, options) -> scores` of fp64 scores [V] of one row, after penalties and
            grammars, and of the token ids before: those of the prompt and those generated. -inf excludes a token; one must
            remain. Temperature, top-k, top-p and min-p are applied to its result, and the token is drawn from that. It must
            be a function of its arguments alone: a text then depends neither on the batch nor on draft tokens.
        options: the settings in `sampler_options` of a request.
    """

    adjust: Callable[..., Any]
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class Kernel:
    """Kernel of an extension for an operation of the trainer, in place of mega's.

    Attributes:
        operation: one of `KernelOperation`. docs/extensions.md has the arguments of each.
        compute: differentiable function with the arguments and the result of the operation, which depends on them alone.
        supports: function with the same arguments that returns whether `compute` is used for a call, such as by dtype,
            device and size; other calls are computed by mega.
        options: kernels have no settings.
    """

    operation: KernelOperation
    compute: Callable[..., Any]
    supports: Callable[..., bool] = lambda *arguments, **options: True
    options: type[StrictConfig] = NoOptions


@dataclass(frozen=True)
class CustomTokenizer:
    """Tokenizer of an extension, named as `FILE.py:NAME` or `PACKAGE:NAME` where a tokenizer is expected.

    Attributes:
        build: class or function `() -> tokenizer` of an object with
            `vocabulary`: mapping from the name of each token to its id, an integer from 0 on;
            `end_token`: name of the end-of-text token in the vocabulary, or None (default);
            `encode(text) -> ids`: all of the text is ordinary text, also one that spells the name of a token;
            `decode(ids) -> text`: for any ids of the vocabulary.
            Both methods must be functions of their argument alone, and may be called from several threads at once.
    """

    build: Callable[[], Any]


@dataclass(frozen=True)
class Extension:
    """Additions of one extension module to mega, such as mixers, objectives and optimizers, by kind and name.

    Attributes:
        name: name of the extension, which checkpoints record.
        version: version of the extension, which checkpoints record.
        api: version of mega's interfaces that it was written for.
        mixers: token mixers, for `model.layers` and `model.mixers`.
        feed_forwards: feed-forward blocks, for `model.layers` and `model.feed_forwards`.
        norms: for `model.norm`.
        activations: for `model.activation`.
        positions: for `model.position`.
        attention_scores: for `model.attention_scores`.
        objectives: for `objective.kind`.
        optimizers: for `optimizer.name`.
        schedules: for `lr_schedule.name`.
        callbacks: for `callbacks`.
        data_kinds: for `data.kind`.
        samplers: for `--sampler` of generation, and `sampler` of a request.
        kernels: for `kernels.functions`.
        tokenizers: for `--tokenizer` and `data.tokenizer`.
        families: `ModelFamily` declarations of HuggingFace folders.
    """

    name: str
    version: str
    api: int
    mixers: Mapping[str, Block] = field(default_factory=dict)
    feed_forwards: Mapping[str, Block] = field(default_factory=dict)
    norms: Mapping[str, NormFunction] = field(default_factory=dict)
    activations: Mapping[str, ActivationFunction] = field(default_factory=dict)
    positions: Mapping[str, PositionFunction] = field(default_factory=dict)
    attention_scores: Mapping[str, ScoreFunction] = field(default_factory=dict)
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    data_kinds: Mapping[str, DataKind] = field(default_factory=dict)
    samplers: Mapping[str, Sampler] = field(default_factory=dict)
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    tokenizers: Mapping[str, CustomTokenizer] = field(default_factory=dict)
    families: Sequence[Any] = ()
