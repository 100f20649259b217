"""Section `objective:` of run.yaml. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from mega_common.strict_config import ConfigProblem, StrictConfig

REFERENCE = ("reference", "reference_model", "ask_only")
# What each kind reads, beside its name.
USED: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "dpo": ("beta", "label_smoothing", *REFERENCE),
    "ipo": ("beta", *REFERENCE),
    "kto": ("beta", "desirable_weight", "undesirable_weight", *REFERENCE),
    "simpo": ("beta", "gamma", "label_smoothing"),
    "reward": ("margin", "center"),
    "distill": ("teacher", "teacher_logits", "top_k", "temperature", "cache", "ask_only"),
}  # fmt: skip
BETAS = {"simpo": 2.0}


class ObjectiveConfig(StrictConfig):
    """Training objective of a run: mean cross entropy of next tokens, a loss of preference pairs, or distillation."""

    kind: Literal["cross_entropy", "dpo", "ipo", "kto", "simpo", "reward", "distill"] = Field(
        "cross_entropy",
        description="cross_entropy: of the next tokens; of preference pairs (data.kind: pairs): dpo (arXiv:2305.18290), ipo "
        "(arXiv:2310.12036, of means over tokens), kto (arXiv:2402.01306), simpo (arXiv:2405.14734); and, for model.score: true, "
        "reward (Bradley and Terry 1952, arXiv:2203.02155); distill: the divergence from a teacher's next tokens "
        "(arXiv:1503.02531)",
    )
    beta: float | None = Field(
        None, gt=0, description="how far the model may go from the reference; default: 0.1, of simpo 2"
    )
    gamma: float = Field(1.0, ge=0, description="of simpo: the margin that is asked for")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="of dpo and simpo: share of pairs that are the wrong way round"
    )
    desirable_weight: float = Field(1.0, gt=0, description="of kto: weight of the chosen answers")
    undesirable_weight: float = Field(1.0, gt=0, description="of kto: weight of the rejected answers")
    margin: float = Field(0.0, ge=0, description="of reward: by which the chosen answer's is to be larger")
    center: float = Field(
        0.0,
        ge=0,
        description="of reward: weight of the squared sum of a pair's, which keeps them around 0 (arXiv:2312.09244)",
    )
    reference: Literal["cached", "live"] = Field(
        "cached",
        description="where the reference model's log-probabilities come from. cached: it tells all of them before training, into "
        "files of `output`/reference; live: it stays in memory, and tells those of each step",
    )
    reference_model: str | None = Field(
        None, description="the reference model: a checkpoint, HuggingFace folder or GGUF file; default: init_from"
    )

    teacher: str | None = Field(
        None,
        description="of distill: the model to learn from, with the same vocabulary; a checkpoint, HuggingFace folder or GGUF",
    )
    teacher_logits: Literal["cached", "live"] = Field(
        "cached", description="of distill: the teacher is asked before training, into files, or stays in memory"
    )
    top_k: PositiveInt = Field(64, description="of distill: likeliest tokens that the teacher tells at each place")
    temperature: float = Field(1.0, gt=0, description="of distill: logits of both are divided by it")
    cache: str | None = Field(
        None,
        description="of distill: a folder for what the teacher tells, which runs may share; default: `output`/teacher",
    )

    ask_only: bool = Field(
        False,
        description="end once the reference model or teacher has told all samples into its files; nothing is trained",
    )

    @property
    def is_pairwise(self) -> bool:
        """True if the objective compares the answers of preference pairs."""
        return self.kind not in ("cross_entropy", "distill")

    @property
    def needs_reference(self) -> bool:
        """True if the objective compares with a reference model."""
        return "reference" in USED[self.kind]

    @property
    def effective_beta(self) -> float:
        """Beta, or its default for this kind."""
        return self.beta or BETAS.get(self.kind, 0.1)

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield settings that the kind does not use."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "kind" and name not in USED[self.kind] and value != field.default:
                readers = " and ".join(kind for kind, used in USED.items() if name in used)
                yield ConfigProblem(name, f"is read by kind {readers}, not by {self.kind}", value, "leave it out")
        if self.ask_only and "live" in (self.reference, self.teacher_logits):
            yield ConfigProblem(
                "ask_only", "fills files, and live has none", True, "reference or teacher_logits: cached"
            )
