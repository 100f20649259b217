"""A run that was ended goes on, and makes what a straight run makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mega_common.errors import DataError
from mega_data.preprocessing import dataset_output as module
from mega_data.preprocessing.dataset_output import DatasetOutput
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.token_files.indexed_writer import IndexedWriter


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORD_INTERVAL", 0.0)
    monkeypatch.setattr("mega_data.preprocessing.text_batches.BATCH", 500)
    monkeypatch.setattr("mega_data.preprocessing.text_batches.PIECE", 1000)


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """Three files with bad lines, empty documents and one of several pieces."""
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for number, path in enumerate(paths):
        records = [json.dumps({"text": f"document {i} " + "the cat " * (i * 37 % 60)}) for i in range(20)]
        records[3], records[5], records[7] = "oops é", '{"text": ""}', json.dumps({"text": "the cät sat\n" * 300})
        path.write_text("\n".join(records[number:]) + "\n")
    return paths


def run(corpus: list[Path], tokenizer: Path, name: str, **options: object) -> dict[str, bytes]:
    """The files of the data set, by suffix."""
    prefix = corpus[0].with_name(name)
    preprocess_corpus(corpus, tokenizer, prefix, append_eod=True, on_bad_line="skip", **options)  # type: ignore[arg-type]
    return {path.name.removeprefix(name): path.read_bytes() for path in prefix.parent.glob(f"{name}.*")}


class Stopped(BaseException):
    """As Ctrl-C."""


def stop_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """End the run by an error in the batch after so many; a record in the error's wake counts as done."""
    left, real = [batches], DatasetOutput.add_batch

    def add(self: DatasetOutput, *args: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DatasetOutput, "add_batch", add)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_stopped_anywhere_goes_on_to_the_same_files(
    corpus: list[Path], tokenizer_folder: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    straight = run(corpus, tokenizer_folder, "straight")
    stops = 0
    while stops < 100:  # eight batches a run, more than one document has pieces
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, 8)
            try:
                whole = run(corpus, tokenizer_folder, "stopped", workers=workers)
            except Stopped:
                stops += 1
            else:
                break
    assert 3 < stops < 100
    assert whole == straight
    assert not list(corpus[0].parent.glob(".*"))


@pytest.mark.parametrize("records", [1, 12])
def test_a_killed_run_goes_on(
    corpus: list[Path], tokenizer_folder: Path, records: int, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import os, sys, signal\n"
        "from pathlib import Path\n"
        "import mega_data.preprocessing.text_batches, mega_data.preprocessing.dataset_output as output\n"
        "from mega_data.preprocessing.preprocess_corpus import preprocess\n"
        "output.EVERY, mega_data.preprocessing.text_batches.BATCH, mega_data.preprocessing.text_batches.PIECE = 0.0, 500, 1000\n"
        f"real, left = output.Output.record, [{records}]\n"
        "def record(self):\n"
        "    real(self)\n"
        "    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n"
        "output.Output.record = record\n"
        "tokenizer, prefix, *corpus = map(Path, sys.argv[1:])\n"
        "preprocess(corpus, tokenizer, prefix, append_eod=True, on_bad_line='skip')\n"
    )
    prefix = corpus[0].with_name("killed")
    done = subprocess.run(
        [sys.executable, "-c", code, tokenizer_folder, prefix, *corpus],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    with caplog.at_level("INFO", "mega"):
        assert run(corpus, tokenizer_folder, "killed") == run(corpus, tokenizer_folder, "straight")
    assert "killed: resuming an interrupted run after " in caplog.text
    assert not list(corpus[0].parent.glob(".*"))


@pytest.mark.parametrize("change", ["touched", "grown", "option", "tokenizer"])
def test_a_run_of_something_else_starts_over(
    corpus: list[Path], tokenizer_folder: Path, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(Stopped):
            run(corpus, tokenizer_folder, "other")
    options: dict[str, object] = {}
    if change == "touched":
        os.utime(corpus[0], ns=(1, 1))
    elif change == "grown":
        corpus[2].write_text(corpus[2].read_text() + '{"text": "more"}\n')
    elif change == "option":
        options["parse_special_tokens"] = True
    else:
        text = (tokenizer_folder / "tokenizer.json").read_text()
        (tmp_path / "tok.json").write_text(text + "\n")
        tokenizer_folder = tmp_path / "tok.json"
    with caplog.at_level("INFO", "mega"):
        assert run(corpus, tokenizer_folder, "other", **options) == run(corpus, tokenizer_folder, "new", **options)
    assert "starting from zero" in caplog.text


def test_only_one_process_writes_a_data_set(corpus: list[Path], tokenizer_folder: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "held", "uint16"), pytest.raises(DataError, match="held: another process is writing"):
        run(corpus, tokenizer_folder, "held")


def test_a_bad_line_mended_by_an_option_keeps_what_was_done(
    corpus: list[Path], tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = corpus[0]
    source.write_text((json.dumps({"text": "the cat " * 20}) + "\n") * 20 + "oops\n")
    with pytest.raises(DataError, match="not JSON"):
        preprocess_corpus([source], tokenizer_folder, source.with_name("d"), append_eod=True)
    with caplog.at_level("INFO", "mega"):
        assert run([source], tokenizer_folder, "d") == run([source], tokenizer_folder, "straight")
    assert "going on" in caplog.text
