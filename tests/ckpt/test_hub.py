from __future__ import annotations

import fnmatch
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hf_models import save_model

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.hub import pull_from_hub, push_to_hub
from mega_common.errors import CheckpointError, MissingPackageError

hub = pytest.importorskip("huggingface_hub", reason="the hub's client is an extra")
constants, errors = (importlib.import_module(f"huggingface_hub.{name}") for name in ("constants", "errors"))

PICKLES = {"pytorch_model.bin", "optimizer.pt", "args.pkl", "word2vec.model"}


class FakeHub:
    """One repository in a folder, behind the client's functions; `calls` has what was asked."""

    def __init__(self, root: Path) -> None:
        self.root, self.private, self.sha = root, False, "c0ffee"
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _files(self, root: Path, patterns: list[str]) -> list[str]:
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        return sorted(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))

    def create_repo(self, repo_id: str, **options: Any) -> SimpleNamespace:
        self.calls.append(("create_repo", options))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"ada/{repo_id}")

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", options))

    def model_info(self, repo_id: str, **_: Any) -> SimpleNamespace:
        siblings = [SimpleNamespace(rfilename=name) for name in self._files(self.root, ["*"])]
        return SimpleNamespace(private=self.private, sha=self.sha, siblings=siblings)

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **options: Any) -> Any:
        self.calls.append(("upload_folder", options | {"repo_id": repo_id}))
        for name in self._files(folder_path, allow_patterns):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder_path / name, self.root / name)
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")

    def snapshot_download(self, repo_id: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> str:
        self.calls.append(("snapshot_download", {"revision": revision, "found": self._files(local_dir, ["*"])}))
        for name in [*self._files(self.root, allow_patterns), ".cache/huggingface/lock"]:
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_bytes((self.root / name).read_bytes() if (self.root / name).exists() else b"")
        return str(local_dir)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    (tmp_path / "remote").mkdir()
    made = FakeHub(tmp_path / "remote")
    for name in ("create_repo", "create_branch", "model_info", "upload_folder", "snapshot_download"):
        monkeypatch.setattr(hub, name, getattr(made, name))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = save_model(tmp_path / "hf", "llama", shard="8KB")
    for name in ("tokenizer.json", "tokenizer.model", "merges.txt", "README.md", "chat_template.jinja"):
        (made / name).write_bytes(name.encode())
    for name in PICKLES:
        (made / name).write_bytes(b"\x80\x04")
    return made


def test_push_and_pull_carry_the_model_and_no_pickle(fake: FakeHub, folder: Path, tmp_path: Path) -> None:
    assert push_to_hub(folder, "ada/llama", message="first") == "https://hub.example/ada/llama/commit/1"
    assert fake.calls == [
        ("create_repo", {"exist_ok": True}),
        ("upload_folder", {"repo_id": "ada/llama", "revision": None, "commit_message": "first"}),
    ]
    (fake.root / "pytorch_model.bin").write_bytes(b"\x80\x04")
    pull_from_hub("ada/llama", tmp_path / "deep" / "back")
    names = {path.name for path in folder.iterdir()} - PICKLES
    back = {path.name: path.read_bytes() for path in (tmp_path / "deep" / "back").iterdir()}
    assert back == {name: (folder / name).read_bytes() for name in names}
    assert os.listdir(tmp_path / "deep") == ["back"]
    assert fake.calls[-1] == ("snapshot_download", {"revision": "c0ffee", "found": []})


def test_push_to_a_branch_of_ones_own_private_repository(fake: FakeHub, folder: Path) -> None:
    fake.private = True
    push_to_hub(folder, "llama", private=True, revision="v2")
    assert fake.calls[0] == ("create_repo", {"private": True, "exist_ok": True})
    assert fake.calls[1] == ("create_branch", {"branch": "v2", "exist_ok": True})
    assert fake.calls[2][1] == {"repo_id": "ada/llama", "revision": "v2", "commit_message": "Upload the model"}


def test_private_never_goes_to_a_public_repository(fake: FakeHub, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="conflicts with an existing public repository"):
        push_to_hub(folder, "ada/llama", private=True)
    assert not list(fake.root.iterdir())


def test_push_sends_nothing_but_a_sound_huggingface_folder(fake: FakeHub, folder: Path, tmp_path: Path) -> None:
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    with pytest.raises(CheckpointError) as caught:
        push_to_hub(tmp_path / "mega", "ada/llama")
    assert f"mega ckpt convert {tmp_path / 'mega'} out/hf --to hf" in str(caught.value)
    with pytest.raises(CheckpointError, match="no such folder"):
        push_to_hub(tmp_path / "nothing", "ada/llama")
    next(folder.glob("model-00001*")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        push_to_hub(folder, "ada/llama")
    assert not fake.calls


def test_pull_refuses_what_is_there_and_what_is_only_pickled(fake: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        pull_from_hub("ada/llama", tmp_path)
    (fake.root / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="safetensors files are missing"):
        pull_from_hub("ada/llama", tmp_path / "out")
    assert not fake.calls


def test_an_interrupted_pull_goes_on_and_never_looks_complete(
    fake: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_to_hub(folder, "ada/llama")
    whole = fake.snapshot_download

    def broken(repo_id: str, *, local_dir: Path, **_: Any) -> str:
        local_dir.mkdir(parents=True)
        (local_dir / "config.json").write_bytes((fake.root / "config.json").read_bytes())
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(hub, "snapshot_download", broken)
    with pytest.raises(CheckpointError, match=r"connection to the hub failed.*Connection reset"):
        pull_from_hub("ada/llama", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(hub, "snapshot_download", whole)
    pull_from_hub("ada/llama", tmp_path / "out")
    assert fake.calls[-1][1]["found"] == ["config.json"]
    assert not list(tmp_path.glob(".out*"))


def test_another_commit_begins_anew(fake: FakeHub, folder: Path, tmp_path: Path) -> None:
    push_to_hub(folder, "ada/llama")
    pull_from_hub("ada/llama", tmp_path / "one")
    fake.sha = "decade"
    os.rename(tmp_path / "one", tmp_path / "aside")
    pull_from_hub("ada/llama", tmp_path / "one", revision="v2")
    assert fake.calls[-1][1] == {"revision": "decade", "found": []}


def refused(kind: str, status: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        error = getattr(errors, kind)
        made = error.__new__(error)
        Exception.__init__(made, f"{status} Client Error\nand more")
        made.response = SimpleNamespace(status_code=status)
        raise made

    return call


@pytest.mark.parametrize(
    ("kind", "status", "message", "hint"),
    [
        ("RepositoryNotFoundError", 404, "no such repository", "log in"),
        ("GatedRepoError", 403, "access requires its owner's approval", "request it"),
        ("RevisionNotFoundError", 404, "has no revision v9", "branch, a tag"),
        ("HfHubHTTPError", 403, "denied access", "token"),
        ("HfHubHTTPError", 503, "status 503: 503 Client Error", "later"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    kind: str, status: int, message: str, hint: str, folder: Path, fake: FakeHub, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hub, "model_info", refused(kind, status))
    monkeypatch.setattr(hub, "upload_folder", refused(kind, status))
    calls: list[Callable[[], object]] = [
        lambda: pull_from_hub("ada/llama", tmp_path / "out", revision="v9"),
        lambda: push_to_hub(folder, "ada/llama", revision="v9"),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=message) as caught:
            call()
        assert hint in (caught.value.hint or "")
        assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_no_network_and_a_bad_name_with_the_real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="must be the name of a repository"):
        pull_from_hub("a/b/c", tmp_path / "out")
    with pytest.raises(CheckpointError, match="the connection to the hub failed"):
        pull_from_hub("ada/llama", tmp_path / "out")


def test_without_the_client(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match="huggingface-hub") as caught:
        pull_from_hub("ada/llama", tmp_path / "out")
    assert "packages/ckpt[hub]" in str(caught.value)
    with pytest.raises(MissingPackageError):
        push_to_hub(folder, "ada/llama")
