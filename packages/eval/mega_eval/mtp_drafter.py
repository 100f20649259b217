"""Draft tokens from the model's own multi-token-prediction (MTP) layers (arXiv:2412.19437, section 2.3).

The k-th layer reads, at token i, the output of the layer before it (the first: the model's normed output) and the embedding
of token i + k, and predicts token i + k + 1. Its keys are in the pages of the text, with those of the model's own layers.
Inputs computed from draft tokens are read again once the tokens are known. Prefix pages shared with another text hold the
keys that the MTP layers computed for that text.

Legend: N tokens of some rows, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_eval.engine_requests import RequestState
from mega_eval.paged_cache import PagedCache, RequestTokenSpan
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.device import to_device
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.input_embeddings import apply_embedding_scale
from mega_trainer.parallel.tensor_parallel import embed_token_ids


class MtpDrafter:
    """Source of draft tokens for speculative decoding by the model's multi-token prediction (MTP) layers.
    There is one draft token per layer; hidden states that these layers have yet to read are kept in the request states.

    Args:
        model: decoder with MTP layers (`predictors`).
        cache: KV cache with the MTP layers after the model's own layers.
    """

    def __init__(self, model: Decoder, cache: PagedCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def record_hidden_states(self, work: Sequence[tuple[RequestState, int]], done: Sequence[int], x: Tensor) -> None:
        """Store the final hidden states of a step in its requests, for accepted tokens only.
        The hidden states are x [N, 1, D], the requests are in `work`; `done` are the numbers of tokens that each
        request had computed before the step.
        """
        hidden, first = self._model.head.norm(x), 0
        for (row, count), before in zip(work, done, strict=True):
            if row.text.finish is None:
                row.mtp_inputs = row.mtp_inputs or [hidden[:0]] * len(self._model.predictors)
                row.mtp_inputs[0] = torch.cat([row.mtp_inputs[0], hidden[first : first + row.num_computed - before]])
            first += count

    def propose_drafts(self, rows: Sequence[RequestState]) -> list[list[int]]:
        """Return draft tokens for each request by the multi-token prediction (MTP) layers.
        All tokens of a request except the last must be computed; the list is empty if its hidden states were not
        recorded.
        """
        ready = [row for row in rows if row.mtp_inputs]
        found = iter(self._draft_tokens(ready) if ready else [])
        return [next(found) if row.mtp_inputs else [] for row in rows]

    @torch.inference_mode()
    def _draft_tokens(self, rows: Sequence[RequestState]) -> list[list[int]]:
        """Return the draft tokens of all MTP layers for each row."""
        drafts: list[list[int]] = [[] for _ in rows]
        inputs, unread = [row.mtp_inputs[0] for row in rows], [row.num_computed for row in rows]
        for k in range(len(self._model.predictors)):
            starts = [row.num_computed - len(one) for row, one in zip(rows, inputs, strict=True)]
            outputs = self._run_mtp_layer(k, rows, inputs, starts, drafts)
            last = torch.stack([one[-1] for one in outputs])
            likeliest = (
                self._model.head.compute_logits(last, self._model.get_output_projection())
                .squeeze(1)
                .argmax(-1)
                .tolist()
            )
            for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
                first = max(start, row.num_computed - k)  # inputs from here on used draft tokens; one more per layer
                row.mtp_inputs[k] = inputs[number][first - start : unread[number] - start]
                unread[number] = first
                drafts[number].append(likeliest[number])
                if k + 1 < len(row.mtp_inputs):
                    inputs[number] = torch.cat([row.mtp_inputs[k + 1], outputs[number]])
        return drafts

    def _run_mtp_layer(
        self,
        k: int,
        rows: Sequence[RequestState],
        inputs: Sequence[Tensor],
        starts: Sequence[int],
        drafts: Sequence[list[int]],
    ) -> list[Tensor]:
        """Return the outputs of MTP layer k for each row's tokens from `starts`, [N, 1, D]."""
        model, device = self._model, self._model.device
        spans: list[RequestTokenSpan] = []
        tokens: list[int] = []
        positions: list[int] = []
        for row, start, drafted in zip(rows, starts, drafts, strict=True):
            first = len(positions)
            positions += range(start, row.num_computed)
            tokens += (row.tokens + drafted)[start + k + 1 : row.num_computed + k + 1]
            own = slice(first, len(positions))
            spans.append(RequestTokenSpan(own, row.num_computed, row.pages, page_size=self._cache.page_size))
        self._cache.begin_forward_pass(spans, device)
        columns, ids = (to_device(torch.tensor(values), device)[:, None] for values in (positions, tokens))
        lengths = [
            max(len(row.request.prompt), position + 1)
            for row, start in zip(rows, starts, strict=True)
            for position in range(start, row.num_computed)
        ]
        context = model.make_forward_context(columns, sequence_bounds=DocumentBounds(lengths), cache=self._cache)
        embedded = apply_embedding_scale(
            embed_token_ids(ids, model.embedding.weight, model.groups.tp, sp=False), model.config
        )
        outputs: Tensor = model.predictors[k](embedded, torch.cat(list(inputs)), context)
        return list(torch.split(outputs, [len(one) for one in inputs]))
