"""Section `objective:` of run.yaml. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from mega_common.model_config import ModelConfig
from mega_common.strict_config import ConfigProblem, ExtensionName, StrictConfig
from mega_data.data_config import DataConfig
from mega_trainer.config.batch_size import BatchConfig
from mega_trainer.config.sections import TrainConfig

PolicyVariant = Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo"]
LabelLoss = Literal["cross_entropy", "mse", "bce"]
LossNormalization = Literal["sequence", "token", "constant", "sum"]

ObjectiveKind = Literal[
    "cross_entropy", "dpo", "ipo", "kto", "simpo", "reward", "distill", "grpo", "classify", "contrastive"
]
REFERENCE = ("reference", "reference_model", "ask_only")
# Settings that each kind uses.
USED: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "dpo": ("beta", "label_smoothing", *REFERENCE),
    "ipo": ("beta", *REFERENCE),
    "kto": ("beta", "desirable_weight", "undesirable_weight", *REFERENCE),
    "simpo": ("beta", "gamma", "label_smoothing"),
    "reward": ("margin", "center"),
    "distill": ("teacher", "teacher_logits", "top_k", "temperature", "cache", "ask_only"),
    "grpo": (
        "variant", "rewards", "reward_model", "reward_timeout", "reward_workers", "group_size", "max_new_tokens", "rollout_steps", "clip", "kl",
        "normalization", "mask_truncated", "resample", "reference_model",
    ),
    "classify": ("loss",),
    "contrastive": ("temperature", "dimensions"),
}  # fmt: skip
BETAS = {"simpo": 2.0}
# Clip and normalization of the loss in the paper of each variant.
VARIANTS: dict[PolicyVariant, tuple[tuple[float, float], LossNormalization]] = {
    "grpo": ((0.2, 0.2), "sequence"),
    "dr_grpo": ((0.2, 0.2), "constant"),
    "dapo": ((0.2, 0.28), "token"),
    "gspo": ((3e-4, 4e-4), "sequence"),
    "rloo": ((0.2, 0.2), "sum"),  # without a ratio to clip
}


class ObjectiveConfig(StrictConfig):
    """Training objective of a run and its settings.
    The objective is the mean cross entropy of next tokens, a loss on preference pairs, distillation from a teacher, or
    reinforcement learning on sampled answers.
    """

    kind: ObjectiveKind | ExtensionName = Field(
        "cross_entropy",
        description="cross_entropy: of the next tokens; on preference pairs (data.kind: pairs): dpo (arXiv:2305.18290), ipo "
        "(arXiv:2310.12036, of means over tokens), kto (arXiv:2402.01306), simpo (arXiv:2405.14734); and, for model.score: true, "
        "reward (Bradley and Terry 1952, arXiv:2203.02155); distill: the divergence from a teacher's next tokens "
        "(arXiv:1503.02531); grpo: policy gradient on groups of sampled answers (data.kind: prompts); for model.task_head: classify: labels of "
        "texts or tokens (data.kind: labels or token_labels); contrastive: text embeddings by InfoNCE (arXiv:1807.03748, "
        "data.kind: groups); or an objective of an extension",
    )
    options: dict[str, Any] = Field({}, description="settings of an extension's objective")
    beta: float | None = Field(
        None, gt=0, description="strength of the penalty for leaving the reference; default: 0.1, for simpo 2"
    )
    gamma: float = Field(1.0, ge=0, description="simpo: target reward margin")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="dpo and simpo: assumed share of swapped pairs")
    desirable_weight: float = Field(1.0, gt=0, description="kto: weight of the chosen answers")
    undesirable_weight: float = Field(1.0, gt=0, description="kto: weight of the rejected answers")
    margin: float = Field(
        0.0, ge=0, description="reward: margin by which the score of the chosen answer is to be larger"
    )
    center: float = Field(
        0.0,
        ge=0,
        description="reward: weight of the squared sum of a pair's scores, which keeps them around 0 (arXiv:2312.09244)",
    )
    reference: Literal["cached", "live"] = Field(
        "cached",
        description="source of the reference model's log-probabilities. cached: computed before training, into files of "
        "`output`/reference; live: the model stays in memory and runs in each step",
    )
    reference_model: str | None = Field(
        None, description="the reference model: a checkpoint, HuggingFace folder or GGUF file; default: init_from"
    )

    teacher: str | None = Field(
        None,
        description="distill: the model to learn from, with the same vocabulary: a checkpoint, HuggingFace folder or GGUF file",
    )
    teacher_logits: Literal["cached", "live"] = Field(
        "cached",
        description="distill: teacher outputs are computed before training, into files, or by a teacher in memory",
    )
    top_k: PositiveInt = Field(64, description="distill: number of most likely teacher tokens used at each position")
    temperature: float | None = Field(
        None,
        gt=0,
        description="distill: divides the logits of both models; contrastive: divides the cosines; default: 1, for "
        "contrastive 0.05",
    )
    dimensions: list[PositiveInt] = Field(
        [], description="contrastive: sizes of truncated vectors whose losses are added (Matryoshka, arXiv:2205.13147)"
    )
    loss: LabelLoss | None = Field(
        None,
        description="classify: cross_entropy of the classes; for one label: mse, squared error of a number; bce, binary cross "
        "entropy, for rerankers; default: mse for one label, else cross_entropy",
    )
    cache: str | None = Field(
        None,
        description="distill: folder of cached teacher outputs, which runs may share; default: `output`/teacher",
    )

    ask_only: bool = Field(
        False,
        description="end once the outputs of the reference model or teacher are cached for all samples; train nothing",
    )

    variant: PolicyVariant = Field(
        "grpo",
        description="grpo: arXiv:2402.03300 (kl is 0 by default); dr_grpo: arXiv:2503.20783; dapo: clip and normalization of "
        "arXiv:2503.14476; gspo: arXiv:2507.18071; rloo: arXiv:2402.14740",
    )
    rewards: str | None = Field(
        None,
        description="grpo: FILE.py:FUNCTION or, of an installed package, MODULE:FUNCTION; a function (prompt: str, answer: str, "
        "record: dict) -> float, which runs in a separate process",
    )
    reward_model: str | None = Field(
        None,
        description="grpo: in place of rewards, a model of objective.kind: reward with the same vocabulary, which scores the "
        "whole text: a checkpoint or HuggingFace folder",
    )
    reward_timeout: float = Field(
        10.0, gt=0, description="grpo: time limit of a call of the reward function in seconds; then the reward is 0"
    )
    reward_workers: PositiveInt = Field(
        1, description="grpo: processes that compute rewards at the same time, on rank 0"
    )
    group_size: Annotated[int, Field(ge=2)] = Field(8, description="grpo: answers sampled for each prompt")
    max_new_tokens: PositiveInt = Field(256, description="grpo: largest number of tokens of an answer")
    rollout_steps: PositiveInt = Field(
        1, description="grpo: optimizer steps on answers that are sampled together; later ones are off-policy"
    )
    clip: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]] | None = Field(
        None, description="grpo: bounds of the policy ratio below and above 1; default: those of the variant's paper"
    )
    kl: float = Field(
        0.0, ge=0, description="grpo: weight of the KL divergence from the reference model; 0: no reference"
    )
    normalization: LossNormalization | None = Field(
        None,
        description="grpo: of the loss. sequence: mean over answers of their means over tokens; token: mean over all tokens; "
        "constant: mean over answers of sums divided by max_new_tokens; sum: mean over answers of sums; default: the variant's",
    )
    mask_truncated: bool = Field(
        False, description="grpo: leave answers that reach max_new_tokens out of the loss (overlong filtering)"
    )

    resample: Annotated[int, Field(ge=0)] = Field(
        0,
        description="grpo: rounds in which groups of equal rewards are replaced by answers to other prompts (dynamic sampling "
        "of dapo); groups that are still equal are left out of the loss; 0: no replacement, and all groups count",
    )

    @property
    def policy_clip_range(self) -> tuple[float, float]:
        """Clip range of the policy loss: `clip`, or the default of the loss variant if `clip` is not set."""
        return self.clip or VARIANTS[self.variant][0]

    @property
    def effective_normalization(self) -> LossNormalization:
        """Normalization of the policy loss: `normalization`, or the default of the loss variant if not set."""
        return self.normalization or VARIANTS[self.variant][1]

    @property
    def uses_preference_pairs(self) -> bool:
        """True if the objective compares the chosen and the rejected answer of preference pairs."""
        return self.kind in ("dpo", "ipo", "kto", "simpo", "reward")

    @property
    def uses_reference_model(self) -> bool:
        """True if the objective compares the trained model with a frozen reference model."""
        return "reference" in USED.get(self.kind, ()) or self.kl > 0

    @property
    def effective_beta(self) -> float:
        """Factor beta of the preference loss: `beta`, or the default of the objective's kind if `beta` is not set."""
        return self.beta or BETAS.get(self.kind, 0.1)

    @property
    def effective_temperature(self) -> float:
        """Value of `temperature`, or the default for this kind of objective if it is not set."""
        return self.temperature or (0.05 if self.kind == "contrastive" else 1.0)

    def get_label_loss(self, labels: int) -> LabelLoss:
        """Return `loss`, or its default for a head with `labels` outputs: `mse` for one, else `cross_entropy`."""
        return self.loss or ("mse" if labels == 1 else "cross_entropy")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield `objective` settings that its kind does not use, and `ask_only` with a live reference or teacher."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in ("kind", "options", *USED.get(self.kind, ())) and value != field.default:
                readers = " and ".join(kind for kind, used in USED.items() if name in used)
                rule = f"has no effect with objective.kind = {self.kind} (used by {readers})"
                yield ConfigProblem(name, rule, value, f"remove objective.{name}")
        for name in ("reference", "teacher_logits"):
            if self.ask_only and getattr(self, name) == "live":
                rule = f"requires objective.{name} = cached, found live"
                yield ConfigProblem("ask_only", rule, True, f"set objective.{name}=cached")

    def find_run_problems(
        self, *, model: ModelConfig, data: DataConfig, train: TrainConfig, batch: BatchConfig, init_from: str | None
    ) -> Iterator[ConfigProblem]:
        """Yield conflicts of the training objective with other settings of a run.
        These are the model, the data, the `train` section and the initial weights.
        """
        kinds = " and ".join(sorted(data.dataset_kinds))
        if self.uses_preference_pairs and data.dataset_kinds != {"pairs"}:
            rule = f"requires preference pairs (data.kind = pairs), found {kinds}"
            yield ConfigProblem("objective.kind", rule, self.kind, "set data.kind=pairs")
        if not self.uses_preference_pairs and self.kind != "grpo" and "pairs" in data.dataset_kinds:
            rule = f"requires an objective on preference pairs, found objective.kind = {self.kind}"
            pairwise = "reward" if model.score else "dpo" if init_from else "simpo"
            hint = f"set objective.kind={pairwise}, or give texts and set data.kind=text"
            yield ConfigProblem("data.kind", rule, "pairs", hint)
        if self.kind != "grpo" and "prompts" in data.dataset_kinds:
            hint = "set objective.kind=grpo, or set data.kind=text"
            yield ConfigProblem("data.kind", "requires objective.kind = grpo", "prompts", hint)
        if self.kind == "grpo" and data.dataset_kinds != {"prompts"}:
            yield ConfigProblem("objective.kind", "requires data.kind = prompts", "grpo", "set data.kind=prompts")
        elif self.kind == "grpo":
            yield from self._policy_problems(model, data, train, batch)
        yield from self._task_problems(model, data)
        if self.kind == "distill":
            yield from self._teacher_problems(model, data)
        if self.kind == "reward" and not model.score:
            yield ConfigProblem("objective.kind", "requires model.score = true", "reward", "set model.score=true")
        if self.kind != "reward" and model.score:
            hint = "set objective.kind=reward and data.kind=pairs, or set model.score=false"
            yield ConfigProblem("objective.kind", "is not supported with model.score = true", self.kind, hint)
        if self.uses_reference_model and self.reference_model is None and init_from is None:
            hint = "set objective.reference_model=FOLDER, or set init_from=FOLDER"
            yield ConfigProblem("objective.kind", "requires a reference model", self.kind, hint)
        yield from self._rollback_problems(train)

    def _task_problems(self, model: ModelConfig, data: DataConfig) -> Iterator[ConfigProblem]:
        """Yield conflicts between the objective, the task head of the model and labeled data."""
        head, kinds = model.task_head, data.dataset_kinds
        data_kinds = {"sequence": "labels", "token": "token_labels", "embedding": "groups"}
        if head is None:
            if self.kind in ("classify", "contrastive"):
                level = "sequence" if self.kind == "classify" else "embedding"
                hint = f"set model.task_head.kind={level} and data.kind={data_kinds[level]}"
                yield ConfigProblem("objective.kind", "requires model.task_head", self.kind, hint)
            elif labeled := [level for level, name in data_kinds.items() if name in kinds]:
                kind = "contrastive" if labeled[0] == "embedding" else "classify"
                hint = f"set objective.kind={kind} and model.task_head.kind={labeled[0]}"
                rule = "requires objective.kind = classify or contrastive"
                yield ConfigProblem("data.kind", rule, data_kinds[labeled[0]], hint)
            return
        if parts := [
            name for name in ("encoder", "retro", "vision", "transformers") if getattr(model, name) is not None
        ]:
            yield ConfigProblem(
                "model.task_head", f"is not supported with model.{parts[0]}", hint="remove model.task_head"
            )
            return
        kind, wanted = "contrastive" if head.kind == "embedding" else "classify", data_kinds[head.kind]
        if self.kind != kind or kinds != {wanted}:
            path, value, found = "objective.kind", kind, self.kind
            if self.kind == kind:
                path, value, found = "data.kind", wanted, " and ".join(sorted(kinds))
            rule = f"must be {value} with model.task_head.kind = {head.kind}"
            yield ConfigProblem(path, rule, found, f"set objective.kind={kind} and data.kind={wanted}")
        if self.kind == "classify" and (self.get_label_loss(head.labels) == "cross_entropy") != (head.labels > 1):
            rule = f"requires {'several labels' if head.labels == 1 else 'model.task_head.labels = 1'}"
            yield ConfigProblem("objective.loss", rule, self.loss, "remove objective.loss")
        if head.kind == "token" and head.labels == 1:
            yield ConfigProblem(
                "model.task_head.labels", "must be at least 2 for tokens", 1, "set model.task_head.labels=2"
            )
        if too_large := [size for size in self.dimensions if size > model.hidden_size]:
            rule = f"must be at most model.hidden_size = {model.hidden_size}"
            yield ConfigProblem("objective.dimensions", rule, too_large, "remove objective.dimensions")

    def _teacher_problems(self, model: ModelConfig, data: DataConfig) -> Iterator[ConfigProblem]:
        """Yield a missing teacher, and models and data that have no next tokens to learn from."""
        if self.teacher is None:
            rule = "is required with objective.kind = distill"
            yield ConfigProblem("objective.teacher", rule, None, "set objective.teacher=FOLDER")
        if data.dataset_kinds & {"bert", "t5", "masked"} or not model.causal:
            rule = "requires a decoder and data of running text"
            yield ConfigProblem("objective.kind", rule, "distill", "set model.causal=true and data.kind=text")
        if self.top_k > model.vocab_size:
            rule = f"must be at most model.vocab_size = {model.vocab_size}"
            hint = f"set objective.top_k={model.vocab_size}"
            yield ConfigProblem("objective.top_k", rule, self.top_k, hint)

    def _policy_problems(
        self, model: ModelConfig, data: DataConfig, train: TrainConfig, batch: BatchConfig
    ) -> Iterator[ConfigProblem]:
        """Yield settings with which answers cannot be sampled, rewarded or grouped."""
        if self.rewards is not None and self.reward_model is not None:
            rule = "conflicts with objective.rewards"
            yield ConfigProblem("objective.reward_model", rule, self.reward_model, "remove objective.reward_model")
        if self.reward_model is None and not (self.rewards or "").rpartition(":")[0]:
            rule = "must be FILE.py:FUNCTION or MODULE:FUNCTION with objective.kind = grpo"
            yield ConfigProblem("objective.rewards", rule, self.rewards, "set objective.rewards=rewards.py:exact")
        if batch.global_ % self.group_size:
            rule = f"must be a multiple of objective.group_size = {self.group_size}"
            size = lcm(self.group_size, batch.micro)
            hint = f"set batch.global={-(-batch.global_ // size) * size}"
            yield ConfigProblem("batch.global", rule, batch.global_, hint)
        for key in ("rampup", "stages"):
            if getattr(batch, key):
                rule = "is not supported with objective.kind = grpo"
                yield ConfigProblem(f"batch.{key}", rule, hint=f"remove batch.{key}")
        if data.tokenizer is None:
            yield ConfigProblem(
                "data.tokenizer", "is required with data.kind = prompts", None, "set data.tokenizer=FOLDER"
            )
        if len(data.train) > 1 or data.train[0].is_glob or data.train[0].path.suffix != ".jsonl":
            rule = "must be one file of JSON lines with data.kind = prompts"
            yield ConfigProblem(
                "data.train", rule, [str(each.path) for each in data.train], "set data.train=FILE.jsonl"
            )
        if data.seq_length <= self.max_new_tokens:
            rule = f"must be larger than objective.max_new_tokens = {self.max_new_tokens}"
            yield ConfigProblem(
                "data.seq_length", rule, data.seq_length, f"set data.seq_length={2 * self.max_new_tokens}"
            )
        if model.vision is not None:
            yield ConfigProblem(
                "model.vision", "is not supported with objective.kind = grpo", hint="remove model.vision"
            )
        if train.eval_every:
            hint = "set train.eval_every=0, and run mega eval on the checkpoints"
            yield ConfigProblem("train.eval_every", "is not supported with data.kind = prompts", train.eval_every, hint)
        for key in ("on_nan", "on_spike"):
            if getattr(train, key) == "rollback":
                rule = "is not supported with objective.kind = grpo"
                yield ConfigProblem(f"train.{key}", rule, "rollback", f"set train.{key}=skip")
        if self.variant == "rloo":
            yield from self._rloo_problems()

    def _rloo_problems(self) -> Iterator[ConfigProblem]:
        """Yield settings of ratios and of the KL term, which the loss of RLOO does not have."""
        for key in ("rollout_steps", "clip", "kl"):
            if getattr(self, key) != type(self).model_fields[key].default:
                rule = "is not supported with objective.variant = rloo"
                yield ConfigProblem(f"objective.{key}", rule, getattr(self, key), f"remove objective.{key}")

    def _rollback_problems(self, train: TrainConfig) -> Iterator[ConfigProblem]:
        """Yield caches of a run's samples under a policy that replaces samples."""
        policies = [key for key in ("on_nan", "on_spike") if getattr(train, key) == "rollback"]
        used = {"reference": "reference" in USED.get(self.kind, ()), "teacher_logits": self.kind == "distill"}
        for key in (key for key in used if policies and used[key] and getattr(self, key) == "cached"):
            rule = f"is not supported with train.{policies[0]} = rollback, which reads samples outside of the cache"
            skip = " and ".join(f"train.{policy}=skip" for policy in policies)
            yield ConfigProblem(f"objective.{key}", rule, "cached", f"set objective.{key}=live, or set {skip}")
