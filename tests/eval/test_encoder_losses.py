"""How well encoders guess: against masks made by hand, each token hidden once.

How well encoders guess: against masks made by hand, each token hidden once.

Text from a model with an encoder, and how well it tells some: as transformers, its trainer and the harness's own model have it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from encoder_decoders import KINDS, published
from masked_data import SENTINELS, SPECIAL, WORDS, save_word_pieces, word_piece_tokenizer
from tiny_models import save_tiny, variant
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

from mega_ckpt.families import find_family_expressing_model
from mega_cli.eval import eval_command
from mega_common.errors import ConfigError, DataError
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer
from mega_eval.encoder_losses import evaluate_masked_lm, evaluate_span_corruption
from mega_eval.generate import generate_completions
from mega_eval.language_model import LanguageModel
from mega_eval.model_loading import load_inference_model
from mega_eval.score import score_continuations
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.model.decoder import Decoder
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.pipeline.schedules import make_pipeline_schedule
from mega_trainer.run.training_run import run_training

CLS, SEP, MASK, EOS = 2, 3, 4, 6
S = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with its tokenizer, and held-out data of 23 tokens, two of which end documents."""
    folder = save_word_pieces(tmp_path_factory.mktemp("bert"), around=True)
    config = variant("bert").model_copy(update={"vocab_size": 207})
    save_tiny(folder, find_family_expressing_model(config), config)
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


PROMPTS = [[7, 8, 9, 150, 11, 12, 6], [20, 6], list(range(30, 60))]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = published(tmp_path, **KINDS[kind], vocab_size=207)
    words = word_piece_tokenizer(tmp_path)
    model = load_inference_model(tmp_path, kinds=("encoder-decoder",))
    found = generate_completions(model, words, PROMPTS, GenerationLimits(12), batch_size=2)
    for prompt, one in zip(PROMPTS, found, strict=True):
        expected = theirs.generate(  # whose cache wants as many layers in the decoder as in the encoder
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=False
        )
        assert one.tokens == expected[0, 1:].tolist()


def test_what_an_encoder_is_not_asked(tmp_path: Path) -> None:
    published(tmp_path, vocab_size=207)
    word_piece_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="not supported with an encoder-decoder model"):
        load_inference_model(tmp_path)
    model = LanguageModel.load(tmp_path)
    assert len(model.generate(["w1 w2"], max_new_tokens=3, repetition_penalty=1.5)[0].tokens) <= 3
    with pytest.raises(DataError, match="token 300 of the prompt is outside"):
        model.generate([[300]])
    with pytest.raises(ConfigError, match="requires contexts"):
        model.score(["w1 w2"])
    assert len(model.score(["w1 w2"], contexts=["w3"])[0].logprobs) == 2


def held_out(prefix: Path, tokens: int) -> Path:
    """Running text of words, in three documents."""
    words = np.random.default_rng(2).integers(len(SPECIAL), len(SPECIAL + WORDS), tokens)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_documents(words, [tokens // 2, 5, tokens - tokens // 2 - 5])
    return prefix


def test_loss_of_hidden_spans_is_that_of_the_runs_own_validation(tmp_path: Path) -> None:
    published(tmp_path, vocab_size=207)
    save_word_pieces(tmp_path)
    prefix, out = held_out(tmp_path / "held-out", 170), tmp_path / "run"
    raw = {
        "model": {"from": str(tmp_path)}, "init_from": str(tmp_path), "output": str(out), "precision": "fp32", "device": "cpu",
        "data": {
            "train": str(prefix), "valid": str(prefix), "split": [1], "seq_length": 20, "kind": "t5",
            "tokenizer": str(tmp_path),
        },
        "batch": {"micro": 2, "global": 4}, "train": {"steps": 1, "eval_every": 1, "eval_steps": 2},
        "log": {"tensorboard": False}, "checkpoint": {"async": False},
    }  # fmt: skip
    config = RunConfig.parse(resolve_run_config(raw))
    run_training(config, RankInfo())
    trained = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["valid_loss"]
    model = load_inference_model(out, kinds=("encoder-decoder",))
    found = evaluate_span_corruption(model, prefix, 20, Tokenizer(tmp_path), per_sample=tmp_path / "each.jsonl")
    assert (found.windows, found.tokens) == (8, 8 * 5)
    assert found.loss == pytest.approx(trained, rel=1e-6)
    each = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert math.fsum(one["loss"] * one["tokens"] for one in each) / found.tokens == pytest.approx(found.loss)
    assert evaluate_span_corruption(model, prefix, 20, Tokenizer(tmp_path), share=0.4).tokens > found.tokens
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness")
    from mega_eval.live_model import build_inference_model

    pairs = [([7, 8, 9, 150, 11], [3, 4])]
    executor = PipelineExecutor(make_pipeline_schedule("1f1b", pp=1, microbatches=1), {0: model}, CommGroup("pp"))
    assert score_continuations(build_inference_model(executor, config), pairs) == score_continuations(model, pairs)
    asked = {**config.model_dump(mode="json", by_alias=True, exclude_unset=True), "eval": {"tasks": ["copa"]}}
    for parallel in ({"pp": 2}, {"zero": 3}):
        with pytest.raises(ConfigError, match=r"eval\.tasks(?s:.*)mega eval --tasks"):
            RunConfig.parse({**asked, "parallel": parallel})
    app = typer.Typer()
    app.command()(eval_command)
    command = [str(out), "--data", str(prefix), "--seq-length", "20", "--json", "-", "--device", "cpu"]
    assert json.loads(CliRunner().invoke(app, command).stdout)["loss"] == pytest.approx(trained, rel=1e-6)


def test_hidden_spans_that_cannot_be(tmp_path: Path) -> None:
    published(tmp_path, vocab_size=207)
    save_word_pieces(tmp_path / "plain")
    backend = (tmp_path / "plain" / "tokenizer.json").read_text()
    for name in SENTINELS:
        backend = backend.replace(f'"{name}"', f'"{name.strip("<>")}"')
    Backend.from_str(backend).save(str(tmp_path / "plain" / "tokenizer.json"))
    model, prefix = load_inference_model(tmp_path, kinds=("encoder-decoder",)), held_out(tmp_path / "d", 60)
    with pytest.raises(DataError, match=r"the sentinel tokens <extra_id_0>"):
        evaluate_span_corruption(model, prefix, 20, Tokenizer(tmp_path / "plain"))
    with pytest.raises(ConfigError, match="mask_probability"):
        evaluate_span_corruption(model, prefix, 20, word_piece_tokenizer(tmp_path), share=0.0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_transformers_whatever_is_beside(batch_size: int, tmp_path: Path) -> None:
    theirs = published(tmp_path, **KINDS["v1.1"], vocab_size=207)
    model = load_inference_model(tmp_path, kinds=("encoder-decoder",))
    pairs = [([7, 8, 9, 150, 11], [3, 4]), ([7, 8], [5]), ([7, 8], [6, 9, 12, 13]), (list(range(30, 47)), [2, 1, 3])]
    found = score_continuations(model, pairs, batch_size=batch_size)
    for (context, continuation), one in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([context]), labels=torch.tensor([continuation])).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).flatten()
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=1e-5, atol=1e-5)
        assert one.greedy == (logits.argmax(-1).tolist() == continuation)
