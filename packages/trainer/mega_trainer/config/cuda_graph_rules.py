"""Requirements of CUDA graphs of layers on a run's settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_common.strict_config import ConfigProblem

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig


def find_cuda_graph_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each unmet requirement of CUDA graphs, if the run sets `cuda_graphs: layers`."""
    for need in list_unmet_graph_needs(config) if config.cuda_graphs == "layers" else ():
        yield ConfigProblem("cuda_graphs", f"requires {need}", "layers", "set cuda_graphs=off")


def list_unmet_graph_needs(config: RunConfig) -> list[str]:
    """Return the requirements of CUDA graphs that a run does not meet, each as text.

    A graph replays the kernels of one layer on fixed addresses: nothing may depend on the data or the step but the values
    of tensors, the host may not act within a layer, and only one micro-batch may be between its forward and its backward.
    """
    model, parallel, data = config.model, config.parallel, config.data
    dropouts = (model.embedding_dropout, model.attention_dropout, model.residual_dropout)
    other_states = (
        model.has_position_bias, model.shared_kv_layers, model.per_layer_input_size, model.mla and model.mla.indexer,
        model.chunked_window,
    )  # fmt: skip
    needs = {
        "parallel.pp = 1, tp = 1 and cp = 1": parallel.pp * parallel.tp * parallel.cp == 1,
        "parallel.zero < 2, as other gradient buffers and weights are in memory only during a pass": parallel.zero < 2,
        "parallel.overlap_expert_exchange = false": not parallel.overlap_expert_exchange,
        "recompute.kind = none": config.recompute.kind == "none",
        "offload.activations = 0": config.offload.activations == 0,
        "precision = bf16, fp16 or fp32, as FP8 weights are prepared once a step": config.precision not in ("fp8", "fp64"),
        "a model without dropout, whose seeds come from the host": not any(dropouts),
        "data.reset_attention_mask = false, as documents have many lengths": not data.reset_attention_mask,
        "data.kind = text, whose samples have one length and no document bounds": data.kind == "text",
        "objective.kind = cross_entropy": config.objective.kind == "cross_entropy",
        "training without lora": config.lora is None,
        "a decoder of mega's own layers, without vision": model.transformers is None
        and not (model.has_encoder or model.retro or model.vision or config.extensions),
        "layers that share rotary angles alone: no position bias, shared keys, sparse attention or chunks": not any(other_states),
        "a residual stream of one width, without model.hyper_connections or moe.shortcut": model.stream_width == model.hidden_size,
        "layers of attention and MLP": bool(list_graphed_layers(config)),
    }  # fmt: skip
    return [need for need, holds in needs.items() if not holds]


def list_graphed_layers(config: RunConfig) -> list[int]:
    """Return the indices of the layers that can be CUDA graphs: those of attention and a dense MLP.
    Experts have as many rows as tokens choose them, and recurrent mixers are left out.
    """
    model = config.model
    return [layer for layer in range(model.num_layers) if model.get_layer_kind(layer) == ("attention", "mlp")]
