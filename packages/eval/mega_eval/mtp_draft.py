"""Guesses by the model's own layers for further tokens (arXiv:2412.19437, section 2.3), from what it has just computed.

The k-th layer reads, at token i, what the one before it made there (the first: the model's normed output) and the embedding of
token i + k, and guesses token i + k + 1. Its keys lie in the pages of the text, as those of the model's own layers do. What it read
of a guess is read again when the token is known. Pages that a text shares with another have what that one's layers left there.

Legend: N tokens of some rows, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_eval.cache import PagedCache, Span
from mega_eval.rows import Row
from mega_trainer.batch import Outline
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.embeddings import scaled
from mega_trainer.parallel.tensor import embed_tokens


class MtpDrafter:
    """Guesses as many tokens as the model has such layers. What they have not read yet is kept by the rows.

    Args:
        model: with its `predictors`.
        cache: with room for their keys behind those of the model's layers.
    """

    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def keep(self, work: Sequence[tuple[Row, int]], done: Sequence[int], x: Tensor) -> None:
        """The stream x [N, 1, D] that a step made of so many tokens of each row, of which `done` were computed before; those
        that stand are kept.
        """
        hidden, first = self._model.head.norm(x), 0
        for (row, count), before in zip(work, done, strict=True):
            if row.text.finish is None:
                row.ahead = row.ahead or [hidden[:0]] * len(self._model.predictors)
                row.ahead[0] = torch.cat([row.ahead[0], hidden[first : first + row.done - before]])
            first += count

    def propose(self, rows: Sequence[Row]) -> list[list[int]]:
        """The tokens that may follow the text of each row, all of whose tokens but the last are computed; none where all these
        were by another row, whose stream was not kept for this one.
        """
        known = [row for row in rows if row.ahead]
        found = iter(self._guesses(known) if known else [])
        return [next(found) if row.ahead else [] for row in rows]

    @torch.inference_mode()
    def _guesses(self, rows: Sequence[Row]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in rows]
        inputs, unread = [row.ahead[0] for row in rows], [row.done for row in rows]
        for k in range(len(self._model.predictors)):
            starts = [row.done - len(one) for row, one in zip(rows, inputs, strict=True)]
            made = self._layer(k, rows, inputs, starts, guesses)
            last = torch.stack([one[-1] for one in made])
            likeliest = self._model.head.logits(last, self._model.output()).squeeze(1).argmax(-1).tolist()
            for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
                first = max(start, row.done - k)  # from here on a guess was read, by the next layer one more
                row.ahead[k] = inputs[number][first - start : unread[number] - start]
                unread[number] = first
                guesses[number].append(likeliest[number])
                if k + 1 < len(row.ahead):
                    inputs[number] = torch.cat([row.ahead[k + 1], made[number]])
        return guesses

    def _layer(
        self, k: int, rows: Sequence[Row], inputs: Sequence[Tensor], starts: Sequence[int], guesses: Sequence[list[int]]
    ) -> list[Tensor]:
        """What layer k makes of each row's tokens from `starts` on, [N, 1, D]."""
        model, device = self._model, self._model.device
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        for row, start, guessed in zip(rows, starts, guesses, strict=True):
            first = len(positions)
            positions += range(start, row.done)
            tokens += (row.tokens + guessed)[start + k + 1 : row.done + k + 1]
            spans.append(Span(slice(first, len(positions)), row.done, row.pages))
        self._cache.begin(spans, device)
        columns, ids = (torch.tensor(values, device=device)[:, None] for values in (positions, tokens))
        lengths = [
            max(len(row.request.prompt), place + 1)
            for row, start in zip(rows, starts, strict=True)
            for place in range(start, row.done)
        ]
        context = model.context(columns, outline=Outline(lengths), cache=self._cache)
        embedded = scaled(embed_tokens(ids, model.embedding.weight, model.groups.tp, sp=False), model.config)
        made: Tensor = model.predictors[k](embedded, torch.cat(list(inputs)), context)
        return list(torch.split(made, [len(one) for one in inputs]))
