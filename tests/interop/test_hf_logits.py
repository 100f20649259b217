"""Logits against transformers: every family that mega knows, with every kind of option that its config.json can say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import VARIANTS, cases, save_tiny, variant

from mega_ckpt.families import FAMILIES, ModelFamily, find_family_expressing_model
from mega_eval.generate import generate_completions
from mega_eval.model_loading import load_inference_model
from mega_eval.text_stream import GenerationLimits

pytest.importorskip("transformers", reason="the reference implementation")


TWO_STACKS = {"t5", "mt5", "umt5"}  # held by tests/trainer/model/test_encoder_decoder.py
OWN_SETTINGS = {"deepseek_v4"}  # held by test_hf_families.py


def test_every_family_and_every_variant_has_a_case():
    found = cases()
    assert {family.name for family, _ in found} | TWO_STACKS | OWN_SETTINGS == {family.name for family in FAMILIES}
    assert {name for _, name in found} == set(VARIANTS)


DECODERS = [(family, name) for family, name in cases() if variant(name).causal]  # encoders: test_hf_encoders.py


@pytest.mark.parametrize(("family", "name"), [pytest.param(f, n, id=f"{f.name}-{n}") for f, n in DECODERS])
def test_logits(tmp_path: Path, family: ModelFamily, name: str):
    config = variant(name)
    reference = save_tiny(tmp_path, family, config)
    model = load_inference_model(tmp_path)
    tokens = torch.randint(config.vocab_size, (2, 29), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(29)[None]
    with torch.no_grad():
        expected = reference(tokens).logits
        found = model.compute_logits(
            model(model.embed_inputs(tokens, positions), model.make_forward_context(positions))
        )
    assert expected.std() > 0.1, "logits that say nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Numbers:
    """A tokenizer of no text."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize(
    "name", ["nemotron-h", "nemotron-h-experts", "mamba2", "bamba", "granite4", "qwen3-next", "qwen3.5"]
)
def test_greedy_text_of_hybrids(tmp_path: Path, name: str):
    """From states that go on token by token here; transformers reads the whole row again for each."""
    config = variant(name)
    reference = save_tiny(tmp_path, find_family_expressing_model(config), config)
    row = [(7 * i * i + 3) % config.vocab_size for i in range(11)]
    (found,) = generate_completions(load_inference_model(tmp_path), Numbers(), [row], GenerationLimits(20))
    with torch.no_grad():
        for _ in range(20):
            row.append(int(reference(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    assert list(found.tokens) == row[11:]
