"""An engine on ranks that share a model answers as one alone does, whatever comes and goes meanwhile."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist
from local_tasks import write_model
from ranks import run_ranks
from tiny_adapters import save_adapter

from mega_ckpt.source import model_at
from mega_common.errors import DataError
from mega_common.lora import LoraConfig
from mega_eval.adapters import Beside
from mega_eval.engine import Engine, Request
from mega_eval.lead import LeadingEngine, follow
from mega_eval.load import load_model, load_tokenizer
from mega_eval.replicas import Sharing, connect
from mega_eval.sampling import Sampling
from mega_eval.text import Limits
from mega_trainer.mesh import Groups

Told = dict[int, list[int]]


def asked(engine: Engine) -> Told:
    """Requests that come between steps, one that is dropped, one that is refused; what becomes of the others."""
    found: Told = defaultdict(list)
    drawn = Sampling(temperature=1.0, seed=2)

    def steps(count: int) -> None:
        for _ in range(count):
            for event in engine.step():
                found[event.request] += event.tokens

    engine.add(Request([1, 2, 3], Limits(12)))
    dropped = engine.add(Request([4, 5], Limits(30)))
    steps(3)
    with pytest.raises(DataError, match="the prompt has no tokens"):
        engine.add(Request([], Limits(2)))
    engine.cancel(dropped)
    engine.add(Request([6], Limits(5), drawn))
    engine.add(Request([1, 2, 3], Limits(7), adapter="a"))
    engine.add(Request([6], Limits(3), adapter="b"))
    steps(20)
    assert (engine.waiting, engine.running, engine.free_pages) == (0, 0, engine.pages)
    return dict(found)


def engine_of(folder: Path, kind: type[Engine] = Engine, groups: Groups | None = None) -> Engine:
    beside = Beside.open(folder, {name: str(folder / name) for name in "ab"})
    model = load_model(folder, groups=groups, beside=beside)
    selection = beside.choice.selection
    return kind(model, load_tokenizer(folder), cache_tokens=256, batch_size=6, adapters=selection)


def on_a_rank(folder: Path, layouts: list[Sharing]) -> list[Told]:
    rank, found = dist.get_rank(), []
    for sharing in layouts:
        groups = connect(model_at(folder), rank, dist.get_world_size(), sharing)
        kind = Engine if rank else LeadingEngine
        engine = engine_of(folder, kind, groups)
        if isinstance(engine, LeadingEngine):
            found.append(asked(engine))
            engine.close()
        else:
            follow(engine)
    return found


def test_ranks_answer_as_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    for seed, (name, rank) in enumerate({"a": 3, "b": 2}.items()):
        save_adapter(tmp_path / name, tmp_path, LoraConfig(rank=rank, dora=name == "b"), seed=seed)
    alone = asked(engine_of(tmp_path))
    assert {request: len(tokens) for request, tokens in alone.items()} == {0: 12, 1: 3, 2: 5, 3: 7, 4: 3}
    assert alone[0][:7] != alone[3]
    found = run_ranks(on_a_rank, 2, tmp_path, [Sharing(tp=2), Sharing(pp=2)])[0]
    assert found == [alone, alone]
