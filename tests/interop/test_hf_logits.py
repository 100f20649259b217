"""Logits against transformers: every family that mega knows, with every kind of option that its config.json can say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VARIANTS, cases, save_tiny, variant

from mega_ckpt.families import FAMILIES, Family
from mega_eval.load import load_model

pytest.importorskip("transformers", reason="the reference implementation")


def test_every_family_and_every_variant_has_a_case():
    found = cases()
    assert {family.name for family, _ in found} == {family.name for family in FAMILIES}
    assert {name for _, name in found} == set(VARIANTS)


@pytest.mark.parametrize(("family", "name"), [pytest.param(f, n, id=f"{f.name}-{n}") for f, n in cases()])
def test_logits(tmp_path: Path, family: Family, name: str):
    config = variant(name)
    reference = save_tiny(tmp_path, family, config)
    model = load_model(tmp_path)
    tokens = torch.randint(config.vocab_size, (2, 29), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(29)[None]
    with torch.no_grad():
        expected = reference(tokens).logits
        found = model.logits(model(model.embed(tokens, positions), model.context(positions)))
    assert expected.std() > 0.1, "logits that say nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
