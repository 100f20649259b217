"""The trainer as a library: log-probabilities, steps by a loss of one's own, weights for others, memory handed back."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity.cases import covering
from parity.library import (
    against_one_process,
    engine_of,
    exportable,
    layouts,
    outcome,
    sequences,
    streams_its_export,
)
from ranks import run_ranks

import mega_trainer
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.source import open_weight_source
from mega_common.errors import ConfigError, DataError
from mega_common.model_config import ModelConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.model.expert_router import ExpertRouter
from mega_trainer.verify.case_trainer import make_case_process_groups
from mega_trainer.verify.layout_case import LayoutCase

EXAMPLE = Path(__file__).parents[2] / "examples/rl"


def test_log_probs_and_steps_by_a_loss_of_ones_own_are_those_of_one_process() -> None:
    cases = covering(layouts(4), 6)
    assert len({case.name for case in cases}) > 2
    assert run_ranks(against_one_process, 4, cases) == [[]] * 4


def test_log_probs_are_those_of_whole_rows_and_documents_do_not_see_each_other() -> None:
    engine = engine_of(layouts(2)[0].single, RankInfo())
    work = sequences(engine.config.model.vocab_size, engine.config.data.seq_length)
    together, alone = engine.log_probs(work), [engine.log_probs([one])[0] for one in work]
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(together, alone, strict=True))
    assert [len(each) for each in together] == [len(one) - 1 for one in work]


def has_one_plain_router(model: ModelConfig) -> bool:
    """Whether a single layer has experts, chosen by softmax without a capacity."""
    layers = sum(map(model.is_moe_layer, range(model.num_layers)))
    return layers == 1 and model.moe is not None and model.moe.score == "softmax" and not model.moe.capacity_factor


def test_experts_are_those_that_a_rollout_chose_and_weigh_as_the_model_scores_them() -> None:
    moe = next(case for case in layouts(2) if case.name == "moe" and has_one_plain_router(case.config.model))
    engine = engine_of(moe.single, RankInfo())
    work = sequences(engine.config.model.vocab_size, engine.config.data.seq_length)
    routes, own = engine.routes(work), engine.log_probs(work)
    count = engine.config.model.moe.num_experts  # type: ignore[union-attr]
    assert [each.shape for each in routes] == [(len(one) - 1, 1, 2) for one in work]  # one layer has experts
    assert all(int(each.min()) >= 0 and int(each.max()) < count for each in routes)
    assert all(torch.equal(a, b) for a, b in zip(own, engine.log_probs(work, routes=routes), strict=True))
    router = next(module for module in engine._state.stages[0].modules() if isinstance(module, ExpertRouter))
    with torch.no_grad():
        router.weight.copy_(-router.weight)  # now it would choose others, and scores those given otherwise
    other, replayed = engine.log_probs(work), engine.log_probs(work, routes=routes)
    assert not torch.allclose(other[0], replayed[0])
    assert not torch.allclose(own[0], replayed[0])
    free = [torch.full_like(each, -1) for each in routes]
    assert all(torch.equal(a, b) for a, b in zip(other, engine.log_probs(work, routes=free), strict=True))
    again = engine.train_step(work, lambda given: -torch.stack([each.mean() for each in given]).mean(), routes=routes)
    assert again.loss == pytest.approx(-torch.stack([each.mean() for each in replayed]).mean().item())
    with pytest.raises(DataError, match=r"routes of sequence 1 must have shape \[1, 1, 2\], found \[1, 1, 1\]"):
        engine.log_probs(work, routes=[routes[0], routes[1][..., :1], *routes[2:]])
    with pytest.raises(ConfigError, match="require a model with experts"):
        engine_of(next(case for case in layouts(2) if case.name == "dense").single, RankInfo()).routes(work[:1])


def test_a_checkpoint_of_the_engine_s_has_the_tokenizer_that_came_with_the_weights(tmp_path: Path) -> None:
    model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    how = {"precision": "fp32", "data": {"seq_length": 6}, "device": "cpu"}
    made = mega_trainer.TrainingEngine({"model": model, **how}).save(tmp_path / "first")
    convert_checkpoint(made, tmp_path / "hf", "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    again = mega_trainer.TrainingEngine({"model": {"from": str(tmp_path / "hf")}, **how}).save(tmp_path / "second")
    assert open_weight_source(again).asset_files().keys() >= {"tokenizer.json", "config.json"}


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether this rank holds the same bits."""
    boxes = [[box.tensor for name in sorted(held) for box in held[name].boxes] for held in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*boxes, strict=True))


def hands_on(cases: Sequence[LayoutCase], folder: Path) -> list[str]:
    rank, maker, wrong = dist.get_rank(), make_case_process_groups(cases), []
    for number, case in enumerate(cases):
        engine = engine_of(case, RankInfo(rank, case.ranks), maker)
        outcome(engine)
        wrong += [] if streams_its_export(engine, folder / str(number)) else [str(case)]
        before = outcome(engine)
        engine.resume(folder / str(number) / "mega")
        engine.offload()
        held = sum(storage.nbytes() for storage, _ in engine._offloaded)
        engine.reload()
        after = outcome(engine)
        wrong += [f"{case}: {held} bytes stay"] if held else []
        wrong += [] if equal_states(before[3], after[3]) and after[1] == before[1] else [f"{case}: not as before"]
    return wrong


@pytest.mark.long
def test_weights_are_handed_on_as_an_export_has_them_and_memory_is_given_and_taken_back(tmp_path: Path) -> None:
    """In any layout; and a checkpoint of the engine's goes on where it was."""
    cases = exportable(covering(layouts(4), 40))
    assert run_ranks(hands_on, 4, cases[:3], tmp_path) == [[]] * 4


def test_the_package_exports_the_engine_and_reads_what_a_run_yaml_says() -> None:
    model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    engine = mega_trainer.TrainingEngine({"model": model, "precision": "fp32", "data": {"seq_length": 6}})
    first = engine.train_step([[1, 2, 3], [4, 5, 6, 7]], lambda given: -sum(each.mean() for each in given), lr=0.1)
    again = engine.train_step([[1, 2, 3], [4, 5, 6, 7]], lambda given: -sum(each.mean() for each in given), lr=0.1)
    assert (first.tokens, engine.step) == (5, 2)
    assert again.loss < first.loss
    with pytest.raises(DataError, match=r"from 2 to data.seq_length \+ 1 = 7 tokens, found 8 in sequence 1"):
        engine.log_probs([[1, 2], [1] * 8])
    with pytest.raises(DataError, match="tokens, found 1 in sequence 0"):
        engine.log_probs([[1]])
    with pytest.raises(ConfigError, match="hidden_size"):
        mega_trainer.TrainingEngine({"model": {**model, "hidden_size": 9}})
    for reads, kind in (({"encoder": {"num_layers": 1}, "num_layers": 2}, "t5"), ({"causal": False}, "masked")):
        with pytest.raises(ConfigError, match="requires a decoder, found a model with an encoder"):
            mega_trainer.TrainingEngine({"model": {**model, **reads}, "data": {"kind": kind}})


def example(steps: int) -> str:
    """What the example's loop prints, as one of two tensor ranks."""
    sys.path.insert(0, str(EXAMPLE))
    loop = importlib.import_module("loop")
    with (
        mock.patch.object(sys, "argv", ["loop.py", "--tp", "2", "--steps", str(steps)]),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as told,
    ):
        loop.main()
    return told.getvalue()


def test_the_example_learns_what_it_is_rewarded_for_and_its_rollout_agrees_with_the_trainer() -> None:
    lines = run_ranks(example, 2, 9)[0].splitlines()
    found = [re.match(r"step \d+: reward (\S+), trainer and rollout differ by (\S+)", line) for line in lines]
    rewards, apart = zip(*((float(one[1]), float(one[2])) for one in found if one), strict=True)
    assert len(rewards) == 10
    assert max(apart) < 1e-5
    assert rewards[-1] > rewards[0] + 0.2
