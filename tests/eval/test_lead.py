"""An engine on ranks that share a model answers as one alone does, whatever comes and goes meanwhile."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist
from local_tasks import write_model
from ranks import run_ranks
from tiny_adapters import save_adapter

from mega_ckpt.source import read_model_config
from mega_common.errors import DataError
from mega_common.lora_config import LoraConfig
from mega_eval.engine_requests import EngineRequest
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import LoraAdapterSet, load_inference_model, load_tokenizer
from mega_eval.multi_rank_inference import (
    BroadcastingEngine,
    ReplicaLayout,
    build_replica_groups,
    repeat_rank_zero_engine_calls,
)
from mega_eval.sampling import Sampling
from mega_eval.text_stream import GenerationLimits
from mega_trainer.distributed.process_groups import ParallelGroups

Told = dict[int, list[int]]


def run_engine(engine: InferenceEngine) -> Told:
    """Requests that come between steps, one that is dropped, one that is refused; what becomes of the others."""
    found: Told = defaultdict(list)
    drawn = Sampling(temperature=1.0, seed=2)

    def steps(count: int) -> None:
        for _ in range(count):
            for event in engine.step():
                found[event.request] += event.tokens

    engine.add_request(EngineRequest([1, 2, 3], GenerationLimits(12)))
    dropped = engine.add_request(EngineRequest([4, 5], GenerationLimits(30)))
    steps(3)
    with pytest.raises(DataError, match="the prompt has no tokens"):
        engine.add_request(EngineRequest([], GenerationLimits(2)))
    engine.cancel_request(dropped)
    engine.add_request(EngineRequest([6], GenerationLimits(5), drawn))
    engine.add_request(EngineRequest([1, 2, 3], GenerationLimits(7), adapter="a"))
    engine.add_request(EngineRequest([6], GenerationLimits(3), adapter="b"))
    steps(20)
    assert (engine.num_waiting, engine.num_running, engine.num_free_pages) == (0, 0, engine.num_pages)
    return dict(found)


def engine_of(
    folder: Path, kind: type[InferenceEngine] = InferenceEngine, groups: ParallelGroups | None = None
) -> InferenceEngine:
    beside = LoraAdapterSet.open_adapters(folder, {name: str(folder / name) for name in "ab"})
    model = load_inference_model(folder, groups=groups, lora_adapters=beside)
    selection = beside.pool.selection
    return kind(model, load_tokenizer(folder), cache_tokens=256, batch_size=6, adapters=selection)


def on_a_rank(folder: Path, layouts: list[ReplicaLayout]) -> list[Told]:
    rank, found = dist.get_rank(), []
    for sharing in layouts:
        groups = build_replica_groups(read_model_config(folder), rank, dist.get_world_size(), sharing)
        kind = InferenceEngine if rank else BroadcastingEngine
        engine = engine_of(folder, kind, groups)
        if isinstance(engine, BroadcastingEngine):
            found.append(run_engine(engine))
            engine.stop_followers()
        else:
            repeat_rank_zero_engine_calls(engine)
    return found


def test_ranks_answer_as_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    for seed, (name, rank) in enumerate({"a": 3, "b": 2}.items()):
        save_adapter(tmp_path / name, tmp_path, LoraConfig(rank=rank, dora=name == "b"), seed=seed)
    alone = run_engine(engine_of(tmp_path))
    assert {request: len(tokens) for request, tokens in alone.items()} == {0: 12, 1: 3, 2: 5, 3: 7, 4: 3}
    assert alone[0][:7] != alone[3]
    found = run_ranks(on_a_rank, 2, tmp_path, [ReplicaLayout(tp=2), ReplicaLayout(pp=2)])[0]
    assert found == [alone, alone]
