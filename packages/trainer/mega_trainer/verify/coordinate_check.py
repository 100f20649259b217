"""Coordinate check of muP (arXiv:2203.03466, appendix D.1): the size of a step's effect on activations, over widths.

A tiny model of the run's kind is trained a few steps on one batch of random tokens at several widths, by the trainer's own
optimizer, with muP and without. With muP the change of every activation is of the same size at every width; without it the
change grows with the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.pages.page_elements import LineSeries, PageSection, draw_line_figure, render_page, render_table
from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.failure_location import list_recorded_modules
from mega_trainer.verify.layout_case import LayoutCase

STEPS, SEEDS = 4, 2  # steps on one batch, and initial weights that the sizes are means over
HEAD_SIZE, MOST_LAYERS, VOCABULARY = 16, 4, 256
STEEPEST = 0.25  # largest exponent of the width in the change of the logits
LOGITS = "logits"


@dataclass(frozen=True)
class CoordinateCheck:
    """Coordinate check of muP: root mean square of each activation's change after some steps, at several widths.

    Attributes:
        base_width: width at which muP changes nothing.
        lr: learning rate.
        widths: hidden sizes.
        changes: sizes at each width, by (with muP, name of the activation), such as `model.layers.0.mlp`.
    """

    base_width: int
    lr: float
    widths: Sequence[int]
    changes: Mapping[tuple[bool, str], Sequence[float]]

    @property
    def names(self) -> list[str]:
        """Names of the activations in the order of the forward pass."""
        return [name for mup, name in self.changes if mup]

    def fit_exponent(self, name: str, *, mup: bool) -> float:
        """Return the exponent p for which the change grows as width^p, by least squares of the logarithms."""
        return float(np.polyfit(np.log(self.widths), np.log(self.changes[mup, name]), 1)[0])

    @property
    def problem(self) -> str:
        """Sentence about logits whose change depends on the width with muP, or ""."""
        exponent = self.fit_exponent(LOGITS, mup=True)
        if abs(exponent) <= STEEPEST:
            return ""
        return f"with muP the change of the logits is as width^{exponent:.2f}, whose exponent must be within {STEEPEST} of 0"

    def as_json(self) -> dict[str, Any]:
        """Return the widths, and the changes and exponents of each activation with muP and without."""
        found: dict[str, Any] = {
            "base_width": self.base_width,
            "lr": self.lr,
            "widths": list(self.widths),
            "steps": STEPS,
        }
        for mup in (True, False):
            found["mup" if mup else "standard"] = {
                name: {"change": list(self.changes[mup, name]), "exponent": self.fit_exponent(name, mup=mup)}
                for name in self.names
            }
        return found | {"problem": self.problem}

    def list_rows(self) -> list[tuple[str, ...]]:
        """Return the coordinate check as table rows: a head, then each activation with muP and without."""
        rows = [("activation", "scaling", *(f"{width:,}" for width in self.widths), "exponent")]
        for name in self.names:
            for mup in (True, False):
                sizes = (f"{size:.3g}" for size in self.changes[mup, name])
                rows.append((name, "muP" if mup else "standard", *sizes, f"{self.fit_exponent(name, mup=mup):+.2f}"))
        return rows

    def render_page(self, title: str) -> str:
        """Return an HTML page with the change of each activation against the width."""
        head, *rows = self.list_rows()
        tiles = [
            (f"exponent of the logits, {name}", f"{self.fit_exponent(LOGITS, mup=mup):+.2f}")
            for name, mup in (("muP", True), ("standard", False))
        ]
        figures = [self._draw(f"{name}: {text}", mup=mup) for mup, name, text in (
            (True, "With muP", "level lines: a step has the same effect at every width"),
            (False, "Without muP", "rising lines: the best learning rate falls with the width"),
        )]  # fmt: skip
        note = f"Root mean square of the change after {STEPS} steps on one batch, mean of {SEEDS} initial models."
        text = f"learning rate {self.lr:g}, base width {self.base_width:,}"
        sections = [
            PageSection("Change of activations against the width", figures, note),
            PageSection("Table", [render_table(head, rows, numbers=range(2, len(head)))]),
        ]
        return render_page(f"Coordinate check of muP: {title}", text, tiles, sections)

    def _draw(self, title: str, *, mup: bool) -> str:
        lines = [
            LineSeries(name, [(float(width), size) for width, size in zip(self.widths, self.changes[mup, name], strict=True)], index, marks=True)
            for index, name in enumerate(self.names)
        ]  # fmt: skip
        return draw_line_figure(title, lines, log_from=1)


def check_coordinates(
    config: RunConfig, widths: Sequence[int], advance: Callable[[str], None] = lambda what: None
) -> CoordinateCheck:
    """Return the coordinate check of a tiny model of the run's kind, trained at several widths with muP and without.

    Args:
        config: the run; the base width is that of `optimizer.mup`, or else the smallest of `widths`.
        widths: at least two hidden sizes, multiples of `HEAD_SIZE`.
        advance: called before each training with its description.

    Raises:
        ConfigError: for widths that cannot be used, or a model for which muP has no rule.
    """
    if len(set(widths)) < 2 or any(width < HEAD_SIZE or width % HEAD_SIZE for width in widths):
        raise ConfigError(
            f"--widths must be at least two different multiples of {HEAD_SIZE}, found {', '.join(map(str, widths))}",
            hint="--widths 64,128,256,512",
        )
    widths, mup = sorted(set(widths)), config.optimizer.mup
    base = widths[0] if mup is None else mup.base_width
    changes: dict[tuple[bool, str], list[float]] = {}
    for with_mup in (True, False):
        for width in widths:
            advance(f"width {width:,}, {'muP' if with_mup else 'standard'}")
            runs = [
                _measure_changes(_make_case(config, width, base if with_mup else None, seed)) for seed in range(SEEDS)
            ]
            for name in runs[0]:
                changes.setdefault((with_mup, name), []).append(sum(run[name] for run in runs) / len(runs))
    return CoordinateCheck(base, config.optimizer.lr, widths, changes)


def _make_case(config: RunConfig, width: int, base: int | None, seed: int) -> LayoutCase:
    """Return the case of a tiny model with a width, and the run's proportions, options and learning rate."""
    model, fields = config.model, config.model.model_dump(mode="json", exclude_unset=True)
    heads = width // HEAD_SIZE
    share = (model.num_kv_heads or model.num_attention_heads) / model.num_attention_heads
    shared = math.gcd(heads, max(1, round(heads * share)))
    fields |= {
        "hidden_size": width, "ffn_hidden_size": max(1, round(width * model.ffn_hidden_size / model.hidden_size)),
        "num_attention_heads": heads, "num_kv_heads": shared, "head_dim": None, "vocab_size": VOCABULARY,
        "num_layers": min(model.num_layers, MOST_LAYERS),
    }  # fmt: skip
    if "layers" in fields:
        fields["layers"] = fields["layers"][:MOST_LAYERS]
    fields.pop("logit_scale", None) if config.optimizer.mup else None
    optimizer = config.optimizer.model_dump(
        mode="json", exclude={"mup", "name", "offload", "decoupled_lr", "lr_factors"}
    )
    optimizer |= {"clip_grad": 0.0, "mup": None if base is None else {"base_width": base}}
    sections = {"optimizer": optimizer, "train": {"seed": seed}, "extensions": list(config.extensions)}
    return LayoutCase(
        f"width {width}",
        fields,
        optimizer=config.optimizer.name,
        precision="fp32",
        micro=4,
        batch=4,
        length=32,
        closed=False,
        sections=sections,
    )


def _measure_changes(case: LayoutCase) -> dict[str, float]:
    """Return the root mean square of the change of each activation by training on the batch of step 0, by its name."""
    trainer = CaseTrainer.build(case)
    before = _record_activations(trainer)
    for _ in range(STEPS):
        trainer.step(0, lr=case.config.optimizer.lr)
    after = _record_activations(trainer)
    return {name: max((after[name] - before[name]).square().mean().sqrt().item(), 1e-30) for name in before}


@torch.no_grad()
def _record_activations(trainer: CaseTrainer) -> dict[str, Tensor]:
    """Return the activations of the batch of step 0, by name, in the order of the forward pass."""
    (model,) = trainer.executor.stages.values()
    found: dict[str, Tensor] = {}
    handles = [module.register_forward_hook(_make_hook(found, name)) for name, module in _list_modules(model)]
    batch = trainer.make_micro_batches(0)[0][0]
    positions = torch.arange(batch.tokens.shape[1])[None]
    states = model(
        model.embed_inputs(batch.tokens, positions), model.make_forward_context(positions, tokens=batch.tokens)
    )
    for handle in handles:
        handle.remove()
    return {**found, LOGITS: model.compute_logits(states).double()}


def _list_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of embeddings and of the branches of each layer."""
    for name, layer, module in list_recorded_modules(model):
        if name == "model.embeddings" or (layer is not None and name != f"model.layers.{layer}"):
            yield name, module


def _make_hook(found: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        found[name] = output.detach().double().clone()

    return hook
