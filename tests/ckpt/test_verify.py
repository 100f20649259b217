"""What verify, diff and inspect tell of checkpoints that are sound, damaged or different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.manifest import MANIFEST
from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_ckpt.verify import diff_checkpoints, inspect_checkpoint, verify_checkpoint
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset

MODEL = ModelConfig.parse(load_model_preset("tiny"))


def save_checkpoint(root: Path, tensors: dict[str, torch.Tensor], *, model: ModelConfig = MODEL, **state: Any) -> Path:
    assets = root.parent / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    (assets / "tokenizer.json").write_text("{}")
    whole = {key: ShardedTensor(tuple(t.shape), [TensorBox((0,) * t.dim(), t)]) for key, t in tensors.items()}
    return save_sharded_checkpoint(root, 1, whole, model=model, state=state, assets=assets)


def two(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weights/a": torch.full((3, 4), fill), "optimizer/main/a": torch.ones(3, 4, dtype=torch.float64)}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_sound_checkpoint(tmp_path: Path) -> None:
    report = verify_checkpoint(save_checkpoint(tmp_path / "root", two()), finite=True)
    assert report.ok
    assert (report.files, report.tensors, report.extra) == (2, 2, [])
    assert "all checksums match" in str(report)


@pytest.mark.parametrize(
    ("name", "position", "named"),
    [
        ("shard-00000-000.safetensors", -1, "weights/a"),
        ("shard-00000-000.safetensors", 0, "optimizer/main/a and 1 more"),
        ("shard-00000-000.safetensors", 20, "optimizer/main/a and 1 more"),
        ("assets/tokenizer.json", 0, "assets/tokenizer.json"),
    ],
)
def test_any_flipped_byte_is_found(tmp_path: Path, name: str, position: int, named: str) -> None:
    folder = save_checkpoint(tmp_path / "root", two())
    flip(folder / name, position)
    report = verify_checkpoint(folder)
    assert not report.ok
    (problem,) = report.problems
    assert name in problem
    assert named in problem


def test_all_damaged_tensors_and_files_are_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "root", two())
    shard = folder / "shard-00000-000.safetensors"
    flip(shard, -1)
    flip(shard, -(48 + 1))
    (folder / "assets" / "tokenizer.json").unlink()
    (folder / "assets" / "stray").touch()
    report = verify_checkpoint(folder)
    assert ["tokenizer.json: the file is missing" in report.problems[0], "main/a" in report.problems[1]] == [True, True]
    assert "weights/a" in report.problems[2]
    assert report.extra == ["assets/stray"]


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "root", two())
    flip(folder / MANIFEST, 200)
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        verify_checkpoint(folder)


def test_elements_that_are_not_finite_are_counted_when_asked(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, float("nan"), float("-inf")]).bfloat16()
    folder = save_checkpoint(tmp_path / "root", {"weights/a": tensor, "count": torch.tensor(3)})
    assert verify_checkpoint(folder).ok
    report = verify_checkpoint(folder, finite=True)
    assert report.not_finite == {"weights/a": 2}
    assert not report.ok


def test_diff_of_the_same(tmp_path: Path) -> None:
    nan = {"weights/a": torch.tensor([float("nan"), 1.0])}
    found = diff_checkpoints(
        save_checkpoint(tmp_path / "a" / "root", nan, x=1), save_checkpoint(tmp_path / "b" / "root", nan, x=1)
    )
    assert found.is_identical
    assert found.equal == 1


def test_diff_tells_settings_and_tensors(tmp_path: Path) -> None:
    left = {**two(), "weights/shape": torch.ones(2), "weights/left": torch.ones(1), "weights/nan": torch.ones(2)}
    right = {**two(1.5), "weights/shape": torch.ones(3), "weights/right": torch.ones(1)}
    right |= {"optimizer/main/a": torch.ones(3, 4), "weights/nan": torch.tensor([1.0, float("nan")])}
    other = MODEL.model_copy(update={"norm_eps": 1e-6})
    a, b = (
        save_checkpoint(tmp_path / "a" / "r", left, x={"y": 1}),
        save_checkpoint(tmp_path / "b" / "r", right, model=other, x={"y": 2}, z=3),
    )
    found = diff_checkpoints(a, b)
    assert not found.is_identical
    assert found.settings == {"model.norm_eps": (1e-5, 1e-6), "state.x.y": (1, 2), "state.z": (None, 3)}
    assert (found.only_in_a, found.only_in_b) == (["weights/left"], ["weights/right"])
    told = {one.key: one for one in found.tensors}
    assert (told["weights/a"].max_abs, told["weights/a"].max_rel) == (0.5, pytest.approx(1 / 3))
    assert told["weights/nan"].max_abs == float("inf")
    assert told["weights/shape"].shapes == ((2,), (3,))
    assert told["weights/shape"].max_abs is None
    assert (told["optimizer/main/a"].dtypes, told["optimizer/main/a"].max_abs) == (("F64", "F32"), 0.0)
    assert "weights/a: max abs 0.5, max rel 0.333" in str(found)


def test_diff_sees_the_sign_of_zero(tmp_path: Path) -> None:
    a = save_checkpoint(tmp_path / "a" / "root", {"t": torch.tensor([0.0])})
    b = save_checkpoint(tmp_path / "b" / "root", {"t": torch.tensor([-0.0])})
    (only,) = diff_checkpoints(a, b).tensors
    assert only.max_abs == 0.0


def test_inspect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_checkpoint(tmp_path / "root", two(), samples=12)
    summary = inspect_checkpoint(folder)
    assert "missing" not in caplog.text
    assert (summary.step, summary.parameters, summary.state) == (1, 12, {"samples": 12})
    assert [(g.prefix, g.dtype, g.tensors, g.elements, g.bytes) for g in summary.groups] == [
        ("optimizer/main", "F64", 1, 12, 96),
        ("weights", "F32", 1, 12, 48),
    ]
    assert summary.model["hidden_size"] == 64
    assert "12 parameters" in str(summary)
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    inspect_checkpoint(folder)
    assert caplog.messages[-1].endswith(f"files are missing: {shard.name}")
