"""The example of a norm, an activation, a position encoding and a score modification: each has an effect, and the same
in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import engine_of, run, tokens_of
from extension_cases import EXAMPLES

from mega_common.errors import ConfigError
from mega_eval.engine_requests import EngineRequest
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.extend import compute_logits, verify_run
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder

FILE = str(EXAMPLES / "model_functions.py")
USED: dict[str, Any] = {
    "norm": "mean_size", "activation": "relu_gate", "position": "neighbors", "attention_scores": "log_distance",
}  # fmt: skip


def make_run(**model: Any) -> dict[str, Any]:
    return {"extensions": [FILE], "model": {"preset": "tiny", "init_std": 0.3, **model}}


@pytest.mark.parametrize("key", USED)
def test_each_function_and_its_options_change_the_logits(key: str) -> None:
    tokens = torch.arange(12)[None]
    runs = [make_run(), make_run(**{key: USED[key]})]
    if key != "norm":
        option = {"activation": "power", "position": "longest", "attention_scores": "slope"}[key]
        runs.append(make_run(**{key: USED[key], "functions": {USED[key]: {option: 3.0}}}))
    logits = [compute_logits(run, tokens) for run in runs]
    changed = compute_logits(runs[-1], torch.cat([tokens[:, :8], tokens[:, 8:] + 1], 1))
    torch.testing.assert_close(changed[:, :8], logits[-1][:, :8])  # causal
    assert all(not torch.allclose(one, other) for i, one in enumerate(logits) for other in logits[:i])


@pytest.mark.parametrize("used", [USED, {**USED, "attention_scores": None}], ids=["tp", "cp"])
def test_every_layout_computes_what_one_process_computes(used: dict[str, Any]) -> None:
    assert verify_run(make_run(**used), layouts=3) == []


@torch.no_grad()
def test_rows_of_the_engine_are_those_without_a_cache() -> None:
    config = RunConfig.parse(resolve_run_config({**make_run(**USED), "data": {"train": "none"}}))
    functions = config.registry.bind_extension_functions(config.model)
    torch.manual_seed(0)
    model = Decoder(LayerBuilder(config.model, dtype=torch.float64, functions=functions)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    prompts = [list(range(3, 20)), [7], [5, 9, 9, 1]]
    requests = [EngineRequest(prompt, GenerationLimits(6), logprobs=0) for prompt in prompts]
    for prompt, events in zip(prompts, run(engine_of(model), requests).values(), strict=True):
        tokens = torch.tensor([prompt + tokens_of(events)])
        positions = torch.arange(tokens.shape[1])[None]
        states = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions))
        logprobs = model.compute_logits(states)[0].log_softmax(-1)
        expected = logprobs[torch.arange(len(prompt) - 1, tokens.shape[1] - 1), tokens[0, len(prompt) :]]
        found = [scored.logprob for event in events for scored in event.scored]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model": {"preset": "tiny", "norm": "mean_size"}}, "model.norm = 'mean_size': must be rmsnorm, layernorm, or one"),
        ({"model": {"preset": "tiny", "attention_scores": "kerple"}}, "requires its extension"),
        (make_run(norm="mean_siz"), "extensions: [./FILE.py]"),
        (make_run(norm="mean_size", zero_centered_norm=True), "zero_centered_norm"),
        (make_run(functions={"relu_gate": {}}), "requires a setting of the model that names it"),
        (make_run(activation="relu_gate", functions={"relu_gate": {"pow": 1}}), "model.functions.relu_gate.pow: unknown key"),
        (make_run(attention_scores="log_distance", attention_dropout=0.1), "attention_dropout"),
        (
            {**make_run(attention_scores="log_distance"), "parallel": {"cp": 2}},
            "parallel.cp = 2: is not supported with model.attention_scores = log_distance",
        ),
    ],
)  # fmt: skip
def test_settings_that_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.parse(resolve_run_config({"data": {"train": "none"}, **raw}))
    assert words in str(error.value)
