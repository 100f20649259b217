"""Experts and a dense feed-forward side by side, each with norms of its own (Gemma 4).

    y = norm(dense(norm x)) + norm(experts(norm x))

The router reads RMSNorm(x) scale / sqrt(D), with a learned vector `scale` [D]; a learned factor of each expert multiplies the
normalised weight of its outputs. Here x is the residual stream itself, and every norm has its own weight.

Legend: B batch, S sequence, N tokens of this rank, D model width, K experts of a token, T tensor-parallel ranks.
"""

from __future__ import annotations

from torch import Tensor

from mega_trainer.model.expert_router import ExpertRouter
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.mixture_of_experts import MixtureOfExperts
from mega_trainer.model.norms import Norm, PlainNorm
from mega_trainer.parallel.expert_routing import MicroBatchRouting, RoutedTokens, RoutingReplay


class ScaledInputRouter(ExpertRouter):
    """Router that normalises and scales the tokens that it scores, and returns them normalised for the experts.
    Every tensor rank has different tokens, so the gradients of its weights are partial.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        config, name = build.config, f"model.layers.{layer}.mlp"
        width = (config.hidden_size,)
        self.norm = PlainNorm(config.norm_eps)
        self.scale = build.build_replicated(f"{name}.gate.scale", width, fill=1.0, partial_grad=True)
        count = (self.moe.num_experts,)
        self.factors = build.build_replicated(f"{name}.gate.per_expert_scale", count, fill=1.0, partial_grad=True)
        start = build.norm_init_value
        weight = build.build_replicated(f"{name}.experts_norm.weight", width, fill=start, partial_grad=True)
        self.experts_norm = Norm(
            build.kernels, weight, None, config.norm_eps, zero_centered=config.zero_centered_norm, layer=False
        )

    def forward(
        self, x: Tensor, tokens: RoutedTokens, routing: MicroBatchRouting | None, routes: RoutingReplay | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return K experts for each token, scored on normed and scaled x, their weights, and normed x for the experts.
        See `ExpertRouter.forward`.
        """
        scored = self.norm(x) * self.scale * x.shape[-1] ** -0.5
        chosen, weights, _ = super().forward(scored, tokens, routing, routes)
        return chosen, weights * self.factors[chosen.clamp(min=0)], self.experts_norm(x)


class SeparatelyNormedExperts(MixtureOfExperts):
    """Sum of the shared expert and the routed experts, each of the stream through norms of its own."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        name = f"model.layers.{layer}.mlp"
        self.router = ScaledInputRouter(build, layer)
        self.dense, self.shared = self.shared, None
        self.dense_norm = build.build_residual_norm(f"{name}.shared_expert_norm")
        self.dense_output_norm = build.build_residual_norm(f"{name}.shared_expert_output_norm")
        self.experts_output_norm = build.build_residual_norm(f"{name}.experts_output_norm")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map the residual stream [B, S or S/T, D] to the sum of both outputs, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        assert self.dense is not None
        dense: Tensor = self.dense_output_norm(self.dense(self.dense_norm(x), context))
        routed: Tensor = self.experts_output_norm(super().forward(x, context))
        return dense + routed
