"""Log-likelihoods of continuations given their contexts; shared prefixes are computed once (tree attention).

Pairs (context, continuation) are sorted, and pairs with a common prefix share a batch row as a tree: " sat" and " ran"
after "the cat" are the row [the, cat, sat, ran], in which `ran` attends to `the`, `cat` and itself, at position 2. Four
answers to a question cost one question and four answers. Pairs without a common prefix share a row as separate trees,
masked from each other, which saves padding. The score of a pair does not depend on the packing. In an encoder-decoder
model the encoder reads the context, and a row is the continuation of one pair.

Legend: B rows, S columns, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_common.errors import CheckpointError, DataError
from mega_common.progress_logging import ProgressBar
from mega_eval.encoder_losses import compute_decoder_states
from mega_eval.model_loading import check_sequence_length
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.vocab_parallel_loss import logit_tokens_per_chunk

EXTRA_COLUMNS = 256  # attention costs grow with the square of a row's columns; GEMMs are faster with more
PAIRS_PER_PACKING = 4096  # pairs packed at a time: a row takes more memory than its pairs

ContextContinuation = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Score:
    """Log-probability of each token of a continuation given its context, and the flag that all are the most likely ones.

    Attributes:
        logprobs: natural logarithm of each token's probability, given all tokens before it.
        greedy: True if every token is the most likely one at its position, as in greedy decoding.
    """

    logprobs: list[float]
    greedy: bool

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation: the sum over its tokens."""
        return math.fsum(self.logprobs)


@dataclass
class PrefixTreeRow:
    """Batch row of packed (context, continuation) pairs to score; pairs with a common prefix share its columns.

    Attributes:
        tokens, positions: of each column.
        branches: for each sequence, the columns shared with earlier sequences and the range of its new columns.
        encoder_tokens: input of the encoder in an encoder-decoder model; the columns are the decoder's.
        targets: index of the pair, the columns whose logits it needs, and the token that each should predict.
    """

    encoder_tokens: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[tuple[list[int], range]] = field(default_factory=list)
    targets: list[tuple[int, list[int], Sequence[int]]] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)  # the sequence that was added last
    _path: list[int] = field(default_factory=list)  # its columns

    def try_add_pair(self, number: int, pair: ContextContinuation, extra_columns: int) -> bool:
        """Add a (context, continuation) pair unless the row becomes too long, and return whether it was added.
        `number` is the index of the pair. A row is too long with more than `extra_columns` columns in addition to
        those of its first sequence.

        A pair that shares most of its columns may exceed this limit by the length of the first sequence.
        """
        context, continuation = pair
        sequence = [*context, *continuation][:-1]
        shared = _common_prefix_length(self._last, sequence)
        new = range(len(self.tokens), len(self.tokens) + len(sequence) - shared)
        if self.branches:
            first = len(self.branches[0][1])
            if new.stop - first > extra_columns + (first if shared > len(new) else 0):
                return False
        if new or not self.branches:
            self.branches.append((self._path[:shared], new))
        self._last, self._path = sequence, [*self._path[:shared], *new]
        self.tokens += sequence[shared:]
        self.positions += range(shared, len(sequence))
        self.targets.append((number, self._path[len(context) - 1 :], continuation))
        return True

    def make_ancestor_mask(self, length: int) -> Tensor:
        """Return the attention mask bool [length, length] of the packed row.
        It is True for the tokens before a column in its own sequence, itself included.
        """
        # padding attends to itself: a softmax over nothing is not a number
        mask = torch.eye(length, dtype=torch.bool)
        for shared, new in self.branches:
            mask[new.start : new.stop, shared] = True
            mask[new.start : new.stop, new.start : new.stop] = torch.ones(len(new), len(new), dtype=torch.bool).tril()
        return mask


@dataclass(frozen=True)
class TreeAttentionMask:
    """Attention mask of batch rows that each pack several sequences as prefix trees.

    Attributes:
        ancestors: bool [B, 1, S, S].
        positions: int64 [B, S].
    """

    ancestors: Tensor
    positions: Tensor
    _window_masks: dict[int, Tensor] = field(default_factory=dict)

    def mask_for_window(self, window: int | None) -> Tensor:
        """Return the attention mask bool [B, 1, S, S] of the packed rows.
        With a sliding `window` each token attends to the last `window` positions, itself included.
        """
        if window is None:
            return self.ancestors
        if window not in self._window_masks:
            distance = self.positions[:, None, :, None] - self.positions[:, None, None, :]
            self._window_masks[window] = self.ancestors & (distance < window)
        return self._window_masks[window]


def score_continuations(
    model: Decoder, pairs: Sequence[ContextContinuation], *, batch_size: int = 1, extra_columns: int = EXTRA_COLUMNS
) -> list[Score]:
    """Return the log-likelihood of each continuation given its context, in the given order.
    `pairs` are (context, continuation) pairs of token ids.

    A score does not depend on the other pairs, their order, `batch_size` or `extra_columns`, up to rounding: 1e-5 in fp32.

    Args:
        model: decoder in eval mode.
        pairs: context and continuation, neither empty; the model's input is both without the last token.
        batch_size: rows computed together. More than one does not help on a CPU, since a row is long.
        extra_columns: columns that a row may have in addition to its first sequence, if they are not shared.

    Raises:
        DataError: when a pair is empty, too long for the model or of another vocabulary.
        CheckpointError: when a log-likelihood is not a number.
    """
    found: dict[int, Score] = {}
    with ProgressBar("scoring", total=len(pairs), unit="continuations") as bar:
        for batch in pack_pair_batches(model, pairs, batch_size, extra_columns):
            new = dict(score_packed_rows(model, batch))
            found |= new
            bar.advance(len(new))
    return [found[number] for number in range(len(pairs))]


def split_into_scoring_windows(tokens: Sequence[int], prefix: int, length: int) -> list[ContextContinuation]:
    """Split a text of any length into (context, continuation) pairs whose log-likelihoods add up to the text's.
    Each token is predicted once, with the longest possible context.

    Args:
        tokens: the text.
        prefix: the token before its first.
        length: maximum number of tokens in a forward pass.
    """
    everything = [prefix, *tokens]
    starts = range(0, len(tokens), length)
    stops = [min(start + length, len(tokens)) for start in starts]
    return [
        (everything[max(0, stop - length) : start + 1], tokens[start:stop])
        for start, stop in zip(starts, stops, strict=True)
    ]


def pack_pair_batches(
    model: Decoder, pairs: Sequence[ContextContinuation], batch_size: int, extra_columns: int = EXTRA_COLUMNS
) -> Iterator[list[PrefixTreeRow]]:
    """Pack (context, continuation) pairs into rows that share common prefixes, and yield batches of rows.
    All pairs are packed; the rows of a batch have a similar length.

    Raises:
        DataError: as `score_continuations`.
    """
    for number, pair in enumerate(pairs):
        _check_pair(model, number, pair)
    encoder = model.config.encoder
    # the RoPE angles of LongRoPE and dynamic NTK depend on the row's length, and a recurrent state belongs to one sequence
    unpacked = (
        model.config.is_recurrent
        or model.config.compressed is not None  # whose windows are of one sequence
        or model.config.transformers is not None
        or encoder is not None
        or any(
            rope is not None and rope.scaling in ("dynamic", "longrope")
            for rope in (model.config.rope, model.config.local_rope)
        )
    )
    order = sorted(range(len(pairs)), key=lambda number: [*pairs[number][0], *pairs[number][1]])
    for first in range(0, len(order), PAIRS_PER_PACKING):
        rows: list[PrefixTreeRow] = []
        for number in order[first : first + PAIRS_PER_PACKING]:
            if unpacked or not rows or not rows[-1].try_add_pair(number, pairs[number], extra_columns):
                context, continuation = pairs[number]
                rows.append(PrefixTreeRow(context if encoder else ()))
                prefix = [encoder.start_token] if encoder else context
                rows[-1].try_add_pair(number, (prefix, continuation), extra_columns)
        rows.sort(key=lambda row: -len(row.encoder_tokens) - len(row.tokens))
        yield from (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))


@torch.inference_mode()
def score_packed_rows(model: Decoder, rows: Sequence[PrefixTreeRow]) -> Iterator[tuple[int, Score]]:
    """Yield (pair index, score) of each (context, continuation) pair packed in `rows`, by one forward pass.

    Raises:
        CheckpointError: as `score_continuations`.
    """
    x, length = _compute_hidden_states(model, rows), max(len(row.tokens) for row in rows)
    targets = [(row * length, *target) for row, each in enumerate(rows) for target in each.targets]
    indices = [start + column for start, _, columns, _ in targets for column in columns]
    labels = [label for *_, continuation in targets for label in continuation]
    logprobs, likeliest = _compute_logprobs(model, x.flatten(0, 1), indices, labels)
    if any(map(math.isnan, logprobs)):
        raise CheckpointError(
            f"the model's output is not a number in {model.dtype}",
            hint="use a precision with a wider range, such as fp32",
        )
    start = 0
    for _, number, columns, _ in targets:
        part = slice(start, start := start + len(columns))
        yield number, Score(logprobs[part], all(likeliest[part]))


def _compute_hidden_states(model: Decoder, rows: Sequence[PrefixTreeRow]) -> Tensor:
    """Return the final hidden states [B, S, D]; rows are padded on the right, which no token attends to."""
    if model.config.encoder:
        return compute_decoder_states(model, [row.encoder_tokens for row in rows], [row.tokens for row in rows])
    length, device = max(len(row.tokens) for row in rows), model.device
    tokens, positions = (
        torch.tensor([values + [0] * (length - len(values)) for values in columns], device=device)
        for columns in ([row.tokens for row in rows], [row.positions for row in rows])
    )
    mask = None  # plain causal attention has the faster kernel
    if any(len(row.branches) > 1 for row in rows):
        mask = TreeAttentionMask(
            torch.stack([row.make_ancestor_mask(length) for row in rows])[:, None].to(device), positions
        )
    context = model.make_forward_context(positions, tokens=tokens, attention_mask=mask)
    x: Tensor = model(model.embed_inputs(tokens, positions), context)
    return x


def _compute_logprobs(
    model: Decoder, x: Tensor, indices: Sequence[int], labels: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Return the log-probability of each label after the token at its index in x [B S, D], and whether it is the most
    likely token.

    Logits are computed in chunks of tokens to save memory.
    """
    size = logit_tokens_per_chunk(x, model.config.vocab_size)
    logprobs, likeliest = [], []
    for start in range(0, len(indices), size):
        chunk, label = (torch.tensor(all_[start : start + size], device=x.device) for all_ in (indices, labels))
        unique, index = chunk.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        logits = model.compute_logits(x[unique][None])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(logits[index, label] - logits.logsumexp(-1)[index])
        likeliest.append(logits.argmax(-1)[index] == label)
    return torch.cat(logprobs).tolist(), torch.cat(likeliest).tolist()


def _common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _check_pair(model: Decoder, number: int, pair: ContextContinuation) -> None:
    """Refuse a pair that is empty, too long for the model or of another vocabulary."""
    context, continuation = pair
    name, known = f"pair {number + 1}", model.config.vocab_size
    if not context or not continuation:
        raise DataError(f"{name}: the {'continuation' if context else 'context'} must not be empty")
    largest = max(*context, *continuation)
    if largest >= known:
        raise DataError(
            f"{name}: token ids must be below the model's vocabulary size {known}, but one is {largest}",
            hint="use the tokenizer of this model",
        )
    both = len(context), len(continuation)
    length = max(both) if model.config.encoder else sum(both) - 1
    if length > model.config.max_position:
        check_sequence_length(model.config, length, f"{name}: its {length} tokens")
