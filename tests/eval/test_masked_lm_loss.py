"""How well encoders guess: against masks made by hand, each token hidden once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from masked_data import WORDS, save_word_pieces
from tiny_models import save_tiny, variant

from mega_ckpt.families import family_for_model
from mega_common.errors import ConfigError, DataError
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer
from mega_eval.masked_lm_loss import evaluate_masked_lm
from mega_eval.model_loading import load_inference_model
from mega_trainer.model.decoder import Decoder

CLS, SEP, MASK, EOS = 2, 3, 4, 6
S = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with its tokenizer, and held-out data of 23 tokens, two of which end documents."""
    folder = save_word_pieces(tmp_path_factory.mktemp("bert"), around=True)
    config = variant("bert").model_copy(update={"vocab_size": 207})
    save_tiny(folder, family_for_model(config), config)
    with IndexedWriter(folder / "held-out", "uint16") as writer:
        tokens = np.random.default_rng(0).integers(7, 7 + len(WORDS), 23)
        tokens[[9, 22]] = EOS
        writer.add_documents(tokens, [10, 13])
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_inference_model(folder, kinds=("encoder",))


def by_hand(model: Decoder, folder: Path) -> list[float]:
    """The loss of each token hidden by itself."""
    tokens = np.fromfile(folder / "held-out.bin", np.uint16).astype(np.int64)
    found = []
    for start in range(0, tokens.size, S - 2):
        window = torch.tensor([CLS, *tokens[start : start + S - 2], SEP])
        for place in range(len(window)):
            if int(window[place]) in (CLS, SEP, EOS):
                continue
            hidden, positions = window.clone(), torch.arange(len(window))[None]
            hidden[place] = MASK
            with torch.no_grad():
                logits = model.compute_logits(
                    model(model.embed_inputs(hidden[None], positions), model.make_forward_context(positions))
                )[0, place]
            found.append(float(torch.nn.functional.cross_entropy(logits, window[place])))
    return found


def test_pseudo_perplexity_is_of_each_token_hidden_alone(model: Decoder, folder: Path, tmp_path: Path) -> None:
    expected = by_hand(model, folder)
    found = evaluate_masked_lm(
        model, folder / "held-out", S, Tokenizer(folder), share=0, batch_size=3, per_sample=tmp_path / "each.jsonl"
    )
    assert (found.tokens, found.windows) == (21, 3)
    assert found.loss == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert len((tmp_path / "each.jsonl").read_text().splitlines()) == 3


def test_every_token_is_guessed_once_whatever_the_share(model: Decoder, folder: Path) -> None:
    results = [
        evaluate_masked_lm(model, folder / "held-out", S, Tokenizer(folder), share=share) for share in (0.15, 0.5)
    ]
    again = evaluate_masked_lm(model, folder / "held-out", S, Tokenizer(folder), batch_size=1)
    assert [one.tokens for one in results] == [21, 21]
    assert results[0].loss == pytest.approx(again.loss, abs=1e-6)
    assert results[0].loss != pytest.approx(results[1].loss, abs=1e-4)


def test_windows_without_room_are_refused(model: Decoder, folder: Path) -> None:
    with pytest.raises(DataError, match="windows must be longer than the 2 special tokens"):
        evaluate_masked_lm(model, folder / "held-out", 2, Tokenizer(folder))


def test_what_is_of_no_use_for_an_encoder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="an encoder, which does not generate text") as told:
        load_inference_model(folder)
    assert "mega embed" in str(told.value)
