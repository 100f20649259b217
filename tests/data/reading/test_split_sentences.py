"""Sentences as sequences, documents as ranges of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError, MissingPackageError
from mega_data.preprocessing import dataset_output
from mega_data.preprocessing.dataset_output import DatasetOutput
from mega_data.preprocessing.document_encoding import SentenceEncoder
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.sharding import InputShard
from mega_data.preprocessing.text_encoder import ComparedFastEncoder, EncoderMismatch
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

TEXT = "Dr. Smith saw the cat, e.g. on the mat.  It sat there! \n\nDid the dog see it? Who knows."
SENTENCES = ["Dr. Smith saw the cat, e.g. on the mat.", "  It sat there!", " \n\nDid the dog see it?", " Who knows."]
needs_sentencex = pytest.mark.usefixtures("sentencex")


@pytest.fixture(scope="session")
def sentencex() -> None:
    pytest.importorskip("sentencex", reason="sentences need the package sentencex")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of none to nine sentences, one of many pieces."""
    sentences = [f"The cat sat on mat {i}. " for i in range(300)]
    texts = ["".join(sentences[i : i + i % 10]) for i in range(40)] + ["", "".join(sentences), "Short."]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(corpus: Path, tokenizer: Path, name: str, **options: Any) -> dict[str, bytes]:
    prefix = corpus.with_name(name)
    preprocess_corpus([corpus], tokenizer, prefix, append_eod=True, **options)
    return {suffix: prefix.with_name(name + suffix).read_bytes() for suffix in (".bin", ".idx", ".info")}


@needs_sentencex
def test_a_sentence_is_a_sequence(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer(tokenizer_folder)
    (tmp_path / "a.txt").write_text(TEXT)
    preprocess_corpus([tmp_path / "a.txt"], tokenizer_folder, tmp_path / "d", append_eod=True, sentences="en")
    reader = IndexedReader(tmp_path / "d")
    found = [tokenizer.decode(reader.read_sequence(i).tolist()) for i in range(len(reader))]
    assert found == [*SENTENCES[:-1], SENTENCES[-1] + "<|endoftext|>"]
    assert reader.document_index.tolist() == [0, 4]


@needs_sentencex
def test_the_tokens_are_those_of_whole_documents(corpus: Path, tokenizer_folder: Path) -> None:
    """But for the white space that a document ends with."""
    run(corpus, tokenizer_folder, "whole")
    run(corpus, tokenizer_folder, "sentences", sentences="en")
    whole, sentences = (IndexedReader(corpus.with_name(name)) for name in ("whole", "sentences"))
    assert whole.document_index.size == sentences.document_index.size == 40 - 4 + 2 + 1
    tokenizer = Tokenizer(tokenizer_folder)
    assert sentences.lengths.size > 300 + 36
    for document, (first, last) in enumerate(zip(sentences.document_index, sentences.document_index[1:], strict=False)):
        parts = np.concatenate([sentences.read_sequence(i) for i in range(first, last)])
        text = tokenizer.decode(whole.read_sequence(document).tolist(), skip_special_tokens=True)
        assert tokenizer.decode(parts.tolist(), skip_special_tokens=True) == text.rstrip()


@needs_sentencex
def test_white_space_is_left_out_where_the_tokenizer_adds_it(adding_space: Tokenizer) -> None:
    assert SentenceEncoder(adding_space, "en").split_sentences(TEXT) == [sentence.strip() for sentence in SENTENCES]


@pytest.fixture
def adding_space(tmp_path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers

    backend = Backend(models.BPE({"▁": 0, "a": 1, ".": 2}, []))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@needs_sentencex
def test_pieces_parts_and_interruptions_change_nothing(
    corpus: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(corpus, tokenizer_folder, "straight", sentences="en")
    for number in (1, 2):
        prefix = corpus.with_name("parts")
        preprocess_corpus(
            [corpus],
            tokenizer_folder,
            prefix,
            append_eod=True,
            sentences="en",
            shard=InputShard(number, 2),
            overwrite=True,
        )
    assert corpus.with_name("parts.bin").read_bytes() == straight[".bin"]
    assert corpus.with_name("parts.idx").read_bytes() == straight[".idx"]

    monkeypatch.setattr(dataset_output, "RECORD_INTERVAL", 0.0)
    monkeypatch.setattr("mega_data.preprocessing.text_batches.BATCH", 500)
    real, left = DatasetOutput.add_batch, [5]

    def add(self: DatasetOutput, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        real(self, *args)

    monkeypatch.setattr(DatasetOutput, "add_batch", add)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, tokenizer_folder, "stopped", sentences="en")
    assert run(corpus, tokenizer_folder, "stopped", sentences="en") == straight


@needs_sentencex
def test_a_document_in_pieces_has_its_sentences(
    corpus: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(corpus, tokenizer_folder, "straight", sentences="en")
    monkeypatch.setattr("mega_data.preprocessing.text_batches.PIECE", 1000)
    assert run(corpus, tokenizer_folder, "pieces", sentences="en")[".bin"] == straight[".bin"]
    found, expected = (IndexedReader(corpus.with_name(name)) for name in ("pieces", "straight"))
    assert found.document_index.size == expected.document_index.size
    # A cut between two pieces lies within a sentence, mostly; where it does not, two of them become one.
    assert set(np.cumsum(found.lengths)) <= set(np.cumsum(expected.lengths))
    assert expected.lengths.size - 8 <= found.lengths.size


@needs_sentencex
def test_files_are_those_that_megatron_writes(corpus: Path, tokenizer_folder: Path) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="the oracle is not installed")
    torch = pytest.importorskip("torch")
    tokenizer = Tokenizer(tokenizer_folder)
    encoder = SentenceEncoder(tokenizer, "en")
    builder = theirs.IndexedDatasetBuilder(str(corpus.with_name("theirs.bin")), dtype=np.uint16)
    for line in corpus.read_text().splitlines():
        (sentences,) = encoder.encode_documents(tokenizer, [json.loads(line)["text"]], np.int32)
        if sentences:
            sentences[-1] = np.append(sentences[-1], tokenizer.eos_id)
            builder.add_document(torch.tensor(np.concatenate(sentences)), [part.size for part in sentences])
    builder.finalize(str(corpus.with_name("theirs.idx")))
    ours = run(corpus, tokenizer_folder, "ours", sentences="en")
    assert ours[".bin"] == corpus.with_name("theirs.bin").read_bytes()
    assert ours[".idx"] == corpus.with_name("theirs.idx").read_bytes()


@needs_sentencex
def test_a_faster_encoder_encodes_sentences(
    corpus: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(corpus, tokenizer_folder, "straight", sentences="en", encoder="tokenizers")
    with caplog.at_level("INFO", "mega"):
        assert run(corpus, tokenizer_folder, "fast", sentences="en", encoder="fastokens") == straight
        assert caplog.text.count(", compared with tokenizers on") == 1
        monkeypatch.setattr(ComparedFastEncoder, "encode_batch", lambda *_: raising(EncoderMismatch(4)))
        assert run(corpus, tokenizer_folder, "slow", sentences="en", encoder="fastokens") == straight
    # the fifth sentence is the second of the fourth document
    assert (
        f"{corpus}:4: fastokens and tokenizers differ on this text; starting from zero without fastokens" in caplog.text
    )


def raising(error: Exception) -> None:
    raise error


@needs_sentencex
def test_a_language_is_a_code(corpus: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=r"^--language must be an ISO 639 language code, not .english."):
        run(corpus, tokenizer_folder, "d", sentences="english")


def test_a_package_that_is_missing_is_named(
    corpus: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(MissingPackageError, match="--split-sentences requires the package sentencex"):
        run(corpus, tokenizer_folder, "d", sentences="en")
