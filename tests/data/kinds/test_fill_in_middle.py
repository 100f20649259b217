"""Middles to fill in: the published rule, written down a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from mega_common.errors import ConfigError
from mega_data.blended_dataset import build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.fill_in_middle import FimContextSamples, build_fim_samples
from mega_data.kinds.masked_lm_samples import make_sample_random_generator
from mega_data.kinds.running_text import build_text_samples
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.sampling.dataset_parts import DatasetPartitioner
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer

S = 96
LINES = ["def f(x):\n    return x + 1\n", "naïve café über straße\n", "the cat sat on the mat\n", "x = {'a': [1, 2]}\n"]


@pytest.fixture(scope="session")
def coder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The usual tokenizer with tokens for filling in: 0 ends a text, then 300 <fim_prefix>, middle, suffix and pad."""
    folder = tmp_path_factory.mktemp("coder")
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    names = ["prefix", "middle", "suffix", "pad"]
    backend.add_special_tokens([f"<fim_{name}>" for name in names])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def code(coder: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    for i in range(60):
        (folder / f"{i:02}.txt").write_text("".join(LINES[(i + j) % 4] for j in range(i % 9 + 1)) + str(i))
    preprocess_corpus([folder], coder.path, folder / "code", append_eod=True)
    return folder / "code"


def samples(code: Path, tokenizer: Tokenizer, cache: Path, **fields: Any) -> tuple[FimContextSamples, Any]:
    """Samples, and those of the kind text that they are made from."""
    config = DataConfig.parse({"train": str(code), "split": [1], "seq_length": S, "kind": "fim", **fields})
    setting = DatasetContext(config, 1, 0, cache, tokenizer)
    (part,) = DatasetPartitioner(config, 0).build_split_parts("train")
    return build_fim_samples(part, setting, 200), build_text_samples(part, setting, 200)


def rearrange_by_rule(
    window: list[int], tokenizer: Tokenizer, draw: np.random.RandomState, spm_rate: float, cut: str
) -> list[int]:
    """A window with every document in it rearranged, and an end token after each but the last."""
    documents: list[list[int]] = [[]]
    for token in window:
        if token == 0:
            documents.append([])
        else:
            documents[-1].append(token)
    out: list[int] = []
    for number, ids in enumerate(documents):
        out += [0] if number else []
        if not ids:
            continue
        if draw.binomial(1, 0.7) == 0:
            out += ids
            continue
        words = tokenizer.decode(ids)
        if cut == "character" and "\ufffd" not in words:
            a, b = sorted(draw.randint(0, len(words) + 1, size=2))
            prefix, middle, suffix = (tokenizer.encode(part) for part in (words[:a], words[a:b], words[b:]))
        else:
            a, b = sorted(draw.randint(0, len(ids) + 1, size=2))
            prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
        if draw.binomial(1, spm_rate):
            out += [300, 302, *suffix, 301, *prefix, *middle]
        else:
            out += [300, *prefix, 302, *suffix, 301, *middle]
    return out


@pytest.mark.parametrize("cut", ["character", "token"])
@pytest.mark.parametrize("spm_rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("order", ["shuffled", "stable", "megatron"])
def test_samples_follow_the_rule(
    tmp_path: Path, code: Path, coder: Tokenizer, cut: str, spm_rate: float, order: str
) -> None:
    settings = {"rate": 0.7, "spm_rate": spm_rate, "cut": cut}
    found, plain = samples(code, coder, tmp_path, fim=settings, order=order)
    changed = 0
    for k in range(60):
        before = [*plain[k].tokens.tolist(), int(plain[k].labels[-1])]
        expected = rearrange_by_rule(before, coder, make_sample_random_generator(found.content_key, k), spm_rate, cut)[
            : S + 1
        ]
        filled = [*expected, *[303] * (S + 1 - len(expected))]
        sample = found[k]
        assert [*sample.tokens.tolist(), int(sample.labels[-1])] == filled
        assert sample.labels[:-1].tolist() == sample.tokens[1:].tolist()
        assert sample.loss_weights.tolist() == [float(i + 1 < len(expected)) for i in range(S)]
        changed += filled != before
    assert changed > 40


@pytest.mark.parametrize("cut", ["character", "token"])
def test_whole_documents_are_rearranged_before_they_are_packed(
    tmp_path: Path, code: Path, coder: Tokenizer, cut: str
) -> None:
    """An epoch has each once: their characters are those of the document, its end token is their last."""
    fim_settings = {"rate": 1.0, "spm_rate": 0.0, "cut": cut, "level": "document"}
    config = DataConfig.parse({"train": str(code), "split": [1], "seq_length": 256, "kind": "fim", "fim": fim_settings})
    (part,) = DatasetPartitioner(config, 0).build_split_parts("train")
    packed = build_fim_samples(part, DatasetContext(config, 1, 0, tmp_path, coder), 0)
    found, count = [], int(packed.samples_per_epoch)
    for sample in (packed[k] for k in range(count)):
        assert sample.document_ids is not None
        for number in range(sample.document_ids.max() + 1):
            own = (sample.document_ids == number) & (sample.loss_weights > 0)
            if own.any():
                assert sample.position_ids[own].tolist() == list(range(own.sum()))
                found.append([*sample.tokens[own].tolist(), int(sample.labels[own][-1])])
    texts = []
    for ids in found:
        assert (ids[0], ids[-1]) == (300, 0)
        middle, suffix = ids.index(301), ids.index(302)
        texts.append(coder.decode([*ids[1:suffix], *ids[middle + 1 : -1], *ids[suffix + 1 : middle]]))
    documents = [coder.decode(part.reader.read_sequence(i).tolist()[:-1]) for i in range(60)]
    assert sorted(texts) == sorted(documents)
    assert count < 60 / 2  # several to a sample
    again = build_fim_samples(part, DatasetContext(config, 1, 0, tmp_path / "other", coder), 0)
    assert again[count - 1].tokens.tolist() == packed[count - 1].tokens.tolist()
    assert again[2 * count - 1].tokens.tolist() != packed[count - 1].tokens.tolist()


def test_a_window_that_becomes_shorter_is_filled_without_loss(tmp_path: Path, coder: Tokenizer) -> None:
    letters = [coder.encode(letter)[0] for letter in "the cat sat on the mat"]  # which has longer tokens
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document(np.array(letters * 20))
    found, _ = samples(tmp_path / "d", coder, tmp_path, fim={"rate": 1.0})
    for k in range(20):
        sample = found[k]
        last = int(np.flatnonzero(sample.tokens != 303)[-1])
        assert last < S - 10
        assert sample.loss_weights.tolist() == [float(i < last) for i in range(S)]


def test_text_that_spells_a_special_token_stays_text(tmp_path: Path, coder: Tokenizer) -> None:
    as_text = Tokenizer(coder.path, specials_as_text=True)
    ids = as_text.encode("a <fim_middle> b <|endoftext|> c " * 4)
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document(np.array(ids))
    found, _ = samples(tmp_path / "d", coder, tmp_path, fim={"rate": 1.0}, seq_length=len(ids))
    for k in range(20):
        assert np.isin(found[k].tokens, [0, 301]).sum() <= 1


def test_rules_about_documents_hold_for_what_was_rearranged(tmp_path: Path, code: Path, coder: Tokenizer) -> None:
    found, _ = samples(code, coder, tmp_path, reset_attention_mask=True, reset_position_ids=True)
    for k in range(20):
        sample: TrainingSample = found[k]
        begins = np.flatnonzero(sample.tokens[:-1] == 0) + 1
        assert not sample.position_ids[begins].any()
        assert sample.document_ids is not None
        assert sample.document_ids[-1] == begins.size


def test_text_and_middles_mix_in_a_blend(tmp_path: Path, code: Path, coder: Tokenizer) -> None:
    train = [{"path": code, "weight": 1}, {"path": code, "weight": 1, "kind": "fim"}]
    config = DataConfig.parse({"train": train, "split": [1], "seq_length": S, "fim": {"rate": 1.0}})
    data, _, _ = build_blended_datasets(config, seed=1, samples={"train": 100}, eod=0, tokenizer=coder)
    with_middle = [bool((data[k].tokens == 300).any()) for k in range(100)]
    assert sum(with_middle) == 50


def test_tokens_are_found_by_their_names_or_named(tmp_path: Path, code: Path, tokenizer_folder: Path) -> None:
    plain = Tokenizer(tokenizer_folder)
    with pytest.raises(ConfigError, match=r"the fill-in-the-middle tokens .* are missing") as refused:
        samples(code, plain, tmp_path)
    assert "data.fim.tokens" in str(refused.value.hint)
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_special_tokens(["<a>", "<b>", "<c>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    found, _ = samples(code, Tokenizer(tmp_path), tmp_path, fim={"rate": 1.0, "tokens": ["<a>", "<b>", "<c>"]})
    assert {300, 301, 302} <= set(np.concatenate([found[k].tokens for k in range(10)]).tolist())


def test_a_tokenizer_that_is_not_known_is_asked_for(tmp_path: Path, code: Path) -> None:
    config = DataConfig.parse({"train": str(code), "split": [1], "kind": "fim"})
    with pytest.raises(ConfigError, match=r"data.kind = fim: requires the tokenizer of the data"):
        build_blended_datasets(config, seed=1, samples={"train": 1}, eod=0)
