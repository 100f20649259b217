"""Inference on several ranks; a server's garbage collections."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch.distributed as dist
from local_tasks import WORDS, write_model
from ranks import run_ranks
from serving import Scripted, service_of, serving
from tokenizers.processors import TemplateProcessing

from mega_ckpt.source import read_model_config
from mega_common.errors import ConfigError
from mega_data.tokenizer import train_tokenizer
from mega_eval.generate import Completion
from mega_eval.model_loading import load_inference_model, load_tokenizer
from mega_eval.multi_rank_inference import (
    ModelReplicas,
    PromptTokenizer,
    ReplicaLayout,
    build_replica_groups,
)
from mega_eval.sampling import Sampling
from mega_eval.score import ContextContinuation, Score
from mega_eval.text_stream import GenerationLimits


@pytest.mark.usefixtures("no_excluded_objects")
def test_a_server_excludes_the_objects_of_its_start(tmp_path: Path) -> None:
    train_tokenizer(["a b"], 260, tmp_path)
    with serving(service_of(Scripted(), tmp_path)):
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


PROMPTS = ["the cat", "a dog ran to", "the end of the story", "one", "in one long day the dog sat on a mat and"]


def pairs() -> list[ContextContinuation]:
    rng = random.Random(0)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(len(WORDS)) for _ in range(rng.randint(low, high))]

    questions = [some(1, 40) for _ in range(12)]
    return [(question, some(1, 8)) for question in questions for _ in range(3)]


def work(replicas: ModelReplicas) -> tuple[dict[int, Score], list[list[Completion]]]:
    """What a first rank may ask of all."""
    drawn = Sampling(temperature=1.0, seed=3)
    texts = [replicas.generate_completions(PROMPTS, 20, GenerationLimits(6), how) for how in (Sampling(), drawn)]
    return dict(replicas.score_pairs(pairs())), texts


def on_a_rank(folder: Path, layouts: list[ReplicaLayout]) -> list[object]:
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for sharing in layouts:
        model = load_inference_model(
            folder, groups=build_replica_groups(read_model_config(folder), rank, world, sharing)
        )
        replicas = ModelReplicas(model, PromptTokenizer(load_tokenizer(folder)), 4, rank, world, sharing)
        if rank:
            replicas.repeat_rank_zero_calls()
        else:
            found.append(work(replicas))
            replicas.stop_followers()
    return found


@pytest.mark.parametrize(
    ("name", "family", "layouts"),  # ranks that share weights, experts, layers; of 8
    [
        ("grouped", "llama", [ReplicaLayout(), ReplicaLayout(tp=4), ReplicaLayout(pp=2), ReplicaLayout(tp=2, pp=2)]),
        ("moe", "mixtral", [ReplicaLayout(tp=4, ep=2), ReplicaLayout(ep=2), ReplicaLayout(ep=2, pp=2)]),
    ],
)
def test_eight_ranks_in_any_layout_give_what_one_gives(
    tmp_path: Path, name: str, family: str, layouts: list[ReplicaLayout]
) -> None:
    write_model(tmp_path, name, family)
    scores, texts = work(ModelReplicas(load_inference_model(tmp_path), PromptTokenizer(load_tokenizer(tmp_path)), 4))
    assert len(scores) == 36
    found = run_ranks(on_a_rank, 8, tmp_path, layouts)[0]
    assert len(found) == len(layouts)
    for other_scores, other_texts in found:
        assert other_texts == texts
        assert other_scores.keys() == scores.keys()
        for number, one in scores.items():
            assert other_scores[number].logprobs == pytest.approx(one.logprobs, rel=1e-5, abs=1e-5)
            assert other_scores[number].greedy == one.greedy


def test_degrees_that_a_model_does_not_allow(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match="tp = 3"):
        build_replica_groups(read_model_config(tmp_path), 0, 3, ReplicaLayout(tp=3))
    with pytest.raises(ConfigError, match="ep = 2"):
        build_replica_groups(read_model_config(tmp_path), 0, 2, ReplicaLayout(ep=2))
    with pytest.raises(ConfigError, match=r"pp = 64 must be at most the number of layers of the model, 2"):
        build_replica_groups(read_model_config(tmp_path), 0, 64, ReplicaLayout(pp=64))


def test_a_text_that_spells_its_first_token_gets_no_second(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    tokenizer.backend.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    plain = tokenizer.encode("the cat")
    text = PromptTokenizer(tokenizer)
    assert text.encode("the cat") == text.encode("<|endoftext|>the cat") == [0, *plain]
    assert text.encode("the cat", add_special_tokens=False) == plain
    assert PromptTokenizer(tokenizer, longest=1).encode("the cat") == plain[-1:]
