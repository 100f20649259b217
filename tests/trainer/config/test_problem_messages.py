"""Messages of all configuration rules of the trainer: their form, and that following a hint solves the problem."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_problems import check_form, follow_hint, list_problems

import mega_trainer.config
from mega_common.errors import ConfigError, MegaError
from mega_common.strict_config import ConfigProblem, apply_config_overrides, load_yaml_mapping
from mega_trainer.config.run_config import RunConfig, resolve_run_config

BASE: dict[str, Any] = {
    "model": {
        "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "max_position": 64,
    },
    "data": {"train": ["none"], "seq_length": 64},
    "batch": {"micro": 1, "global": 8},
    "train": {"steps": 100},
    "device": "cpu",
}  # fmt: skip
MOE = "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 12}"
KERNELS = Path(__file__).parents[3] / "examples" / "extensions" / "sampler_tokenizer_kernel.py"
FUNCTIONS = Path(__file__).parents[3] / "examples" / "extensions" / "model_functions.py"
ENCODER = ["model.encoder={num_layers: 2}", "data.kind=t5", "model.position=relative", "model.norm=rmsnorm"]
RETRO = ["model.retro={layers: [1], chunk_length: 16, encoder_layers: 2}", "data.kind=retro"]
FP8 = ["precision=fp8", "device=auto", "model.hidden_size=512", "model.ffn_hidden_size=512"]
GRPO = [
    "objective={kind: grpo, rewards: 'rewards.py:exact', max_new_tokens: 8}",
    "data.kind=prompts",
    "data.train=a.jsonl",
    "data.tokenizer=FOLDER",
]
DEEPSTACK = (
    "{num_layers: 3, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, image_size: 8, patch_size: 4, "
    "image_token: 5, class_token: false, pre_norm: false, feature_layer: -1, projector: merger, "
    "native: {window: null, positions: 9, deepstack: [0, 1, 2]}}"
)
SCORE = ["model.score=true", "objective.kind=reward", "data.kind=pairs"]

STREAM = ["data.train=a.jsonl", "data.tokenizer=FOLDER", "data.stream=true"]
BIASED = ["model.causal=false", "model.relative_bias=true", "model.masked_lm={}", "data.kind=masked"]
CLASSIFY = ["objective.kind=classify", "model.task_head={labels: 3}", "data.kind=labels"]
CONTRAST = ["objective.kind=contrastive", "model.task_head.kind=embedding", "data.kind=groups"]

CASES: list[list[str]] = [
    # task heads and streams
    ["objective.kind=classify"],
    ["objective.kind=contrastive"],
    ["data.kind=token_labels"],
    ["data.kind=groups"],
    [*CLASSIFY, "data.kind=text"],
    [*CLASSIFY, "objective.kind=contrastive"],
    [*CLASSIFY, "objective.loss=mse"],
    [*CLASSIFY, "model.task_head={kind: token, labels: 1}", "data.kind=token_labels"],
    [*ENCODER, "model.task_head={labels: 3}"],
    [*CLASSIFY, "eval.tasks=[hellaswag]"],
    [*CONTRAST, "objective.dimensions=[16, 128]"],
    [*STREAM, "train.eval_every=10"],
    [*STREAM, "train.epochs=2"],
    # architecture
    ["model.num_layers=4", "model.shared_kv_layers=1", "parallel.pp=4"],
    ["model.num_layers=4", "model.shared_kv_layers=1", "parallel.pp=2", "parallel.pipeline_layout=[3, 1]"],
    ["model.per_layer_input_size=8", "parallel.pp=2", "eval.tasks=[hellaswag]"],
    ["model.position=learned", "data.seq_length=128"],
    ["data.kind=masked"],
    ["data.kind=bert"],
    ["model.causal=false"],
    ["model.causal=false", "data.kind=masked", "eval.tasks=[hellaswag]"],
    ["model.causal=false", "data.kind=bert"],
    ["data.kind=t5"],
    ["model.position=alibi", "parallel.cp=2"],
    [*BIASED, "parallel.pp=2"],
    [*BIASED, "parallel.zero=3"],
    [*BIASED, "parallel.cp=2"],
    ["model.causal=false", "model.embedding_size=8", "data.kind=masked"],
    [f"extensions=[{FUNCTIONS}]", "model.attention_scores=log_distance", "parallel.cp=2"],
    ["optimizer.mup={base_width: 16}", "optimizer.name=muon"],
    ["optimizer.mup={base_width: 16}", "model.score=true", "objective.kind=reward", "data.kind=preferences"],
    ["optimizer.mup={base_width: 16}", "model.logit_scale=3"],
    [*ENCODER, "data.kind=text"],
    [*ENCODER, "parallel.cp=2"],
    [*ENCODER, "parallel.cp=2", "parallel.cp_kind=alltoall", "model.attention_dropout=0.1"],
    [*ENCODER, "precision=fp8"],
    [*ENCODER, "eval.tasks=[hellaswag]", "parallel.pp=2"],
    [*ENCODER, "parallel.tp=2", "parallel.sp=true", "data.t5.decoder_seq_length=33"],
    [*ENCODER, "model.position=learned", "data.t5.decoder_seq_length=80"],
    ["data.kind=retro"],
    [*RETRO, "data.kind=text"],
    [*RETRO, "data.seq_length=40"],
    [*RETRO, "parallel.tp=3", "parallel.sp=true", "model.num_attention_heads=6", "model.hidden_size=96", "model.ffn_hidden_size=96", "data.seq_length=48"],
    [*RETRO, "parallel.cp=2"],
    [*RETRO, "precision=fp8"],
    [*RETRO, "eval.tasks=[hellaswag]"],
    [*RETRO, "lora={rank: 4}", "init_from=FOLDER"],
    # extensions
    ["optimizer.name=adamv"],
    ["optimizer.options={a: 1}"],
    ["optimizer.sgd={momentum: 0.0, nesterov: true}"],
    ["callbacks={mine: {}}"],
    [f"extensions=[{KERNELS}]", "kernels.functions=[recomputed_norm, recomputed_norm]"],
    [
        "model.mixers={mean: {declares: {extension: mean, tensors: {}}}}",
        "model.layers=[mean+mlp, mean+mlp, mean+mlp, mean+mlp]", "parallel.cp=2",
    ],
    # objective
    ["objective.kind=simpo"],
    ["data.kind=pairs"],
    ["data.kind=pairs", "init_from=FOLDER"],
    ["data.kind=pairs", "objective.kind=reward"],
    [*SCORE, "objective.kind=simpo"],
    ["model.score=true"],
    ["data.kind=pairs", "objective.kind=dpo"],
    ["data.kind=pairs", "objective.kind=dpo", "init_from=FOLDER", "train.on_nan=rollback"],
    ["objective.kind=distill"],
    ["objective.kind=distill", "objective.teacher=FOLDER", "model.causal=false", "data.kind=masked"],
    ["objective.kind=distill", "objective.teacher=FOLDER", "objective.top_k=500"],
    ["objective.kind=distill", "objective.teacher=FOLDER", "train.on_nan=rollback", "train.on_spike=rollback"],
    ["objective.beta=0.2"],
    [*GRPO, "objective.kind=cross_entropy"],
    [*GRPO, "data.kind=text"],
    [*GRPO, "objective.rewards=exact"],
    [*GRPO, "objective.reward_model=FOLDER"],
    [*GRPO, "batch.global=12"],
    [*GRPO, "batch.rampup={start: 2, increment: 2, samples: 100}"],
    [*GRPO, "data.tokenizer=null"],
    [*GRPO, "data.train=[a.jsonl, b.jsonl]"],
    [*GRPO, "objective.max_new_tokens=64"],
    [*GRPO, "model.vision={num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, image_size: 8, patch_size: 4, image_token: 5}"],
    [*GRPO, "train.eval_every=10"],
    [*GRPO, "train.on_spike=rollback"],
    [*GRPO, "objective.variant=rloo", "objective.rollout_steps=2"],
    [*GRPO, "objective.kl=0.1"],
    ["objective.kind=distill", "objective.teacher=FOLDER", "objective.teacher_logits=live", "objective.ask_only=true"],
    ["lora={rank: 4}"],
    ["lora={rank: 4, quantize: nf4}", "init_from=FOLDER", "parallel.zero=3"],
    ["lora={rank: 4, quantize: nf4}", "init_from=FOLDER", *FP8],
    # train, checkpoint, profile, fault, output
    ["train.early_stop=2"],
    ["checkpoint.best=true"],
    ["train.epochs=1", "data.order=megatron"],
    ["train.on_nan=rollback", "data.order=megatron"],
    ["train.on_spike=rollback", "data.order=megatron"],
    ["profile.steps=[200, 300]"],
    ["profile.steps=[5, 3]"],
    ["fault.recompute_every=5", "parallel.zero=2"],
    ["fault.recompute_every=5", "device=auto"],
    ["output=s3://bucket/run"],
    ["init_from=$HOME/model"],
    ["recompute.modules=[mlp]"],
    # optimizer and learning rate
    ["optimizer.betas=[1.0, 2.0]"],
    ["fp16.initial_scale=1000.0"],
    ["fp16.min_scale=0.0"],
    ["fp16.initial_scale=2.0", "fp16.min_scale=4.0"],
    ["lr_schedule.min_lr=1.0"],
    ["lr_schedule.warmup_init=1.0"],
    ["lr_schedule.warmup_steps=100"],
    ["lr_schedule.warmup_samples=800"],
    ["lr_schedule.warmup_share=0.999"],
    ["train.steps=1", "lr_schedule.warmup_share=0.05"],
    ["lr_schedule.warmup_steps=50", "lr_schedule.warmup_samples=80"],
    ["lr_schedule.warmup_steps=50", "lr_schedule.warmup_share=0.2"],
    ["lr_schedule.warmup_samples=50", "lr_schedule.warmup_share=0.2"],
    ["lr_schedule.timescale_steps=5"],
    ["lr_schedule.name=wsd", "lr_schedule.cooldown_steps=5", "lr_schedule.cooldown_share=0.2"],
    ["lr_schedule.name=wsd", "lr_schedule.warmup_steps=30", "lr_schedule.cooldown_steps=80"],
    ["lr_schedule.name=wsd", "lr_schedule.warmup_samples=201", "lr_schedule.cooldown_share=0.8"],
    ["lr_schedule.name=wsd", "lr_schedule.warmup_samples=799", "lr_schedule.cooldown_steps=10"],
    ["lr_schedule.decoupled_min_lr=0.1"],
    ["lr_schedule.decoupled_min_lr=0.1", "optimizer.decoupled_lr=0.01"],
    # batch
    ["batch.micro=3"],
    ["batch.rampup={start: 8, increment: 1, samples: 100}"],
    ["batch.rampup={start: 8, increment: 8, samples: 100}", "batch.micro=8"],
    ["batch.rampup={start: 2, increment: 4, samples: 100}"],
    ["batch.rampup={start: 1, increment: 1, samples: 100}", "batch.global=20001"],
    ["batch.rampup={start: 2, increment: 2, samples: 100}", "batch.stages=[{until: 10, size: 4}]"],
    ["batch.stages=[{until: 10, size: 4}, {until: 5, size: 4}]"],
    ["batch.stages=[{until: 10, size: 16}]"],
    ["batch.stages=[{until: 10, size: 5}]", "batch.micro=2"],
    # parallel degrees
    ["parallel.tp=3"],
    ["parallel.pp=8"],
    ["parallel.pp=2", "parallel.virtual_stages=4"],
    ["parallel.pp=4", "parallel.schedule=zbv", "parallel.virtual_stages=2"],
    ["parallel.pp=4", "parallel.schedule=zbv"],
    ["parallel.pp=2", "parallel.schedule=zbv", "parallel.virtual_stages=2", "model.num_layers=3"],
    ["parallel.pp=2", "parallel.schedule=zbv"],
    ["parallel.pp=2", "parallel.schedule=zb-h1", "parallel.virtual_stages=2"],
    ["parallel.schedule=zb-h1"],
    ["parallel.schedule=zbv", "parallel.virtual_stages=2"],
    ["parallel.virtual_stages=2"],
    ["parallel.pp=2", "parallel.pipeline_layout=[1, 1, 2]"],
    ["parallel.pp=2", "parallel.pipeline_layout=[1, 2]"],
    ["parallel.pp=4", "parallel.pipeline_layout=[2, 0, 1, 1]"],
    ["parallel.pp=8", "parallel.pipeline_layout=[2, 2]"],
    [f"model.vision={DEEPSTACK}", "parallel.pp=3"],
    [f"model.vision={DEEPSTACK}", "parallel.pp=2", "parallel.virtual_stages=2"],
    [f"model.vision={DEEPSTACK}", "parallel.pp=2", "parallel.schedule=zbv", "parallel.virtual_stages=2"],
    [f"model.vision={DEEPSTACK}", "parallel.pp=8"],
    [f"model.vision={DEEPSTACK}", "parallel.pp=2", "parallel.pipeline_layout=[2, 2]"],
    [f"model.vision={DEEPSTACK}", "parallel.pp=3", "parallel.pipeline_layout=[2, 1, 1]"],
    ["parallel.cp=3"],
    ["parallel.tp=4", "parallel.sp=true", "data.seq_length=50"],
    ["parallel.cp=2", "model.attention_dropout=0.1"],
    ["parallel.cp=8", "parallel.cp_kind=alltoall"],
    ["parallel.cp=8", "parallel.cp_kind=alltoall", "model.attention_dropout=0.1"],
    ["parallel.ep=2"],
    ["parallel.expert_tp=2"],
    [MOE, "parallel.ep=3"],
    [MOE, "parallel.expert_tp=8"],
    [MOE, "parallel.ep=2", "parallel.dispatch=nvshmem"],
    [MOE, "parallel.ep=2", "parallel.expert_tp=3", "parallel.dispatch=nvshmem", "parallel.dispatch_bound=2.0"],
    [MOE, "parallel.ep=2", "parallel.expert_tp=2", "parallel.dispatch=deepep"],
    ["parallel.zero=2", "parallel.zero3_gather=step"],
    ["cuda_graphs=layers", "parallel.zero=2", "precision=fp8"],
    [MOE, "parallel.overlap_expert_exchange=true"],
    ["optimizer.name=adamw8bit", "precision=fp64"],
    ["optimizer.name=adamw8bit", "fault.hash_every=5"],
    ["optimizer.name=soap", "lora={rank: 2}", "init_from=FOLDER"],
    ["parallel.tp=2", "parallel.tp_comm_overlap=true"],
    ["parallel.tp=2", "parallel.sp=true", "parallel.tp_comm_overlap=true", "kernels.linear=te"],
    ["parallel.tp=2", "parallel.sp=true", "parallel.tp_comm_overlap=true", "debug.ordered_reductions=true"],
    [*FP8, "parallel.tp=2", "parallel.sp=true", "parallel.tp_comm_overlap=true"],
    ["parallel.zero3_shard=2"],
    ["parallel.zero3_layers=2"],
    # fp8
    [*FP8, "fp8.recipe=delayed"],
    [*FP8, "fp8.bf16_first=3", "fp8.bf16_last=1"],
    [*FP8, "fp8.recipe=rowwise", "kernels.linear=te"],
    [*FP8, "kernels.linear=te", "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 64}"],
    [*FP8, "fp8.recipe=blockwise", "model.hidden_size=192", "data.seq_length=128"],
    [*FP8, "model.ffn_hidden_size=24"],
    [*FP8, "fp8.recipe=blockwise"],
    [*FP8, "fp8.recipe=nvfp4", "fp8.format=e4m3"],
    [*FP8, "fp8.recipe=nvfp4", "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 64}"],
    [*FP8, "parallel.cp=4", "data.seq_length=64"],
]  # fmt: skip
WORLD_CASES: list[tuple[int, list[str]]] = [
    (4, [MOE, "parallel.ep=4", "parallel.overlap_expert_exchange=true", "batch.micro=2"]),
    (3, ["parallel.tp=2", "parallel.pp=2"]),
    (20, ["parallel.tp=4", "parallel.pp=2", "parallel.cp=2", "batch.global=40", "data.seq_length=48"]),
    (5, ["parallel.tp=2", "batch.global=7"]),
    (4, ["parallel.tp=2", "parallel.dp=4"]),
    (2, [MOE, "parallel.ep=4"]),
    (4, [MOE, "parallel.ep=2", "parallel.expert_tp=3", "batch.global=12"]),
    (4, ["parallel.zero=3", "parallel.zero3_shard=3"]),
    (3, ["parallel.zero=3", "parallel.zero3_shard=2", "batch.global=9"]),
    (3, ["batch.global=8"]),
]

UNTRIED = (
    "replace it by its value",
    "change the number of ranks, and batch.global to fit it",
    "shorten the warmup",
)


def raw_run(overrides: list[str]) -> dict[str, Any]:
    return resolve_run_config(apply_config_overrides(BASE, overrides))


def world_problems(raw: dict[str, Any], world: int) -> list[ConfigProblem]:
    return list(RunConfig.parse(raw).parallel_rules.find_world_size_problems(world))


def check_hint(problem: ConfigProblem, before: list[ConfigProblem], after: list[ConfigProblem]) -> None:
    kinds = {(each.path, each.rule.split()[0]) for each in before}
    assert problem.rule not in [each.rule for each in after if each.path == problem.path], str(problem)
    assert not [each for each in after if (each.path, each.rule.split()[0]) not in kinds], (str(problem), after)


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_problems_are_sentences_and_hints_work(overrides: list[str]) -> None:
    raw = raw_run(overrides)
    found = list_problems(raw)
    assert found
    for problem in found:
        check_form(problem)
        changed = list(follow_hint(raw, problem.hint))
        assert changed or problem.hint.startswith(UNTRIED), str(problem)
        for alternative in changed:
            check_hint(problem, found, list_problems(alternative))


@pytest.mark.parametrize(("world", "overrides"), WORLD_CASES)
def test_degrees_of_a_hint_fit_the_number_of_ranks(world: int, overrides: list[str]) -> None:
    raw = raw_run(overrides)
    found = world_problems(raw, world)
    assert found
    for problem in found:
        check_form(problem)
        for alternative in follow_hint(raw, problem.hint):
            check_hint(problem, found, world_problems(alternative, world))


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, init = Path(next(iter(mega_trainer.config.__path__))), ConfigProblem.__init__
    reached: set[tuple[str, int]] = set()

    def noted(problem: ConfigProblem, *args: Any, **more: Any) -> None:
        frame = sys._getframe(1)
        reached.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        init(problem, *args, **more)

    monkeypatch.setattr(ConfigProblem, "__init__", noted)
    for overrides in CASES:
        list_problems(raw_run(overrides))
    for world, overrides in WORLD_CASES:
        world_problems(raw_run(overrides), world)
    missing = []
    # rules of transformers' modules need a model of theirs: tests/trainer/model/test_transformers_decoder.py has their cases
    for path in sorted({*folder.glob("*.py")} - {folder / "transformers_rules.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigProblem":
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if not any((path.name, line) in reached for line in lines):
                    missing.append(f"{path.name}:{node.lineno}")
    assert not missing


def test_a_preset_and_a_folder_conflict() -> None:
    with pytest.raises(ConfigError, match=r"model\.preset conflicts with model\.from"):
        resolve_run_config({"model": {"preset": "llama3-8b", "from": "folder"}})


ODD_VALUES: list[Any] = [
    None, True, -1, 0, 2.5, 10**30, "abc", "", "a" * 300, [], {}, [1, 2], {"a": 1}, ["a"], [None], float("nan"), float("inf"), "\0",
]  # fmt: skip


def iterate_key_paths(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted path of each key of run.yaml, from its JSON schema."""
    for key, value in schema.get("properties", {}).items():
        yield f"{path}{key}"
        for choice in (value, *value.get("anyOf", ())):
            name = choice.get("$ref", "").rpartition("/")[2]
            if name and path.count(".") < 3:
                yield from iterate_key_paths(definitions[name], definitions, f"{path}{key}.")


def test_an_odd_value_of_any_key_is_accepted_or_a_problem() -> None:
    """Every key of run.yaml has one of the odd values in turn; a problem never has a name of Python in its text."""
    schema = RunConfig.model_json_schema()
    paths = list(iterate_key_paths(schema, schema["$defs"]))
    assert len(paths) > 300
    messages: dict[str, str] = {}
    for number, path in enumerate(paths):
        raw = json.loads(json.dumps(BASE))
        *outer, key = path.split(".")
        section = functools.reduce(
            lambda node, name: node.setdefault(name, {}) if isinstance(node, dict) else {}, outer, raw
        )
        if isinstance(section, dict):
            section[key] = ODD_VALUES[number % len(ODD_VALUES)]
        try:
            RunConfig.parse(resolve_run_config(raw))
        except MegaError as error:
            messages[path] = str(error)
    python = re.compile(r"NoneType|nput should|object at 0x|Errno|Value error")
    assert not {path: message for path, message in messages.items() if python.search(message)}
    assert len(messages) > len(paths) / 2


@pytest.mark.parametrize("value", [True, 3, "abc", ["a"], [None]])
@pytest.mark.parametrize("kind", ["mixers", "feed_forwards"])
def test_blocks_of_extensions_must_be_a_section(kind: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"model.{kind}"):
        RunConfig.parse(resolve_run_config({**BASE, "model": {**BASE["model"], kind: value}}))


def test_the_fix_for_each_key_of_another_trainer_names_real_settings() -> None:
    fixes = RunConfig.load_foreign_keys()
    table = load_yaml_mapping(Path(mega_trainer.config.__file__).with_name("foreign_keys.yaml"))
    assert sum(len(keys.split()) for keys in table.values()) == len(fixes) > 300
    schema = RunConfig.model_json_schema()
    known = {"model.preset", "model.from", *iterate_key_paths(schema, schema["$defs"])}
    for key, fix in fixes.items():
        assert key == key.lower().replace("-", "_")
        assert key not in known - {"fp16", "fp8", "lora"}, f"{key} is a setting of run.yaml"
        named = re.findall(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+\b|\b[a-z_]+(?==)", fix) if " " in fix else [fix]
        assert named or fix.startswith("remove it") or "--from-deepspeed" in fix, fix
        assert {*named} <= known, fix
