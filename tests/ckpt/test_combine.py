from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hf_models import save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mega_ckpt import combine
from mega_ckpt.combine import average, prune
from mega_ckpt.convert import convert
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Box, Sharded
from mega_ckpt.source import Source, open_source
from mega_ckpt.store import Checkpoint, save
from mega_ckpt.verify import verify
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig

MODEL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}


def save_checkpoint(root: Path, seed: int, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """A checkpoint of random weights with two moments each and an asset."""
    model = ModelConfig.parse({**MODEL, **changes})
    generator = torch.Generator().manual_seed(seed)
    held = {}
    for name, shape in tensors_of(model).items():
        for key in (f"weights/{name}", f"optimizer/exp_avg/{name}", f"optimizer/exp_avg_sq/{name}"):
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            held[key] = Sharded(shape, [Box((0,) * len(shape), tensor)])
    assets = root / "assets"
    assets.mkdir(parents=True)
    (assets / "tokenizer.json").write_text(f'{{"seed": {seed}}}')
    return save(root, 7, held, model=model, state={"consumed_samples": 70}, assets=assets, provenance={"run": "first"})


def weights(source: Source) -> dict[str, Tensor]:
    return {name: source.read(name).clone() for name in source.keys()}  # noqa: SIM118


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prune_keeps_the_model_to_the_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    full = save_checkpoint(tmp_path / "run", 1, dtype)
    prune(tmp_path / "run", tmp_path / "deep" / "pruned")
    pruned = Checkpoint.open(tmp_path / "deep" / "pruned")
    assert verify(pruned.folder).ok
    assert pruned.keys() == Checkpoint.open(full).keys("weights/")
    assert same(weights(open_source(pruned.folder)), weights(open_source(full)))
    assert (pruned.step, pruned.state, pruned.model) == (7, {}, Checkpoint.open(full).model)
    assert pruned.manifest.provenance == {
        "run": "first",
        "pruned": {"source": str(full), "without": ["optimizer/exp_avg", "optimizer/exp_avg_sq"]},
    }
    assert (pruned.folder / "assets" / "tokenizer.json").read_bytes() == b'{"seed": 1}'


def test_what_came_from_huggingface_still_goes_back_to_the_byte(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "gpt2")
    convert(folder, tmp_path / "mega", "mega")
    prune(tmp_path / "mega", tmp_path / "pruned")
    convert(tmp_path / "pruned", tmp_path / "back", "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_prune_refuses_what_is_damaged_or_no_checkpoint(tmp_path: Path) -> None:
    full = save_checkpoint(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="exists already"):
        prune(full, tmp_path / "run")
    with pytest.raises(CheckpointError):
        prune(tmp_path / "nothing", tmp_path / "out")
    shard = max(full.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=shard.name):
        prune(full, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_stopped_before_the_rename_it_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = save_checkpoint(tmp_path / "run", 1)

    written: list[str] = []

    def stopped(temporary: Path, final: Path) -> None:
        written.append(temporary.name)
        assert verify(temporary).ok
        assert not final.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(combine.os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        prune(full, tmp_path / "out")
    assert written[0].startswith(".out.")
    assert sorted(os.listdir(tmp_path)) == ["run"]


@settings(max_examples=10, deadline=None)
@given(shares=st.lists(st.floats(0.01, 10), min_size=2, max_size=4))
def test_average_is_the_weighted_mean(shares: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("average")
    sources = [save_checkpoint(root / str(seed), seed, torch.float64) for seed in range(len(shares))]
    average(sources, root / "out", weights=shares)
    held, found = [weights(open_source(path)) for path in sources], weights(open_source(root / "out"))
    for name, tensor in found.items():
        expected = sum(share * one[name] for share, one in zip(shares, held, strict=True)) / sum(shares)
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


def test_average_sums_wide_and_writes_the_first_ones_dtype_and_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_ckpt.stream.BLOCK_BYTES", 256)  # several slabs a tensor
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    sources = [save_checkpoint(tmp_path / str(seed), seed, kind) for seed, kind in enumerate(kinds)]
    average(sources, tmp_path / "out")
    held, found = [weights(open_source(path)) for path in sources], weights(open_source(tmp_path / "out"))
    for name, tensor in found.items():
        wide = torch.stack([one[name].float() for one in held]).mean(0)
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), wide, rtol=2**-8, atol=1e-6)
    out = Checkpoint.open(tmp_path / "out")
    assert (out.step, out.state, verify(out.folder).ok) == (0, {}, True)
    assert out.manifest.provenance == {"average": [{"source": str(path), "weight": 1 / 3} for path in sources]}
    assert (out.folder / "assets" / "tokenizer.json").read_bytes() == b'{"seed": 0}'


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    """A sum in bf16 would lose the small weights: 256 + 1 is 256 there."""
    values = (256.0, 1.0, 1.0, 1.0, 1.0)
    model = ModelConfig.parse(MODEL)
    for number, value in enumerate(values):
        held = {
            f"weights/{name}": Sharded(shape, [Box((0,) * len(shape), torch.full(shape, value, dtype=torch.bfloat16))])
            for name, shape in tensors_of(model).items()
        }
        save(tmp_path / str(number), 1, held, model=model, state={})
    average([tmp_path / str(number) for number in range(5)], tmp_path / "out")
    for tensor in weights(open_source(tmp_path / "out")).values():
        assert (tensor == torch.tensor(260 / 5, dtype=torch.bfloat16)).all()


def test_average_of_a_huggingface_folder_and_its_checkpoint(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "llama-tied-linear")
    convert(folder, tmp_path / "mega", "mega")
    average([folder, tmp_path / "mega"], tmp_path / "out")
    assert same(weights(open_source(tmp_path / "out")), weights(open_source(folder)))
    convert(tmp_path / "out", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_average_names_what_makes_another_model(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "one", 1)
    other = save_checkpoint(tmp_path / "other", 1, num_layers=3, rope={"theta": 5e5})
    with pytest.raises(CheckpointError, match=r"num_layers is 3 instead of 2, rope is .*500000") as caught:
        average([one, one, other], tmp_path / "out")
    assert caught.value.message.startswith(str(other))
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]


def test_training_settings_make_no_other_model(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "one", 1)
    other = save_checkpoint(tmp_path / "other", 1, attention_dropout=0.1, num_kv_heads=4)
    average([one, other], tmp_path / "out")
    assert same(weights(open_source(tmp_path / "out")), weights(open_source(one)))


@pytest.mark.parametrize(
    ("count", "given_weights", "match"),
    [
        (1, None, "two or more"),
        (2, [1.0], "1 weights for 2 checkpoints"),
        (2, [1.0, 0.0], "expected a positive number"),
        (2, [1.0, -1.0], "expected a positive number"),
        (2, [1.0, float("nan")], "expected a positive number"),
        (2, [1.0, float("inf")], "expected a positive number"),
    ],
)
def test_weights_that_do_not_fit(count: int, given_weights: list[float] | None, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        average([tmp_path / "one"] * count, tmp_path / "out", weights=given_weights)
