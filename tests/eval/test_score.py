from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VARIANTS, variant

from mega_common.errors import CheckpointError, DataError
from mega_eval.score import ContextContinuation, pack_pair_batches, score_continuations, split_into_scoring_windows
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder

VOCAB = 61
# what may make a token depend on its neighbors: positions, windows, latents, experts, sinks, lengths of rows
NAMES = ["plain", "multi-query", "gpt2", "window", "gemma2", "gemma3", "oss", "deepseek3", "dynamic", "long"]
TOKENS = st.integers(0, VOCAB - 1)
CONTEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=9)  # of few tokens, so that many begin alike
PAIRS = st.lists(st.tuples(CONTEXTS, st.lists(TOKENS, min_size=1, max_size=12)), min_size=1, max_size=9)


def model_of(name: str) -> Decoder:
    model = Decoder(LayerBuilder(variant(name), dtype=torch.float32)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


MODELS = {name: model_of(name) for name in NAMES}


@torch.inference_mode()
def one_by_one(model: Decoder, pair: ContextContinuation) -> tuple[list[float], bool]:
    """A pair alone: each token's log-probability, and whether all are the likeliest."""
    tokens = torch.tensor([[*pair[0], *pair[1]]])
    positions = torch.arange(tokens.shape[1] - 1)[None]
    logits = model.compute_logits(
        model(model.embed_inputs(tokens[:, :-1], positions), model.make_forward_context(positions))
    )[0]
    tail, labels = logits[len(pair[0]) - 1 :].log_softmax(-1), tokens[0, len(pair[0]) :]
    return tail.gather(1, labels[:, None])[:, 0].tolist(), bool((tail.argmax(-1) == labels).all())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(pairs=PAIRS, batch_size=st.integers(1, 4), extra_columns=st.sampled_from([0, 4, 20, 512]))
def test_a_score_is_that_of_the_pair_alone(
    name: str, pairs: list[ContextContinuation], batch_size: int, extra_columns: int
) -> None:
    model = MODELS[name]
    found = score_continuations(model, pairs, batch_size=batch_size, extra_columns=extra_columns)
    for pair, one in zip(pairs, found, strict=True):
        logprobs, greedy = one_by_one(model, pair)
        assert one.logprobs == pytest.approx(logprobs, abs=1e-5, rel=1e-5)
        assert one.logprob == pytest.approx(sum(logprobs), abs=1e-4, rel=1e-5)
        assert one.greedy == greedy


def test_greedy_says_what_the_model_would_say() -> None:
    model, context = MODELS["plain"], [3, 5, 8]
    said: list[int] = []
    for _ in range(4):
        said.append(
            next(token for token in range(VOCAB) if score_continuations(model, [(context + said, [token])])[0].greedy)
        )
    other = [*said[:2], (said[2] + 1) % VOCAB, said[3]]
    assert [one.greedy for one in score_continuations(model, [(context, said), (context, other), (context, said[:2])])] == [
        True, False, True,
    ]  # fmt: skip


def test_what_pairs_begin_with_is_computed_once() -> None:
    question = list(range(40))
    pairs: list[ContextContinuation] = [(question, [n, n + 1]) for n in range(4)] + [
        (question[:30], [7]),
        (question, [2]),
    ]
    ((row,),) = pack_pair_batches(MODELS["plain"], pairs, 8)
    assert len(row.tokens) == len(question) + 4  # of an answer all but its last token is given to the model
    assert sorted(number for number, *_ in row.targets) == list(range(6))
    shots: list[ContextContinuation] = [
        (question + [n] * 5, [1]) for n in range(40)
    ]  # 40 columns for all of a row, 5 for each
    assert [len(row.tokens) for (row,) in pack_pair_batches(MODELS["plain"], shots, 1, extra_columns=10)] == [
        100,
        100,
        100,
        60,
    ]
    apart = pack_pair_batches(MODELS["plain"], [(question, [1]), (question[1:], [1])], 1, extra_columns=10)
    assert [len(row.tokens) for (row,) in apart] == [40, 39]


@pytest.mark.parametrize("name", ["dynamic", "long"])
def test_rows_whose_angles_depend_on_their_length_hold_one_sequence(name: str) -> None:
    assert len(list(pack_pair_batches(MODELS[name], [([1, 2], [3]), ([1, 2], [4, 5])], 1))) == 2


@given(st.integers(0, 40), st.integers(1, 12))
def test_windows_predict_each_token_once_with_the_fullest_context(count: int, length: int) -> None:
    tokens = list(range(1, count + 1))
    found = split_into_scoring_windows(tokens, 0, length)
    assert [token for _, part in found for token in part] == tokens
    for context, part in found:
        assert [*context, *part] == list(range(context[0], part[-1] + 1))  # consecutive, and no gap between
        assert len(context) + len(part) - 1 <= length
        assert len(context) + len(part) - 1 == length or context[0] == 0


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (([], [1]), "pair 2: the context must not be empty"),
        (([1], []), "pair 2: the continuation must not be empty"),
        (([1], [VOCAB]), f"pair 2: token ids must be below the model's vocabulary size {VOCAB}, but one is {VOCAB}"),
        (([1] * 64, [1, 1]), "pair 2: its 65 tokens are more than the 64 positions"),
    ],
)
def test_pairs_that_cannot_be_scored(pair: tuple[Sequence[int], Sequence[int]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        score_continuations(MODELS["gpt2"], [([1], [1]), pair])


def test_what_is_not_a_number_is_refused() -> None:
    model = model_of("plain")
    model.output_weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not a number"):
        score_continuations(model, [([1], [2])])


def test_no_pairs_no_scores() -> None:
    assert score_continuations(MODELS["plain"], []) == []
    assert set(NAMES) <= VARIANTS.keys()
