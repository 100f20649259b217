from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mega_cli.main import main
from mega_common.errors import DataError
from mega_data import tokenizer_conversion as module
from mega_data.tokenizer import Tokenizer
from mega_data.tokenizer_conversion import convert_tokenizer

PATTERN = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
TEXTS = ["the cat sat on the mat, the hat\n", "naïve café  日本語 \t 12345", "", "</s> the end <|end|>", "x" * 300]
MERGES = [b"th", b"the", b"at", b"ca", b"cat", b" t", b" the"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *MERGES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece", reason="trains and reads what is converted")
    folder = tmp_path_factory.mktemp("models")
    (folder / "text").write_text("\n".join(f"the cat {n} sat on the mat, the hat of a fat rat" for n in range(200)))
    kinds: dict[str, dict[str, Any]] = {
        "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                  "remove_extra_whitespaces": False},
        "t5": {"model_type": "unigram"},
        "word": {"model_type": "word"},
    }  # fmt: skip
    for name, settings in kinds.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / name), vocab_size=300, minloglevel=2,
            hard_vocab_limit=False, **settings,
        )  # fmt: skip
    return folder


@pytest.mark.parametrize(("name", "texts"), [("llama", TEXTS), ("t5", ["the cat sat on a mat", "  a fat  rat "])])
def test_sentencepiece(models: Path, tmp_path: Path, name: str, texts: list[str]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the oracle")
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(models / f"{name}.model"))
    tokenizer = convert_tokenizer(models / f"{name}.model", tmp_path, texts)
    assert [tokenizer.encode(text) for text in texts] != [[]] * len(texts)
    plain = Tokenizer(tmp_path, specials_as_text=True)
    assert [plain.encode(text) for text in texts] == [oracle.encode(text) for text in texts]
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("</s>", oracle.eos_id())
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_what_cannot_be_expressed(models: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a BPE nor a Unigram"):
        convert_tokenizer(models / "word.model", tmp_path, TEXTS)


def test_a_difference_writes_nothing(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_list_merges", lambda *_: [])
    with pytest.raises(
        DataError, match=r"llama.model: the converted tokenizer encodes document 2 differently: \["
    ) as raised:
        convert_tokenizer(models / "llama.model", tmp_path, ["", *TEXTS])
    assert str(raised.value.hint).startswith("nothing was written")
    assert not list(tmp_path.iterdir())


def test_no_text_is_no_agreement(models: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the comparison requires text"):
        convert_tokenizer(models / "llama.model", tmp_path, [""])


def test_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="reads what is converted")
    file = tmp_path / "x.tiktoken"
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    file.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    oracle = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|end|>": len(ranks)})
    with pytest.raises(DataError, match="requires --pattern"):
        convert_tokenizer(file, tmp_path / "out", TEXTS)
    tokenizer = convert_tokenizer(file, tmp_path / "out", TEXTS, pattern=PATTERN, special_tokens=["<|end|>", "<|pad|>"])
    assert [tokenizer.encode(text) for text in TEXTS] == [oracle.encode(text, allowed_special="all") for text in TEXTS]
    assert (tokenizer.eos_token, tokenizer.eos_id, tokenizer.vocab_size) == ("<|end|>", len(ranks), len(ranks) + 2)
    with pytest.raises(DataError, match="exists already"):
        convert_tokenizer(file, tmp_path / "out", TEXTS, pattern=PATTERN)


def test_tekken_by_the_command(tmp_path: Path) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", reason="reads what is converted")
    file, text = tmp_path / "tekken.json", tmp_path / "a.jsonl"
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]
    sizes = {"num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab) + 20, "default_num_special_tokens": 20}
    file.write_text(json.dumps({"config": {"pattern": PATTERN, "version": "v3", **sizes}, "vocab": vocab}))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS))
    command = ["data", "convert-tokenizer", str(file), "--input", str(text), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert not end.value.code
    tokenizer, oracle = Tokenizer(tmp_path / "out", specials_as_text=True), tekken.Tekkenizer.from_file(file)
    assert [tokenizer.encode(line) for line in TEXTS] == [oracle.encode(line, bos=False, eos=False) for line in TEXTS]
    assert (tokenizer.eos_token, tokenizer.eos_id) == ("</s>", oracle.eos_id)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bpe", b"", "is not a supported tokenizer file"),
        ("a.tiktoken", b"xx yy", "cannot be read"),
        ("b.model", b"no", "cannot be read"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: {message}"):
        convert_tokenizer(tmp_path / name, tmp_path / "out", TEXTS, pattern=PATTERN)
