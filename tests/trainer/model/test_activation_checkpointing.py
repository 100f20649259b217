"""What layers keep for the backward: less, or elsewhere, and always with the same bits."""

from __future__ import annotations

import gc

import pytest
import torch
from live import Live

from mega_common.model_config import ModelConfig
from mega_trainer.model.activation_checkpointing import ActivationOffloadPool, RecomputedModule, RecomputePolicy
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.plan.part_memory import count_model_part_memory
from mega_trainer.plan.training_layout import TrainingLayout

D, F, TOKENS, LAYERS = 32, 128, 48, 3
MODEL = {
    "num_layers": LAYERS,
    "hidden_size": D,
    "ffn_hidden_size": F,
    "num_attention_heads": 4,
    "vocab_size": 16,
    "init_std": 0.2,
}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": F // 2, "shared_ffn_hidden_size": F}


def test_forwards_do_not_hold_on_to_each_other() -> None:
    """Also where the first layer is none of those that are offloaded."""
    config = ModelConfig.model_validate(MODEL)
    decoder = Decoder(
        LayerBuilder(config), None, RecomputePolicy("full", layers=1), ActivationOffloadPool(2, min_bytes=0)
    )
    positions = torch.arange(TOKENS).unsqueeze(0)
    lasts = []
    for _ in range(2):
        decoder(
            decoder.embed_inputs(positions % 16, positions), decoder.make_forward_context(positions)
        ).sum().backward()
        lasts.append(decoder.saved._last)
    before = lasts[1]
    while before is not None:
        assert before is not lasts[0]
        before = before._before


def trained(
    recompute: RecomputePolicy | None, offload: ActivationOffloadPool | None = None, moe: dict[str, int] | None = None
) -> tuple[list[torch.Tensor], int]:
    """The gradients of a model, and elements that its layers keep from forward to backward."""
    config = ModelConfig.model_validate({**MODEL, "moe": moe})
    decoder = Decoder(LayerBuilder(config), None, recompute, offload)
    initialize_weights(decoder, 1)
    positions = torch.arange(TOKENS).unsqueeze(0)
    x = decoder.embed_inputs(positions % 16, positions)
    context = decoder.make_forward_context(positions)
    with Live() as live:
        y = decoder(x, context)
        gc.collect()
        kept = live.now - y.nbytes
        y.square().sum().backward()
    return [p.grad for p in decoder.parameters() if p.grad is not None], kept // 4


PLAIN, KEPT = trained(None)


@pytest.mark.parametrize(
    ("modules", "tokens"),
    [
        (("norm",), 2 * D), (("activation",), F), (("norm", "activation"), 2 * D + F), (("mlp",), 3 * F),
        (("norm", "activation", "attention"), 2 * D + F + 4),
    ],
)  # fmt: skip
def test_what_is_computed_again_is_not_kept(modules: tuple[RecomputedModule, ...], tokens: int) -> None:
    """In elements a token and layer: norms' outputs, activations, and all of an MLP but its input. The planner knows."""
    gradients, kept = trained(RecomputePolicy("selective", modules=modules))
    assert all(map(torch.equal, gradients, PLAIN))
    assert len(gradients) == len(PLAIN)
    assert KEPT - kept == LAYERS * TOKENS * tokens
    shape = TrainingLayout(TOKENS, precision="fp32", recompute="selective", modules=modules, device="cpu")
    planned = count_model_part_memory(ModelConfig.model_validate(MODEL), shape).layers[0].kept
    made_outside = TOKENS * D
    assert LAYERS * planned == 4 * (kept + made_outside)


@pytest.mark.parametrize("modules", [("activation",), ("norm", "activation"), ("moe",)])
def test_rows_of_experts_are_not_kept(modules: tuple[RecomputedModule, ...]) -> None:
    (plain, most), (gradients, kept) = (
        trained(how, moe=EXPERTS) for how in (None, RecomputePolicy("selective", modules=modules))
    )
    assert all(map(torch.equal, gradients, plain))
    assert most - kept >= LAYERS * TOKENS * (F + EXPERTS["top_k"] * F // 2)


@pytest.mark.parametrize("recompute", [None, RecomputePolicy("selective")])
def test_offloaded_layers_keep_nothing_on_the_device(
    recompute: RecomputePolicy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the host is told apart by its maker; it is used again in the next step."""
    made: list[torch.Tensor] = []

    def memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr("mega_trainer.model.activation_checkpointing.allocate_host_memory", memory)
    offload = ActivationOffloadPool(2, min_bytes=1024)
    (_, everything), (gradients, kept) = trained(recompute), trained(recompute, offload)
    assert all(map(torch.equal, gradients, PLAIN))
    away = sum(memory.numel() for memory in made) // 4
    assert away > 0.55 * everything
    assert kept - away < 0.45 * everything
    count = len(made)
    trained(recompute, offload)
    assert len(made) == count
