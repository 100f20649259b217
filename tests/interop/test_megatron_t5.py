"""Megatron-Core's T5: its checkpoints both ways, and its losses on its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from masked_data import sentences, word_piece_tokenizer
from megatron_oracle import BASE, run
from torch import Tensor

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.source import open_weight_source
from mega_ckpt.store import Checkpoint
from mega_data.batch_loader import BatchLoader
from mega_data.blended_dataset import build_blended_datasets
from mega_eval.model_loading import load_inference_model
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.model.encoder_decoder import EncoderDecoderModel

pytest.importorskip("megatron.core", reason="the reference implementation")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

T5: dict[str, Any] = {
    **BASE, "num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": 2, "normalization": "LayerNorm", "swiglu": False,
    "add_bias_linear": True, "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
    "vocab_size": 256, "padded_vocab_size": 256, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
}  # fmt: skip
# By name: args, layout of Megatron's save, and that of the way back.
KINDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "tied": (T5, 2, 2),
    "untied": (
        {**T5, "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "add_bias_linear": False,
         "decoder_num_layers": 3, "num_layers": 3, "normalization": "RMSNorm", "swiglu": True}, 1, 2,
    ),
    "relative": ({**T5, "position_embedding_type": "relative", "relative_attention_num_buckets": 8}, 4, 1),
}  # fmt: skip
SAMPLES, S, DECODER = 6, 40, 32


def megatrons_samples(folder: Path) -> MicroBatch:
    """In Megatron's order, which tests/data/kinds/test_t5.py holds against its own; the same goes to `samples.pt`."""
    data = {"train": [str(sentences(folder / "d", 3, longest=20))], "seq_length": S, "order": "megatron"}
    model = {
        "encoder": {"num_layers": 1},
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 207,
    }
    raw = {
        "model": model,
        "data": {**data, "t5": {"decoder_seq_length": DECODER}},
        "batch": {"micro": SAMPLES, "global": SAMPLES},
    }
    config = RunConfig.parse(resolve_run_config(raw), source="test")
    words = word_piece_tokenizer(folder)
    samples, *_ = build_blended_datasets(config.data, seed=1, samples={"train": SAMPLES}, eod=None, tokenizer=words)
    batch = next(iter(BatchLoader(samples, global_batch=SAMPLES, seq_length=S)))
    (micro,) = split_micro_batches(batch, config, torch.device("cpu"))
    assert batch.source is not None
    assert np.unique(batch.source.lengths).size > 1
    theirs = {
        "encoder": torch.from_numpy(batch.source.tokens), "decoder": micro.tokens, "labels": micro.labels,
        "read": torch.from_numpy(batch.loss_weights > 0),
        "seen": torch.arange(S) < torch.from_numpy(batch.source.lengths)[:, None],
    }  # fmt: skip
    torch.save(theirs, folder / "samples.pt")
    return micro


@dataclass(frozen=True)
class Theirs:
    """Folders: what Megatron saved, of each kind, and what came back to it; and the micro-batch of samples that both read."""

    root: Path
    micro: MicroBatch

    def found(self, name: str, folder: str) -> dict[str, Any]:
        """Megatron's weights and losses of a folder."""
        found: dict[str, Any] = torch.load(self.root / name / f"{folder}.pt")
        return found


@pytest.fixture(scope="module")
def megatron_t5(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """Megatron's folders through mega and back, in both formats, one of which comes from the files of its ranks."""
    root = tmp_path_factory.mktemp("t5")
    micro = megatrons_samples(root)
    run(
        [
            {"do": "save", "args": args, "tp": tp, "folder": str(root / name / "iter_0000007"), "legacy": str(root / name / "ranks")}
            for name, (args, tp, _) in KINDS.items()
        ]
        + [
            {"do": "train", "args": T5, "tp": 2, "pp": 1, "ep": 1, "bf16": False, "sharding": None,
             "folder": str(root / "trained" / "theirs"), "memory": str(root / "trained" / "memory")}
        ],
        root / "a",
    )  # fmt: skip
    jobs = []
    for name, (args, _, tp) in KINDS.items():
        place = root / name
        samples = None if args["position_embedding_type"] == "relative" else str(root / "samples.pt")
        convert_checkpoint(place, place / "mega", "mega", verify=True)
        convert_checkpoint(place / "ranks", place / "from-ranks", "mega", verify=True)
        convert_checkpoint(
            place / "mega", place / "back", "megatron", options=ConvertOptions(tp=2, implementation="local")
        )
        older = ConvertOptions(tp=tp, implementation="local", megatron_format="torch")
        convert_checkpoint(place / "mega", place / "older", "megatron", options=older, verify=True)
        jobs += [
            {"do": "t5", "folder": str(place / "iter_0000007"), "samples": samples},
            {"do": "t5", "folder": str(place / "back" / "release"), "samples": samples},
            {"do": "load legacy", "folder": str(place / "older" / "release"), "tp": tp, "pp": 1, "like": str(place / "iter_0000007")},
        ]  # fmt: skip
    run(jobs, root / "b")
    return Theirs(root, micro)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "relative"])
def test_losses_on_megatrons_samples_are_megatrons(megatron_t5: Theirs, name: str) -> None:
    micro, model = (
        megatron_t5.micro,
        load_inference_model(str(megatron_t5.root / name / "mega"), kinds=("encoder-decoder",)),
    )
    assert isinstance(model, EncoderDecoderModel)
    with torch.no_grad():
        _, _, ours = model.run_stage(None, micro, model.make_batch_context(micro, lambda *_: None))
    read = torch.load(megatron_t5.root / "samples.pt")["read"]
    assert read.sum() > 20
    losses: Tensor = megatron_t5.found(name, "iter_0000007")["losses"]
    torch.testing.assert_close(ours[read], losses[read], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_what_mega_writes_is_what_megatron_wrote(megatron_t5: Theirs, name: str) -> None:
    one, other = megatron_t5.found(name, "iter_0000007"), megatron_t5.found(name, "back/release")
    assert one["weights"].keys() == other["weights"].keys()
    for tensor in one["weights"]:
        assert torch.equal(one["weights"][tensor], other["weights"][tensor]), tensor
    assert one["losses"] is None or torch.equal(one["losses"], other["losses"])


@pytest.mark.parametrize("name", KINDS)
def test_files_of_ranks_hold_the_same(megatron_t5: Theirs, name: str) -> None:
    one, other = (
        open_weight_source(megatron_t5.root / name / "mega"),
        open_weight_source(megatron_t5.root / name / "from-ranks"),
    )
    assert one.model == other.model
    assert one.tensor_names() == other.tensor_names()
    assert all(torch.equal(one.read_tensor(tensor), other.read_tensor(tensor)) for tensor in one.tensor_names())


def test_moments_come_along(megatron_t5: Theirs) -> None:
    """Those of a T5 that Megatron trained are what it had in memory."""
    place = megatron_t5.root / "trained"
    convert_checkpoint(place / "theirs", place / "ours", "mega", verify=True)
    ours = Checkpoint.open_folder(place / "ours")
    for moment in ("exp_avg", "exp_avg_sq"):
        memory = open_weight_source(f"{place}/memory-{moment}")
        for tensor in memory.tensor_names():
            assert torch.equal(ours.read_tensor(f"optimizer/{moment}/{tensor}"), memory.read_tensor(tensor)), tensor
