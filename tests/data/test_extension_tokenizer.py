"""Tokenizers of extensions: the example, and what is reported of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.extension_tokenizer import ExtensionBackend, TokenizerReference, find_recorded_tokenizer
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/extensions/sampler_tokenizer_kernel.py"
PLACE_VALUE = Path(f"{EXAMPLE}:place_value")
TOKENIZER = Tokenizer(PLACE_VALUE)
HEAD = """from mega_trainer.extend import CustomTokenizer, Extension
class Letters:
    vocabulary, end_token = {"end": 0, "a": 1, "b": 2}, "end"
    def encode(self, text): return [self.vocabulary[letter] for letter in text]
    def decode(self, ids): return "".join(" ab"[number] for number in ids)
"""
TAIL = """
EXTENSION = Extension(name="letters", version="VERSION", api=1, tokenizers={"letters": CustomTokenizer(Letters)})
"""


def write(folder: Path, change: str = "", version: str = "1.0") -> Path:
    file = folder / f"letters_{len(list(folder.iterdir()))}.py"
    file.write_text(HEAD + change + TAIL.replace("VERSION", version))
    return file


def test_the_example_names_the_places_of_digits() -> None:
    names = [TOKENIZER.backend.id_to_token(token) for token in TOKENIZER.encode("1204 x")]
    assert names == ["1@3", "2@2", "0@1", "4@0", "byte 32", "byte 120"]
    assert (TOKENIZER.vocab_size, TOKENIZER.eos_id, TOKENIZER.bos_id) == (417, 0, None)
    assert TOKENIZER.decode([0], skip_special_tokens=True) == ""


@given(st.text())
def test_the_example_decodes_what_it_encodes(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_data_records_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"text": "1+20=21"}\n{"text": "<end>"}')
    info = preprocess_corpus([tmp_path / "sums.jsonl"], PLACE_VALUE, tmp_path / "sums", append_eod=True)
    assert info.tokenizer is not None
    assert (info.tokenizer.path, info.tokenizer.extension) == (str(PLACE_VALUE), "sampler-tokenizer-kernel 1.0")
    assert info.tokenizer.fingerprint == TOKENIZER.fingerprint
    reader = IndexedReader(tmp_path / "sums")
    assert [TOKENIZER.decode(reader.read_sequence(number).tolist()) for number in range(2)] == [
        "1+20=21<end>",
        "<end><end>",
    ]
    assert len(reader.read_sequence(1)) == 6  # a text that spells the end token is text


def test_a_long_text_is_cut_where_no_token_changes() -> None:
    text = "the sum of 123456 and 7 is, " * 400
    pieces = list(TOKENIZER.split_long_text([text], 2000))
    assert len(pieces) > 2
    assert [token for piece in pieces for token in TOKENIZER.encode(piece.text)] == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("    vocabulary = {}", "vocabulary must map the name of each token to an id of its own"),
        ("    vocabulary = {'a': 1, 'b': 1}", "vocabulary must map the name of each token to an id of its own"),
        ("    end_token = 'stop'", "end_token 'stop' is not in the vocabulary"),
        ("    def __init__(self): 1 / 0", "build raised ZeroDivisionError: division by zero"),
        ("    def encode(self, text): return [7]", "encode returned the id 7, which is not in the vocabulary"),
        ("    def encode(self, text): return text.nothing", "encode raised AttributeError"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(change: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        Tokenizer(Path(f"{write(tmp_path, change)}:letters")).encode("ab")


def test_names_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the extension letters has no tokenizer 'words'; it has letters"):
        Tokenizer(Path(f"{write(tmp_path)}:words"))
    with pytest.raises(DataError, match="must name the tokenizer of an extension"):
        Tokenizer(EXAMPLE)
    assert TokenizerReference.parse(Path("s3://bucket/tokenizer")) is None
    with pytest.raises(DataError, match="found a tokenizer of an extension"):
        Tokenizer(PLACE_VALUE).backend.to_str()
    with pytest.raises(DataError, match="--kind conversations is not supported") as error:
        preprocess_corpus([EXAMPLE], PLACE_VALUE, tmp_path / "chats", chat=ChatOptions(kind="conversations"))
    assert error.value.hint == "use a tokenizer with tokenizer.json"


def test_a_record_finds_its_tokenizer_only_among_named_extensions(tmp_path: Path) -> None:
    file = write(tmp_path)
    record = ExtensionBackend(TokenizerReference(str(file), "letters")).make_record("letters")
    assert find_recorded_tokenizer(record, [str(EXAMPLE), str(file)], "runs/a") == Path(f"{file}:letters")
    with pytest.raises(DataError, match="runs/a: the tokenizer requires the extension 'letters'"):
        find_recorded_tokenizer(record, [str(EXAMPLE)], "runs/a")
    newer = write(tmp_path, version="1.1")
    assert find_recorded_tokenizer(record, [str(newer)], "runs/a") == Path(f"{newer}:letters")
    other = write(tmp_path, "    vocabulary = {'end': 0, 'a': 2, 'b': 1}", "2.0")
    with pytest.raises(DataError, match="has another vocabulary than when it was saved") as error:
        find_recorded_tokenizer(record, [str(other)], "runs/a")
    assert error.value.hint == "use version 1.0 of the extension"
    assert json.loads(record)["version"] == "1.0"
