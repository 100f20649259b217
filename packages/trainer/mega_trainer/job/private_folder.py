"""Private folders in shared memory: of one user, with a secret name, kept while their launcher lives.

    /dev/shm/mega-<user>-<secret>/            mode 0700
    /dev/shm/mega-<user>-<secret>/owner.json  the launcher: process, start time, PID namespace
    /dev/shm/mega-<user>-<secret>/lock        locked (flock, shared) by every rank that uses the folder

`/dev/shm` is writable by every user and may be shared by containers with separate PID namespaces. So the name
depends on a key in the run's output folder, an existing folder must have the right owner and mode, and the folder of a
launcher in another PID namespace is removed only when no rank holds its lock and it has been unused for an hour.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import shutil
import stat
import time
from pathlib import Path

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger

KEY_NAME = ".memory-key"
KEY_BYTES = 32
OWNER_NAME, LOCK_NAME = "owner.json", "lock"
UNUSED_SECONDS = 3600.0  # before the folder of an unknown launcher is removed; a restart of ranks takes minutes


def load_secret_key(output: Path) -> bytes:
    """Return the key in `output`/.memory-key that signs a run's memory copies of its state; create the file if missing.

    Raises:
        ConfigError: when the file can be neither read nor written.
    """
    path = output / KEY_NAME
    try:
        output.mkdir(parents=True, exist_ok=True)
        if (key := _read_key(path)) is not None:
            return key
        key = secrets.token_bytes(KEY_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(key)
        return key
    except OSError as error:
        rule = f"checkpoint.memory_every requires a readable and writable {path}: {error.strerror}"
        raise ConfigError(rule, hint="fix its permissions, or set checkpoint.memory_every to 0") from error


def _read_key(path: Path) -> bytes | None:
    """Read a key that only this user can read or write; remove any other file of that name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:  # a symbolic link, or a file of another user
        found, key = None, b""
    else:
        with open(descriptor, "rb") as stream:
            found, key = os.fstat(descriptor), stream.read(KEY_BYTES + 1)
    if found is not None and _is_private(found, stat.S_ISREG) and len(key) == KEY_BYTES:
        return key
    logger.warning(
        "%s is not a private key of this user; it is replaced, and earlier copies in memory are unused", path
    )
    path.unlink()
    return None


def _is_private(found: os.stat_result, is_kind: object) -> bool:
    assert callable(is_kind)
    return bool(is_kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def sign_file_text(key: bytes, name: str, text: bytes) -> str:
    """Return the signature of a file's name and text: HMAC-SHA256 with `key`, in hex."""
    return hmac.digest(key, name.encode() + b"\0" + text, "sha256").hex()


def launcher_folder_path(root: Path, key: bytes, launcher: int) -> Path:
    """Return the path of the folder in which a launcher's ranks keep memory copies of their training state.
    The path is unchanged by a restart of the ranks, and unpredictable without the secret `key`.
    """
    identity = json.dumps([launcher, _start_time(launcher), _pid_namespace()]).encode()
    return root / f"mega-{os.geteuid()}-{sign_file_text(key, 'folder', identity)[:32]}"


def claim_private_folder(path: Path, launcher: int) -> int:
    """Create a private folder, or check that an existing one is private, lock it, and return the lock's descriptor.

    Raises:
        ConfigError: when it belongs to another user, or others may use it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check_private_folder(path)
    descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(descriptor)
    owner = {"launcher": launcher, "started": _start_time(launcher), "namespace": _pid_namespace()}
    with open_atomic_file(path / OWNER_NAME, text=True) as stream:
        json.dump(owner, stream)
    return descriptor


def check_private_folder(path: Path) -> None:
    """Raise `ConfigError` if a folder is a link, belongs to another user or is open to others."""
    found = path.lstat()
    if not _is_private(found, stat.S_ISDIR):
        kind = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        rule = f"checkpoint.memory_every requires {path} to be a folder of user {os.geteuid()} with mode 0700, found {kind}"
        raise ConfigError(rule, hint="remove it, or set checkpoint.memory_every to 0")


def remove_abandoned_memory_copies(root: Path) -> None:
    """Remove this user's folders of memory copies under `root` whose launcher process has ended."""
    for path in root.glob(f"mega-{os.geteuid()}-*"):
        with contextlib.suppress(FileNotFoundError):  # another rank has removed it meanwhile
            if _is_private(path.lstat(), stat.S_ISDIR) and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    try:
        owner = json.loads((path / OWNER_NAME).read_text())
        if owner["namespace"] == _pid_namespace():
            return owner["started"] is None or owner["started"] != _start_time(owner["launcher"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # being made, or cut short: judged by its lock
    return _is_unused(path)


def _is_unused(path: Path) -> bool:
    """Return whether no rank holds the lock, and none has for `UNUSED_SECONDS`."""
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return time.time() - path.lstat().st_mtime > UNUSED_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(descriptor).st_mtime > UNUSED_SECONDS
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _start_time(process: int) -> int | None:
    """Return when a process of this PID namespace started, in clock ticks since boot; None when there is none."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
