"""Megatron-Core's BERT: its checkpoints both ways, and its losses on its own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from masked_data import save_word_pieces, sentences
from megatron_oracle import BASE, run

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_data.batch_loader import BatchLoader, StepBatch
from mega_data.blended_dataset import build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.model_loading import load_inference_model
from mega_trainer.data.micro_batch import DocumentBounds, SegmentOrderTargets

pytest.importorskip("megatron.core", reason="the reference implementation")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BERT: dict[str, Any] = {
    **BASE, "normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False, "vocab_size": 256, "padded_vocab_size": 256, "bert_binary_head": True,
}  # fmt: skip
MODELS = {
    "pairs": (BERT, {"tp": 2, "pp": 1}),
    "no-pairs": ({**BERT, "bert_binary_head": False, "untie_embeddings_and_output_weights": True}, {"tp": 2, "pp": 2}),
}
SAMPLES, S = 6, 64


def megatrons_samples(folder: Path, name: str) -> StepBatch:
    """In Megatron's order, which test_bert.py holds against its own, and as its model is given them."""
    pairs = bool(MODELS[name][0]["bert_binary_head"])
    raw = {
        "train": str(sentences(folder / f"d-{name}", 3)),
        "kind": "bert",
        "order": "megatron",
        "seq_length": S,
        "split": [1],
    }
    config = DataConfig.parse({**raw, "bert": {"sentence_pairs": pairs}})
    tokenizer = Tokenizer(save_word_pieces(folder / "tok"))
    data, *_ = build_blended_datasets(config, seed=5, samples={"train": SAMPLES}, eod=None, tokenizer=tokenizer)
    given = [data[k] for k in range(SAMPLES)]
    columns = {"text": "tokens", "labels": "labels", "padding_mask": "padding_mask", "types": "token_types"}
    theirs = {
        key: torch.stack([torch.as_tensor(getattr(one, ours)).long() for one in given]) for key, ours in columns.items()
    }
    theirs["types"] = theirs["types"] if pairs else None
    torch.save(
        {**theirs, "is_random": torch.tensor([int(one.is_random) for one in given])}, folder / f"{name}-samples.pt"
    )
    return next(iter(BatchLoader(data, global_batch=SAMPLES, seq_length=S)))


@pytest.fixture(scope="module")
def megatron_bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, StepBatch]]:
    """As Megatron saves them, its losses; and what it makes of the weights after a way through a checkpoint of mega's."""
    root = tmp_path_factory.mktemp("bert")
    batches = {name: megatrons_samples(root, name) for name in MODELS}
    run(
        [
            {"do": "save", "args": args, **layout, "folder": str(root / name / "iter_0000007")}
            for name, (args, layout) in MODELS.items()
        ],
        root / "a",
    )
    jobs = []
    for name in MODELS:
        convert_checkpoint(root / name, root / f"{name}-mega", "mega", verify=True)
        convert_checkpoint(
            root / f"{name}-mega",
            root / f"{name}-back",
            "megatron",
            options=ConvertOptions(tp=2, implementation="local"),
        )
        for folder in (root / name / "iter_0000007", root / f"{name}-back" / "release"):
            jobs.append({"do": "bert", "folder": str(folder), "samples": str(root / f"{name}-samples.pt")})
    run(jobs, root / "b")
    return root, batches


@pytest.mark.parametrize("name", MODELS)
def test_losses_on_megatrons_samples_are_megatrons(megatron_bert: tuple[Path, dict[str, StepBatch]], name: str) -> None:
    root, batches = megatron_bert
    batch, expected = batches[name], torch.load(root / name / "iter_0000007.pt")
    model = load_inference_model(root / f"{name}-mega", kinds=("encoder",))
    assert batch.document_ids is not None
    tokens, labels, weights, positions = (
        torch.from_numpy(each) for each in (batch.tokens, batch.labels, batch.loss_weights, batch.position_ids)
    )
    types = torch.from_numpy(batch.token_types) if model.config.token_types and batch.token_types is not None else None
    outline = DocumentBounds.from_positions(batch.position_ids, batch.document_ids)
    x = model(
        model.embed_inputs(tokens, positions, types=types),
        model.make_forward_context(positions, sequence_bounds=outline),
    )
    _, each = model.compute_token_loss(x, labels, weights)
    at = weights > 0
    assert at.sum() > 20
    torch.testing.assert_close(each[at], expected["lm"][at], rtol=1e-5, atol=1e-5)
    if model.head.pooler is not None:
        assert batch.pair_labels is not None
        order = SegmentOrderTargets(torch.from_numpy(batch.pair_labels), torch.full((SAMPLES,), 1 / SAMPLES))
        torch.testing.assert_close(
            model.head.pooler.segment_order_loss(model.head.norm(x), order), expected["pairs"], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", MODELS)
def test_what_mega_writes_is_what_megatron_wrote(megatron_bert: tuple[Path, dict[str, StepBatch]], name: str) -> None:
    root, _ = megatron_bert
    one, other = (torch.load(root / f"{folder}.pt") for folder in (f"{name}/iter_0000007", f"{name}-back/release"))
    assert torch.equal(one["lm"], other["lm"])
    assert one["pairs"] is None or torch.equal(one["pairs"], other["pairs"])
