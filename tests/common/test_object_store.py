"""An object store that answers wrongly: passing faults are retried by its client, lasting ones are one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.store import (
    delete_old_checkpoints,
    get_checkpoint_step_folder,
    list_checkpoints,
    load_sharded_checkpoint,
    parse_location,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.errors import MegaError
from mega_common.model_config import ModelConfig
from mega_common.object_store import ObjectStoreError, RemotePath
from mega_data.preprocessing.dataset_upload import upload_dataset
from mega_data.token_files.remote_copies import resolve_local_prefix

pytest.importorskip("s3fs", reason="the client of s3:// is not installed")
pytest.importorskip("moto.server", reason="moto, a local S3 server, is not installed")

from faulty_s3 import SETTINGS, Fault, FaultyStore, faulty_store

MODEL = ModelConfig.parse(
    {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
)
LASTING = 1000
CONTENT = {"bin": bytes(range(256)) * 40, "idx": bytes(range(255, -1, -1)) * 3, "info": b"{}"}


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    with faulty_store() as store:
        yield store


@pytest.fixture
def bucket(
    server: FaultyStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemotePath]:
    """A bucket of its own; retries wait for nothing."""
    import s3fs

    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": server.endpoint, "AWS_MAX_ATTEMPTS": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.retryhandler.delay_exponential", lambda *_, **__: 0.0)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    monkeypatch.setattr("s3fs.S3FileSystem.read_timeout", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{abs(hash(request.node.name))}"
    s3fs.S3FileSystem().mkdir(name)
    yield RemotePath(f"s3://{name}")
    server.faults.clear()


def tensors(step: int) -> dict[str, ShardedTensor]:
    return {"weights/a": ShardedTensor((64, 8), [TensorBox((0, 0), torch.full((64, 8), float(step)))])}


def save_step(bucket: RemotePath, step: int) -> Any:
    return save_sharded_checkpoint(
        parse_location(bucket / "run"), step, tensors(step), model=MODEL, state={"step": step}
    )


def load_step(bucket: RemotePath) -> int:
    """Load the newest checkpoint and return its step, which all of its numbers must be."""
    newest = list_checkpoints(bucket / "run")[-1]
    held = torch.zeros(64, 8)
    load_sharded_checkpoint(newest, {"weights/a": ShardedTensor((64, 8), [TensorBox((0, 0), held)])})
    step = int(newest.name.removeprefix("step-"))
    assert torch.equal(held, torch.full((64, 8), float(step)))
    return step


PASSING = {
    "put 500": Fault("error", "PUT"),
    "put 503": Fault("error", "PUT", status=503, code="SlowDown"),
    "put 429": Fault("error", "PUT", status=429, code="TooManyRequests"),
    "put 502": Fault("error", "PUT", status=502),
    "put reset": Fault("reset", "PUT"),
    "put stored, answered with 500": Fault("lost", "PUT", "manifest.json"),
    "put stored, answered with 503": Fault("lost", "PUT", "shard-", status=503, code="SlowDown"),
    "get 500": Fault("error", "GET", "shard-"),
    "get 503": Fault("error", "GET", "manifest.json", 503, "SlowDown"),
    "get cut": Fault("cut", "GET", "shard-"),
    "get reset": Fault("reset", "GET", "shard-"),
    "head 503": Fault("error", "HEAD", status=503),
    "list 500": Fault("error", "GET", "list-type"),
    "list cut": Fault("cut", "GET", "list-type"),
    "list reset": Fault("reset", "GET", "list-type"),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_fault_is_retried(bucket: RemotePath, server: FaultyStore, name: str) -> None:
    save_step(bucket, 1)
    server.faults.append(PASSING[name])
    save_step(bucket, 2)
    assert load_step(bucket) == 2
    assert PASSING[name].times == 0


SAVES = {
    "500 for shards": (Fault("error", "PUT", "shard-", times=LASTING), "shard-"),
    "503 for shards": (Fault("error", "PUT", "shard-", 503, "SlowDown", LASTING), "shard-"),
    "500 for the manifest": (Fault("error", "PUT", "manifest.json", times=LASTING), "manifest.json"),
    "403 for the manifest": (Fault("error", "PUT", "manifest.json", 403, "AccessDenied", LASTING), "manifest.json"),
    "no such bucket": (Fault("error", "PUT", "shard-", 404, "NoSuchBucket", LASTING), "shard-"),
    "reset for shards": (Fault("reset", "PUT", "shard-", times=LASTING), "shard-"),
    "reset for the manifest": (Fault("reset", "PUT", "manifest.json", times=LASTING), "manifest.json"),
    "insufficient storage": (Fault("error", "PUT", "shard-", 507, "QuotaExceeded", LASTING), "shard-"),
    "not implemented": (Fault("error", "PUT", "shard-", 501, "NotImplemented", LASTING), "shard-"),
    "expired credentials": (Fault("error", "PUT", "shard-", 400, "ExpiredToken", LASTING), "shard-"),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_lasting_fault_of_a_save_leaves_the_one_before(bucket: RemotePath, server: FaultyStore, name: str) -> None:
    save_step(bucket, 1)
    fault, named = SAVES[name]
    server.faults.append(fault)
    with pytest.raises(MegaError, match=rf"s3://\S*{named}") as raised:
        save_step(bucket, 2)
    assert raised.value.exit_status == 2
    assert len(raised.value.message.splitlines()) == 1
    server.faults.clear()
    assert load_step(bucket) == 1


LOADS = {
    "500": Fault("error", "GET", "shard-", times=LASTING),
    "503": Fault("error", "GET", "shard-", 503, "SlowDown", LASTING),
    "403": Fault("error", "GET", "shard-", 403, "AccessDenied", LASTING),
    "404": Fault("error", "GET", "shard-", 404, "NoSuchKey", LASTING),
    "412": Fault("error", "GET", "shard-", 412, "PreconditionFailed", LASTING),
    "reset": Fault("reset", "GET", "shard-", times=LASTING),
    "cut": Fault("cut", "GET", "shard-", times=LASTING),
    "short": Fault("short", "GET", "shard-", times=LASTING),
    "whole object for a range": Fault("whole", "GET", "shard-", times=LASTING),
    "shifted range": Fault("shifted", "GET", "shard-", times=LASTING),
    "manifest cut": Fault("cut", "GET", "manifest.json", times=LASTING),
    "manifest short": Fault("short", "GET", "manifest.json", times=LASTING),
    "manifest 500": Fault("error", "GET", "manifest.json", times=LASTING),
    "list 500": Fault("error", "GET", "list-type", times=LASTING),
    "list 403": Fault("error", "GET", "list-type", 403, "AccessDenied", LASTING),
    "list cut": Fault("cut", "GET", "list-type", times=LASTING),
}


@pytest.mark.parametrize("name", LOADS)
def test_a_lasting_fault_of_a_load_is_one_sentence(bucket: RemotePath, server: FaultyStore, name: str) -> None:
    save_step(bucket, 1)
    server.faults.append(LOADS[name])
    with pytest.raises(MegaError, match=r"s3://") as raised:
        load_step(bucket)
    assert raised.value.exit_status == 2
    assert len(raised.value.message.splitlines()) == 1


def store_data(bucket: RemotePath) -> None:
    for name, content in CONTENT.items():
        (bucket / f"wiki.{name}").write_bytes(content)


FETCHES = {
    "passing 500": (Fault("error", "GET", "/wiki.bin"), None),
    "passing 503": (Fault("error", "GET", "/wiki.bin", 503, "SlowDown"), None),
    "passing cut": (Fault("cut", "GET", "/wiki.bin"), None),
    "passing reset": (Fault("reset", "GET", "/wiki.idx"), None),
    "passing list 500": (Fault("error", "GET", "list-type"), None),
    "500": (Fault("error", "GET", "/wiki.bin", times=LASTING), "wiki.bin"),
    "503": (Fault("error", "GET", "/wiki.idx", 503, "SlowDown", LASTING), "wiki.idx"),
    "403": (Fault("error", "GET", "/wiki.bin", 403, "AccessDenied", LASTING), "wiki.bin"),
    "404": (Fault("error", "GET", "/wiki.bin", 404, "NoSuchKey", LASTING), "wiki.bin"),
    "changed meanwhile": (Fault("error", "GET", "/wiki.bin", 412, "PreconditionFailed", LASTING), "wiki.bin"),
    "cut": (Fault("cut", "GET", "/wiki.bin", times=LASTING), "wiki.bin"),
    "short": (Fault("short", "GET", "/wiki.bin", times=1), "wiki.bin"),
    "short index": (Fault("short", "GET", "/wiki.idx", times=1), "wiki.idx"),
    "whole object for a range": (Fault("whole", "GET", "/wiki.bin", times=LASTING), "wiki.bin"),
    "reset": (Fault("reset", "GET", "/wiki.bin", times=LASTING), "wiki.bin"),
    "head 404": (Fault("error", "HEAD", "/wiki.bin", 404, "NoSuchKey", LASTING), "wiki.bin"),
    "head 403": (Fault("error", "HEAD", "wiki.info", 403, "AccessDenied", LASTING), "wiki.info"),
}


@pytest.mark.parametrize("name", FETCHES)
def test_a_fetch_has_all_bytes_or_names_the_object(
    bucket: RemotePath, server: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Blocks are small, so that a wrong one is neither the first nor the last."""
    monkeypatch.setattr("mega_data.token_files.remote_copies.BLOCK", 1000)
    monkeypatch.setattr("mega_common.object_store.READ_AHEAD", 1000)
    store_data(bucket)
    fault, named = FETCHES[name]
    server.faults.append(fault)
    if named:
        with pytest.raises(MegaError, match=rf"s3://\S*{named}") as raised:
            resolve_local_prefix(Path(str(bucket / "wiki")), tmp_path)
        assert raised.value.exit_status == 2
        assert len(raised.value.message.splitlines()) == 1
        server.faults.clear()
    prefix = resolve_local_prefix(Path(str(bucket / "wiki")), tmp_path)
    assert {name: prefix.with_name(f"wiki.{name}").read_bytes() for name in CONTENT} == CONTENT


DELETIONS = {
    "keys refused in an answer of 200": Fault("refused keys", "POST", "delete", times=LASTING),
    "403": Fault("error", "POST", "delete", 403, "AccessDenied", LASTING),
    "500": Fault("error", "POST", "delete", times=LASTING),
    "503": Fault("error", "POST", "delete", 503, "SlowDown", LASTING),
    "reset": Fault("reset", "POST", "delete", times=LASTING),
    "list 500": Fault("error", "GET", "list-type", times=LASTING),
    "list 403": Fault("error", "GET", "list-type", 403, "AccessDenied", LASTING),
    "list cut": Fault("cut", "GET", "list-type", times=LASTING),
    "501": Fault("error", "POST", "delete", 501, "NotImplemented", LASTING),
    "404": Fault("error", "POST", "delete", 404, "NoSuchBucket", LASTING),
}


@pytest.mark.parametrize("name", DELETIONS)
def test_a_deletion_that_is_refused_leaves_whole_checkpoints_and_data(
    bucket: RemotePath, server: FaultyStore, tmp_path: Path, name: str
) -> None:
    """The manifest goes first, and an index before the new data: neither may be taken for gone while it is there."""
    for step in (1, 2):
        save_step(bucket, step)
    store_data(bucket)
    new = tmp_path / "made" / "wiki"
    new.parent.mkdir()
    for suffix in CONTENT:
        new.with_name(f"wiki.{suffix}").write_bytes(b"new")
    server.faults.append(DELETIONS[name])
    with pytest.raises(MegaError, match="s3://"):
        delete_old_checkpoints(bucket / "run", keep=1)
    with pytest.raises(ObjectStoreError, match=r"s3://\S*wiki"):
        upload_dataset(new, bucket / "wiki")
    server.faults.clear()
    assert [load_step(bucket)] == [2]
    assert (get_checkpoint_step_folder(bucket / "run", 1) / "manifest.json").is_file()
    assert {suffix: (bucket / f"wiki.{suffix}").read_bytes() for suffix in CONTENT} == CONTENT
    assert {path.name for path in new.parent.iterdir()} == {f"wiki.{suffix}" for suffix in CONTENT}


HIDING = {
    "root hidden": Fault("hidden", "GET", "list-type", times=1),
    "lists hidden": Fault("hidden", "GET", "list-type", times=LASTING),
    "head 403": Fault("error", "HEAD", "manifest.json", 403, "AccessDenied", LASTING),
    "head 500": Fault("error", "HEAD", "manifest.json", times=LASTING),
    "head 503": Fault("error", "HEAD", "manifest.json", 503, "SlowDown", LASTING),
    "head reset": Fault("reset", "HEAD", "manifest.json", times=LASTING),
    "manifest 404 once": Fault("error", "GET", "manifest.json", 404, "NoSuchKey", 1),
    "manifest cut": Fault("cut", "GET", "manifest.json", times=LASTING),
    "manifest short": Fault("short", "GET", "manifest.json", times=LASTING),
    "list 500": Fault("error", "GET", "list-type", times=LASTING),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_sweep_never_deletes_a_checkpoint_that_the_store_hides(
    bucket: RemotePath, server: FaultyStore, name: str
) -> None:
    for step in (1, 2):
        save_step(bucket, step)
    server.faults.append(HIDING[name])
    with contextlib.suppress(MegaError):
        remove_leftovers(bucket / "run")
    server.faults.clear()
    assert [folder.name for folder in list_checkpoints(bucket / "run")] == ["step-00000001", "step-00000002"]
    assert load_step(bucket) == 2


MULTIPART = {
    "part 500": (Fault("error", "PUT", "partNumber=2"), True),
    "part 503": (Fault("error", "PUT", "partNumber=1", 503, "SlowDown"), True),
    "part reset": (Fault("reset", "PUT", "partNumber=2"), True),
    "part stored, answered with 500": (Fault("lost", "PUT", "partNumber=1"), True),
    "begin 500": (Fault("error", "POST", "uploads"), True),
    "end 503": (Fault("error", "POST", "uploadId", 503, "SlowDown"), True),
    "end 200 with an error, once": (Fault("late error", "POST", "uploadId"), True),
    "end 200 with an error": (Fault("late error", "POST", "uploadId", times=LASTING), False),
    "end 500": (Fault("error", "POST", "uploadId", times=LASTING), False),
    "part 403": (Fault("error", "PUT", "partNumber=2", 403, "AccessDenied", LASTING), False),
    "part 500 always": (Fault("error", "PUT", "partNumber=2", times=LASTING), False),
    "begin 503 always": (Fault("error", "POST", "uploads", 503, "SlowDown", LASTING), False),
}


@pytest.mark.parametrize("name", MULTIPART)
def test_an_object_in_parts_appears_whole_or_not(
    bucket: RemotePath, server: FaultyStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 << 20)
    held = {"weights/a": ShardedTensor((3 << 20,), [TensorBox((0,), torch.arange(3 << 20, dtype=torch.float32))])}
    fault, passes = MULTIPART[name]
    server.faults.append(fault)
    if not passes:
        with pytest.raises(MegaError, match=r"s3://\S*shard-"):
            save_sharded_checkpoint(parse_location(bucket / "run"), 1, held, model=MODEL, state={})
        server.faults.clear()
        assert list_checkpoints(bucket / "run") == []
        return
    folder = save_sharded_checkpoint(parse_location(bucket / "run"), 1, held, model=MODEL, state={})
    read = torch.zeros(3 << 20)
    load_sharded_checkpoint(folder, {"weights/a": ShardedTensor((3 << 20,), [TensorBox((0,), read)])})
    assert torch.equal(read, torch.arange(3 << 20, dtype=torch.float32))
