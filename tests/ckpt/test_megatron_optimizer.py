"""The optimizer in checkpoints of Megatron without Megatron: each form that can be read, and why another cannot."""

from __future__ import annotations

import itertools
import logging
import math
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_megatron import BASE, EXPERTS, mega, metadata_says, rewrite
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.inspect_foreign import inspect_megatron
from mega_ckpt.source import open_weight_source
from mega_ckpt.store import Checkpoint
from mega_common.errors import CheckpointError
from mega_common.progress_logging import logger

SEEDS = {"exp_avg": 6, "exp_avg_sq": 7, "fp32_param": 8}
STEP = {"param_groups": [{"params": 1, "step": 6}, {"params": 2, "step": 6}]}
Chunks = dict[tuple[int, ...], Tensor]


def tensors_in(root: Path) -> dict[str, Tensor]:
    metadata: Metadata = pickle.loads((root / ".metadata").read_bytes())
    held = metadata.state_dict_metadata.items()
    found = {key: torch.empty(one.size) for key, one in held if isinstance(one, TensorStorageMetadata)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(root), no_dist=True)
    return found


def whole_chunk(_: str, tensor: Tensor) -> tuple[tuple[int, ...], Chunks]:
    return tuple(tensor.shape), {(0,) * tensor.dim(): tensor}


def flat(key: str, tensor: Tensor) -> tuple[tuple[int, ...], Chunks]:
    """As the distributed optimizer once had it: what a rank of the model holds in a row, cut among the data ranks."""
    stacked = key.startswith("decoder.layers.")
    grid = tuple(n if stacked and not axis else 2 if axis == stacked else 1 for axis, n in enumerate(tensor.shape))
    cell, out = tuple(n // parts for n, parts in zip(tensor.shape, grid, strict=True)), dict[tuple[int, ...], Tensor]()
    for place in itertools.product(*map(range, grid)):
        window = tuple(slice(at * n, at * n + n) for at, n in zip(place, cell, strict=True))
        row, begin = tensor[window].reshape(-1), 0
        for end in (len(row) // 5, len(row) // 2 + 1, len(row)):
            out[(*place, begin)] = row[begin:end].clone().view(*(1,) * len(grid), -1)
            begin = end
    return (*grid, math.prod(cell)), out


def add(root: Path, tensors: dict[str, tuple[tuple[int, ...], Chunks]]) -> None:
    """Further tensors for a torch_dist folder: their shapes and chunks."""
    metadata: Metadata = pickle.loads((root / ".metadata").read_bytes())
    name = f"__1_{len(list(root.glob('*.distcp')))}.distcp"
    with open(root / name, "xb") as stream:
        for key, (size, chunks) in tensors.items():
            one = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), [])
            for offset, tensor in chunks.items():
                begin = stream.tell()
                torch.save(tensor, stream)
                one.chunks.append(ChunkStorageMetadata(torch.Size(offset), tensor.shape))
                place = _StorageInfo(name, begin, stream.tell() - begin)
                metadata.storage_data[MetadataIndex(key, torch.Size(offset))] = place
            metadata.state_dict_metadata[key] = one
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def trained(
    tmp_path: Path,
    fields: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    form: Callable[[str, Tensor], tuple[tuple[int, ...], Chunks]] = whole_chunk,
    prefix: str = "",
) -> Path:
    """A checkpoint of Megatron after 7 steps, one of them skipped; what it has of each kind is the model <kind>."""
    convert_checkpoint(mega(tmp_path / "weights", fields, dtype), tmp_path / "dist", "megatron")
    root = tmp_path / "dist" / "release"
    for kind, seed in SEEDS.items():
        convert_checkpoint(mega(tmp_path / kind, fields, seed=seed), tmp_path / f"{kind}-dist", "megatron")
        found = tensors_in(tmp_path / f"{kind}-dist" / "release")
        moved = {key: tensor for key, tensor in found.items() if not key.endswith("expert_bias")}
        add(root, {f"{prefix}optimizer.state.{kind}.{key}": form(key, tensor) for key, tensor in moved.items()})
    rewrite(root / "common.pt", lambda state: state.update(iteration=7, optimizer={0: {"optimizer": STEP}}))
    rewrite(root / "common.pt", lambda state: setattr(state["args"], "consumed_train_samples", 56))
    return tmp_path / "dist"


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain"), {}).parent


@pytest.fixture
def folder(plain_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to change, in dist."""
    shutil.copytree(plain_checkpoint / "dist", tmp_path / "dist")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [whole_chunk, flat])
@pytest.mark.parametrize("experts", [False, True])
def test_moments_and_main_weights_come_along(
    experts: bool, form: Callable[[str, Tensor], Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    fields = {"moe": EXPERTS | {"selection_bias": True, "layers": [1, 3]}} if experts else {"qk_norm": True}
    source = trained(tmp_path, fields, dtype, form, prefix="chained_1." if experts else "")
    convert_checkpoint(source, tmp_path / "ours", "mega", verify=True)
    ours = Checkpoint.open_folder(tmp_path / "ours")
    numbers = {name: value for name, value in ours.trainer_state.items() if name != "settings"}
    assert (ours.step, ours.model) == (7, open_weight_source(source).model)
    assert numbers == {
        "consumed_samples": 56, "optimizer_steps": 6, "loss_average": 0.0, "loss_seen": 0, "loss_scale": None,
    }  # fmt: skip
    kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"} | (
        {"main": "fp32_param"} if dtype != torch.float32 else {}
    )
    assert {key.split("/")[1] for key in ours.tensor_keys("optimizer/")} == kinds.keys()
    for kind, theirs in kinds.items():
        expected = open_weight_source(tmp_path / theirs)
        names = [name for name in expected.tensor_names() if not name.endswith("correction_bias")]
        assert ours.tensor_keys(f"optimizer/{kind}/") == sorted(f"optimizer/{kind}/{name}" for name in names)
        assert all(
            torch.equal(ours.read_tensor(f"optimizer/{kind}/{name}"), expected.read_tensor(name)) for name in names
        )


def test_the_loss_scale_of_fp16(tmp_path: Path) -> None:
    source = trained(tmp_path, {}, torch.float16)
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 17, "hysteresis_tracker": 2}
    rewrite(source / "release/common.pt", lambda state: state["optimizer"][0].update(grad_scaler=scaler))
    convert_checkpoint(source, tmp_path / "ours", "mega")
    assert Checkpoint.open_folder(tmp_path / "ours").trainer_state["loss_scale"] == [4096.0, 17]


def pop(*keys: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.startswith(keys)]:
            del metadata.state_dict_metadata[key]

    return change


def common(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda root: rewrite(root / "dist/release/common.pt", change)


def bucket(root: Path) -> None:
    metadata_says(pop("optimizer."))(root)
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"
    add(root / "dist" / "release", {name: whole_chunk("", torch.ones(10))})


UP = "decoder.layers.mlp.linear_fc1.weight"
LEFT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no optimizer": (metadata_says(pop("optimizer.")), "the checkpoint has no optimizer state"),
    "buckets": (bucket, "buckets of the distributed optimizer can be loaded only by the ranks that saved them"),
    "a moment left out": (
        metadata_says(pop(f"optimizer.state.exp_avg_sq.{UP}")),
        r"the optimizer state has no exp_avg_sq of decoder.layers.0.mlp.linear_fc1.weight \(and 3 more\)",
    ),
    "another optimizer": (
        metadata_says(pop("optimizer.state.exp_avg_sq")), "the optimizer is not Adam: its state is exp_avg"
    ),
    "no count of updates": (
        common(lambda state: state.update(optimizer={})), "numbers of steps and samples are missing"
    ),
    "several counts of updates": (
        common(lambda state: state["optimizer"].update({1: {"state": {"common_step": torch.tensor(5.0)}}})),
        "numbers of steps and samples are missing",
    ),
    "no count of samples": (
        common(lambda state: delattr(state["args"], "consumed_train_samples")), "numbers of steps"
    ),
}  # fmt: skip


def error_or_log(caplog: pytest.LogCaptureFixture, work: Callable[[], None]) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger.name):
        work()
    return "\n".join(record.message for record in caplog.records)


@pytest.mark.parametrize("what", LEFT)
def test_what_stays_behind_and_why(what: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, why = LEFT[what]
    change(folder)
    text = error_or_log(caplog, lambda: convert_checkpoint(folder / "dist", folder / "ours", "mega"))
    assert text.startswith("only the weights are converted: ")
    assert "\n" not in text
    assert re.search(why, text), text
    ours = Checkpoint.open_folder(folder / "ours")
    assert not ours.tensor_keys("optimizer/")
    assert (ours.step, ours.trainer_state) == (0, {})


def test_samples_as_the_schedule_counted_them(folder: Path) -> None:
    change = folder / "dist/release/common.pt"
    rewrite(change, lambda state: state.update(opt_param_scheduler={"num_steps": 48}))
    convert_checkpoint(folder / "dist", folder / "one", "mega")
    assert Checkpoint.open_folder(folder / "one").trainer_state["consumed_samples"] == 56
    rewrite(change, lambda state: delattr(state["args"], "consumed_train_samples"))
    convert_checkpoint(folder / "dist", folder / "two", "mega")
    assert Checkpoint.open_folder(folder / "two").trainer_state["consumed_samples"] == 48


def test_inspect_says_what_would_come_along(folder: Path) -> None:
    assert inspect_megatron(folder / "dist").state["optimizer"] == "exp_avg, exp_avg_sq: converted with --to mega"
    metadata_says(pop("optimizer."))(folder)
    assert (
        "not converted: the checkpoint has no optimizer state" in inspect_megatron(folder / "dist").state["optimizer"]
    )


def test_a_cast_leaves_the_optimizer_behind(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ConvertOptions(dtype=torch.bfloat16)
    text = error_or_log(caplog, lambda: convert_checkpoint(folder / "dist", folder / "ours", "mega", options=options))
    assert "only the weights are converted: the optimizer state is not supported with a cast" in text
    assert not Checkpoint.open_folder(folder / "ours").tensor_keys("optimizer/")


def test_files_of_ranks_say_no_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ConvertOptions(megatron_format="torch", tp=2)
    convert_checkpoint(mega(tmp_path / "mega", BASE), tmp_path / "torch", "megatron", options=options)
    assert "the checkpoint has no optimizer state" in error_or_log(
        caplog, lambda: convert_checkpoint(tmp_path / "torch", tmp_path / "one", "mega")
    )
    (tmp_path / "torch/release/mp_rank_00/distrib_optim.pt").write_bytes(b"not looked into")
    text = error_or_log(caplog, lambda: convert_checkpoint(tmp_path / "torch", tmp_path / "two", "mega"))
    assert "only the weights are converted: in the format torch the optimizer's tensors have rank-local numbers" in text


def test_a_damaged_moment_is_an_error(folder: Path) -> None:
    key = f"optimizer.state.exp_avg.{UP}"
    metadata_says(lambda m: setattr(m.state_dict_metadata[key], "size", torch.Size((4, 40, 16))))(folder)
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight has shape"):
        convert_checkpoint(folder / "dist", folder / "ours", "mega")
    assert not (folder / "ours").exists()


def test_what_comes_along_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = error_or_log(caplog, lambda: convert_checkpoint(folder / "dist", folder / "ours", "mega"))
    assert "the optimizer state of step 7 is converted" in text
    assert "\n" not in text
