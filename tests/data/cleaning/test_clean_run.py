from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mega_common.errors import ConfigError, DataError
from mega_data.cleaning import clean_run as module
from mega_data.cleaning.clean_config import CleanConfig
from mega_data.cleaning.clean_run import clean_corpus
from mega_data.cleaning.duplicate_removal import FirstPassDeduplication
from mega_data.reading.source_readers import iterate_document_texts

EXACT = {"duplicates": True}


def jsonl(path: Path, *values: str, **more: Any) -> Path:
    path.write_text("".join(json.dumps({"text": v, "id": i, **more}) + "\n" for i, v in enumerate(values)))
    return path


def cleaned(place: Path, inputs: list[Path], config: dict[str, Any], **options: Any) -> dict[str, Any]:
    options = {"workers": 1, **options}
    return clean_corpus(inputs, CleanConfig.parse({"compression": "none", **config}), place / "out", **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*")) for line in path.read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 100)
    monkeypatch.setattr(module, "PART", 400)


def test_all_that_was_read_is_kept_or_dropped_with_its_reason(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", "first one", "x", "first one", "mail a@example.com", url="http://u")
    summary = cleaned(tmp_path, [source], {"length": {"min_chars": 3}, "pii": True, "duplicates": True})
    assert lines(tmp_path / "out" / "kept") == [
        {"text": "first one", "id": 0, "url": "http://u"},
        {"text": "mail <EMAIL>", "id": 3, "url": "http://u"},
    ]
    place = {"file": str(source)}
    assert lines(tmp_path / "out" / "dropped") == [
        {"rule": "exact", "why": "duplicate", "detail": f"the text of {source}:1", **place, "line": 3,
         "record": {"text": "first one", "id": 2, "url": "http://u"}},
        {"rule": "length", "why": "characters below 3", "detail": "1", **place, "line": 2,
         "record": {"text": "x", "id": 1, "url": "http://u"}},
    ]  # fmt: skip
    assert lines(tmp_path / "out" / "changed") == [
        {"rules": ["pii"], **place, "line": 4, "record": {"text": "mail a@example.com", "id": 3, "url": "http://u"}}
    ]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert (summary["read"], summary["kept"]) == ({"documents": 4, "bytes": 37}, {"documents": 2, "bytes": 21})
    assert summary["dropped"] == {"documents": 2, "bytes": 10}
    assert summary["rules"]["length"]["why"] == {"characters below 3": 1}
    assert summary["rules"]["pii"]["found"] == {"email": 1}
    assert summary["rules"]["exact"]["samples"][0]["detail"] == f"the text of {source}:1"
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out"}


@pytest.mark.usefixtures("small_parts")
def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", *(f"document {i % 70} of these" for i in range(100)))
    config = {"length": {"min_chars": 20}, "duplicates": True, "compression": "gz"}
    one = cleaned(tmp_path, [source], config)
    first = content(tmp_path / "out")
    assert sum(name.startswith("kept/") for name in first) > 2
    assert cleaned(tmp_path, [source], config, workers=2, overwrite=True) == one
    assert content(tmp_path / "out") == first


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("owner", "name"), [(module.CleaningRun, "_add_batch"), (FirstPassDeduplication, "_write_lines")]
)
def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Ended at every third batch or file, until it is through; the files are those of a straight run."""
    source = jsonl(tmp_path / "a.jsonl", *(f"document {i % 70} of these" for i in range(100)))
    config = {"length": {"min_chars": 20}, "duplicates": True, "compression": "gz"}
    summary = cleaned(tmp_path, [source], config)
    straight = content(tmp_path / "out")
    calls, ends, original = [0], [0], getattr(owner, name)

    def ended(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(owner, name, ended)
    monkeypatch.setattr(module, "RECORD_INTERVAL", 0)
    while True:
        try:
            again = cleaned(tmp_path, [source], config, overwrite=True)
        except KeyboardInterrupt:
            ends[0] += 1
            assert content(tmp_path / "out") == straight
        else:
            break
    assert ends[0] >= 2
    assert again == summary
    assert content(tmp_path / "out") == straight


def test_a_change_of_the_rules_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", "one", "three")
    monkeypatch.setattr(module, "RECORD_INTERVAL", 0)
    with monkeypatch.context() as context:
        context.setattr(module, "rename_folder_into_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cleaned(tmp_path, [source], {"length": {"min_chars": 4}})
    assert cleaned(tmp_path, [source], {"length": {"max_chars": 4}})["kept"]["documents"] == 1
    assert [record["text"] for record in lines(tmp_path / "out" / "kept")] == ["one"]


def test_a_kill_just_after_the_output_appeared_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", "one", "two", "one")
    with monkeypatch.context() as context:
        context.setattr(module.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cleaned(tmp_path, [source], EXACT)
    assert cleaned(tmp_path, [source], EXACT, overwrite=True)["kept"]["documents"] == 2
    assert [record["text"] for record in lines(tmp_path / "out" / "kept")] == ["one", "two"]


def test_a_changed_filter_is_another_run(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", "one", "two")
    for answer, kept in (("True", 2), ("record['id'] == 0", 1)):
        (tmp_path / "mine.py").write_text(f"def keep(record):\n    return {answer}\n")
        summary = cleaned(tmp_path, [source], {"filter": "mine:keep"}, folder=tmp_path, overwrite=True)
        assert summary["kept"]["documents"] == kept


def test_a_worker_that_is_killed_is_told_of(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", "one")
    (tmp_path / "mine.py").write_text("import os\ndef keep(record):\n    os.kill(os.getpid(), 9)\n")
    with pytest.raises(DataError, match=r"worker process was killed(?s:.*)fewer --workers"):
        cleaned(tmp_path, [source], {"filter": "mine:keep"}, folder=tmp_path, workers=2)


def test_no_document_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r"a\.jsonl: no document in the inputs"):
        cleaned(tmp_path, [tmp_path / "a.jsonl"], EXACT)


def test_duplicates_across_and_within_inputs(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path / "a.jsonl", "one", "two", "one"), jsonl(tmp_path / "b.jsonl", "one", "three", "three")
    across = cleaned(tmp_path, [a, b], EXACT)
    assert [across["inputs"][str(path)]["kept"]["documents"] for path in (a, b)] == [2, 1]
    within = cleaned(tmp_path, [a, b], {"duplicates": {"between_inputs": False}}, overwrite=True)
    assert [within["inputs"][str(path)]["kept"]["documents"] for path in (a, b)] == [2, 2]


def test_duplicates_of_what_an_earlier_run_kept(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path / "a.jsonl", "one", "two", "one"), jsonl(tmp_path / "b.jsonl", "two", "three", "three")
    clean_corpus([a], CleanConfig.parse(EXACT), tmp_path / "earlier", workers=1)
    cleaned(tmp_path, [b], {"duplicates": {"against": [tmp_path / "earlier"]}})
    assert [record["text"] for record in lines(tmp_path / "out" / "kept")] == ["three"]
    dropped = {record["line"]: record["detail"] for record in lines(tmp_path / "out" / "dropped")}
    assert dropped == {1: f"the text of document 2 of {tmp_path / 'earlier'}", 3: f"the text of {b}:2"}


def test_fingerprints_of_another_kind_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="makes the signatures")
    source = jsonl(tmp_path / "a.jsonl", "one")
    clean_corpus([source], CleanConfig.parse(EXACT), tmp_path / "earlier", workers=1)
    for folder, message in ((tmp_path / "earlier", "cannot be compared"), (tmp_path, r"summary.json: cannot be read")):
        with pytest.raises(DataError, match=message):
            cleaned(tmp_path, [source], {"duplicates": {"minhash": True, "against": [folder]}})


def test_near_duplicates(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="makes the signatures")
    text = " ".join(f"w{i}" for i in range(200))
    source = jsonl(tmp_path / "a.jsonl", text, text.replace("w100", "other"), "something else")
    summary = cleaned(tmp_path, [source], {"duplicates": {"minhash": None}})
    assert summary["kept"]["documents"] == 2
    (sample,) = summary["rules"]["minhash"]["samples"]
    assert sample["detail"].endswith(f" like {source}:1")


def test_what_datatrove_writes_is_read(tmp_path: Path) -> None:
    """JSON lines, packed, or Parquet, with text, id and metadata, as its writers make them."""
    records = [{"text": f"text {i}", "id": f"{i}", "metadata": {"url": "http://u", "date": "2024"}} for i in range(3)]
    (tmp_path / "in").mkdir()
    packed = gzip.compress("".join(json.dumps(record) + "\n" for record in records[:2]).encode())
    (tmp_path / "in" / "00000.jsonl.gz").write_bytes(packed)
    arrow = pytest.importorskip("pyarrow", reason="reads Parquet")
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.Table.from_pylist(records[2:]), tmp_path / "in" / "00001.parquet"
    )
    cleaned(tmp_path, [tmp_path / "in"], EXACT)
    assert lines(tmp_path / "out" / "kept") == records


@pytest.mark.parametrize("compression", ["gz", "zst", "none"])
def test_every_compression_is_read_again(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("pyarrow", reason="packs and reads .zst")
    values = [f"text {i}" for i in range(5)]
    cleaned(tmp_path, [jsonl(tmp_path / "a.jsonl", *values)], {**EXACT, "compression": compression})
    assert list(iterate_document_texts([tmp_path / "out" / "kept"])) == values


def test_keys_in_objects_are_changed_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": {"b": "to a@example.com", "c": 1}, "d": 2}) + "\n")
    cleaned(tmp_path, [tmp_path / "a.jsonl"], {"pii": True}, json_key="a.b")
    assert lines(tmp_path / "out" / "kept") == [{"a": {"b": "to <EMAIL>", "c": 1}, "d": 2}]


class TestDecontaminate:
    def test_documents_with_words_of_an_evaluation_set_go(self, tmp_path: Path) -> None:
        question = "how many legs has a spider that lost two of them in a fight"
        evaluation = tmp_path / "eval.jsonl"
        evaluation.write_text(json.dumps({"question": question, "answer": "six"}) + "\n")
        source = jsonl(tmp_path / "a.jsonl", f"He asked: {question.title()}?", "How many legs has a spider?")
        config = {"decontaminate": {"against": [str(evaluation)], "json_keys": ["question", "answer"]}}
        summary = cleaned(tmp_path, [source], config)
        assert summary["kept"]["documents"] == 1
        (dropped,) = lines(tmp_path / "out" / "dropped")
        assert dropped["detail"] == "2 times, first: how many legs has a spider that lost two of them in a"

    def test_nothing_to_look_for_is_an_error(self, tmp_path: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", "one two")
        with pytest.raises(DataError, match="has at least 13 words"):
            cleaned(tmp_path, [source], {"decontaminate": {"against": [str(source)]}})


class TestOwnFilter:
    def config(self, folder: Path, body: str) -> dict[str, Any]:
        (folder / "mine.py").write_text(f"def keep(record):\n    {body}\n")
        return {"filter": "mine:keep"}

    def test_its_answer_decides(self, tmp_path: Path) -> None:
        config = self.config(tmp_path, "return record['id'] != 1 and ('too late' if record['id'] > 2 else True)")
        source = jsonl(tmp_path / "a.jsonl", *"abcd")
        summary = cleaned(tmp_path, [source], config, folder=tmp_path)
        assert summary["rules"]["filter"]["why"] == {"mine:keep": 1, "too late": 1}

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("pass", "a.jsonl:1: filter mine:keep: must return True, False or a reason, not None"),
            ("1/0", "a.jsonl:1: filter mine:keep fails with Zero"),
        ],
    )
    def test_its_faults_are_told(self, tmp_path: Path, body: str, message: str) -> None:
        config, source = self.config(tmp_path, body), jsonl(tmp_path / "a.jsonl", "a")
        with pytest.raises(DataError, match=message):
            cleaned(tmp_path, [source], config, folder=tmp_path)
        assert not (tmp_path / ".out.partial").exists()

    def test_it_must_be_there(self, tmp_path: Path) -> None:
        self.config(tmp_path, "return True")
        for name in ("mine:other", "nowhere:keep"):
            with pytest.raises(ConfigError, match=f"filter {name}"):
                cleaned(tmp_path, [jsonl(tmp_path / "a.jsonl", "a")], {"filter": name}, folder=tmp_path)


class TestBadInput:
    def test_error_names_file_and_line(self, tmp_path: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", "a")
        source.write_text(source.read_text() + "{oops\n")
        with pytest.raises(DataError, match=r"a.jsonl:2: not JSON(?s:.*)--on-bad-line skip"):
            cleaned(tmp_path, [source], EXACT)
        assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl"}

    def test_skip_puts_them_with_the_dropped(self, tmp_path: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", "a")
        source.write_text(source.read_text() + "{oops\n")
        summary = cleaned(tmp_path, [source], EXACT, on_bad_line="skip")
        assert (summary["kept"]["documents"], summary["rules"]["unreadable"]["why"]) == (1, {"not JSON": 1})
        assert [line["content"] for line in lines(tmp_path / "out" / "dropped")] == ["{oops"]

    def test_nothing_is_overwritten_unasked(self, tmp_path: Path) -> None:
        source = jsonl(tmp_path / "a.jsonl", "a")
        cleaned(tmp_path, [source], EXACT)
        with pytest.raises(DataError, match=r"out: exists already(?s:.*)--overwrite"):
            cleaned(tmp_path, [source], EXACT)
        with pytest.raises(DataError, match="both an input and the output"):
            clean_corpus([tmp_path / "out" / "kept"], CleanConfig.parse(EXACT), tmp_path / "out", overwrite=True)


class TestConfig:
    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            ({}, "at least one rule is required"),
            ({"gopher": True}, "unknown key"),
            ({"language": {"keep": ["English"]}}, "must be ISO 639 codes"),
            ({"language": {"keep": ["en"], "detector": "fasttext"}}, "is required with detector: fasttext"),
            ({"filter": "no_colon"}, "must have the form module:function"),
            ({"duplicates": {"exact": False}}, "requires exact or minhash"),
            ({"pii": {"patterns": {"x": "("}}}, "must be a regular expression"),
        ],
    )
    def test_mistakes_are_told(self, raw: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            CleanConfig.parse(raw)

    def test_of_a_list_of_one_the_brackets_may_be_left_out(self) -> None:
        config = CleanConfig.parse({"language": {"keep": "en"}, "duplicates": {"against": "cleaned/wiki"}})
        assert config.language is not None
        assert config.language.keep == ["en"]
        assert config.duplicates is not None
        assert config.duplicates.against == [Path("cleaned/wiki")]

    def test_a_bare_key_switches_a_rule_on_and_false_off(self) -> None:
        config = CleanConfig.parse({"c4": None, "pii": True, "length": False, "duplicates": {"minhash": None}})
        assert config.c4 is not None
        assert config.pii is not None
        assert config.length is None
        assert config.duplicates is not None
        assert config.duplicates.minhash is not None


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """A kill of the command leaves no process behind."""
    jsonl(tmp_path / "a.jsonl", *(f"text {i}" for i in range(20)))
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n"
        "def keep(record):\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'pid{{os.getpid()}}').touch()\n"
        "    time.sleep(60)\n"
    )
    code = (
        "from pathlib import Path\n"
        "from mega_data.cleaning.clean_config import CleanConfig\n"
        "from mega_data.cleaning.clean_run import clean_corpus\n"
        "if __name__ == '__main__':\n"
        f"    folder = Path({str(tmp_path)!r})\n"
        "    clean_corpus([folder / 'a.jsonl'], CleanConfig(filter='mine:keep'), folder / 'out', folder=folder, workers=2)\n"
    )
    (tmp_path / "main.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, tmp_path / "main.py"], env=environment, stderr=subprocess.DEVNULL)
    workers = wait_for(lambda: [int(path.name[3:]) for path in tmp_path.glob("pid*")])
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in workers))
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Any) -> Any:
    end = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
