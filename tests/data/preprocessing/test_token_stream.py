"""Streamed raw data has the samples of token files in order `blocks`, from any start, in bounded space."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from chat_templates import CONVERSATIONS, chat_tokenizer
from masked_data import SPECIAL, WORDS
from pyarrow import parquet
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import mega_data.preprocessing.token_stream as stream_module
from mega_common.errors import ConfigError, DataError
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.data_config import DataConfig
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.token_cache import open_token_stream
from mega_data.preprocessing.token_stream import FIRST, TokenStream
from mega_data.tokenizer import Tokenizer

DRAW = random.Random(1)
TEXTS = [
    {"text": " ".join(DRAW.choices(["the", "cat", "saw a", "dog", "on", "its", "mat. And"], k=n % 31))}
    for n in range(150)
]
CHATS = [CONVERSATIONS[name] for name in ("one", "turns", "system")] * 15
PAIRS = [{"prompt": f"Hi {n}", "chosen": "Hello" * (n % 4 + 1), "rejected": "No"} for n in range(20)]
Build = Callable[..., BlendedDataset]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of each file, as large data has."""
    monkeypatch.setattr(stream_module, "PIECE", 2000)


@pytest.fixture
def tokenizer(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return chat_tokenizer(tokenizer_folder, tmp_path / "tok", "qwen", marks=True)


@pytest.fixture
def build(tokenizer: Path, tmp_path: Path) -> Build:
    """The training samples of a run, with the cache in the test's folder."""

    def make(train: object, **keys: Any) -> BlendedDataset:
        settings = {
            "tokenizer": str(tokenizer),
            "cache": str(tmp_path / "cache"),
            "seq_length": 32,
            "block_tokens": 400,
        }
        raw = {"train": train if isinstance(train, list) else str(train), "split": "1", **settings, **keys}
        eod = Tokenizer(Path(raw["tokenizer"])).eos_id
        return build_blended_datasets(DataConfig.parse(raw), seed=3, samples={"train": 9}, eod=eod)[0]

    return make


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def values(sample: Any) -> list[Any]:
    found = [getattr(sample, field.name) for field in fields(sample)]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in found]


def assert_same(expected: BlendedDataset, found: BlendedDataset, samples: range) -> None:
    for k in samples:
        assert values(found[k]) == values(expected[k]), k
    assert found.estimate_attention_work(samples).tolist() == expected.estimate_attention_work(samples).tolist()


KINDS = [
    ("text", TEXTS, None), ("documents", TEXTS, None), ("conversations", CHATS, ChatOptions()),
    ("pairs", PAIRS, ChatOptions(kind="pairs")),
    ("labels", [{**text, "label": n} for n, text in enumerate(TEXTS) if text["text"]], ChatOptions(kind="labels", max_length=200)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "records", "chat"), KINDS)
def test_a_stream_has_the_samples_of_token_files(
    kind: str, records: list[Any], chat: ChatOptions | None, build: Build, tokenizer: Path, tmp_path: Path
) -> None:
    """Through two epochs, and from the position that a checkpoint has."""
    path = write_lines(tmp_path / "raw.jsonl", records)
    preprocess_corpus([path], tokenizer, tmp_path / "tokens", chat=chat, append_eod=chat is None)
    keys = {"kind": kind, "seq_length": 32 if chat is None else 200}
    expected, found = build(tmp_path / "tokens", order="blocks", **keys), build(path, stream=True, **keys)
    size = int(expected.samples_per_epoch)
    assert_same(expected, found, range(2 * size + 5))
    assert found.samples_per_epoch == size
    for k in (size // 2, size + size // 3):
        position = found.find_stream_positions(k)
        assert position[str(path)]["block"] > 0
        assert_same(expected, build(path, stream=True, streamed=position, **keys), range(k, k + size))


@pytest.mark.parametrize("kind", ["bert", "masked"])
def test_encoder_kinds_stream(kind: str, build: Build, tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    texts = [{"text": ". ".join(" ".join(DRAW.choices(WORDS, k=6)).capitalize() for _ in range(4))} for _ in range(60)]
    path = write_lines(tmp_path / "raw.jsonl", texts)
    sentences = "en" if kind == "bert" else None
    preprocess_corpus([path], tmp_path / "words", tmp_path / "tokens", sentences=sentences)
    keys = {"kind": kind, "tokenizer": str(tmp_path / "words")}
    expected = build(tmp_path / "tokens", order="blocks", **keys)
    assert_same(expected, build(path, stream=True, **keys), range(int(expected.samples_per_epoch) + 5))


def as_folder(folder: Path, store: Any) -> str:
    for number in range(3):
        write_lines(folder / "parts" / f"{number}.jsonl", TEXTS[number * 50 : number * 50 + 50])
    return str(folder / "parts")


def as_glob(folder: Path, store: Any) -> str:
    return as_folder(folder, store) + "/*.jsonl"


def as_parquet(folder: Path, store: Any) -> str:
    parquet.write_table(arrow.Table.from_pylist(TEXTS), folder / "corpus.parquet", row_group_size=20)
    return str(folder / "corpus.parquet")


def as_objects(folder: Path, store: Any) -> str:
    store.pipe("/bucket/raw/a.jsonl", write_lines(folder / "a.jsonl", TEXTS[:70]).read_bytes())
    store.pipe("/bucket/raw/b.jsonl", write_lines(folder / "b.jsonl", TEXTS[70:]).read_bytes())
    return "memory://bucket/raw/*.jsonl"


def as_saved_dataset(folder: Path, store: Any) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(TEXTS).save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}"


@pytest.mark.parametrize("write", [as_folder, as_glob, as_parquet, as_objects, as_saved_dataset])
def test_every_input_streams(
    write: Callable[[Path, Any], str], build: Build, tokenizer: Path, tmp_path: Path, store: Any
) -> None:
    path = write_lines(tmp_path / "all.jsonl", TEXTS)
    preprocess_corpus([path], tokenizer, tmp_path / "tokens", append_eod=True)
    expected, found = build(tmp_path / "tokens", order="blocks"), build(write(tmp_path, store), stream=True)
    assert_same(expected, found, range(int(expected.samples_per_epoch) + 5))


def test_streams_and_token_files_blend(build: Build, tokenizer: Path, tmp_path: Path) -> None:
    """With a position for each stream in the checkpoint."""
    one, two = write_lines(tmp_path / "1.jsonl", TEXTS[:90]), write_lines(tmp_path / "2.jsonl", TEXTS[90:])
    for path in (one, two):
        preprocess_corpus([path], tokenizer, path.with_suffix(""), append_eod=True)

    def blend(first: Path, second: Path, **keys: Any) -> BlendedDataset:
        return build([{"path": str(first), "weight": 2}, {"path": str(second), "weight": 1}], **keys)

    expected = blend(one.with_suffix(""), two.with_suffix(""), order="blocks")
    found = blend(one, two, stream=True)
    assert_same(expected, found, range(40))
    assert blend(one, two.with_suffix(""), stream=True).find_stream_positions(40).keys() == {str(one)}
    resumed = blend(one, two, stream=True, streamed=found.find_stream_positions(40))
    assert_same(expected, resumed, range(40, 90))


def count_blocks(folder: Path) -> int:
    return sum(path.is_dir() for path in next((folder / "cache").glob("*.stream")).iterdir())


def test_read_blocks_are_removed(build: Build, tmp_path: Path) -> None:
    found = build(write_lines(tmp_path / "raw.jsonl", TEXTS * 8), stream=True)
    for k in range(400):
        found[k]
    assert found.find_stream_positions(400)[str(tmp_path / "raw.jsonl")]["block"] > 20
    assert count_blocks(tmp_path) <= 8


def test_a_removed_block_is_made_again(build: Build, tokenizer: Path, tmp_path: Path) -> None:
    """As for a rank that reads later than another, or after a rollback."""
    path = write_lines(tmp_path / "raw.jsonl", TEXTS * 2)
    preprocess_corpus([path], tokenizer, tmp_path / "tokens", append_eod=True)
    expected, found = build(tmp_path / "tokens", order="blocks"), build(path, stream=True)
    size = int(expected.samples_per_epoch)
    for k in (*range(0, size, 3), *range(5), size // 4):
        assert values(found[k]) == values(expected[k])


def test_processes_share_blocks(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with streams and locks of their own, as processes have."""
    path, made, make = write_lines(tmp_path / "raw.jsonl", TEXTS), [], TokenStream._make_block
    read: list[list[Any]] = []
    monkeypatch.setattr(TokenStream, "_make_block", lambda self, start, to: made.append(start) or make(self, start, to))
    readers = [build(path, stream=True) for _ in range(3)]

    def run(samples: BlendedDataset) -> None:
        read.append([values(samples[k]) for k in range(40)])

    threads = [threading.Thread(target=run, args=(each,)) for each in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 3
    assert read[0] == read[1] == read[2]
    assert len(made) < 2 * len({*made})


def test_a_killed_block_is_made_again(
    build: Build, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "raw.jsonl", TEXTS)
    preprocess_corpus([path], tokenizer, tmp_path / "tokens", append_eod=True)

    def killed(self: TokenStream, batch: Any, documents: Any, output: Any) -> None:
        output.add_batch(batch, documents)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenStream, "_write_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            build(path, stream=True)
    assert_same(build(tmp_path / "tokens", order="blocks"), build(path, stream=True), range(20))


def test_changed_input_is_read_from_its_beginning(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "raw.jsonl", TEXTS)
    first = build(path, stream=True)
    first[40]
    position = first.find_stream_positions(40)
    write_lines(path, [*TEXTS, *TEXTS])
    assert values(build(path, stream=True, streamed=position)[40]) == values(build(path, stream=True)[40])
    assert "changed since the checkpoint" in caplog.text


def test_bad_records_are_named_or_left_out(build: Build, tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "raw.jsonl", [*TEXTS, {"text": 1}, *TEXTS])
    with pytest.raises(DataError, match=r"raw\.jsonl.*:\d+: .*\n.*set data\.raw\.on_bad_line: skip"):
        build(path, stream=True)[200]
    good = write_lines(tmp_path / "good.jsonl", [*TEXTS, *TEXTS])
    preprocess_corpus([good], tokenizer, tmp_path / "tokens", append_eod=True)
    expected = build(tmp_path / "tokens", order="blocks")
    assert_same(expected, build(path, stream=True, raw={"on_bad_line": "skip"}), range(int(expected.samples_per_epoch)))


def test_without_text_it_is_an_error(build: Build, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document with text"):
        build(write_lines(tmp_path / "raw.jsonl", [{"text": ""}]), stream=True, raw={"append_eod": False})


def test_a_block_depends_on_its_start_alone(build: Build, tmp_path: Path, tokenizer: Path) -> None:
    """Also one of a long document, which is encoded in pieces."""
    long = {"text": "the cat sat on the mat\n" * 20000}
    path = write_lines(tmp_path / "raw.jsonl", [*TEXTS[:40], long, *TEXTS[40:]])
    preprocess_corpus([path], tokenizer, tmp_path / "tokens", append_eod=True)
    expected, found = build(tmp_path / "tokens", order="blocks"), build(path, stream=True)
    size = int(expected.samples_per_epoch)
    assert_same(expected, found, range(size - 30, size))
    settings = {"train": str(path), "tokenizer": str(tokenizer), "cache": str(tmp_path / "other"), "stream": True}
    config = DataConfig.parse({**settings, "block_tokens": 400})
    stream, starts = open_token_stream(config.train[0], config), [FIRST]
    while (block := stream.open_block(starts[-1])) and block.end:
        starts.append(block.end)
    again = open_token_stream(config.train[0], config)
    for start, end in reversed([*pairwise(starts)]):
        block = again.open_block(start, ahead=False)
        assert block is not None
        assert block.end == end


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": "tokens"}, r"stream = true: requires raw data in data\.train"),
        ({"order": "stable"}, r"order = 'stable': must be blocks with data\.stream"),
        ({"split": "90,10"}, r"split = .*: gives valid or test a share"),
        ({"temperature": 2.0}, r"temperature = 2\.0: requires the number of tokens"),
        ({"train": [{"path": "a.jsonl", "max_epochs": 2}]}, r"train\.0\.max_epochs = 2\.0: is not supported with data\.stream"),
        ({"kind": "prompts"}, r"stream = true: is not supported with data\.kind = prompts"),
        ({"stream": False, "order": "blocks", "train": "tokens", "kind": "retro"}, r"order = 'blocks': is not supported with data\.kind = retro"),
        ({"stream": False, "block_tokens": 5}, r"block_tokens = 5: requires data\.order = blocks"),
    ],
)  # fmt: skip
def test_conflicting_settings_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig.parse({"train": "a.jsonl", "tokenizer": "tok", "stream": True, **keys})
