from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mega_common import atomic_files
from mega_common.atomic_files import (
    add_path_to_errors,
    compute_file_sha256,
    create_atomic_folder,
    lock_folder,
    open_atomic_file,
    write_json_atomically,
)
from mega_common.errors import ConfigError


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new/folder/a.bin"
    with open_atomic_file(path) as stream:
        stream.write(b"x" * 1000)
        assert not path.exists()
    assert path.read_bytes() == b"x" * 1000
    assert os.listdir(path.parent) == ["a.bin"]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_after_an_error_all_is_as_before(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with open_atomic_file(path, text=True) as stream:
            stream.write("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a.json"
    write_json_atomically(path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files.os, step, full)
    with pytest.raises(OSError, match="No space"):
        write_json_atomically(path, 2)
    assert json.loads(path.read_text()) == 1
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_kill_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    script = f"""
import os, signal
from pathlib import Path
from mega_common.atomic_files import open_atomic_file
with open_atomic_file(Path({str(path)!r}), text=True) as stream:
    stream.write("half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", script], env=env).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = [name for name in os.listdir(tmp_path) if name != "a.txt"]
    assert left.startswith(".a.txt.")
    assert left.endswith(".tmp")


def test_content_is_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}
    for name, call in real.items():
        monkeypatch.setattr(
            atomic_files.os, name, lambda *args, name=name, call=call: (order.append(name), call(*args))[1]
        )
    write_json_atomically(tmp_path / "a.json", {})
    assert order == ["fsync", "replace", "fsync"]


def test_json_refuses_what_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomically(tmp_path / "a.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1, 16, 100])
def test_sha256_of_a_file_and_its_progress(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(size))
    told: list[int] = []
    assert compute_file_sha256(path, chunk=16, advance=told.append) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(told) == size
    assert max(told, default=0) <= 16


def test_a_folder_is_whole_or_what_it_was(tmp_path: Path) -> None:
    def fill(content: str, *, stop: bool = False) -> None:
        with create_atomic_folder(tmp_path / "out") as folder:
            (folder / "file").write_text(content)
            if stop:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        fill("first", stop=True)
    assert list(tmp_path.iterdir()) == []
    fill("first")
    with pytest.raises(RuntimeError):
        fill("second", stop=True)
    assert (tmp_path / "out/file").read_text() == "first"
    fill("second")
    assert (tmp_path / "out/file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with (
        pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"),
        add_path_to_errors(path),
        open(path, "w") as out,
    ):
        print(1, file=out, flush=True)


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from mega_common.atomic_files import lock_folder
with lock_folder(Path({str(tmp_path)!r})):
    print(flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on .* since 20"), lock_folder(tmp_path):
            pass
        holder.kill()
    with lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path):
        pass


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_folder(tmp_path):
        assert "the file system does not support locks (No locks available)" in caplog.text
