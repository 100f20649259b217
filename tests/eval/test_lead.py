"""An engine on ranks that share a model answers as one alone does, whatever comes and goes meanwhile."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist
from local_tasks import write_model
from ranks import run_ranks

from mega_ckpt.source import model_at
from mega_common.errors import DataError
from mega_eval.engine import Engine, Request
from mega_eval.lead import LeadingEngine, follow
from mega_eval.load import load_model, load_tokenizer
from mega_eval.replicas import Sharing, connect
from mega_eval.sampling import Sampling
from mega_eval.text import Limits

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
    steps(15)
    assert (engine.waiting, engine.running, engine.free_pages) == (0, 0, engine.pages)
    return dict(found)


def on_a_rank(folder: Path, layouts: list[Sharing]) -> list[Told]:
    rank, found = dist.get_rank(), []
    for sharing in layouts:
        groups = connect(model_at(folder), rank, dist.get_world_size(), sharing)
        kind = Engine if rank else LeadingEngine
        engine = kind(load_model(folder, groups=groups), load_tokenizer(folder), cache_tokens=256, batch_size=4)
        if isinstance(engine, LeadingEngine):
            found.append(asked(engine))
            engine.close()
        else:
            follow(engine)
    return found


def test_ranks_answer_as_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    alone = asked(Engine(load_model(tmp_path), load_tokenizer(tmp_path), cache_tokens=256, batch_size=4))
    assert [len(tokens) for tokens in alone.values()] == [12, 3, 5]
    found = run_ranks(on_a_rank, 2, tmp_path, [Sharing(tp=2), Sharing(pp=2)])[0]
    assert found == [alone, alone]
