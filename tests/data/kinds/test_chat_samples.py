from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import ConfigError, DataError
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.token_files.dataset_info import ChatInfo, TokenizerInfo, write_dataset_info
from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, get_loss_mask_prefix
from mega_data.token_files.indexed_writer import IndexedWriter

LENGTH = 32


def data_set(prefix: Path, lengths: list[int], *, one: int | None = None, **chat: Any) -> Path:
    """Document d has the tokens 100 d, 100 d + 1, ...; the second half of each counts, by 1, or by d / 10 with `one`."""
    tokens = np.concatenate([100 * number + np.arange(length) for number, length in enumerate(lengths)])
    mask = np.concatenate(
        [(np.arange(length) >= length // 2) * (number * 10 if one else 1) for number, length in enumerate(lengths)]
    ).astype(np.uint8)
    with IndexedWriter(prefix, "uint16", masked=True) as writer:
        writer.add_documents(tokens, lengths, mask)
    if one:
        about = ChatInfo(
            **{"kind": "conversations", "loss_on": "answers", "one": one, "template": "", "marked": True} | chat
        )
        write_dataset_info(
            prefix, tokenizer=TokenizerInfo(path="", fingerprint="", vocab_size=5000), append_eod=False, dtype="uint16",
            documents=len(lengths), tokens=tokens.size, text_bytes=0, bin_sha256="", chat=about,
        )  # fmt: skip
    return prefix


def built(prefix: Path, **fields: Any) -> BlendedDataset:
    config = DataConfig.parse(
        {"train": str(prefix), "seq_length": LENGTH, "kind": "conversations", "split": "1", **fields}
    )
    return build_blended_datasets(config, seed=3, samples={"train": 10}, eod=None)[0]


@pytest.mark.parametrize("one", [None, 100])
def test_labels_weigh_what_the_mask_says_of_them(tmp_path: Path, one: int | None) -> None:
    lengths = [5, 20, 9, 2, 33, 12]
    dataset = built(data_set(tmp_path / "d", lengths, one=one))
    seen: dict[int, float] = {}
    for k in range(4):
        sample = dataset[k]
        assert sample.tokens.shape == sample.loss_weights.shape == (LENGTH,)
        inside = sample.labels == sample.tokens + 1  # not padding, whose label is its own token
        assert not sample.loss_weights[~inside].any()
        seen |= dict(zip(sample.labels[inside].tolist(), sample.loss_weights[inside].tolist(), strict=True))
    for number, length in enumerate(lengths):
        for place in range(1, length):
            full = number * 10 / one if one else 1
            assert seen[100 * number + place] == pytest.approx(full * (place >= length // 2))


def test_the_fingerprint_is_that_of_tokens_and_mask(tmp_path: Path) -> None:
    one, other = data_set(tmp_path / "one", [5, 20, 9]), data_set(tmp_path / "other", [5, 20, 9])
    assert built(one).fingerprint == built(other).fingerprint
    path = get_bin_path(get_loss_mask_prefix(other))
    path.write_bytes(bytes([1 - byte for byte in path.read_bytes()]))
    assert built(one).fingerprint != built(other).fingerprint


@pytest.mark.parametrize(("byte", "said"), [(0, "selects no token"), (1, "selects every token, including")])
def test_a_mask_of_nothing_or_everything_is_refused(tmp_path: Path, byte: int, said: str) -> None:
    path = get_bin_path(get_loss_mask_prefix(data_set(tmp_path / "d", [5, 20])))
    path.write_bytes(bytes([byte] * 25))
    with pytest.raises(DataError, match=said):
        built(tmp_path / "d").fingerprint  # noqa: B018 - what a run asks for first


def test_a_mask_of_everything_may_be_what_was_asked_for(tmp_path: Path) -> None:
    path = get_bin_path(get_loss_mask_prefix(data_set(tmp_path / "d", [5, 20], one=1, loss_on="all")))
    path.write_bytes(bytes([1] * 25))
    assert built(tmp_path / "d")[0].loss_weights.any()


def test_conversations_are_no_text_and_text_is_no_conversations(tmp_path: Path) -> None:
    data_set(tmp_path / "chat", [5, 20])
    for kind in ("text", "documents"):
        with pytest.raises(DataError, match=f"has conversations, which conflicts with data.kind = {kind}"):
            built(tmp_path / "chat", kind=kind)
    for path in (get_bin_path, get_idx_path):
        path(get_loss_mask_prefix(tmp_path / "chat")).unlink()
    with pytest.raises(DataError, match=r"has text, which conflicts with data.kind = conversations"):
        built(tmp_path / "chat")
    data_set(tmp_path / "pairs", [5, 20], one=1, kind="pairs")
    with pytest.raises(DataError, match=r"has pairs, which conflicts with data.kind = conversations"):
        built(tmp_path / "pairs")


def test_megatron_has_no_such_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kind conversations is not supported with data.order = megatron"):
        built(data_set(tmp_path / "d", [5, 20]), order="megatron")
