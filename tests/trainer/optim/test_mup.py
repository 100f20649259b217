"""Maximal update parametrization: its factors, what is refused, and activations whose size does not depend on the width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.parameter_info import get_parameter_info


def parse(width: int = 64, base: int | None = 32, **raw: Any) -> RunConfig:
    model = {
        "num_layers": 2, "hidden_size": width, "ffn_hidden_size": 2 * width, "num_attention_heads": width // 16, "vocab_size": 97,
        **raw.pop("model", {}),
    }  # fmt: skip
    optimizer = {"lr": 0.01, **({} if base is None else {"mup": {"base_width": base}}), **raw.pop("optimizer", {})}
    run = {"data": {"train": "none"}, "model": model, "optimizer": optimizer, **raw}
    return RunConfig.parse(resolve_run_config(resolve_run_config(run)))  # resolved twice, as after a resume


def test_the_factors_of_a_model_twice_as_wide() -> None:
    config = parse()
    assert config.model.logit_scale == 0.5
    for name, lr, std in (
        ("model.layers.0.self_attn.q_proj.weight", 0.5, math.sqrt(0.5)),
        ("model.layers.1.mlp.down_proj.weight", 0.5, math.sqrt(0.5)),
        ("model.embed_tokens.weight", 1, 1),
        ("lm_head.weight", 1, 1),
        ("model.layers.0.input_layernorm.weight", 1, 1),
    ):
        assert (config.lr_factor_of(name), config.init_factor_of(name)) == (lr, std), name


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"optimizer": {"name": "muon"}}, "requires optimizer.name = adamw, not muon"),
        ({"model": {"logit_scale": 1.0}}, "must be optimizer.mup.base_width / model.hidden_size = 0.5"),
        ({"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}}, "the model has moe"),
    ],
)
def test_settings_that_mup_has_no_rule_for(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**raw)
    assert words in str(error.value)


def measure_logit_change(config: RunConfig) -> float:
    """Root mean square of the change of the logits over three steps of Adam on one batch."""
    model = Decoder(LayerBuilder(config.model))
    initialize_weights(model, 1, config.init_factor_of)
    tokens = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16)[None]
    groups = [
        {"params": [weight], "lr": config.optimizer.lr * config.lr_factor_of(get_parameter_info(weight).pieces[0].name)}
        for weight in model.parameters()
    ]
    optimizer, seen = torch.optim.Adam(groups), []
    for _ in range(4):
        states = model(model.embed_inputs(tokens[:, :-1], positions), model.make_forward_context(positions))
        logits = model.compute_logits(states)
        seen.append(logits.detach())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return (seen[-1] - seen[0]).square().mean().sqrt().item()


def test_the_logits_change_equally_at_every_width_only_with_mup() -> None:
    ratio = {
        base: measure_logit_change(parse(512, base)) / measure_logit_change(parse(32, base)) for base in (32, None)
    }
    assert 0.5 < ratio[32] < 1.5
    assert ratio[None] > 3
