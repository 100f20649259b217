"""Distribution of the layers over pipeline stages."""

from __future__ import annotations

import re

from mega_cli.megatron_args.hybrid_layers import PATTERNS, hybrid_pattern
from mega_cli.megatron_args.run_draft import RunDraft
from mega_cli.megatron_args.shell_words import MARK, format_unknown_marks

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
VIRTUAL = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
LAYOUT = "pipeline_model_parallel_layout"


def write_pipeline_layout(draft: RunDraft) -> None:
    """Write `parallel.virtual_stages` and `parallel.pipeline_layout` to run.yaml, if Megatron-LM flags give them."""
    layers, pp = draft.run["model"]["num_layers"], draft["pipeline_model_parallel_size"]
    if pp == 1:
        return
    if not layers or not pp or any(draft.is_unknown(dest) for dest in (FIRST, LAST, *VIRTUAL)):
        _open(draft)
        return
    if draft[LAYOUT]:
        _explicit(draft, pp, layers)
        return
    pattern = hybrid_pattern(draft)
    if pattern and len(pattern.stages) > 1:
        _group_stages(draft, list(pattern.stages), pp, layers, *PATTERNS)
        return
    virtual = draft[VIRTUAL[0]] or 1
    if per_stage := draft[VIRTUAL[1]]:
        virtual = (layers + draft[EMBEDDING] + draft[LOSS]) // pp // per_stage
    if virtual > 1:
        draft.set_key("parallel.virtual_stages", virtual, *VIRTUAL)
    if any(draft[name] for name in (FIRST, LAST, EMBEDDING, LOSS)):
        layout = layers_per_stage(
            layers, pp, virtual, first=draft[FIRST], last=draft[LAST], embedding=draft[EMBEDDING], loss=draft[LOSS]
        )
        _put_layout(draft, layout, layers, FIRST, LAST, EMBEDDING, LOSS)


def _open(draft: RunDraft) -> None:
    ask = "follows from the numbers of layers and of pipeline ranks"
    for key, dests in (("virtual_stages", VIRTUAL), ("pipeline_layout", (FIRST, LAST, EMBEDDING, LOSS, LAYOUT))):
        if any(dest in draft for dest in dests):
            draft.set_key(f"parallel.{key}", None, *dests, ask=ask)


def layers_per_stage(
    layers: int, pp: int, virtual: int, *, first: int | None, last: int | None, embedding: bool, loss: bool
) -> list[int]:
    """Return the number of decoder layers of each of pp x virtual pipeline stages by Megatron's rules; stage s belongs
    to rank s % pp.

    `first` and `last` are the layers of the first and the last rank; the others are distributed evenly. Without them, all
    stages are even, with `embedding` and `loss` counted as one layer each.
    """
    if first is None and last is None:
        counts = [(layers + embedding + loss) // (pp * virtual)] * (pp * virtual)
        counts[0] -= embedding
        counts[-1] -= loss
        return counts
    between = pp - (first is not None) - (last is not None)
    ranks = [(layers - (first or 0) - (last or 0)) // max(1, between)] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return [count // virtual for _ in range(virtual) for count in ranks]


def parse_layout_string(text: str) -> list[int]:
    """Return the number of decoder layers of each stage in a Megatron layout such as `Ett|(tt|)*6t|L`: `t` is a layer,
    `|` ends a stage, `*` repeats.
    """
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return [stage.count("t") for stage in text.split("|")]


def _explicit(draft: RunDraft, pp: int, layers: int) -> None:
    if MARK.search(draft[LAYOUT]):
        draft.set_key("parallel.pipeline_layout", None, LAYOUT, instead=format_unknown_marks(draft[LAYOUT]))
        return
    _group_stages(draft, parse_layout_string(draft[LAYOUT]), pp, layers, LAYOUT)


def _group_stages(draft: RunDraft, layout: list[int], pp: int, layers: int, *flags: str) -> None:
    """Write an explicit layout; its number of stages is a multiple of the pipeline ranks."""
    if len(layout) % pp == 0 and len(layout) > pp:
        draft.set_key("parallel.virtual_stages", len(layout) // pp, *flags)
    _put_layout(draft, layout, layers, *flags)


def _put_layout(draft: RunDraft, layout: list[int], layers: int, *flags: str) -> None:
    if min(layout) < 0 or 0 in layout[1:-1] or sum(layout) != layers:
        draft.add_note(
            "no equivalent",
            f"stages of {layout} layers are not supported; mega distributes the {layers} layers evenly",
            *flags,
        )
    else:
        draft.set_key("parallel.pipeline_layout", layout, *flags)
