from __future__ import annotations

import ast
import csv
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from chat_templates import CONVERSATIONS, chat_tokenizer
from pyarrow import parquet

import mega_data
import mega_data.preprocessing.content_digest as digest_module
import mega_data.preprocessing.dataset_output as output_module
import mega_data.preprocessing.text_batches as batches_module
from mega_common.errors import ConfigError, DataError
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.data_config import DataConfig
from mega_data.preprocessing.preprocess_corpus import PreprocessJob, preprocess_corpus
from mega_data.preprocessing.token_cache import (
    read_first_record,
    tokenize_raw_data,
    tokenize_raw_source,
    translate_options_to_run_yaml,
)
from mega_data.reading.corpus_sources import find_corpus_sources
from mega_data.tokenizer import Tokenizer

TEXTS = [{"text": "the cat sat on the mat. The dog saw it."}, {"text": "def f(x):\n    return x + 1\n"}] * 3
CHATS = [CONVERSATIONS[name] for name in ("one", "turns", "system")]
PAIRS = [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}] * 3
FILES = ("bin", "idx", "mask.bin", "mask.idx")


@pytest.fixture
def tokenizer(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return chat_tokenizer(tokenizer_folder, tmp_path / "tok", "qwen", marks=True)


@pytest.fixture
def config(tokenizer: Path, tmp_path: Path) -> Callable[..., DataConfig]:
    """The data section of a run on raw data, with the cache in the test's folder."""

    def make(train: Any, **keys: Any) -> DataConfig:
        return DataConfig.parse({"train": train, "tokenizer": str(tokenizer), "cache": str(tmp_path / "cache"), **keys})

    return make


Config = Callable[..., DataConfig]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prefix(config: DataConfig) -> Path:
    return tokenize_raw_source(config.train[0], config)


def contents(prefix: Path) -> dict[str, bytes]:
    files = {name: prefix.with_name(f"{prefix.name}.{name}") for name in FILES}
    return {name: path.read_bytes() for name, path in files.items() if path.exists()}


def as_lines(folder: Path) -> str:
    return str(write_lines(folder / "corpus.jsonl", TEXTS))


def as_csv(folder: Path) -> str:
    with open(folder / "corpus.csv", "w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerows([["id", "text"], *([number, each["text"]] for number, each in enumerate(TEXTS))])
    return str(folder / "corpus.csv")


def as_parquet(folder: Path) -> str:
    parquet.write_table(arrow.Table.from_pylist(TEXTS), folder / "corpus.parquet")
    return str(folder / "corpus.parquet")


def as_text_files(folder: Path) -> str:
    for number, each in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(each["text"])
    return str(folder / "*.txt")


def as_folder(folder: Path) -> str:
    for number, each in enumerate(TEXTS):
        write_lines(folder / "parts" / f"{number}.jsonl", [each])
    return str(folder / "parts")


def as_saved_dataset(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(TEXTS).save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}"


WRITERS = [as_lines, as_csv, as_parquet, as_text_files, as_folder, as_saved_dataset]


@pytest.mark.parametrize("write", WRITERS)
def test_raw_texts_become_the_tokens_of_preprocess(
    write: Callable[[Path], str], config: Config, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "raw").mkdir()
    given = write(tmp_path / "raw")
    made = config(given)
    assert made.train[0].is_raw
    preprocess_corpus([given], tokenizer, tmp_path / "by-hand", append_eod=True)
    assert contents(prefix(made)) == contents(tmp_path / "by-hand")


@pytest.mark.parametrize(
    ("kind", "records", "chat", "sentences"),
    [
        ("conversations", CHATS, ChatOptions(), None),
        ("pairs", PAIRS, ChatOptions(kind="pairs"), None),
        ("bert", TEXTS, None, "en"),
    ],
)
def test_records_of_each_kind_become_the_tokens_of_preprocess(
    kind: str, records: list[Any], chat: ChatOptions | None, sentences: str | None, config: Config, tokenizer: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = write_lines(tmp_path / "raw.jsonl", records)
    preprocess_corpus([path], tokenizer, tmp_path / "by-hand", chat=chat, sentences=sentences)
    assert contents(prefix(config(str(path), kind=kind))) == contents(tmp_path / "by-hand")


def test_text_kinds_share_their_tokens(config: Config, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "raw.jsonl", TEXTS))
    assert len({prefix(config(path, kind=kind)) for kind in ("text", "documents", "fim", "masked", "t5")}) == 1


def test_the_key_is_content_tokenizer_and_settings(config: Config, tokenizer: Path, tmp_path: Path) -> None:
    first = prefix(config(str(write_lines(tmp_path / "a" / "raw.jsonl", CHATS)), kind="conversations"))
    copied = write_lines(tmp_path / "b" / "raw.jsonl", CHATS)
    assert prefix(config(str(copied), kind="conversations")) == first
    changed = [
        config(str(copied), kind="conversations", raw={"loss_on": "last"}),
        config(str(copied), kind="conversations", raw={"max_length": 100}),
        config([{"path": str(copied), "map": {"messages": "messages"}}], kind="conversations"),
        config(str(write_lines(tmp_path / "c" / "raw.jsonl", CHATS[:2])), kind="conversations"),
    ]
    template = tokenizer / "chat_template.jinja"
    others = [prefix(each) for each in changed]
    template.write_text(template.read_text() + "{# another #}")
    others.append(prefix(config(str(copied), kind="conversations")))
    assert len({first, *others}) == 6


def test_a_changed_additional_template_changes_the_key(config: Config, tokenizer: Path, tmp_path: Path) -> None:
    made = config(str(write_lines(tmp_path / "raw.jsonl", CHATS)), kind="conversations")
    template = tokenizer / "additional_chat_templates" / "tool_use.jinja"
    keys = [prefix(made)]
    template.parent.mkdir()
    for text in ("{{ messages }}", "{{ tools }}"):
        template.write_text(text)
        keys.append(prefix(made))
    template.rename(template.with_name("rag.jinja"))
    assert len({*keys, prefix(made)}) == 4


def test_nothing_is_tokenized_or_hashed_twice(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(str(write_lines(tmp_path / "raw.jsonl", TEXTS)))
    first = prefix(made)
    monkeypatch.setattr(PreprocessJob, "build_dataset", lambda *_: pytest.fail("tokenized again"))
    hashed = []
    count = digest_module.compute_file_sha256
    monkeypatch.setattr(
        digest_module, "compute_file_sha256", lambda path, **keys: hashed.append(Path(path).name) or count(path, **keys)
    )
    assert prefix(made) == first
    assert "raw.jsonl" not in hashed


def test_one_of_several_processes_tokenizes(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with locks of their own, as processes have."""
    made = config(str(write_lines(tmp_path / "raw.jsonl", TEXTS)))
    built, build = [], PreprocessJob.build_dataset
    both = threading.Barrier(2)

    def slowly(self: PreprocessJob, *args: Any) -> Any:
        built.append(self.whole)
        return build(self, *args)

    monkeypatch.setattr(PreprocessJob, "build_dataset", slowly)

    def run() -> None:
        both.wait()
        tokenize_raw_data(made)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert contents(built[0])


def test_a_killed_tokenization_resumes(
    config: Config, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also from a copy of the data elsewhere, since the content is the same."""
    path = write_lines(tmp_path / "raw.jsonl", TEXTS * 20)
    preprocess_corpus([path], tokenizer, tmp_path / "by-hand", append_eod=True)
    monkeypatch.setattr(output_module, "RECORD_INTERVAL", 0.0)
    monkeypatch.setattr(batches_module, "BATCH", 200)
    add, added = output_module.DatasetOutput.add_batch, []

    def until_killed(self: Any, batch: Any, documents: Any) -> None:
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(batch)
        add(self, batch, documents)

    with monkeypatch.context() as patch:
        patch.setattr(output_module.DatasetOutput, "add_batch", until_killed)
        with pytest.raises(KeyboardInterrupt):
            prefix(config(str(path)))
    moved = shutil.move(path, tmp_path / "moved.jsonl")
    path = Path(shutil.move(moved, tmp_path / "raw.jsonl"))
    with caplog.at_level(logging.INFO, logger="mega"):
        found = prefix(config(str(path)))
    assert "resuming an interrupted run after" in caplog.text
    assert contents(found) == contents(tmp_path / "by-hand")
    assert sorted(each.name for each in found.parent.iterdir()) == ["raw.bin", "raw.idx", "raw.info"]


def test_columns_are_named_by_map(config: Config, tmp_path: Path) -> None:
    """Other columns are ignored, also one that a form would have."""
    usual = write_lines(tmp_path / "usual.jsonl", [{"prompt": "Hi", "completion": "Hello"}])
    named = write_lines(tmp_path / "named.jsonl", [{"q": {"de": "Hi"}, "a": "Hello", "messages": "x", "label": 1}])
    source = {"path": str(named), "map": {"prompt": "q.de", "completion": "a"}}
    found = [prefix(config(each, kind="conversations")) for each in (str(usual), [source])]
    assert contents(found[0]) == contents(found[1])
    text = write_lines(tmp_path / "text.jsonl", [{"body": "the cat", "text": "no"}])
    body = prefix(config([{"path": str(text), "map": {"text": "body"}}]))
    tokens = contents(body)["bin"]
    assert tokens == contents(prefix(config(str(write_lines(tmp_path / "plain.jsonl", [{"text": "the cat"}])))))["bin"]


@pytest.mark.parametrize(
    ("records", "keys", "message"),
    [
        (CHATS, {}, r"raw\.jsonl: data\.kind = text does not read records of the form messages \(OpenAI\)\n.*data\.kind: conversations"),
        (PAIRS, {"kind": "conversations"}, r"form chosen and rejected \(preference\)\n.*data\.kind: pairs"),
        ([{"prompt": "a", "completion": "b", "label": True}], {"kind": "text"}, r"completion and label \(KTO\)\n.*kind: pairs"),
        ([{"text": "a", "label": 1}], {"kind": "conversations"}, r"text and label \(classification\)\n.*data\.kind: labels"),
        (TEXTS, {"kind": "conversations"}, r"form text\n.*data\.kind: text"),
        ([{"a": 1}], {"kind": "conversations"}, r"form a \(unknown\)\n.*map"),
        ([*TEXTS, {"text": 1}], {}, r"raw\.jsonl:7: .*\n.*set data\.raw\.on_bad_line: skip"),
        ([*CHATS, {"messages": 1}], {"kind": "conversations"}, r"raw\.jsonl:4: 'messages' must be a list of messages, found a number(.*\n)+.*data\.raw\.on_bad_line: skip"),
    ],
)  # fmt: skip
def test_errors_are_in_the_terms_of_settings(
    records: list[Any], keys: dict[str, Any], message: str, config: Config, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as error:
        prefix(config(str(write_lines(tmp_path / "raw.jsonl", records)), **keys))
    assert "--" not in str(error.value)


def test_a_missing_column_is_named(config: Config, tmp_path: Path) -> None:
    source = {"path": str(write_lines(tmp_path / "raw.jsonl", CHATS)), "map": {"messages": "dialog"}}
    with pytest.raises(DataError, match=r"no column 'dialog', which is mapped to 'messages'; the columns are messages"):
        prefix(config([source], kind="conversations"))


def test_bad_records_can_be_skipped(config: Config, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "raw.jsonl", [*TEXTS, {"text": 1}])
    found = prefix(config(str(path), raw={"on_bad_line": "skip"}))
    assert json.loads((found.parent / "raw.quarantine.jsonl").read_text())["line"] == 7


@pytest.mark.parametrize("record", [*CHATS, *TEXTS, *PAIRS])
def test_the_first_record_is_read(record: dict[str, Any], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "raw.jsonl", [record])
    assert read_first_record(find_corpus_sources([path])).record == record


class TestHub:
    """`hf:NAME` of the HuggingFace Hub, of which a test has nothing but the answers."""

    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        hub, commits = pytest.importorskip("huggingface_hub"), {"org/chats": "a1"}

        class Api:
            def dataset_info(self, name: str) -> Any:
                if name not in commits:
                    raise ConnectionError("no network")
                return type("Info", (), {"sha": commits[name]})

        rows = iter([*TEXTS] * 9)
        monkeypatch.setattr(hub, "HfApi", Api)
        monkeypatch.setattr(
            "mega_data.reading.source_readers._load_datasets",
            lambda _, name: [{**next(rows), "of": list(name)}],
        )
        return commits

    def test_the_commit_is_part_of_the_key(
        self, config: Config, hub: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        made = config([{"path": "hf:org/chats", "subset": "de", "split": "test"}])
        assert made.train[0].input_name == "hf:org/chats:de@test"
        first = prefix(made)
        assert prefix(made) == first
        assert prefix(config("hf:org/chats")) != first
        hub["org/chats"] = "b2"
        newer = prefix(made)
        assert newer != first
        hub.clear()
        assert prefix(made) == newer
        assert "cannot be reached; using its commit b2 of the last use" in caplog.text

    def test_an_unknown_one_is_an_error(self, config: Config, hub: dict[str, str]) -> None:
        with pytest.raises(DataError, match=r"hf:org/none: cannot be found on the HuggingFace Hub \(.*no network"):
            prefix(config("hf:org/none"))


@pytest.mark.parametrize(
    ("train", "keys", "message"),
    [
        ("a.jsonl", {"tokenizer": None}, r"tokenizer: is required for raw data, and a\.jsonl does not exist"),
        ("a.jsonl", {"kind": "retro"}, r"train\.0\.path = 'a\.jsonl': is not supported with raw data"),
        ([{"path": "a.jsonl", "subset": "de"}], {}, r"train\.0\.subset = 'de': requires a data set of the Hugging"),
        ([{"path": "a.jsonl", "split": "test"}], {}, r"train\.0\.split = 'test': requires a data set of the Hugging"),
        ([{"path": "tokens", "map": {"text": "a"}}], {}, r"train\.0\.map = .*: requires raw data, and tokens names"),
        ([{"path": "a.jsonl", "map": {"messages": "a"}}], {}, r"train\.0\.map = .*: must name columns for data\.kind = text: text"),
        ([{"path": "a.jsonl", "map": {"text": "a"}}], {"kind": "pairs"}, r"must name columns for data\.kind = pairs: messages, "),
        ([{"path": "a.jsonl", "map": {"body": "a"}}], {}, r"train\.0\.map\.body"),
        ("tokens", {"raw": {"append_eod": True}}, r"raw\.append_eod = true: requires raw data, such as"),
        ("a.jsonl", {"raw": {"loss_on": "last"}}, r"raw\.loss_on = 'last': requires data\.kind = conversations or pairs"),
        ("a.jsonl", {"raw": {"append_eod": True}, "kind": "pairs"}, r"raw\.append_eod = true: requires raw data of another"),
        ("a.jsonl", {"raw": {"loss_on": "all"}, "kind": "pairs"}, r"raw\.loss_on = 'all': conflicts with data\.kind = pairs"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(train: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig.parse({"train": train, "tokenizer": "tok", **keys})


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.jsonl", True), ("a.JSONL.gz", True), ("s3://bucket/a.parquet", True), ("hf:org/name", True), ("a.txt", True),
        ("data/wiki", False), ("data/wiki.bin", False), ("s3://bucket/wiki", False), ("texts", True), ("tokens", False),
        ("both", False), ("tok*", False), ("tex*", True), ("nothing*", False),
    ],
)  # fmt: skip
def test_raw_data_is_told_from_token_files(
    name: str, raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("texts", "both"):
        (tmp_path / folder).mkdir()
    for file in ("both.idx", "both.bin", "tokens.idx", "tokens.bin"):
        (tmp_path / file).touch()
    assert DataConfig.model_validate({"train": name}).train[0].is_raw == raw


def test_the_tokenizer_must_exist(config: Config, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "raw.jsonl", TEXTS))
    with pytest.raises(DataError, match="tokenizer"):
        prefix(config(path, tokenizer=str(tmp_path / "none")))
    assert Tokenizer(tmp_path / "tok").eos_id is not None


# Modules whose messages reach users of run.yaml, which has no options of the command line.
MESSAGES = (
    "chat/chat_template",
    "chat/chat_preparation",
    "chat/unrendered_parts",
    "reading/documents",
    "reading/corpus_sources",
)


@pytest.mark.parametrize("module", MESSAGES)
def test_messages_name_settings_of_run_yaml(module: str) -> None:
    tree = ast.parse((Path(mega_data.__file__).parent / f"{module}.py").read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    options = [text for text in texts if re.search(r"(^| )--[a-z]", text)]
    assert options
    for text in options:
        translated = translate_options_to_run_yaml(text).replace("mega data preprocess --", "")
        assert "--" not in translated, translated
