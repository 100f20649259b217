"""Module of the transformers library with the interface of `Decoder`: from a micro-batch's tokens to the loss.

The module computes logits; the loss, the data, the optimizer and the checkpoints are those of every other model. Each
parameter is one piece, named as transformers names it. Hidden states of `Decoder`'s interface are logits here.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_ckpt.formats.transformers_module import build_randomly_initialized_module, build_uninitialized_module
from mega_ckpt.tensor_pieces import TensorBox, TensorPiece, copy_overlap
from mega_ckpt.transformers_library import convert_transformers_errors, list_module_tensors
from mega_common.errors import ConfigError
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.data.micro_batch import DocumentBounds, MicroBatch
from mega_trainer.distributed.rng import DropoutFactory, SeededDropout, seeded_generator
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.model.activation_checkpointing import ActivationCheckpointer, ActivationOffloadPool, RecomputePolicy
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.forward_context import AttentionMask, ForwardContext, KVCache, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.parameter_info import ParameterInfo, get_local_values, get_parameter_info
from mega_trainer.parallel.zero_buffers import ForwardGatherUnit

PROBE_TOKENS = 12  # two documents of six tokens


class TransformersDecoder(Decoder):
    """Causal language model of the transformers library, whole on every rank or sharded by FSDP.

    Raises:
        CheckpointError: from the constructor, when transformers cannot build the model.
        ConfigError: from the constructor, for activation checkpointing that the model does not support.
    """

    other_forwards = ("compute_logit_gradients",)

    def __init__(
        self,
        build: LayerBuilder,
        stage: PipelineStageLayers | None = None,
        recompute: RecomputePolicy | None = None,
        offload: ActivationOffloadPool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        assert build.config.transformers is not None
        self.config, self.groups, self.sp, self.dtype = build.config, build.groups, False, build.dtype
        self.described = build.config.transformers
        self.stage = stage or PipelineStageLayers.for_whole_model(build.config)
        self.saved, self.deferred, self.borrows = ActivationCheckpointer(recompute, offload), None, False
        self.vision, self.predictors = None, nn.ModuleList()
        self.module = build_uninitialized_module(self.described, build.dtype)
        self._accepted = inspect.signature(self.module.forward).parameters
        self._verified = {False: False, True: False}
        if self.saved.recompute.kind == "full":
            self._enable_recompute()
        self._place_tensors(build)
        self.layers = _find_layers(self.module)

    def _enable_recompute(self) -> None:
        if not self.module.supports_gradient_checkpointing:
            raise ConfigError(
                f"recompute.kind = full is not supported with model_type {self.described.model_type}, whose module in "
                "transformers has no gradient checkpointing",
                hint="set recompute.kind=none",
            )
        enable = getattr(self.module, "activation_checkpointing_enable", self.module.gradient_checkpointing_enable)
        enable({"use_reentrant": False})

    def _place_tensors(self, build: LayerBuilder) -> None:
        """Replace all parameters by uninitialised ones of the run's dtype on its device, described for the trainer, and
        move the buffers unless parameters are on the meta device.
        """
        data, dtype = build.groups.dp_cp, build.stored_dtype or build.dtype
        infos = {
            id(parameter): ParameterInfo(
                (TensorPiece.whole_tensor(name, parameter.shape),), data, accumulate_in_place=False
            )
            for name, parameter in self.module.named_parameters()
        }
        scalar = next((name for name, parameter in self.module.named_parameters() if parameter.dim() == 0), None)
        if scalar is not None and build.device.type == "meta":
            raise ConfigError(
                f"parallel.zero = 3 is not supported with model_type {self.described.model_type}, whose parameter {scalar} "
                "is a single number",
                hint="set parallel.zero=2",
            )

        def place(parameter: Tensor) -> nn.Parameter:
            made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=build.device))
            made.mega = infos[id(parameter)]  # type: ignore[attr-defined]
            return made

        _replace_parameters(self.module, place)
        if build.device.type != "meta":
            _move_buffers(self.module, build.device)

    def materialize(self, device: torch.device) -> None:
        """Give all parameters uninitialised memory on `device`, and move the buffers there with their values.
        FSDP may have sharded the parameters; tied parameters stay tied.
        """
        _replace_parameters(
            self.module,
            lambda old: nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad),
        )
        _move_buffers(self.module, device)

    def saved_buffers(self) -> Iterator[tuple[Tensor, tuple[TensorPiece, ...]]]:
        """Yield the module's persistent buffers, which checkpoints contain, with their `TensorPiece` positions."""
        own = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        for name, value in list_module_tensors(self.module).items():
            if name not in own:
                yield value, (TensorPiece.whole_tensor(name, value.shape),)

    @torch.no_grad()
    def initialize_from_seed(self, seed: int) -> None:
        """Fill parameters and persistent buffers with the random weights of transformers, equal in every layout.
        Each rank draws the whole model in host memory.
        """
        fresh = list_module_tensors(
            build_randomly_initialized_module(self.described, torch.promote_types(self.dtype, torch.float32), seed)
        )
        parts = [(get_local_values(p), get_parameter_info(p).pieces) for p in self.parameters()]
        for local, pieces in [*parts, *self.saved_buffers()]:
            for piece in pieces:
                zeros = (0,) * len(piece.global_shape)
                copy_overlap(
                    TensorBox(piece.global_offset, piece.local_view(local)), TensorBox(zeros, fresh[piece.name])
                )

    def list_parameter_units(self) -> list[ForwardGatherUnit]:
        """Return the module as one unit: its forward waits for all gathered weights."""
        return [ForwardGatherUnit(self.module, list(self.module.parameters()))]

    def make_forward_context(
        self,
        positions: Tensor,
        *,
        tokens: Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KVCache | None = None,
        dropout: SeededDropout | None = None,
        sequence_bounds: DocumentBounds | None = None,
        routing: MicroBatchRouting | None = None,
    ) -> ForwardContext:
        """Return the forward context of whole sequences; a mask or a KV cache of mega is not supported."""
        assert attention_mask is None
        assert cache is None
        starts = None if sequence_bounds is None else sequence_bounds.document_starts
        mask = SequenceMask(positions.shape[-1], positions.device, starts, True, ())
        return ForwardContext(mask, dropout=dropout)

    def make_batch_context(
        self, batch: MicroBatch, dropout: DropoutFactory, routing: MicroBatchRouting | None = None
    ) -> ForwardContext:
        """Return the forward context of a micro-batch; the first call checks that the module attends causally, within documents.
        It has the positions and documents, as the module of transformers takes them.
        """
        packed = batch.sequence_bounds.document_starts is not None
        if not self._verified[packed]:
            self._verify_attention(packed=packed, device=batch.tokens.device)
            self._verified[packed] = True
        context = self.make_forward_context(batch.positions, sequence_bounds=batch.sequence_bounds)
        return replace(context, dropout=dropout(batch.tokens.shape[1], 0))

    def embed_inputs(
        self,
        tokens: Tensor,
        positions: Tensor,
        dropout: SeededDropout | None = None,
        types: Tensor | None = None,
        images: BatchImages | None = None,
    ) -> Tensor:
        """Return the token ids unchanged, int64 [B, S], since the module of transformers embeds them itself."""
        return tokens

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the logits [B, S, V] of tokens x, int64 [B, S]."""
        logits: Tensor = self.run_module(x).logits
        return logits

    def run_module(self, tokens: Tensor, positions: Tensor | None = None) -> Any:
        """Run the module of transformers on tokens int64 [B, S] and return its output.
        `positions` int64 [B, S] that restart at each document separate documents.
        """
        return self._call_module(tokens, {"use_cache": False, "return_dict": True, "position_ids": positions})

    def run_with_kv_cache(self, tokens: Tensor, cache: Any) -> Any:
        """Run the module of transformers with its own KV cache on the next tokens of a text, and return its output.
        The tokens are int64 [1, S] and follow those in `cache` (None: the text begins).
        """
        return self._call_module(tokens, {"use_cache": True, "return_dict": True, "past_key_values": cache})

    def _call_module(self, tokens: Tensor, arguments: Mapping[str, Any]) -> Any:
        accepted = {key: value for key, value in arguments.items() if key in self._accepted and value is not None}
        with convert_transformers_errors(self.described.model_type, f"run on tokens of shape {list(tokens.shape)}"):
            return self.module(input_ids=tokens, **accepted)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return logits x [B, S, V] unchanged."""
        return x

    def compute_token_loss(self, x: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the tokens' cross entropies, and each token's unweighted cross entropy [B, S].
        Labels are int64 [B, S], logits x [B, S, V], weights fp32 [B, S].
        """
        losses = F.cross_entropy(upcast_to_fp32(x).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (losses * weights).sum(), losses.detach()

    def run_stage(
        self, x: Tensor | None, batch: MicroBatch, context: ForwardContext, tied_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the transformers module from tokens to the training loss, with its experts' auxiliary loss in training.
        The results are as from `Decoder.compute_objective`.

        An auxiliary loss of the module (`aux_loss`) joins the gradient with the weight of config.json, times the
        micro-batch's share of the step's loss weights.
        """
        with _seeded_dropout(context.dropout, batch):
            packed = batch.sequence_bounds.document_starts is not None
            found = self.run_module(batch.tokens, batch.positions if packed else None)
        total, losses = self.compute_token_loss(found.logits, batch.labels, batch.weights)
        loss, auxiliary = total, getattr(found, "aux_loss", None)
        if self.training and isinstance(auxiliary, Tensor) and auxiliary.requires_grad:
            text = self.module.config.get_text_config()
            loss = total + text.router_aux_loss_coef * auxiliary * batch.weights.sum()
        return loss, torch.stack([total.detach(), total.new_zeros(())]).double(), losses

    def compute_logit_gradients(self, tokens: Tensor, positions: Tensor | None, row: int) -> Tensor:
        """Return the gradient of a weighted sum of one token's logits in the embeddings of all tokens, [1, S, D].
        The tokens are int64 [1, S], the one is number `row`. The gradient is zero at tokens on which its logits do not
        depend.
        """
        seen: list[Tensor] = []

        def watch(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            seen.append(output.detach().requires_grad_())
            return seen[-1]

        handle = self.module.get_input_embeddings().register_forward_hook(watch)
        try:
            with torch.enable_grad():
                logits = self.run_module(tokens, positions).logits
                mixed = (logits[0, row] * torch.linspace(-1, 1, logits.shape[-1], device=logits.device)).sum()
                return torch.autograd.grad(mixed, seen[0])[0]
        finally:
            handle.remove()

    def _verify_attention(self, *, packed: bool, device: torch.device) -> None:
        """Verify, by gradients that must be zero, that no logits depend on later tokens, nor with `packed` on tokens of
        an earlier document.

        Raises:
            ConfigError: when they do.
            CheckpointError: when the module cannot run.
        """
        kind, half = self.described.model_type, PROBE_TOKENS // 2
        stream = seeded_generator(torch.device("cpu"), 0, "attention probe")
        tokens = torch.randint(0, self.config.vocab_size, (1, PROBE_TOKENS), generator=stream).to(device)
        positions = torch.arange(PROBE_TOKENS, device=device)[None] % half if packed else None
        training = self.module.training
        self.module.eval()
        with convert_transformers_errors(kind, "differentiate the logits in the embeddings"):
            late = self.compute_logit_gradients(tokens, positions, PROBE_TOKENS - 1)[0, :half]
            early = self.compute_logit_gradients(tokens, positions, half - 1)[0, half:]
        self.module.train(training)
        if early.count_nonzero():
            raise ConfigError(
                f"model_type {kind} attends to later tokens, and is not supported as a causal language model",
                hint="set is_decoder to true in config.json if the model has this setting",
            )
        if packed and late.count_nonzero():
            raise ConfigError(
                f"data.reset_attention_mask and packed data are not supported with model_type {kind}: its module in "
                "transformers lets tokens depend on earlier documents of a row",
                hint="set data.kind=text and data.reset_attention_mask=false, or use a model type that mega has",
            )


def _find_layers(module: nn.Module) -> nn.ModuleList:
    """Return the list of the module's layers, which FSDP gathers one by one: the one with the most parameters; empty
    without one.
    """
    lists = [found for found in module.modules() if isinstance(found, nn.ModuleList) and len(found)]
    sizes = [sum(parameter.numel() for parameter in found.parameters()) for found in lists]
    return lists[sizes.index(max(sizes))] if lists else nn.ModuleList()


def _replace_parameters(module: nn.Module, make: Any) -> None:
    """Replace each parameter of a module by `make` of it, and keep tied parameters tied."""
    made: dict[int, nn.Parameter] = {}
    old: list[nn.Parameter] = []  # kept alive, so that no id is used again
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                old.append(parameter)
                made[id(parameter)] = make(parameter)
            owner._parameters[name] = made[id(parameter)]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


@contextmanager
def _seeded_dropout(dropout: SeededDropout | None, batch: MicroBatch) -> Iterator[None]:
    """Seed torch's generators by the run's seed and the micro-batch's first sample, so that dropout does not depend on
    ranks or on a resumption.
    """
    if dropout is None:
        yield
        return
    device = batch.tokens.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seeded_generator(torch.device("cpu"), dropout.seed, batch.samples[0]).initial_seed())
        yield
