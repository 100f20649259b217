from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from mega_common.errors import DataError
from mega_data.tokenizer import Tokenizer, disable_encoder_threads, train_tokenizer


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_every_text_survives(tokenizer_folder: Path, text: str) -> None:
    tokenizer = Tokenizer(tokenizer_folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text])[0].tolist() == ids


def test_folder_and_file_are_the_same_tokenizer(tokenizer_folder: Path) -> None:
    folder, file = Tokenizer(tokenizer_folder), Tokenizer(tokenizer_folder / "tokenizer.json")
    assert folder.fingerprint == file.fingerprint
    assert (folder.vocab_size, folder.eos_id) == (file.vocab_size, file.eos_id) == (300, 0)


def test_transformers_loads_what_was_trained(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle for tokenizer folders")
    oracle = transformers.AutoTokenizer.from_pretrained(str(tokenizer_folder))
    ours = Tokenizer(tokenizer_folder)
    text = "the cat sat, naïve <|endoftext|>\n\tdef f():"
    assert oracle(text)["input_ids"] == ours.encode(text)
    assert oracle.decode(ours.encode(text)) == text
    assert (oracle.eos_token_id, len(oracle)) == (ours.eos_id, ours.vocab_size)


def test_fingerprint_changes_with_the_content(tokenizer_folder: Path, tmp_path: Path) -> None:
    other = train_tokenizer(["something else entirely"], 270, tmp_path)
    assert other.fingerprint != Tokenizer(tokenizer_folder).fingerprint


def test_saved_truncation_and_padding_do_not_count(tokenizer_folder: Path, tmp_path: Path) -> None:
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat" * 3
    assert Tokenizer(tmp_path).encode(text) == Tokenizer(tokenizer_folder).encode(text)


@pytest.mark.parametrize(
    ("config", "eos"),
    [({"eos_token": "a"}, "a"), ({"eos_token": {"content": "b"}}, "b"), ({}, "<|endoftext|>"), (None, "<|endoftext|>")],
)
def test_eos_comes_from_the_config(tokenizer_folder: Path, tmp_path: Path, config: object, eos: str) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_id == tokenizer.backend.token_to_id(eos)


def test_eos_outside_the_vocabulary_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nope>"}')
    with pytest.raises(DataError, match=r"tokenizer_config.json: eos_token '<nope>' is not in the vocabulary"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config", ['{"eos_token": 3}', '{"eos_token": ["a"]}', '{"bos_token": {"content": {}}}', "[]", "null"]
)
def test_special_tokens_of_a_wrong_type_are_named(tokenizer_folder: Path, tmp_path: Path, config: str) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(
        DataError, match=r"tokenizer_config.json: (.os_token must be a text|must be a JSON object), found"
    ):
        Tokenizer(tmp_path)


def test_no_eos_when_nothing_names_one(tmp_path: Path) -> None:
    Backend(models.BPE({"a": 0, "b": 7}, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (None, 8)  # ids may have holes


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such tokenizer"):
        Tokenizer(tmp_path / "gpt2")
    with pytest.raises(DataError, match=r"tokenizer.json is missing in this folder"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(DataError, match=r"which has tokenizer.model"):
        Tokenizer(tmp_path)
    panicking = {
        "version": "1.0",
        "model": {"type": "BPE", "continuing_subword_prefix": "abc", "vocab": {"a": 0, "b": 1, "ab": 2}},
    }
    panicking["model"]["merges"] = [
        ["a", "b"]
    ]  # without the prefix, which ends the library's parser by a panic of Rust
    for content in ({"model": 3}, panicking):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=r"`tokenizers` library can read"):
            Tokenizer(tmp_path)


def test_training_refuses(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(["a"], 256, tmp_path)
    with pytest.raises(DataError, match="requires text"):
        train_tokenizer([""], 300, tmp_path)
    with pytest.raises(DataError, match="exists already"):
        train_tokenizer(["a"], 300, tokenizer_folder)
    assert not (tmp_path / "tokenizer.json").exists()


def test_training_stops_with_the_error_of_its_texts(tmp_path: Path) -> None:
    def broken() -> object:
        yield "fine"
        raise DataError("corpus.jsonl:2: broken")

    with pytest.raises(DataError, match=r"corpus.jsonl:2"):
        train_tokenizer(broken(), 300, tmp_path)  # type: ignore[arg-type]


LINES = st.lists(st.text(alphabet="abc é\t,1'", max_size=12), max_size=40)


@given(lines=LINES, size=st.integers(1, 60), block=st.integers(1, 99))
@settings(max_examples=100, deadline=None)
def test_pieces_encode_to_the_tokens_of_the_whole(
    tokenizer_folder: Path, lines: list[str], size: int, block: int
) -> None:
    tokenizer, text = Tokenizer(tokenizer_folder), "\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mega_data.tokenizer.WINDOW", 16)  # small, so that a cut is judged by less than the whole text
        pieces = list(tokenizer.split_long_text([text], size))
        blocks = [text[at : at + block] for at in range(0, len(text), block)]
        assert list(tokenizer.split_long_text(blocks, size)) == pieces
    assert "".join(piece.text for piece in pieces) == text
    tokens = [token for piece in pieces for token in tokenizer.encode_after_text(piece.lead, piece.text)]
    if all(piece.exact for piece in pieces):
        assert tokens == tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text


def test_long_text_is_cut(tokenizer_folder: Path) -> None:
    pieces = list(Tokenizer(tokenizer_folder).split_long_text(["the cat sat on the mat\n" * 1000], 1000))
    assert max(len(piece.text) for piece in pieces) < 2000


@pytest.mark.parametrize("text", ["a\n" * 1000, "ab" * 1000, "a b" * 1000, "日本。" * 1000])
def test_a_lead_keeps_the_mark_of_the_begin_from_a_piece(tmp_path: Path, text: str) -> None:
    """As with Llama 2's tokenizer, which knows no words either."""
    backend = Backend(models.BPE({"▁": 0, "a": 1, "b": 2, "\n": 3, "▁a": 4, "ab": 5, "日": 6, "本": 7, "。": 8, "▁日": 9},
                                 [("▁", "a"), ("▁", "日"), ("a", "b")]))  # fmt: skip
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    pieces = list(tokenizer.split_long_text([text], 100))
    assert len(pieces) >= 10
    tokens = [token for piece in pieces for token in tokenizer.encode_after_text(piece.lead, piece.text)]
    assert tokens == tokenizer.encode(text)


def test_text_is_not_cut_where_the_text_would_change(tmp_path: Path) -> None:
    Backend(models.WordLevel({"?": 0}, "?")).save(str(tmp_path / "tokenizer.json"))  # whatever it is given is one word
    assert [piece.text for piece in Tokenizer(tmp_path).split_long_text(["a b " * 100], 10)] == ["a b " * 100]


def test_text_without_a_place_to_cut_is_cut_anywhere(tokenizer_folder: Path) -> None:
    tokenizer, text = Tokenizer(tokenizer_folder), "0123456789" * 1000
    pieces = list(tokenizer.split_long_text([text], 1000))
    assert max(len(piece.text) for piece in pieces) < 2000
    assert {piece.exact for piece in pieces[:-1]} == {False}
    assert (
        tokenizer.decode([token for piece in pieces for token in tokenizer.encode_after_text(piece.lead, piece.text)])
        == text
    )


def test_numbers_and_marks_are_places_to_cut(tokenizer_folder: Path) -> None:
    for text in ("12345 67 " * 2000, "1,2\n33,4\n" * 2000, "日本語。中文，" * 2000):
        pieces = list(Tokenizer(tokenizer_folder).split_long_text([text], 1000))
        assert len(pieces) > 5
        assert all(piece.exact for piece in pieces)


def test_the_space_that_a_tokenizer_puts_before_each_text_stands_for_the_one_at_a_cut(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4}, [("▁", "a"), ("▁", "b")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = Tokenizer(tmp_path), "a b " * 1000
    pieces = list(tokenizer.split_long_text([text], 100))
    assert len(pieces) > 10
    assert [
        token for piece in pieces for token in tokenizer.encode_after_text(piece.lead, piece.text)
    ] == tokenizer.encode(text)


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("true", None):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if before:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        with disable_encoder_threads():
            assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
