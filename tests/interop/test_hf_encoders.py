"""Encoders against transformers: hidden states, both losses, segments and padding, and folders to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VARIANTS, save_tiny, variant
from torch import Tensor

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import find_family_by_name, find_family_expressing_model
from mega_eval.model_loading import load_inference_model
from mega_trainer.data.micro_batch import DocumentBounds, SegmentOrderTargets
from mega_trainer.model.decoder import Decoder

pytest.importorskip("transformers", reason="the reference implementation")
ENCODERS = [name for name, fields in VARIANTS.items() if fields.get("causal") is False]
LENGTHS, S = [29, 17, 23], 29


def random_inputs(vocab: int, types: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Tokens none of which is for padding, types of segment, and which are padding."""
    g = torch.Generator().manual_seed(1)
    padding = np.arange(S) >= np.array(LENGTHS)[:, None]
    tokens = torch.randint(3, vocab, (len(LENGTHS), S), generator=g)
    return tokens, torch.randint(0, max(types, 1), tokens.shape, generator=g), padding


def stream(model: Decoder, tokens: Tensor, types: Tensor, padding: np.ndarray) -> Tensor:
    """The residual stream behind all layers, where padding is a document by itself."""
    positions = torch.arange(S).expand(tokens.shape)
    outline = DocumentBounds.from_positions(positions.numpy(), padding.astype(np.int32))
    return model(
        model.embed_inputs(tokens, positions, types=types),
        model.make_forward_context(positions, sequence_bounds=outline),
    )


@pytest.mark.parametrize(("name", "family"), [*((name, "") for name in ENCODERS), ("bert-pairs", "ernie")])
def test_hidden_states_logits_and_losses(tmp_path: Path, name: str, family: str) -> None:
    config = variant(name)
    reference, model = (
        save_tiny(tmp_path, find_family_by_name(family) if family else find_family_expressing_model(config), config),
        load_inference_model(tmp_path, kinds=("encoder",)),
    )
    tokens, types, padding = random_inputs(config.vocab_size, config.token_types)
    there = torch.from_numpy(~padding)
    labels = torch.where(there & (torch.rand(tokens.shape) < 0.3), tokens.flip(1), -100)
    asked: dict[str, Any] = {"attention_mask": there.long()} | ({"token_type_ids": types} if config.token_types else {})
    if config.position_offset:  # transformers tells padding by its token
        asked["position_ids"] = torch.arange(S).expand(tokens.shape) + config.position_offset
    order = torch.tensor([1, 0, 1])
    asked |= {"labels": labels} if config.masked_lm else {}
    asked |= {"next_sentence_label": order} if config.sentence_pairs else {}
    with torch.no_grad():
        expected = reference(tokens, **asked, output_hidden_states=config.masked_lm is not None)
        x = stream(model, tokens, types, padding)
        hidden = model.head.norm(x)
        last = expected.hidden_states[-1] if config.masked_lm else expected.last_hidden_state
        near: dict[str, Any] = {"rtol": 0, "atol": 1e-5}
        torch.testing.assert_close(hidden[there], last[there], **near)
        loss = torch.tensor(0.0)
        if config.masked_lm:
            logits = expected.prediction_logits if config.sentence_pairs else expected.logits
            torch.testing.assert_close(model.compute_logits(x)[there], logits[there], **near)
            weights = (labels >= 0).float()
            loss = model.compute_token_loss(x, labels.clamp(min=0), weights)[0] / weights.sum()
        if config.sentence_pairs:
            assert model.head.pooler is not None
            torch.testing.assert_close(
                model.head.pooler.segment_order_logits(hidden), expected.seq_relationship_logits, **near
            )
            loss = loss + model.head.pooler.segment_order_loss(
                hidden, SegmentOrderTargets(order, torch.full((3,), 1 / 3))
            )
        elif config.pooler:
            assert model.head.pooler is not None
            torch.testing.assert_close(model.head.pooler(hidden), expected.pooler_output, **near)
        if config.masked_lm:
            torch.testing.assert_close(loss, expected.loss, **near)


@pytest.mark.parametrize("name", ENCODERS)
def test_folders_come_back_to_the_byte(tmp_path: Path, name: str) -> None:
    config = variant(name)
    save_tiny(tmp_path / "hf", find_family_expressing_model(config), config)
    convert_checkpoint(tmp_path / "hf", tmp_path / "mega", "mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf")
    for file in (tmp_path / "hf").iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


def test_norms_with_the_names_of_the_first_folders(tmp_path: Path) -> None:
    """And the output's bias a second time, with the buffer of positions, as `bert-base-uncased` has them."""
    from safetensors.torch import load_file, save_file

    config = variant("bert")
    save_tiny(tmp_path, find_family_expressing_model(config), config)
    held = load_file(tmp_path / "model.safetensors")
    model = load_inference_model(tmp_path, kinds=("encoder",))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in held.items()
    }
    old |= {
        "cls.predictions.decoder.bias": old["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(64)[None],
    }
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = load_inference_model(tmp_path, kinds=("encoder",))
    for (_, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert one.equal(other)
