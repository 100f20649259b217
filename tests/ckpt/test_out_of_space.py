"""Commands whose output does not fit the disk: one sentence that names the file and the way out, status 2."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import save_model

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_cli.main import run_and_report_errors
from mega_common.atomic_files import HINT, open_atomic_file, write_json_atomically
from mega_data.token_files.indexed_writer import IndexedWriter


def _limited(call: Callable[[], object], limit: int, log: Connection) -> None:
    os.dup2(log.fileno(), 2)  # a pipe, which the limit does not concern
    sys.stderr = sys.__stderr__
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os._exit(run_and_report_errors(call))


def run_limited(call: Callable[[], object], limit: int) -> tuple[int | None, str]:
    """Run a command in a child that cannot write files beyond a size, and return its status and messages."""
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_limited, args=(call, limit, writer))
    child.start()
    writer.close()
    with os.fdopen(os.dup(reader.fileno()), "rb") as stream:
        said = stream.read().decode()
    child.join(60)
    child.kill()
    return child.exitcode, said


def _convert(to: str, **options: Any) -> Callable[[Path, Path], object]:
    return lambda source, out: convert_checkpoint(source, out, to, options=ConvertOptions(**options))


def _embeddings(_: Path, out: Path) -> None:
    with open_atomic_file(out) as stream:
        np.save(stream, np.zeros((100, 100), np.float32))


def _tokens(_: Path, out: Path) -> None:
    writer = IndexedWriter(out, np.dtype("<u2"))
    for _ in range(100):
        writer.add_document(np.zeros(1000, np.uint16))
    writer.finish_files()


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "hf": _convert("hf"),
    "mega": _convert("mega"),
    "torch_dist": _convert("megatron"),
    "torch": _convert("megatron", megatron_format="torch"),
    "torch of two ranks": _convert("megatron", megatron_format="torch", tp=2),
    "json": lambda _, out: write_json_atomically(out, list(range(10_000))),
    "embeddings": _embeddings,
    "tokens": _tokens,
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("limit", [0, 5000])
def test_a_file_that_does_not_fit(name: str, limit: int, tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    status, said = run_limited(lambda: COMMANDS[name](source, out), limit)
    assert (status, HINT in said, "internal error" in said) == (2, True, False), said
    assert str(tmp_path) in said
    assert not out.exists()


def test_a_conversion_goes_on_after_a_full_disk(tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    convert = _convert("hf", max_shard=40_000)
    convert(source, tmp_path / "whole")
    largest = max(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors"))
    status, said = run_limited(lambda: convert(source, out), largest - 1)
    assert (status, out.exists()) == (2, False), said
    convert(source, out)
    assert out.is_dir()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_standard_output_that_is_full() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -P -m mega_cli.main --help >/dev/full"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert (done.returncode, HINT in done.stderr, "Exception" in done.stderr) == (2, True, False), done.stderr
