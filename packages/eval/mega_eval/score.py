"""Log-likelihoods of continuations under their contexts; what several of them begin with is computed once.

Pairs (context, continuation) are sorted, and those that begin alike share a row of the batch as a tree: " sat" and
" ran" after "the cat" are the row [the, cat, sat, ran], in which `ran` sees `the`, `cat` and itself, at position 2.
So four answers to a question cost one question and four answers. Pairs that share nothing lie in one row as trees that
do not see each other, which leaves less to pad. What a token computes is what it would compute alone. Where a model has an
encoder, that reads the context, and a row is the continuation of one pair.

Legend: B rows, S columns, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_common.errors import CheckpointError, DataError
from mega_common.log import ProgressBar
from mega_eval.encoder_decoder import hidden
from mega_eval.load import check_length
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.loss import chunk_of

BESIDE = 256  # attention pays for all pairs of a row's columns, products of matrices are faster for many
AHEAD = 4096  # pairs that are laid out at a time: a row takes more memory than its pairs

Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
        logprobs: natural logarithm of each token's probability, given all before it.
        greedy: whether each token is the likeliest at its place, so that greedy decoding would give the continuation.
    """

    logprobs: list[float]
    greedy: bool

    @property
    def logprob(self) -> float:
        """That of the whole continuation."""
        return math.fsum(self.logprobs)


@dataclass
class Row:
    """Sequences that are computed in one row, as a forest.

    Attributes:
        tokens, positions: of each column.
        branches: for each sequence the columns that it shares with those before it, and the range of those it adds.
        read: what the encoder reads, where the model has one; the columns are the decoder's.
        asked: number of the pair, the columns whose logits it needs, and the token that each should predict.
    """

    read: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[tuple[list[int], range]] = field(default_factory=list)
    asked: list[tuple[int, list[int], Sequence[int]]] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)  # the sequence that was added last
    _path: list[int] = field(default_factory=list)  # its columns

    def add(self, number: int, pair: Pair, beside: int) -> bool:
        """Take a pair; False if the row would have more than `beside` columns beside those of its first sequence.

        A pair that shares most of its columns may come on top of as many again as the first sequence has.
        """
        context, continuation = pair
        sequence = [*context, *continuation][:-1]
        shared = _shared(self._last, sequence)
        new = range(len(self.tokens), len(self.tokens) + len(sequence) - shared)
        if self.branches:
            first = len(self.branches[0][1])
            if new.stop - first > beside + (first if shared > len(new) else 0):
                return False
        if new or not self.branches:
            self.branches.append((self._path[:shared], new))
        self._last, self._path = sequence, [*self._path[:shared], *new]
        self.tokens += sequence[shared:]
        self.positions += range(shared, len(sequence))
        self.asked.append((number, self._path[len(context) - 1 :], continuation))
        return True

    def ancestors(self, length: int) -> Tensor:
        """Which columns each sees, itself and those before it in its sequences: bool [length, length]."""
        seen = torch.eye(length, dtype=torch.bool)  # padding sees itself: a softmax over nothing is not a number
        for shared, new in self.branches:
            seen[new.start : new.stop, shared] = True
            seen[new.start : new.stop, new.start : new.stop] = torch.ones(len(new), len(new), dtype=torch.bool).tril()
        return seen


@dataclass(frozen=True)
class Trees:
    """Who sees whom among the columns of some rows: see `Sight`.

    Attributes:
        ancestors: bool [B, 1, S, S].
        positions: int64 [B, S].
    """

    ancestors: Tensor
    positions: Tensor
    _made: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """bool [B, 1, S, S]; with a window each sees so many, itself included."""
        if window is None:
            return self.ancestors
        if window not in self._made:
            distance = self.positions[:, None, :, None] - self.positions[:, None, None, :]
            self._made[window] = self.ancestors & (distance < window)
        return self._made[window]


def score(model: Decoder, pairs: Sequence[Pair], *, batch_size: int = 1, beside: int = BESIDE) -> list[Score]:
    """The score of each (context, continuation), int token ids, in the order given.

    A score does not depend on the other pairs, on their order, on `batch_size` or on `beside`, but for rounding: 1e-5 in fp32.

    Args:
        model: in eval mode.
        pairs: neither context nor continuation may be empty; all but the last token of both are what the model is given.
        batch_size: rows computed together. A CPU gains nothing by more than one, for a row is long.
        beside: columns that a row may have beside those of its first sequence, where these are not shared.

    Raises:
        DataError: when a pair is empty, too long for the model or of another vocabulary.
        CheckpointError: when a log-likelihood is not a number.
    """
    found: dict[int, Score] = {}
    with ProgressBar("scoring", total=len(pairs), unit="continuations") as bar:
        for batch in batches(model, pairs, batch_size, beside):
            new = dict(score_batch(model, batch))
            found |= new
            bar.advance(len(new))
    return [found[number] for number in range(len(pairs))]


def windows(tokens: Sequence[int], prefix: int, length: int) -> list[Pair]:
    """Pairs whose scores add up to that of a text of any length: each token once, with as much context as there can be.

    Args:
        tokens: the text.
        prefix: the token before its first.
        length: tokens that the model sees at once.
    """
    everything = [prefix, *tokens]
    starts = range(0, len(tokens), length)
    stops = [min(start + length, len(tokens)) for start in starts]
    return [
        (everything[max(0, stop - length) : start + 1], tokens[start:stop])
        for start, stop in zip(starts, stops, strict=True)
    ]


def batches(model: Decoder, pairs: Sequence[Pair], batch_size: int, beside: int = BESIDE) -> Iterator[list[Row]]:
    """All pairs laid out in rows, and these in batches of about equally long ones.

    Raises:
        DataError: as `score` does.
    """
    for number, pair in enumerate(pairs):
        _check(model, number, pair)
    encoder = model.config.encoder
    # LongRoPE and dynamic NTK turn a whole row by angles that depend on its length, and a state is one sequence's
    alone = (
        model.config.recurrent
        or encoder is not None
        or any(
            rope is not None and rope.scaling in ("dynamic", "longrope")
            for rope in (model.config.rope, model.config.local_rope)
        )
    )
    order = sorted(range(len(pairs)), key=lambda number: [*pairs[number][0], *pairs[number][1]])
    for first in range(0, len(order), AHEAD):
        rows: list[Row] = []
        for number in order[first : first + AHEAD]:
            if alone or not rows or not rows[-1].add(number, pairs[number], beside):
                context, continuation = pairs[number]
                rows.append(Row(context if encoder else ()))
                rows[-1].add(number, ([encoder.start_token] if encoder else context, continuation), beside)
        rows.sort(key=lambda row: -len(row.read) - len(row.tokens))
        yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))


@torch.inference_mode()
def score_batch(model: Decoder, rows: Sequence[Row]) -> Iterator[tuple[int, Score]]:
    """The scores of the pairs in some rows, with their numbers.

    Raises:
        CheckpointError: as `score` does.
    """
    x, length = _hidden(model, rows), max(len(row.tokens) for row in rows)
    asked = [(row * length, *one) for row, each in enumerate(rows) for one in each.asked]
    places = [start + column for start, _, columns, _ in asked for column in columns]
    labels = [label for *_, continuation in asked for label in continuation]
    logprobs, likeliest = _logprobs(model, x.flatten(0, 1), places, labels)
    if any(map(math.isnan, logprobs)):
        raise CheckpointError(
            f"the model's output is not a number in {model.dtype}", hint="try a precision with a wider range"
        )
    start = 0
    for _, number, columns, _ in asked:
        part = slice(start, start := start + len(columns))
        yield number, Score(logprobs[part], all(likeliest[part]))


def _hidden(model: Decoder, rows: Sequence[Row]) -> Tensor:
    """The residual stream [B, S, D] behind all layers; rows are padded on the right, which nothing before it sees."""
    if model.config.encoder:
        return hidden(model, [row.read for row in rows], [row.tokens for row in rows])
    length, device = max(len(row.tokens) for row in rows), model.device
    tokens, positions = (
        torch.tensor([values + [0] * (length - len(values)) for values in columns], device=device)
        for columns in ([row.tokens for row in rows], [row.positions for row in rows])
    )
    sight = None  # plain causal attention has the faster kernel
    if any(len(row.branches) > 1 for row in rows):
        sight = Trees(torch.stack([row.ancestors(length) for row in rows])[:, None].to(device), positions)
    x: Tensor = model(model.embed(tokens, positions), model.context(positions, sight=sight))
    return x


def _logprobs(
    model: Decoder, x: Tensor, places: Sequence[int], labels: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Log-probability of each label behind the token at its place in x [B S, D], and whether it is the likeliest.

    Logits exist of a few tokens at a time.
    """
    size = chunk_of(x, model.config.vocab_size)
    logprobs, likeliest = [], []
    for start in range(0, len(places), size):
        place, label = (torch.tensor(all_[start : start + size], device=x.device) for all_ in (places, labels))
        unique, index = place.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        logits = model.logits(x[unique][None])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(logits[index, label] - logits.logsumexp(-1)[index])
        likeliest.append(logits.argmax(-1)[index] == label)
    return torch.cat(logprobs).tolist(), torch.cat(likeliest).tolist()


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _check(model: Decoder, number: int, pair: Pair) -> None:
    context, continuation = pair
    name, known = f"pair {number + 1}", model.config.vocab_size
    if not context or not continuation:
        raise DataError(f"{name}: its {'continuation' if context else 'context'} is empty")
    largest = max(*context, *continuation)
    if largest >= known:
        raise DataError(
            f"{name}: token {largest} is outside the model's vocabulary of {known}",
            hint="the tokenizer is that of another model",
        )
    both = len(context), len(continuation)
    length = max(both) if model.config.encoder else sum(both) - 1
    if length > model.config.max_position:
        check_length(model.config, length, f"{name}: its {length} tokens")
