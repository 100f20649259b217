"""The same on a real client and a real protocol: s3fs, and a server of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crash.savers import MODEL, found, part
from ranks import run_ranks

from mega_ckpt import dcp_planners, shard_files
from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.store import (
    AsyncSaver,
    Location,
    delete_old_checkpoints,
    get_checkpoint_step_folder,
    latest_checkpoint,
    list_checkpoints,
    load_sharded_checkpoint,
    parse_location,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_ckpt.verify import diff_checkpoints, verify_checkpoint
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

pytest.importorskip("s3fs", reason="the client of s3:// is not installed")
moto_server = pytest.importorskip("moto.server", reason="moto, a local S3 server, is not installed")


def settings(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def root(endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Location:
    import s3fs

    for name, value in settings(endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(request.node.name))}"
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(bucket)
    return parse_location(f"s3://{bucket}/run")


def save_version(root: Location, version: int) -> Location:
    return save_sharded_checkpoint(root, version, part(version, 0, 1), model=MODEL, state={"version": version})


def test_save_load_retain_sweep_verify(root: Location, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert latest_checkpoint(root) is None
    save_version(root, 1)
    with AsyncSaver() as saver:
        for version in (2, 2, 3):
            saver.start_save(
                root, version, part(version, 0, 1), model=MODEL, state={"version": version}, assets=tmp_path
            )
    assert found(root) == 3
    assert verify_checkpoint(get_checkpoint_step_folder(root, 3), finite=True).ok
    assert delete_old_checkpoints(root, keep=2) == [get_checkpoint_step_folder(root, 1)]
    (root / "step-00000009" / "1234" / "shard-00000-000.safetensors").write_bytes(b"half")
    assert list_checkpoints(root) == [get_checkpoint_step_folder(root, 2), get_checkpoint_step_folder(root, 3)]
    assert remove_leftovers(root) == [root / "step-00000009"]
    assert [path.name for path in root.iterdir()] == ["step-00000002", "step-00000003"]


def test_a_shard_of_several_parts_is_read_by_ranges(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 takes parts of 5 MB at least; what is dropped in between leaves no object."""
    monkeypatch.setattr(dcp_planners, "MAX_SLAB_BYTES", 1 << 20)
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 << 20)
    tensor = torch.randn(64, 1 << 15 << 2)[:, ::4].contiguous()
    tensor = torch.cat([tensor, tensor])
    held = {"t": ShardedTensor(tuple(tensor.shape), [TensorBox((0, 0), tensor)])}
    folder = save_sharded_checkpoint(root, 1, held, model=MODEL, state={})
    quarter = torch.zeros(32, tensor.shape[1])
    load_sharded_checkpoint(folder, {"t": ShardedTensor(tuple(tensor.shape), [TensorBox((32, 0), quarter)])})
    assert torch.equal(quarter, tensor[32:64])

    write, calls = shard_files.HashingFileWriter.write_hashed, iter(range(1000))

    def failing(self: shard_files.HashingFileWriter, *args: Any) -> None:
        if next(calls) == 12:
            raise OSError(5, "no more")
        write(self, *args)

    monkeypatch.setattr(shard_files.HashingFileWriter, "write_hashed", failing)
    with pytest.raises(CheckpointError, match="no more"):
        save_sharded_checkpoint(root, 2, held, model=MODEL, state={})
    assert list(root.iterdir()) == [folder]


def test_damage_and_refusal(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_version(root, 1)
    (inner,) = (path for path in folder.iterdir() if path.name != "manifest.json")
    (shard,) = inner.iterdir()
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        CheckpointError, match=r"s3://.*shard-00000-000\.safetensors: damaged: the checksum of weights/a"
    ):
        found(root)
    with pytest.raises(CheckpointError, match=r"s3://nobucket/run/.*bucket does not exist"):
        save_version(parse_location("s3://nobucket/run"), 1)


def test_conversions(root: Location, tmp_path: Path) -> None:
    model = ModelConfig.parse(
        {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}
    )
    held = {
        f"weights/{name}": ShardedTensor(shape, [TensorBox((0,) * len(shape), torch.randn(shape))])
        for name, shape in canonical_tensors(model).items()
    }
    save_sharded_checkpoint(root, 1, held, model=model, state={})
    convert_checkpoint(root, tmp_path / "hf", "hf", verify=True)
    convert_checkpoint(tmp_path / "hf", root / "mega", "mega", verify=True)
    assert verify_checkpoint(root / "mega").ok
    assert not verify_checkpoint(root / "mega").extra
    for path in (tmp_path / "hf").iterdir():
        (root / "hf" / path.name).write_bytes(path.read_bytes())
    convert_checkpoint(root / "hf", tmp_path / "mega", "mega", verify=True)
    assert diff_checkpoints(root / "mega", tmp_path / "mega").is_identical


def save_sharded(root: Location, endpoint: str) -> int:
    import os

    os.environ.update(settings(endpoint))
    rank, world = dist.get_rank(), dist.get_world_size()
    save_sharded_checkpoint(root, 1, part(1, rank, world), model=MODEL, state={"version": 1})
    with AsyncSaver() as saver:
        saver.start_save(root, 2, part(2, rank, world), model=MODEL, state={"version": 2})
    dist.barrier()
    return found(root)


def test_four_ranks(root: Location, endpoint: str) -> None:
    assert run_ranks(save_sharded, 4, root, endpoint) == [2] * 4
    assert found(root) == 2
