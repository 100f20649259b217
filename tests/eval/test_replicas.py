from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch.distributed as dist
from local_tasks import WORDS, write_model
from ranks import run_ranks
from tokenizers.processors import TemplateProcessing

from mega_ckpt.source import model_at
from mega_common.errors import ConfigError
from mega_eval.generate import Completion
from mega_eval.load import load_model, load_tokenizer
from mega_eval.replicas import Prompts, Replicas, Sharing, connect
from mega_eval.sampling import Sampling
from mega_eval.score import Pair, Score
from mega_eval.text import Limits

PROMPTS = ["the cat", "a dog ran to", "the end of the story", "one", "in one long day the dog sat on a mat and"]


def pairs() -> list[Pair]:
    rng = random.Random(0)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(len(WORDS)) for _ in range(rng.randint(low, high))]

    questions = [some(1, 40) for _ in range(12)]
    return [(question, some(1, 8)) for question in questions for _ in range(3)]


def work(replicas: Replicas) -> tuple[dict[int, Score], list[list[Completion]]]:
    """What a first rank may ask of all."""
    drawn = Sampling(temperature=1.0, seed=3)
    texts = [replicas.generate(PROMPTS, 20, Limits(6), how) for how in (Sampling(), drawn)]
    return dict(replicas.score(pairs())), texts


def on_a_rank(folder: Path, layouts: list[Sharing]) -> list[object]:
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    for sharing in layouts:
        model = load_model(folder, groups=connect(model_at(folder), rank, world, sharing))
        replicas = Replicas(model, Prompts(load_tokenizer(folder)), 4, rank, world, sharing)
        if rank:
            replicas.follow()
        else:
            found.append(work(replicas))
            replicas.close()
    return found


@pytest.mark.parametrize(
    ("name", "family", "layouts"),  # ranks that share weights, experts, layers; of 8
    [
        ("grouped", "llama", [Sharing(), Sharing(tp=4), Sharing(pp=2), Sharing(tp=2, pp=2)]),
        ("moe", "mixtral", [Sharing(tp=4, ep=2), Sharing(ep=2), Sharing(ep=2, pp=2)]),
    ],
)
def test_eight_ranks_in_any_layout_give_what_one_gives(
    tmp_path: Path, name: str, family: str, layouts: list[Sharing]
) -> None:
    write_model(tmp_path, name, family)
    scores, texts = work(Replicas(load_model(tmp_path), Prompts(load_tokenizer(tmp_path)), 4))
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
        connect(model_at(tmp_path), 0, 3, Sharing(tp=3))
    with pytest.raises(ConfigError, match="ep = 2"):
        connect(model_at(tmp_path), 0, 2, Sharing(ep=2))
    with pytest.raises(ConfigError, match=r"pp = 64: this model has 2 layers"):
        connect(model_at(tmp_path), 0, 64, Sharing(pp=64))


def test_a_text_that_spells_its_first_token_gets_no_second(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    tokenizer.backend.post_processor = TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    plain = tokenizer.encode("the cat")
    text = Prompts(tokenizer)
    assert text.encode("the cat") == text.encode("<|endoftext|>the cat") == [0, *plain]
    assert text.encode("the cat", add_special_tokens=False) == plain
    assert Prompts(tokenizer, longest=1).encode("the cat") == plain[-1:]
