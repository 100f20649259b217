"""A special token that a text spells is text, for each kind of tokenizer and each encoder."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from mega_common.errors import DataError
from mega_data.plain_text_tokenizer import list_token_spellings
from mega_data.preprocessing.text_encoder import ComparedFastEncoder, choose_text_encoder
from mega_data.tokenizer import Tokenizer
from mega_data.tokenizer_conversion import convert_tokenizer

SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "[CLS]", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PLAIN = "".join(map(chr, range(33, 127)))
CORPUS = [
    "the heron stands in the water and waits for a fish\n",
    "a list: [CLS] means </s> or <unk> here, and <0x41> is A; <s>, <pad> and <|im_end|> too",
    PLAIN, " ".join(PLAIN), "s> /s> unk> pad> CLS] 0x41> |im_end|> <s </s <unk <pad [CLS <0x4 <0x <|im_end|",
] * 8  # fmt: skip
FORMS = ("{}", "a{}b", " {} c", "{0}{0}", "see {} and {} here\n")
Make = Callable[[], Backend]


def bpe(*, fallback: bool = False, ignore_merges: bool = False, whole: bool = False, **added: Any) -> Backend:
    """A BPE tokenizer that was trained on the spellings; `whole` leaves words as they are, spaces included."""
    options = {"unk_token": "<unk>", "byte_fallback": fallback, "ignore_merges": ignore_merges}
    backend = Backend(models.BPE(**options))  # type: ignore[arg-type]
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*|[^▁]+"), "isolated") if not whole else None
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500 + 256 * fallback, show_progress=False,
                                special_tokens=["<unk>"] + BYTES * fallback))  # fmt: skip
    return _with_merged_specials(backend, fallback, added)


def _with_merged_specials(backend: Backend, fallback: bool, added: dict[str, Any]) -> Backend:
    """Make specials of pieces that the merges reach, and leave byte tokens in the model alone."""
    spec = json.loads(backend.to_str())
    vocab = spec["model"]["vocab"]
    spec["added_tokens"] = [one for one in spec["added_tokens"] if one["content"] == "<unk>"]
    for token in [*SPECIALS, "<0x41>"] if fallback else SPECIALS:
        parts = list(token)
        while len(parts) > 1:
            left, right = parts.pop(0), parts.pop(0)
            for part in (left, right, left + right):
                vocab.setdefault(part, len(vocab))
            if [left, right] not in spec["model"]["merges"]:
                spec["model"]["merges"].insert(0, [left, right])
            parts.insert(0, left + right)
    made = Backend.from_str(json.dumps(spec))
    made.add_special_tokens([AddedToken(token, special=True, **added) for token in SPECIALS])
    made.add_tokens([AddedToken("<tool>", special=False)])
    return made


def byte_level(**added: Any) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=SPECIALS[:2],
                                  initial_alphabet=alphabet)  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, **added) for token in SPECIALS])
    backend.add_tokens([AddedToken("<tool>", special=False, **added)])
    return backend


def unigram(*, fallback: bool = False, **added: Any) -> Backend:
    letters = [(letter, -9.0 - number / 100) for number, letter in enumerate(PLAIN + "▁\n")]
    words = [("▁the", -4.0), ("CLS", -5.0), ("<s", -6.0), ("0x", -5.5), ("im_", -6.5)]
    pieces = [(token, 0.0) for token in SPECIALS + BYTES * fallback] + letters + words
    backend = Backend(models.Unigram(pieces, 2, fallback))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, **added) for token in SPECIALS])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return backend


def words(kind: str, *, lower: bool = False) -> Backend:
    vocab = {token: number for number, token in enumerate([*SPECIALS, "the", "a", "c", "see", "and", "here"])}
    if kind == "piece":
        for letter in PLAIN:
            vocab.setdefault(letter, len(vocab))
            vocab.setdefault("##" + letter, len(vocab))
        backend = Backend(models.WordPiece(vocab, unk_token="<unk>"))
        backend.decoder = decoders.WordPiece()
    else:
        backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens(SPECIALS)
    return backend


TOKENIZERS: dict[str, Make] = {
    "bpe": bpe,
    "bpe with byte fallback": lambda: bpe(fallback=True),
    "bpe of whole texts": lambda: bpe(whole=True),
    "bpe of whole texts with byte fallback": lambda: bpe(whole=True, fallback=True),
    "bpe without merges of whole words": lambda: bpe(ignore_merges=True),
    "bpe, stripping": lambda: bpe(lstrip=True, rstrip=True),
    "bpe, normalized": lambda: bpe(normalized=True, fallback=True),
    "bpe, single words": lambda: bpe(single_word=True),
    "byte level": byte_level,
    "byte level, stripping": lambda: byte_level(lstrip=True, rstrip=True, normalized=True),
    "unigram": unigram,
    "unigram with byte fallback": lambda: unigram(fallback=True),
    "unigram, stripping": lambda: unigram(lstrip=True, rstrip=True),
    "unigram, normalized": lambda: unigram(normalized=True, fallback=True),
    "word piece": lambda: words("piece"),
    "word piece, lower case": lambda: words("piece", lower=True),
    "word level": lambda: words("level"),
    "word level, lower case": lambda: words("level", lower=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spelled_special_tokens_are_text(name: str, tmp_path: Path) -> None:
    TOKENIZERS[name]().save(str(tmp_path / "tokenizer.json"))
    tokenizer, parsing = Tokenizer(tmp_path, specials_as_text=True), Tokenizer(tmp_path)
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    unknown = vocab["<unk>"] if name.startswith("word") else None  # a word that is not in a vocabulary of words
    forbidden = {vocab[token] for token in [*SPECIALS, *BYTES] if token in vocab} - {unknown}
    for token in [*SPECIALS, *BYTES]:
        for form in FORMS:
            text = form.format(token, token)
            ids = tokenizer.encode(text)
            assert ids == tokenizer.encode_batch([text])[0].tolist()
            assert forbidden.isdisjoint(ids), (text, ids)
            if unknown is None:
                assert tokenizer.decode(ids).strip() == text.strip()
    for text in [*CORPUS[:1], "here the heron", "see <tool> and"]:
        assert tokenizer.encode(text) == parsing.encode(text)
    for text in ("é 日本 🎉 the", "a\x00b"):
        assert tokenizer.encode(text) == tokenizer.encode_batch([text])[0].tolist() == parsing.encode(text)


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_faster_encoder_is_taken_only_if_it_agrees_on_every_spelling(
    name: str, as_text: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    TOKENIZERS[name]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, specials_as_text=as_text)
    encoder = choose_text_encoder("auto", tokenizer, 1 << 30, rereadable=True)
    assert len(caplog.records) == 1
    texts = [form.format(token, token) for token in list_token_spellings(tokenizer.backend) for form in FORMS]
    if isinstance(encoder, ComparedFastEncoder):
        encoder.compared = 1 << 60
    for ours, theirs in zip(
        encoder.encode_batch(texts, np.int64), tokenizer.encode_batch(texts, np.int64), strict=True
    ):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc_cf"])
def test_spelled_tokens_are_those_of_sentencepiece(kind: str, fallback: bool, rule: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type=kind, byte_fallback=fallback,
        vocab_size=150 + 256 * fallback, hard_vocab_limit=False, control_symbols=["[CLS]", "<|im_end|>"], pad_id=3,
        character_coverage=1.0, minloglevel=2, normalization_rule_name=rule,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = convert_tokenizer(tmp_path / "tokenizer.model", tmp_path / "hf", CORPUS)
    judge = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    plain = Tokenizer(tokenizer.path, specials_as_text=True)
    for token in [*SPECIALS, *BYTES]:
        for text in [*(form.format(token, token) for form in FORMS), f"日{token}é", token[:-1], token[1:]]:
            assert plain.encode(text) == judge.encode(text), text
    encoder = choose_text_encoder("auto", plain, 1 << 30, rereadable=True)
    texts = [form.format(token, token) for token in [*SPECIALS, *BYTES] for form in FORMS]
    assert [one.tolist() for one in encoder.encode_batch(texts, np.int64)] == judge.encode(texts)


def test_a_byte_token_as_a_whole_word_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    bpe(fallback=True, ignore_merges=True).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, specials_as_text=True)
    assert tokenizer.encode("the heron 日") == Tokenizer(tmp_path).encode("the heron 日")
    with pytest.raises(DataError, match="spells a byte token such as <0x41> is not supported"):
        tokenizer.encode("<0x41>")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_symbols_that_a_conversion_encodes_differently_are_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type=kind, vocab_size=150, hard_vocab_limit=False,
        user_defined_symbols=["<sep>"], character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    convert_tokenizer(tmp_path / "tokenizer.model", tmp_path / "hf", CORPUS)
    assert (
        "the converted tokenizer encodes texts that spell 1 of the 4 special, added and byte tokens differently: <sep>"
        in caplog.text
    )


REAL = [
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_241114.model.v7",
]


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_spelled_tokens_of_published_tokenizers_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    package = pytest.importorskip("mistral_common", reason="has tokenizers in its data")
    file = Path(package.__file__).parent / "data" / name
    (tmp_path / "tokenizer.model").write_bytes(file.read_bytes())
    tokenizer = convert_tokenizer(tmp_path / "tokenizer.model", tmp_path / "hf", CORPUS)
    judge = sentencepiece.SentencePieceProcessor(model_file=str(file))
    plain = Tokenizer(tokenizer.path, specials_as_text=True)
    defined = {one.content for one in plain.backend.get_added_tokens_decoder().values() if not one.special}
    spelled = [token for token in list_token_spellings(plain.backend) if token not in defined]
    texts = [form.format(token, token) for token in spelled for form in FORMS]
    expected = judge.encode(texts)
    assert [plain.encode(text) for text in texts] == expected
    encoder = choose_text_encoder("auto", plain, 1 << 30, rereadable=True)
    assert [one.tolist() for one in encoder.encode_batch(texts, np.int64)] == expected
