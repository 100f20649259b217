"""A small loop of reinforcement learning: sample, reward, step, hand on the weights.

    torchrun --nproc-per-node 2 loop.py [--tp 2] [--steps 30]

The policy is a tiny model, the reward is the share of even tokens in what it samples, and the rollout is transformers, which
stands for vLLM or SGLang: it gets its weights as they would, by name, after each step. Group-relative advantages with a clipped
ratio (GRPO, arXiv:2402.03300).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from worker import EngineWorker

VOCABULARY, PROMPT, LENGTH, GROUP, CLIP = 32, [1, 2, 3], 12, 16, 0.2
MODEL = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": VOCABULARY, "max_position": 64,
}  # fmt: skip


class Rollout:
    """Generates with the weights that it was handed."""

    def __init__(self) -> None:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config).eval()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take new ones."""
        self.model.load_state_dict(weights, strict=True)

    @torch.no_grad()
    def sample(self, seed: int) -> list[list[int]]:
        """A group of continuations of the prompt, the prompt in front."""
        torch.manual_seed(seed)
        prompts = torch.tensor([PROMPT] * GROUP)
        how = {"do_sample": True, "max_new_tokens": LENGTH, "top_k": 0}
        found: list[list[int]] = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **how).tolist()
        return found

    @torch.no_grad()
    def log_probs(self, sequences: list[list[int]]) -> Tensor:
        """Of all tokens but the first, [N, L - 1]."""
        tokens = torch.tensor(sequences)
        told = self.model(tokens).logits[:, :-1].log_softmax(-1)
        return told.gather(-1, tokens[:, 1:, None])[..., 0]


def policy_loss(new: list[Tensor], old: list[Tensor], advantages: Tensor) -> Tensor:
    """The clipped ratio, over the tokens behind the prompt."""
    begin = len(PROMPT) - 1
    terms = []
    for told, before, advantage in zip(new, old, advantages, strict=True):
        ratio = (told[begin:] - before[begin:]).exp()
        terms.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
    return torch.stack(terms).mean()


def main() -> None:
    """Train, and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    worker = EngineWorker({
        "model": MODEL, "parallel": {"tp": args.tp}, "batch": {"micro": 2}, "data": {"seq_length": 64},
        "precision": "fp32", "optimizer": {"lr": 0.01, "weight_decay": 0.0},
    })  # fmt: skip
    worker.initialize()
    rollout = Rollout()
    for step in range(args.steps + 1):
        rollout.load_weights({name: tensor.clone() for name, tensor in worker.get_per_tensor_param()})
        worker.to("cpu")  # a GPU's memory is the rollout's meanwhile
        sequences = rollout.sample(seed=step)  # every rank draws the same
        worker.to("device")
        rewards = torch.tensor([sum(token % 2 == 0 for token in one[len(PROMPT) :]) / LENGTH for one in sequences])
        old = worker.forward_backward_batch(sequences, None, forward_only=True)
        apart = (torch.stack(old) - rollout.log_probs(sequences)).abs().max().item()
        if worker.rank == 0:
            print(f"step {step}: reward {rewards.mean():.3f}, trainer and rollout differ by {apart:.1e}", flush=True)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        worker.forward_backward_batch(sequences, lambda new: policy_loss(new, old, advantages))  # noqa: B023 called at once
        worker.optimizer_step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
