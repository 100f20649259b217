from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hf_models import save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_ckpt import derive_checkpoint
from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.derive_checkpoint import average_checkpoints, copy_checkpoint_without_training_state
from mega_ckpt.source import WeightSource, open_weight_source
from mega_ckpt.store import Checkpoint, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_ckpt.verify import verify_checkpoint
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}


def save_random_checkpoint(root: Path, seed: int, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A checkpoint of random weights with two moments each and an asset."""
    model = ModelConfig.parse({**MODEL, **changes})
    generator = torch.Generator().manual_seed(seed)
    held = {}
    for name, shape in canonical_tensors(model).items():
        for key in (f"weights/{name}", f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}"):
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            held[key] = ShardedTensor(shape, [TensorBox((0,) * len(shape), tensor)])
    assets = root / "assets"
    assets.mkdir(parents=True)
    (assets / "tokenizer.json").write_text(f'{{"seed": {seed}}}')
    return save_sharded_checkpoint(
        root, 7, held, model=model, state={"consumed_samples": 70}, assets=assets, provenance={"run": "first"}
    )


def weights(source: WeightSource) -> dict[str, Tensor]:
    return {name: source.read_tensor(name).clone() for name in source.tensor_names()}


def equal_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prune_keeps_the_model_to_the_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    full = save_random_checkpoint(tmp_path / "run", 1, dtype)
    copy_checkpoint_without_training_state(tmp_path / "run", tmp_path / "deep" / "pruned")
    pruned = Checkpoint.open_folder(tmp_path / "deep" / "pruned")
    assert verify_checkpoint(pruned.folder).ok
    assert pruned.tensor_keys() == Checkpoint.open_folder(full).tensor_keys("weights/")
    assert equal_tensors(weights(open_weight_source(pruned.folder)), weights(open_weight_source(full)))
    assert (pruned.step, pruned.trainer_state, pruned.model) == (7, {}, Checkpoint.open_folder(full).model)
    assert pruned.manifest.provenance == {
        "run": "first",
        "pruned": {"source": str(full), "without": ["optimizer/exp_avg", "optimizer/exp_avg_sq"]},
    }
    assert (pruned.folder / "assets" / "tokenizer.json").read_bytes() == b'{"seed": 1}'


def test_what_came_from_huggingface_still_goes_back_to_the_byte(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "gpt2")
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    copy_checkpoint_without_training_state(tmp_path / "mega", tmp_path / "pruned")
    convert_checkpoint(tmp_path / "pruned", tmp_path / "back", "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_prune_refuses_what_is_damaged_or_no_checkpoint(tmp_path: Path) -> None:
    full = save_random_checkpoint(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="exists already"):
        copy_checkpoint_without_training_state(full, tmp_path / "run")
    with pytest.raises(CheckpointError):
        copy_checkpoint_without_training_state(tmp_path / "nothing", tmp_path / "out")
    shard = max(full.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=shard.name):
        copy_checkpoint_without_training_state(full, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_stopped_before_the_rename_it_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = save_random_checkpoint(tmp_path / "run", 1)

    written: list[str] = []

    def stopped(temporary: Path, final: Path) -> None:
        written.append(temporary.name)
        assert verify_checkpoint(temporary).ok
        assert not final.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(derive_checkpoint.os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        copy_checkpoint_without_training_state(full, tmp_path / "out")
    assert written[0].startswith(".out.")
    assert sorted(os.listdir(tmp_path)) == ["run"]


@settings(max_examples=10, deadline=None)
@given(shares=st.lists(st.floats(0.01, 10), min_size=2, max_size=4))
def test_average_is_the_weighted_mean(shares: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("average")
    sources = [save_random_checkpoint(root / str(seed), seed, torch.float64) for seed in range(len(shares))]
    average_checkpoints(sources, root / "out", weights=shares)
    held, found = [weights(open_weight_source(path)) for path in sources], weights(open_weight_source(root / "out"))
    for name, tensor in found.items():
        expected = sum(share * one[name] for share, one in zip(shares, held, strict=True)) / sum(shares)
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


def test_average_sums_wide_and_writes_the_first_ones_dtype_and_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_ckpt.stream_checkpoint.BLOCK_BYTES", 256)  # several slabs a tensor
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    sources = [save_random_checkpoint(tmp_path / str(seed), seed, kind) for seed, kind in enumerate(kinds)]
    average_checkpoints(sources, tmp_path / "out")
    held, found = [weights(open_weight_source(path)) for path in sources], weights(open_weight_source(tmp_path / "out"))
    for name, tensor in found.items():
        wide = torch.stack([one[name].float() for one in held]).mean(0)
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), wide, rtol=2**-8, atol=1e-6)
    out = Checkpoint.open_folder(tmp_path / "out")
    assert (out.step, out.trainer_state, verify_checkpoint(out.folder).ok) == (0, {}, True)
    assert out.manifest.provenance == {"average": [{"source": str(path), "weight": 1 / 3} for path in sources]}
    assert (out.folder / "assets" / "tokenizer.json").read_bytes() == b'{"seed": 0}'


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    """A sum in bf16 would lose the small weights: 256 + 1 is 256 there."""
    values = (256.0, 1.0, 1.0, 1.0, 1.0)
    model = ModelConfig.parse(MODEL)
    for number, value in enumerate(values):
        held = {
            f"weights/{name}": ShardedTensor(
                shape, [TensorBox((0,) * len(shape), torch.full(shape, value, dtype=torch.bfloat16))]
            )
            for name, shape in canonical_tensors(model).items()
        }
        save_sharded_checkpoint(tmp_path / str(number), 1, held, model=model, state={})
    average_checkpoints([tmp_path / str(number) for number in range(5)], tmp_path / "out")
    for tensor in weights(open_weight_source(tmp_path / "out")).values():
        assert (tensor == torch.tensor(260 / 5, dtype=torch.bfloat16)).all()


def test_average_of_a_huggingface_folder_and_its_checkpoint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "llama-tied-linear")
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    average_checkpoints([folder, tmp_path / "mega"], tmp_path / "out")
    assert equal_tensors(weights(open_weight_source(tmp_path / "out")), weights(open_weight_source(folder)))
    convert_checkpoint(tmp_path / "out", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_average_names_what_makes_another_model(tmp_path: Path) -> None:
    one = save_random_checkpoint(tmp_path / "one", 1)
    other = save_random_checkpoint(tmp_path / "other", 1, num_layers=3, rope={"theta": 5e5})
    with pytest.raises(CheckpointError, match=r"num_layers is 3 instead of 2, rope is .*500000") as caught:
        average_checkpoints([one, one, other], tmp_path / "out")
    assert caught.value.message.startswith(str(other))
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


def test_training_settings_make_no_other_model(tmp_path: Path) -> None:
    one = save_random_checkpoint(tmp_path / "one", 1)
    other = save_random_checkpoint(tmp_path / "other", 1, attention_dropout=0.1, num_kv_heads=4)
    average_checkpoints([one, other], tmp_path / "out")
    assert equal_tensors(weights(open_weight_source(tmp_path / "out")), weights(open_weight_source(one)))


@pytest.mark.parametrize(
    ("count", "given_weights", "match"),
    [
        (1, None, "at least two checkpoints, found 1"),
        (2, [1.0], "one number for each of the 2 checkpoints, found 1"),
        (2, [1.0, 0.0], "must be positive numbers, found"),
        (2, [1.0, -1.0], "must be positive numbers, found"),
        (2, [1.0, float("nan")], "must be positive numbers, found"),
        (2, [1.0, float("inf")], "must be positive numbers, found"),
    ],
)
def test_weights_that_do_not_fit(count: int, given_weights: list[float] | None, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        average_checkpoints([tmp_path / "one"] * count, tmp_path / "out", weights=given_weights)
