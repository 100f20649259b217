"""Cutting data sets for the splits of a run, and looking at them first."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.blended_dataset import DatasetUsage, build_blended_datasets, plan_dataset_usage
from mega_data.data_config import DataConfig
from mega_data.sampling.dataset_parts import find_matching_prefixes
from mega_data.token_files.indexed_reader import IndexedReader, OpenReaderPool
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.remote_copies import restore_url_slashes

EOD = 0


def data_set(prefix: Path, ends: str = "all", documents: int = 100, length: int = 20) -> Path:
    """`documents` of `length` tokens; `ends` says which of them end with EOD: all, half, first (begin with it), none."""
    with IndexedWriter(prefix, "uint16") as writer:
        for number in range(documents):
            tokens = np.arange(1, length + 1)
            if ends == "all" or (ends == "half" and number < documents // 2):
                tokens[-1] = EOD
            elif ends == "first":
                tokens[0] = EOD
            writer.add_document(tokens)
    return prefix


def config(*paths: Path, **fields: Any) -> DataConfig:
    return DataConfig.parse({"train": [str(path) for path in paths], "seq_length": 16, "split": [1], **fields})


@pytest.mark.parametrize("rule", ["reset_attention_mask", "reset_position_ids", "eod_mask_loss"])
@pytest.mark.parametrize(
    ("ends", "refused", "warned"),
    [("all", False, False), ("first", False, False), ("half", False, True), ("none", True, True)],
)
def test_rules_about_documents_need_documents_that_end(
    tmp_path: Path, rule: str, ends: str, refused: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(data_set(tmp_path / "d", ends), **{rule: True})
    if refused and rule != "eod_mask_loss":  # which then masks nothing, as it should
        with pytest.raises(DataError, match=rf"d: data\.{rule} requires documents that end .* token 0"):
            build_blended_datasets(settings, seed=1, samples={"train": 1}, eod=EOD)
        return
    build_blended_datasets(settings, seed=1, samples={"train": 1}, eod=EOD)
    assert ("checked documents do not end" in caplog.text) == warned


def test_a_blend_of_with_and_without_end_tokens_is_refused(tmp_path: Path) -> None:
    blend = [data_set(tmp_path / "with"), data_set(tmp_path / "without", "none")]
    with pytest.raises(DataError, match=r"without: data.* requires documents that end"):
        build_blended_datasets(config(*blend, reset_attention_mask=True), seed=1, samples={"train": 1}, eod=EOD)
    build_blended_datasets(config(*blend), seed=1, samples={"train": 1}, eod=EOD)


def test_validation_data_is_looked_at_as_well(tmp_path: Path) -> None:
    settings = config(data_set(tmp_path / "a"), valid=str(data_set(tmp_path / "b", "none")), reset_attention_mask=True)
    with pytest.raises(DataError, match=r"b: data.* requires documents that end"):
        build_blended_datasets(settings, seed=1, samples={"train": 1, "valid": 1}, eod=EOD)


def test_every_data_set_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    there = data_set(tmp_path / "there")
    with pytest.raises(DataError, match=r"(?s)2 data sets cannot be used:.*one\.idx: no such file.*two\.idx: no such"):
        build_blended_datasets(
            config(tmp_path / "one", there, tmp_path / "two"), seed=1, samples={"train": 1}, eod=None
        )


OPENING = """
import json, resource, sys
soft, hard, prefix, count, order = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from mega_common.errors import DataError
from mega_data.data_config import DataConfig
from mega_data.blended_dataset import build_blended_datasets
train = [{"path": f"{prefix}-{number}", "weight": 1} for number in range(count)]
config = DataConfig.parse({"train": train, "seq_length": 16, "split": [1], "order": order})
try:
    dataset, _, _ = build_blended_datasets(config, seed=1, samples={"train": 1000}, eod=None)
    print(dataset[999].tokens.shape)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("order", ["shuffled", "stable", "megatron"])
def test_a_blend_may_have_more_data_sets_than_files_may_be_open(tmp_path: Path, order: str) -> None:
    """Also 600 of them, which take 1,200 files where 1,024 are usual; this is the same, smaller."""
    data_set(tmp_path / "d-0")
    count = 100
    for number in range(1, count):
        for suffix in ("bin", "idx"):
            (tmp_path / f"d-{number}.{suffix}").symlink_to(tmp_path / f"d-0.{suffix}")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def opened(soft: int, hard: int) -> str:
        command = [sys.executable, "-c", OPENING, json.dumps([soft, hard, str(tmp_path / "d"), count, order])]
        env = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert opened(64, most).strip() == "(16,)"
    assert opened(64, 64).strip() == "(16,)"


def test_what_a_run_will_read_is_known_before_it_does(tmp_path: Path) -> None:
    one, two = data_set(tmp_path / "one"), data_set(tmp_path / "two", documents=50)
    settings = DataConfig.parse(
        {
            "train": [{"path": str(one), "weight": 3}, {"path": str(two), "weight": 1}],
            "valid": str(two),
            "seq_length": 20,
            "split": [1],
        }
    )
    assert plan_dataset_usage(settings, {"train": 400, "valid": 10}, None) == [
        DatasetUsage("train", one, 100, 2000, 300.0, 3.0),
        DatasetUsage("train", two, 50, 1000, 100.0, 2.0),
        DatasetUsage("valid", two, 50, 1000, 10.0, 0.2),
    ]
    assert [use.split for use in plan_dataset_usage(settings, {"train": 400}, None)] == ["train", "train"]


def test_many_data_sets_are_opened_by_a_few_small_reads_and_checked_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = data_set(tmp_path / "good", documents=900), data_set(tmp_path / "bad", documents=900)
    raw = bytearray((tmp_path / "bad.idx").read_bytes())
    raw[34 + 4 * 400] += 1
    (tmp_path / "bad.idx").write_bytes(raw)
    with pytest.raises(DataError, match="sequence 401 begins"):
        build_blended_datasets(config(good, bad), seed=1, samples={"train": 1}, eod=None)
    monkeypatch.setattr("mega_data.sampling.dataset_parts.EAGER_CHECK_BYTES", 1000)
    with caplog.at_level("INFO"):
        train = build_blended_datasets(config(good, bad), seed=1, samples={"train": 1}, eod=None)[0]
    assert "2 data sets: each index is checked when it is first read" in caplog.text
    with pytest.raises(DataError, match="sequence 401 begins"):
        [train[k] for k in range(4)]


@pytest.mark.parametrize(("cut", "told"), [(0, "requires 3,998"), (1, "must rise from 0")])
def test_ends_that_do_not_meet_are_told_without_reading_the_index(tmp_path: Path, cut: int, told: str) -> None:
    data_set(tmp_path / "d")
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[34 + 4 * 99 if cut == 0 else -8] -= 1
    (tmp_path / "d.idx").write_bytes(raw)
    with pytest.raises(DataError, match=told):
        IndexedReader(tmp_path / "d", OpenReaderPool(1))


def test_only_so_many_data_sets_are_open_at_a_time(tmp_path: Path) -> None:
    files = OpenReaderPool(2)
    readers = [IndexedReader(data_set(tmp_path / str(i), length=i + 2), files) for i in range(5)]
    held = [reader.tokens for reader in readers]
    del held
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    assert [f"{tmp_path}/{i}.bin" in maps for i in range(5)] == [False, False, False, True, True]
    assert [int(reader.lengths[3]) for reader in readers] == [2, 3, 4, 5, 6]
    assert [reader.find_token_position(3) for reader in readers] == [6, 9, 12, 15, 18]


def test_a_glob_weighs_as_one_by_the_tokens_of_what_matches(tmp_path: Path) -> None:
    for name, documents in (("web-0", 30), ("web-1", 90), ("wiki", 50)):
        data_set(tmp_path / name, documents=documents)
    settings = DataConfig.parse({
        "train": [{"path": f"{tmp_path}/web-*", "weight": 3}, f"{tmp_path}/wiki"], "seq_length": 20, "split": [1],
    })  # fmt: skip
    used = {use.prefix.name: use.samples for use in plan_dataset_usage(settings, {"train": 1600}, None)}
    assert used == {"web-0": 300, "web-1": 900, "wiki": 400}
    by_size = settings.model_copy(
        update={"temperature": 1.0, "train": [s.model_copy(update={"weight": None}) for s in settings.train]}
    )
    used = {use.prefix.name: use.samples for use in plan_dataset_usage(by_size, {"train": 1700}, None)}
    assert used == {"web-0": 300, "web-1": 900, "wiki": 500}
    with pytest.raises(DataError, match="no data set matches"):
        plan_dataset_usage(config(tmp_path / "code-*"), {"train": 1}, None)


def test_a_glob_of_urls_and_one_of_conversations_with_their_masks(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("web-0", "web-1", "wiki", "chat", "chat.mask"):
        data_set(tmp_path / name)
        for suffix in ("bin", "idx"):
            store.pipe(f"/bucket/{name}.{suffix}", (tmp_path / f"{name}.{suffix}").read_bytes())
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (str(tmp_path), "memory://bucket"):
        for pattern, names in (("web-*", ["web-0", "web-1"]), ("ch*", ["chat"])):
            found = find_matching_prefixes(DataConfig.parse({"train": f"{folder}/{pattern}"}).train[0])
            assert [restore_url_slashes(path) for path in found] == [f"{folder}/{name}" for name in names]
            assert IndexedReader(found[0]).documents == IndexedReader(tmp_path / names[0]).documents


def test_a_name_with_brackets_that_is_there_is_no_glob(tmp_path: Path) -> None:
    path = data_set(tmp_path / "web[2]")
    assert [use.prefix for use in plan_dataset_usage(config(path), {"train": 10}, None)] == [path]


def test_temperature_favours_small_data_sets(tmp_path: Path) -> None:
    one, two = data_set(tmp_path / "one", documents=90), data_set(tmp_path / "two", documents=10)
    shares = []
    for temperature in (1.0, 2.0, 1e9):
        uses = plan_dataset_usage(config(one, two, temperature=temperature), {"train": 1000}, None)
        shares.append(uses[1].samples)
    assert shares == [100, 250, 500]
