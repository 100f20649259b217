"""Private folders in shared memory: what others planted is refused, and what lives is kept."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mega_common.errors import ConfigError
from mega_trainer.job.memory_checkpoint import MemoryCopyFolder
from mega_trainer.job.private_folder import (
    KEY_NAME,
    LOCK_NAME,
    OWNER_NAME,
    UNUSED_SECONDS,
    claim_private_folder,
    launcher_folder_path,
    load_secret_key,
    remove_abandoned_memory_copies,
)

KEY = b"k" * 32


def make_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def make_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("requires root, to give a folder to another user")
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)


def make_open(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)


PLANTED: dict[str, Callable[[Path], object]] = {
    "link": make_link,
    "dangling link": lambda path: path.symlink_to(path.parent / "nothing"),
    "file": lambda path: path.write_text(""),
    "pipe": os.mkfifo,
    "of another user": make_foreign,
    **{oct(mode): partial(make_open, mode=mode) for mode in (0o777, 0o755, 0o750, 0o711, 0o701)},
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_folder_is_refused(tmp_path: Path, planted: str) -> None:
    path = tmp_path / "mega"
    PLANTED[planted](path)
    with pytest.raises(ConfigError, match=r"requires .* with mode 0700, found"):
        claim_private_folder(path, os.getpid())
    with pytest.raises(ConfigError, match=r"requires .* with mode 0700, found"):
        MemoryCopyFolder(path, "run", KEY).memory_map_copy_file(0, 0, 64)


def test_a_link_at_the_name_of_a_copy_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = launcher_folder_path(tmp_path, KEY, os.getpid())
    os.close(claim_private_folder(path, os.getpid()))
    (path / "0.0").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        MemoryCopyFolder(path, "run", KEY).memory_map_copy_file(0, 0, 64)
    assert precious.read_text() == "precious"


def test_everything_in_the_folder_is_closed_to_others(tmp_path: Path) -> None:
    path = launcher_folder_path(tmp_path, KEY, os.getpid())
    os.close(claim_private_folder(path, os.getpid()))
    MemoryCopyFolder(path, "run", KEY).memory_map_copy_file(0, 0, 64)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "0.0").stat().st_mode & 0o077 == 0


def test_the_name_is_the_same_after_a_restart_and_depends_on_key_and_launcher(tmp_path: Path) -> None:
    names = {launcher_folder_path(tmp_path, key, launcher) for key in (KEY, b"other") for launcher in (1, os.getpid())}
    assert len(names) == 4
    assert launcher_folder_path(tmp_path, KEY, 1) in names


def change(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


FORGED: dict[str, Callable[[Path], Any]] = {
    "step": lambda path: change(path, b'"step": 3', b'"step": 9'),
    "no signature": lambda path: path.write_text('{"step": 3, "ranks": 1, "run": "run"}'),
    "empty": lambda path: path.write_bytes(b""),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\n\xff"),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "of another rank": lambda path: path.rename(path.with_name("1.0.json")),
    "of the other slot": lambda path: path.rename(path.with_name("0.1.json")),
    "of another run": lambda path: MemoryCopyFolder(path.parent, "run", b"another").write_manifest(
        0, 0, {"step": 3, "ranks": 1}
    ),
    "lines swapped": lambda path: path.write_bytes(b"\n".join(reversed(path.read_bytes().split(b"\n")))),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_copy_that_the_run_has_not_signed_is_ignored(
    tmp_path: Path, forged: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = MemoryCopyFolder(tmp_path, "run", KEY)
    folder.write_manifest(0, 0, {"step": 3, "ranks": 1})
    assert folder.list_copies() == {(3, 1, 0): 0}
    FORGED[forged](tmp_path / "0.0.json")
    with caplog.at_level("WARNING", "mega"):
        assert folder.list_copies() == {}
    assert "is not signed by this run; the copy is ignored" in caplog.text


def write_key(path: Path, key: bytes, mode: int) -> None:
    path.write_bytes(key)
    path.chmod(mode)


def link_key(path: Path) -> None:
    write_key(path.parent / "planted", KEY, 0o600)
    path.symlink_to(path.parent / "planted")


UNFIT_KEYS: dict[str, Callable[[Path], object]] = {
    "readable by others": partial(write_key, key=KEY, mode=0o644),
    "short": partial(write_key, key=b"k", mode=0o600),
    "link": link_key,
}


@pytest.mark.parametrize("unfit", UNFIT_KEYS)
def test_an_unfit_key_is_replaced(tmp_path: Path, unfit: str, caplog: pytest.LogCaptureFixture) -> None:
    UNFIT_KEYS[unfit](tmp_path / KEY_NAME)
    with caplog.at_level("WARNING", "mega"):
        key = load_secret_key(tmp_path)
    assert "is not a private key of this user" in caplog.text
    assert key not in (KEY, b"k")
    assert (tmp_path / KEY_NAME).stat().st_mode & 0o777 == 0o600
    assert load_secret_key(tmp_path) == key


def launched(root: Path, namespace: str | None = None, *, idle: float = 0.0, ended: bool = False) -> Path:
    """Return a folder whose launcher is this process, or has ended, in this or another PID namespace."""
    launcher = 2**22 + 1 if ended else os.getpid()
    path = launcher_folder_path(root, os.urandom(8), launcher)
    os.close(claim_private_folder(path, launcher))
    if namespace:
        owner = json.loads((path / OWNER_NAME).read_text())
        (path / OWNER_NAME).write_text(json.dumps({**owner, "namespace": namespace}))
    if idle:
        times = (path / LOCK_NAME).stat().st_mtime - idle
        os.utime(path / LOCK_NAME, (times, times))
    return path


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    ("kept", "made"),
    [
        (True, {}),
        (False, {"ended": True}),
        (True, {"idle": 2 * UNUSED_SECONDS}),
        (True, {"namespace": "pid:[1]"}),
        (True, {"namespace": "pid:[1]", "ended": True}),
        (False, {"namespace": "pid:[1]", "idle": 2 * UNUSED_SECONDS}),
        (True, {"namespace": "pid:[1]", "idle": -2 * UNUSED_SECONDS}),  # the clock was set back
    ],
)
def test_only_folders_of_ended_launchers_are_swept(tmp_path: Path, kept: bool, made: Any, locked: bool) -> None:
    path = launched(tmp_path, **made)
    with open(path / LOCK_NAME) as lock:
        if locked:
            fcntl.flock(lock, fcntl.LOCK_SH)
        remove_abandoned_memory_copies(tmp_path)
    assert path.exists() == (kept or (locked and "namespace" in made))


def test_a_reused_process_id_is_another_launcher(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        path = launched(tmp_path)
        owner = json.loads((path / OWNER_NAME).read_text())
        (path / OWNER_NAME).write_text(json.dumps({**owner, "launcher": process.pid}))
        remove_abandoned_memory_copies(tmp_path)
        assert not path.exists()
        process.kill()


def test_folders_of_other_names_are_not_swept(tmp_path: Path) -> None:
    for name in ("mega-1", f"mega-{os.getpid()}", "other", f"mega-{os.geteuid() + 1}-0"):
        (tmp_path / name).mkdir(mode=0o700)
    remove_abandoned_memory_copies(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
