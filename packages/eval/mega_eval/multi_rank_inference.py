"""Inference on several ranks: replicas of a model, and calls that rank 0 broadcasts to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.engine_requests import EngineRequest, GenerationEvent
from mega_eval.generate import Completion, generate_completions
from mega_eval.inference_engine import InferenceEngine
from mega_eval.sampling import Sampling
from mega_eval.score import ContextContinuation, Score, pack_pair_batches, score_packed_rows
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.parallel_layout import ParallelLayout, check_parallel_degrees
from mega_trainer.distributed.process_groups import ParallelGroups, build_parallel_groups
from mega_trainer.job.garbage_collection import exclude_objects_from_gc
from mega_trainer.model.decoder import Decoder


@dataclass(frozen=True)
class ReplicaLayout:
    """Parallel degrees of one copy of a model for inference.
    `tp` ranks share each weight, `ep` ranks share the experts, `pp` stages share the layers.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def ranks_per_stage(self) -> int:
        """Number of adjacent ranks that form one pipeline stage of a copy of the model."""
        return max(self.tp, self.ep)

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that one copy of the model takes."""
        return self.ranks_per_stage * self.pp


def build_replica_groups(
    model: ModelConfig, rank: int, world_size: int, replica_layout: ReplicaLayout
) -> ParallelGroups:
    """Build this rank's process groups for copies of a model (replicas) over all ranks.
    There are `world_size` ranks; the groups are for tensor, expert and pipeline parallelism. All ranks must call it.

    Raises:
        ConfigError: when the model does not support these parallel degrees.
    """
    check_parallel_degrees(model, tp=replica_layout.tp, ep=replica_layout.ep)
    most = model.most_pipeline_stages
    if replica_layout.pp > most:
        first, last = model.first_stage_layers, model.last_stage_layers
        which = f"last {last}" if last > first else f"first {first}"
        together = f", less {model.num_layers - most}, as its {which} must be on one rank"
        raise ConfigError(
            f"pp = {replica_layout.pp} must be at most the number of layers of the model, {model.num_layers}"
            + (together if most < model.num_layers else ""),
            hint=f"use pp <= {most}",
        )
    data = world_size // replica_layout.pp // replica_layout.tp
    layout = ParallelLayout(tp=replica_layout.tp, pp=replica_layout.pp, dp=data, ep=replica_layout.ep)
    return build_parallel_groups(layout, rank, heads=model.shared_head_counts)


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokenizer of prompts with an optional length limit; of a longer prompt the first tokens are cut off.

    Attributes:
        tokenizer: tokenizer of the model.
        longest: maximum number of tokens; the last ones of a longer prompt are kept. None: no maximum.
    """

    tokenizer: Tokenizer
    longest: int | None = None

    @property
    def prefix_token_id(self) -> int | None:
        """Id of the token that begins a text, or of the end-of-text token if the vocabulary has no begin token."""
        return self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, with at most one begin token.
        A prompt that already starts with the begin token, as from chat templates, does not get a second one.
        """
        bos = self.tokenizer.bos_id
        has_bos = bos is not None and text.startswith(self.tokenizer.decode([bos]))
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens and not has_bos)
        return ids if self.longest is None else ids[-self.longest :]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@dataclass(frozen=True)
class ModelReplicas:
    """Copies of a model spread over all ranks, which divide scoring and generation among them; rank 0 gives the work.

    Attributes:
        model: this rank's part of a copy, in eval mode.
        prompts: tokenizer of prompts.
        batch_size: prompts that a copy continues together; on a GPU also the rows that it scores together.
        rank, world_size: this rank and the number of ranks.
        replica_layout: parallel degrees within a copy.
        group: process group of all ranks for broadcasts of work; the default group if None.
    """

    model: Decoder
    prompts: PromptTokenizer
    batch_size: int = 1
    rank: int = 0
    world_size: int = 1
    replica_layout: ReplicaLayout = ReplicaLayout()
    group: dist.ProcessGroup | None = None

    @property
    def num_copies(self) -> int:
        """Number of copies of the model over all ranks."""
        return self.world_size // self.replica_layout.ranks_per_copy

    @property
    def copy_index(self) -> int:
        """Index of the model copy to which this rank belongs.
        The ranks of one pipeline stage of all copies are adjacent.
        """
        return self.rank % (self.world_size // self.replica_layout.pp) // self.replica_layout.ranks_per_stage

    def score_pairs(self, pairs: Sequence[ContextContinuation]) -> Iterator[tuple[int, Score]]:
        """Yield (index, score) of each (context, continuation) pair as it is computed, in any order.
        It is called on rank 0 while the other ranks run `repeat_rank_zero_calls`.

        Raises:
            DataError, CheckpointError: as `score.score_continuations`.
        """
        self._broadcast_work(("score", (pairs,)))
        for found in self._score_share(pairs):
            yield from found.items()

    def generate_completions(
        self, prompts: Sequence[str], longest: int, limits: GenerationLimits, sampling: Sampling
    ) -> list[Completion]:
        """Return a continuation of each prompt, of which only the last `longest` tokens are used.
        It is called on rank 0 while the other ranks run `repeat_rank_zero_calls`.

        Raises:
            DataError: as `generate.generate_completions`.
        """
        self._broadcast_work(("generate", (prompts, longest, limits, sampling)))
        return self._generate_share(prompts, longest, limits, sampling)

    def repeat_rank_zero_calls(self) -> None:
        """Take part in the scoring and generation that rank 0 starts, until rank 0 calls `stop_followers`.
        It is called on all other ranks.
        """
        while (work := self._receive_work()) is not None:
            name, arguments = work
            if name == "score":
                for _ in self._score_share(*arguments):
                    pass
            else:
                self._generate_share(*arguments)

    def stop_followers(self) -> None:
        """End `repeat_rank_zero_calls` on the other ranks; called on rank 0 after its last work."""
        self._broadcast_work(None)

    def _score_share(self, pairs: Sequence[ContextContinuation]) -> Iterator[dict[int, Score]]:
        """Yield the scores of each round of batches, gathered on rank 0."""
        together = 1 if self.model.device.type == "cpu" else self.batch_size
        plan = pack_pair_batches(self.model, pairs, together)
        while share := list(islice(plan, self.num_copies)):
            mine = share[self.copy_index :][:1]
            found = {number: score for batch in mine for number, score in score_packed_rows(self.model, batch)}
            yield {number: score for part in self._gather_results(found) for number, score in part.items()}

    def _generate_share(
        self, prompts: Sequence[str], longest: int, limits: GenerationLimits, sampling: Sampling
    ) -> list[Completion]:
        """Continue this copy's share of the prompts; rank 0 returns all completions in order."""
        # a draw depends on the index of its prompt among all prompts, so with sampling every copy generates all of them
        copies = 1 if sampling.temperature > 0 else self.num_copies
        text, mine = replace(self.prompts, longest=longest), prompts[self.copy_index % copies :: copies]
        found = (
            generate_completions(self.model, text, mine, limits, sampling, batch_size=self.batch_size) if mine else []
        )
        parts = self._gather_results(found)
        return [parts[number % copies][number // copies] for number in range(len(prompts))] if self.rank == 0 else []

    def _broadcast_work(self, work: tuple[str, tuple[Any, ...]] | None) -> None:
        """Broadcast a call as (name, arguments), or None at the end, to the other ranks."""
        if self.world_size > 1:
            dist.broadcast_object_list([work], group=self.group)

    def _receive_work(self) -> Any:
        """Return the work that rank 0 broadcasts."""
        received = [None]
        dist.broadcast_object_list(received, group=self.group)
        return received[0]

    def _gather_results(self, found: Any) -> list[Any]:
        """Return the results of all copies on rank 0, an empty list elsewhere."""
        if self.world_size == 1:
            return [found]
        everything: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        stride = self.replica_layout.ranks_per_stage
        dist.gather_object(found if self.rank == self.copy_index * stride else None, everything, group=self.group)
        return (everything or [])[: self.num_copies * stride : stride]


EngineCalls = list[Callable[[InferenceEngine], object]]  # calls of rank 0 since the last step


class BroadcastingEngine(InferenceEngine):
    """Inference engine of rank 0 for a model shared by several ranks, which repeat its calls.
    It takes the arguments of `InferenceEngine`, equal on all ranks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._calls: EngineCalls = []

    def add_request(self, request: EngineRequest) -> int:
        """Add a request to this engine, queue the call for the other ranks, and return the request's number.
        They repeat it before the next step.
        """
        number = super().add_request(request)
        self._calls.append(partial(InferenceEngine.add_request, request=request))
        return number

    def cancel_request(self, request: int) -> None:
        """Cancel a request in this engine and queue the call, which other ranks repeat before the next step."""
        super().cancel_request(request)
        self._calls.append(partial(InferenceEngine.cancel_request, request=request))

    def load_adapter(self, name: str, base: str, folder: str) -> None:
        """Raise `ConfigError`: adapters cannot be loaded at run time on several ranks."""
        raise ConfigError(
            "loading adapters at run time is not supported on several ranks", hint="start with --adapter NAME=FOLDER"
        )

    def drop_all_requests(self) -> None:
        """Drop all requests in this engine, and in the engines of the other ranks before their next step."""
        super().drop_all_requests()
        self._calls = [InferenceEngine.drop_all_requests]

    def step(self, *, isolate: bool = False) -> list[GenerationEvent]:
        """Broadcast the queued calls to the other ranks, run one engine step on all ranks and return its events."""
        dist.broadcast_object_list([self._calls])
        self._calls = []
        return super().step(isolate=isolate)

    def stop_followers(self) -> None:
        """End `repeat_rank_zero_engine_calls` on the other ranks; called on rank 0 after its last step."""
        dist.broadcast_object_list([None])


def repeat_rank_zero_engine_calls(engine: InferenceEngine) -> None:
    """Repeat on this rank's inference engine the calls that rank 0 makes, until rank 0 calls `stop_followers`.
    Rank 0 makes the calls on its `BroadcastingEngine`.
    """
    with exclude_objects_from_gc():
        while (calls := _receive_calls()) is not None:
            for call in calls:
                call(engine)
            engine.step(isolate=True)  # the first rank reports failures


def _receive_calls() -> EngineCalls | None:
    """Return the calls that rank 0 broadcasts; None at the end."""
    received: list[EngineCalls | None] = [None]
    dist.broadcast_object_list(received)
    return received[0]
