"""Losses of preference pairs: by transformers' logits and the published formulas, in any layout, cached as live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from first_steps import in_layouts, step
from preference_pairs import LENGTH, Answer, pairs, rated, write_model, write_pairs
from ranks import run_ranks
from torch import Tensor

from mega_ckpt.convert import convert_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.data_check import check_datasets
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.objectives.sample_cache import PrecomputedOutputCache
from mega_trainer.run.training_run import run_training
from mega_trainer.verify.case_comparison import assemble_tensor

transformers = pytest.importorskip("transformers", reason="whose logits are the truth here")

PAIRS = pairs(24)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1, "reference": "live"},
    "ipo": {"beta": 0.4},
    "kto": {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "simpo": {"beta": 1.5, "gamma": 0.7},
    "reward": {"margin": 0.3, "center": 0.1},
}
WITHOUT_REFERENCE = ("simpo", "reward")
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {"tp": 2, "sp": True, "cp": 2}),
    ("ipo", {"pp": 2, "schedule": "zb-h1", "zero": 2}),
    ("kto", {"zero": 3, "cp": 2, "cp_kind": "allgather"}),
    ("reward", {"tp": 2, "sp": True, "cp": 2}),
]


def settings(folder: Path, kind: str, **sections: Any) -> dict[str, Any]:
    told = {} if kind in WITHOUT_REFERENCE else {"reference_model": str(folder / "reference")}
    raw: dict[str, Any] = {
        "model": {"from": str(folder / ("scorer" if kind == "reward" else "policy"))}, "precision": "fp64", "device": "cpu", "output": str(folder / "run"),
        "data": {"train": str(folder / "pairs"), "kind": "pairs", "seq_length": LENGTH, "split": [1]},
        "batch": {"micro": 1, "global": 4}, "train": {"steps": 1}, "optimizer": {"clip_grad": 0.0},
        "checkpoint": {"async": False}, "log": {"tensorboard": False}, "objective": {"kind": kind, **OBJECTIVES[kind], **told},
    }  # fmt: skip
    return {**raw, **sections}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preference")
    write_pairs(made / "pairs", PAIRS)
    write_model(made / "policy", 1)
    write_model(made / "reference", 2)
    write_model(made / "scorer", 3, kind="LlamaForSequenceClassification", num_labels=1)
    return made


def answers_in(batch: Any) -> list[list[Answer]]:
    """Of each row its answers, as tokens and how many of them are the question."""
    out = []
    for tokens, weights, documents in zip(batch.tokens, batch.loss_weights, batch.document_ids, strict=True):
        found = []
        for number in range(documents.max() + 1):
            own = documents == number
            if weights[own].any():
                found.append((tokens[own].tolist(), int(np.argmax(weights[own] > 0)) + 1))
        out.append(found)
    return out


def sums(model: Any, answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the answers, and how many tokens they have: [pairs, 2] each."""
    told = []
    for tokens, asked in answers:
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        told.append(logits.gather(1, torch.tensor(tokens[1:])[:, None])[asked - 1 :].sum())
    sizes = torch.tensor([len(tokens) - asked for tokens, asked in answers], dtype=torch.float64)
    return torch.stack(told).view(-1, 2), sizes.view(-1, 2)


def published(kind: str, batch: Any, policy: Any, reference: Any) -> Tensor:
    """The loss by the formulas as they were published, with the settings of `OBJECTIVES`."""
    answers = [answer for row in answers_in(batch) for answer in row]
    if kind == "reward":
        r = torch.stack([policy(torch.tensor([tokens])).logits[0, 0] for tokens, _ in answers]).view(-1, 2)
        return (-F.logsigmoid(r[:, 0] - r[:, 1] - 0.3) + 0.1 * (r[:, 0] + r[:, 1]) ** 2).mean()
    (logp, sizes), (ref, _) = sums(policy, answers), sums(reference, answers)
    ratio = logp - ref.detach()
    if kind == "dpo":
        h = 0.3 * (ratio[:, 0] - ratio[:, 1])
        return (-0.9 * F.logsigmoid(h) - 0.1 * F.logsigmoid(-h)).mean()
    if kind == "ipo":
        return ((ratio[:, 0] / sizes[:, 0] - ratio[:, 1] / sizes[:, 1] - 1 / 0.8) ** 2).mean()
    if kind == "simpo":
        return -F.logsigmoid(1.5 * (logp[:, 0] / sizes[:, 0] - logp[:, 1] / sizes[:, 1]) - 0.7).mean()
    others = []
    for row in answers_in(batch):  # each question with the answer before it
        others += [(one[:asked] + row[i - 1][0][row[i - 1][1] :], asked) for i, (one, asked) in enumerate(row)]
    kl = (sums(policy, others)[0] - sums(reference, others)[0]).mean().clamp(min=0).detach()
    chosen, rejected = 1 - torch.sigmoid(0.5 * (ratio[:, 0] - kl)), 1 - torch.sigmoid(0.5 * (kl - ratio[:, 1]))
    return torch.cat([1.5 * chosen, 0.5 * rejected]).mean()


def missing_kto(batch: Any, policy: Any, reference: Any) -> tuple[Tensor, dict[str, float]]:
    """Loss and figures of KTO by its published formula, of rated answers of which most stand alone."""
    answers, good, others = [], [], []
    for tokens, weights, documents in zip(batch.tokens, batch.loss_weights, batch.document_ids, strict=True):
        row = []
        for number in range(2 * ((documents.max() + 1) // 2)):
            own = documents == number
            if weights[own].any():
                row.append((tokens[own].tolist(), int(np.argmax(weights[own] > 0)) + 1))
                good.append(number % 2 == 0)
        answers += row
        others += [(one[:asked] + row[i - 1][0][row[i - 1][1] :], asked) for i, (one, asked) in enumerate(row)]

    def ratios(these: list[Answer]) -> Tensor:
        both = [
            sums(model, [*these, these[0]] if len(these) % 2 else these)[0].flatten() for model in (policy, reference)
        ]
        return (both[0] - both[1].detach())[: len(these)]

    kl, ratio = ratios(others).mean().clamp(min=0).detach(), ratios(answers)
    desirable = torch.tensor(good)
    losses = torch.where(
        desirable, 1.5 * (1 - torch.sigmoid(0.5 * (ratio - kl))), 0.5 * (1 - torch.sigmoid(0.5 * (kl - ratio)))
    )
    means = {
        "rewards/chosen": 0.5 * ratio[desirable].mean().item(),
        "rewards/rejected": 0.5 * ratio[~desirable].mean().item(),
        "kl": kl.item(), "pairs": len(answers) / 2,
    }  # fmt: skip
    return losses.mean(), means


@pytest.mark.parametrize("reference", ["live", "cached"])
def test_kto_of_answers_that_are_rated_alone(folder: Path, tmp_path: Path, reference: str) -> None:
    write_pairs(tmp_path / "rated", rated(24))
    data = {"train": str(tmp_path / "rated"), "kind": "pairs", "seq_length": LENGTH, "split": [1]}
    raw = settings(folder, "kto", output=str(tmp_path / "run"), data=data)
    raw["objective"]["reference"] = reference
    result, told, gradients, batch = step(raw)
    policy, other = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("policy", "reference")
    )
    loss, means = missing_kto(batch, policy, other)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert {name: told[name] for name in means} == pytest.approx(means, rel=1e-5, abs=1e-5)
    assert told["rewards/margins"] == pytest.approx(means["rewards/chosen"] - means["rewards/rejected"], abs=1e-5)
    for name, parameter in policy.named_parameters():
        error = (assemble_tensor(gradients[name]) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "reward"])
def test_answers_that_are_rated_alone_are_no_pairs(folder: Path, tmp_path: Path, kind: str) -> None:
    write_pairs(tmp_path / "rated", rated(24))
    data = {"train": str(tmp_path / "rated"), "kind": "pairs", "seq_length": LENGTH, "split": [1]}
    config = RunConfig.parse(resolve_run_config(settings(folder, kind, output=str(tmp_path / "run"), data=data)))
    with pytest.raises(DataError, match=f"objective.kind = {kind} requires pairs of answers, found 18 single answers"):
        check_datasets(config)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_published_formulas_on_transformers_logits(
    folder: Path, kind: str, tmp_path: Path
) -> None:
    result, told, gradients, batch = step(settings(folder, kind, output=str(tmp_path)))
    kinds = {"policy": "CausalLM", "reference": "CausalLM", "scorer": "SequenceClassification"}
    policy, reference = (
        getattr(transformers, f"AutoModelFor{kinds[name]}").from_pretrained(folder / name, dtype=torch.float64)
        for name in (("scorer" if kind == "reward" else "policy"), "reference")
    )
    loss = published(kind, batch, policy, reference)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)  # norms of transformers are in fp32
    assert told["pairs"] == sum(map(len, answers_in(batch))) / 2
    for name, parameter in policy.named_parameters():
        error = (assemble_tensor(gradients[name]) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5


def test_layouts_make_the_same_step_and_the_same_figures(folder: Path, tmp_path: Path) -> None:
    raws = [settings(folder, kind, output=str(tmp_path / kind), parallel=parallel) for kind, parallel in LAYOUTS]
    assert run_ranks(in_layouts, 4, raws) == [[]] * 4


def trained(folder: Path, output: Path, **sections: Any) -> list[dict[str, Any]]:
    """What a run in one process tells of its steps."""
    raw = settings(folder, "dpo", output=str(output), **sections)
    run_training(RunConfig.parse(resolve_run_config(raw)), RankInfo())
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_what_is_preferred_and_goes_on_from_a_cached_reference_as_if_never_stopped(
    folder: Path, tmp_path: Path
) -> None:
    data = {"train": str(folder / "pairs"), "kind": "pairs", "seq_length": LENGTH, "split": [3, 1]}
    how = {"data": data, "optimizer": {"lr": 0.02}, "lr_schedule": {"name": "constant"}}
    cached = {"objective": {"kind": "dpo", "reference": "cached"}, "init_from": str(folder / "policy"), **how}
    live = {**cached, "objective": {"kind": "dpo", "reference": "live"}}
    told = trained(folder, tmp_path / "live", **live, train={"steps": 6, "eval_every": 3, "eval_steps": 1})
    assert told[0]["loss"] == pytest.approx(np.log(2))  # the model is its own reference
    assert told[-1]["rewards/accuracies"] == 1
    assert told[-1]["rewards/margins"] > 0.1
    assert told[-1].keys() >= {"valid_loss", "valid_rewards/accuracies", "pairs", "logps/chosen", "tokens"}
    assert "kl" not in told[-1]
    trained(folder, tmp_path / "halves", **cached, train={"steps": 3, "eval_every": 3, "eval_steps": 1})
    assert len(sorted((tmp_path / "halves" / "reference").rglob("*.safetensors"))) == 2  # of training and validation
    again = trained(folder, tmp_path / "halves", **cached, train={"steps": 6, "eval_every": 3, "eval_steps": 1})
    for one, other in zip(told, again, strict=True):
        assert all(one[name] == other[name] for name in one if name.split("/")[0] in ("loss", "rewards", "valid_loss"))


def test_what_a_killed_reference_left_is_gone_on_with_and_other_samples_are_refused(tmp_path: Path) -> None:
    files = PrecomputedOutputCache(tmp_path)
    files.write_samples(4, {"answers": [np.array([1.5, 2.5]), np.array([])]})
    files.write_samples(6, {"answers": [np.array([-3.0])]})
    (tmp_path / ".samples-000000000007.safetensors.abc.tmp").write_bytes(b"cut")
    again = PrecomputedOutputCache(tmp_path)
    assert [again.first_missing_sample(sample) for sample in (0, 4, 6)] == [0, 7, 7]
    assert [again.read_array("answers", sample).tolist() for sample in (6, 4, 5)] == [[-3.0], [1.5, 2.5], []]
    with pytest.raises(DataError, match="sample 7 is missing"):
        again.read_array("answers", 7)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"data": {"train": "x"}}, r"objective.kind = 'dpo': requires preference pairs .* -> set data\.kind=pairs"),
        ({"objective": {}}, "data.kind = 'pairs': requires an objective on preference pairs"),
        ({"objective": {"kind": "ipo"}, "init_from": None}, "requires a reference model"),
        (
            {"objective": {"kind": "dpo", "gamma": 2}},
            r"objective.gamma = 2.0: has no effect with objective.kind = dpo \(used by simpo\)",
        ),
        ({"objective": {"kind": "dpo", "bet": 2}}, "objective.bet: unknown key -> did you mean 'beta'?"),
        ({"train": {"on_nan": "rollback"}}, "reads samples outside of the cache"),
    ],
)
def test_what_does_not_fit_is_told_with_a_way_out(changed: dict[str, Any], expected: str) -> None:
    model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    raw = {"model": model, "data": {"train": "x", "kind": "pairs"}, "objective": {"kind": "dpo"}, "init_from": "y"}
    with pytest.raises(ConfigError, match=expected):
        RunConfig.parse({**raw, **changed})


def test_a_reward_model_begins_with_a_language_model_and_is_exported_as_transformers_has_it(
    folder: Path, tmp_path: Path
) -> None:
    base = {"from": str(folder / "policy"), "score": True}
    raw = settings(folder, "reward", model=base, output=str(tmp_path / "run"), train={"steps": 8})
    raw |= {"optimizer": {"lr": 0.02}, "lr_schedule": {"name": "constant"}, "objective": {"kind": "reward"}}
    run_training(RunConfig.parse(resolve_run_config(raw)), RankInfo())
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert told[-1]["loss"] < told[0]["loss"]
    assert told[-1]["rewards/accuracies"] > 0.8
    assert "logps/chosen" not in told[-1]
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "again", "mega", verify=True)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    right = [
        theirs(torch.tensor([good])).logits.item() > theirs(torch.tensor([bad])).logits.item()
        for (good, _), (bad, _) in PAIRS
    ]
    assert sum(right) > 0.8 * len(right)
