"""Decoders of every family against transformers: logits, loss, gradients of every tensor, and greedy text.

The models are those of `tests/hf_models.py`, whose options are odd and whose weights are random.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hf_models import ENCODERS, MODELS, auto_class
from torch import Tensor

from mega_ckpt.canonical_tensors import EXPERT_TABLE
from mega_ckpt.formats.hf_source import HfSource
from mega_common.layer_kinds import INDEXER
from mega_eval.generate import generate_completions
from mega_eval.model_loading import load_inference_model
from mega_eval.text_stream import GenerationLimits
from mega_trainer.parallel.parameter_info import get_parameter_info

transformers = pytest.importorskip("transformers", reason="the reference implementation")

# Held to transformers elsewhere: recurrent layers (test_hf_logits.py), encoders (test_hf_encoders.py), two stacks (T5).
ELSEWHERE = {*ENCODERS, "t5", "mt5", "umt5", "nemotron_h", "mamba2", "bamba", "granitemoehybrid"}
ELSEWHERE |= {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
CASES = [case for case, (kind, _) in MODELS.items() if kind not in ELSEWHERE]


class Numbers:
    """A tokenizer of no text."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


def save_reference(case: str, folder: Path) -> torch.nn.Module:
    """Save a random model of transformers, as a case of `MODELS` describes it, and return it."""
    kind, settings = MODELS[case]
    config = transformers.AutoConfig.for_model(kind, **settings)
    config.eos_token_id = None
    config.pad_token_id = 0 if kind == "modernbert-decoder" else None  # a padding token would have no gradient
    config.output_router_logits = False  # which adds the router's loss to the loss
    torch.manual_seed(len(case))
    model = auto_class(kind).from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        biases = [
            buffer
            for name, buffer in model.named_buffers()
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar"))
        ]
        for parameter in [*model.parameters(), *biases]:
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(EXPERT_TABLE):
                buffer.copy_(torch.rand(len(buffer), model.num_experts).topk(buffer.shape[1], -1).indices)
    model.save_pretrained(folder)
    return model.eval()


def gradients_by_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a whole model by canonical tensor."""
    found: dict[str, Tensor] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            for piece in get_parameter_info(parameter).pieces:
                rows = tuple(slice(a, a + n) for a, n in zip(piece.local_start, piece.shape, strict=True))
                found[piece.name] = parameter.grad[rows]
    return found


def reference_gradients(model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return transformers' gradients by canonical tensor: saved as a folder of weights, and read as one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    source = HfSource(folder)
    return {name: source.read_tensor(name) for name in source.tensor_names()}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_gradients_and_greedy_text(tmp_path: Path, case: str) -> None:
    theirs = save_reference(case, tmp_path / "hf")
    ours = load_inference_model(tmp_path / "hf").requires_grad_(True)
    tokens = torch.randint(ours.config.vocab_size, (2, 29), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(28)[None]
    expected = theirs(tokens[:, :-1], labels=tokens[:, 1:].clone(), shift_labels=tokens[:, 1:].contiguous())
    x = ours(ours.embed_inputs(tokens[:, :-1], positions), ours.make_forward_context(positions, tokens=tokens[:, :-1]))
    assert expected.logits.std() > 0.01, "logits that say nothing"
    torch.testing.assert_close(ours.compute_logits(x), expected.logits, rtol=0, atol=1e-5)
    loss, _ = ours.compute_token_loss(x, tokens[:, 1:], torch.full((2, 28), 1 / 56))
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)

    row = tokens[0, :11].tolist()
    (found,) = generate_completions(ours, Numbers(), [row], GenerationLimits(20))
    with torch.no_grad():
        for _ in range(20):
            row.append(int(theirs(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    assert list(found.tokens) == row[11:]

    loss.backward()
    expected.loss.backward()
    wanted, held = reference_gradients(theirs, tmp_path / "gradients"), gradients_by_name(ours)
    # an indexer has no gradient from the loss of the model, here and in transformers
    trained = {
        name
        for name in wanted
        if not name.endswith(("e_score_correction_bias", "layer_scalar", EXPERT_TABLE)) and INDEXER not in name
    }
    assert held.keys() >= trained
    for name in trained:
        torch.testing.assert_close(
            held[name], wanted[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
