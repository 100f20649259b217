"""The example of a family that mega does not know: transformers' logits, the round trip of a folder, and layouts."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
from extension_cases import EXAMPLES, extended_cases, find_differences
from preference_pairs import pairs, write_pairs
from safetensors.torch import load_file

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.source import open_weight_source, read_model_config
from mega_common.errors import CheckpointError
from mega_eval.model_loading import load_inference_model
from mega_trainer.config.extensions import load_extensions
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.engine import TrainingEngine
from mega_trainer.job.step_replay import read_recorded_steps
from mega_trainer.run.training_run import run_training

FILE = str(EXAMPLES / "biogpt.py")
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "initializer_range": 0.3,
    "layerdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("bio") / "hf"
    transformers.BioGptForCausalLM(transformers.BioGptConfig(**SHAPE)).eval().save_pretrained(out)
    return out


def test_logits_are_those_of_transformers(folder: Path) -> None:
    reference = transformers.BioGptForCausalLM.from_pretrained(folder).eval()
    model, tokens = load_inference_model(folder, extensions=[FILE]), torch.arange(20)[None] * 7 % 61
    positions = torch.arange(20)[None]
    states = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions))
    torch.testing.assert_close(model.compute_logits(states), reference(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_round_trip_gives_the_same_bytes(folder: Path) -> None:
    families = tuple(load_extensions([FILE]).families)
    options = ConvertOptions(families=families)
    convert_checkpoint(folder, folder.parent / "mega", "mega", options=options)
    convert_checkpoint(folder.parent / "mega", folder.parent / "again", "hf", options=options, verify=True)
    weights = "model.safetensors"
    assert (folder.parent / "again" / weights).read_bytes() == (folder / weights).read_bytes()
    with pytest.raises(CheckpointError, match="model type 'biogpt' is not supported"):
        open_weight_source(folder)


@pytest.mark.parametrize(
    ("line", "broken", "words"),
    [
        ('        *weight_bias_rules(f"{BLOCK}.fc2", f"{LAYER}.mlp.down_proj"),\n', "", r"mlp\.down_proj"),
        ('"k_proj": "k_proj"', '"k_proj": "q_proj"', r"self_attn\.[qk]_proj"),
        ('"position_offset": 2', '"position_offset": 0', "embed_positions"),
    ],
    ids=["a tensor left out", "a tensor counted twice", "rows of a table"],
)
def test_a_wrong_declaration_is_named(line: str, broken: str, words: str, folder: Path, tmp_path: Path) -> None:
    source = Path(FILE).read_text()
    assert source.count(line) == 1
    (tmp_path / "biogpt.py").write_text(source.replace(line, broken))
    options = ConvertOptions(families=tuple(load_extensions([str(tmp_path / "biogpt.py")]).families))
    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(folder, tmp_path / "mega", "mega", options=options)


def test_a_config_without_the_weights_is_written_and_read(folder: Path) -> None:
    (family,) = load_extensions([FILE]).families
    raw = json.loads((folder / "config.json").read_text())
    model = family.read_config_json(raw)
    assert not family.unread_keys(raw)
    assert model == read_model_config(folder, families=[family])
    assert family.read_config_json(family.write_config_json(model)) == model


def test_every_layout_computes_what_one_process_computes(folder: Path) -> None:
    (family,) = load_extensions([FILE]).families
    model = family.read_config_json(json.loads((folder / "config.json").read_text()))
    fields = model.model_dump(mode="json", exclude_unset=True)
    layouts = [({"tp": 4}, "none"), ({"tp": 2, "sp": True, "pp": 2}, "full"), ({"cp": 2, "zero": 3}, "none")]
    del fields["num_layers"]
    cases = extended_cases("biogpt.py", {"model": fields}, layouts)
    assert not find_differences(cases)


def test_an_engine_loads_and_streams_the_weights_under_the_names_of_the_family(folder: Path) -> None:
    raw = {"extensions": [FILE], "model": {"from": str(folder)}, "precision": "fp32", "device": "cpu"}
    engine = TrainingEngine({**raw, "data": {"seq_length": 16}})
    streamed = dict(chain.from_iterable(engine.stream_weights()))
    stored = load_file(folder / "model.safetensors")
    assert streamed.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in streamed.items())


def test_a_cached_reference_model_is_read_by_the_family(folder: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs", pairs(4))
    raw = {
        "extensions": [FILE], "model": {"from": str(folder)}, "precision": "fp64", "device": "cpu", "output": str(tmp_path / "run"),
        "data": {"train": str(tmp_path / "pairs"), "kind": "pairs", "seq_length": 32, "split": [1]},
        "batch": {"global": 2}, "train": {"steps": 1}, "checkpoint": {"save": False}, "log": {"tensorboard": False},
        "objective": {"kind": "dpo"},
    }  # fmt: skip
    run_training(RunConfig.parse(resolve_run_config(raw)), RankInfo())
    assert read_recorded_steps(tmp_path / "run")[1]["loss"] == pytest.approx(math.log(2))  # the policy is the reference
