"""All layouts against one process, and docs/parity.md: `make parity`; with a number, so many of them, and no page.

Verdicts are kept in build/parity.jsonl as long as no source changes: what was killed goes on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from parity.cases import MODELS, RANKS, WITH_CONTEXT, all_layouts, covering
from parity.journal import Journal

from mega_common.atomic_files import open_atomic_file
from mega_common.progress_logging import ProgressBar
from mega_trainer.verify.case_comparison import TOLERANCE, CaseVerdict
from mega_trainer.verify.layout_case import LayoutCase
from mega_trainer.verify.local_examination import verify_layout_cases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
SMALLEST = 1e-11  # errors below it are rounding, which differs from machine to machine

INTRODUCTION = """\
# Any layout computes what one process computes

Written by `make parity`; do not edit. {models} models train in every combination of tensor parallelism (tp),
sequence parallelism (sp), pipeline parallelism (pp) under each schedule (1F1B, ZB-H1, ZBV, DualPipeV), interleaved stages (vp), data
parallelism (dp) and ZeRO (at level 3 also with several copies of the weights), {context} of them also with context
parallelism of each kind (cp), {experts} with expert parallelism (ep), experts split as well (expert-tp), half of these with the exchange beside another pass (overlap), on up to {ranks}
ranks, in fp64 on gloo, with uneven documents and loss masks: three steps, or one where there are both cp and experts or many delta nets.
Recomputation, uneven pipelines, micro-batch and bucket sizes, AdamW and Muon are drawn for each. Loss, gradient norm,
every gradient after the clip, every weight and every optimizer moment are held against one process: the largest
difference, relative to the largest element of each tensor, must be below {tolerance:g}.

- `dense`: RMSNorm, SwiGLU, rope
- `tied`: tied embeddings, LayerNorm, GELU, learned positions, biases, three dropouts, a vocabulary of 59
- `gqa`: fewer key/value heads than tensor ranks, query-key norm, a sliding window, a vocabulary of 61
- `gemma`: norms before and after, zero-centred; soft caps, sinks, bounded SwiGLU, scaled tied embeddings, a window and
  a rotation of its own in every layer but one, a vocabulary of 53
- `mla`: latent attention, of queries too or tied embeddings; one or two layers that predict further tokens
- `long`: grouped key/value heads, one layer with a sliding window and one without, soft-capped scores, two dropouts
- `moe`: a dense layer, then layers of eight experts of which a token takes two, and one that all take behind a gate;
  grouped heads, biases, a router's two losses, a bias of the choice that follows the load
- `deepseek`: `mla` with such experts, by sigmoid scores and within groups of them
- `hybrid`: layers of Mamba-1 and 2, gated delta nets, Kimi Delta Attention, lightning attention, short convolutions, attention,
  dense and expert feed-forwards, or of some of these; groups and key heads fewer than tensor ranks, states passed or heads exchanged over context ranks, experts in a latent space
- `vision`: a vision tower (as CLIP's, SigLIP's, Qwen2.5-VL's or Qwen3-VL's), frozen or not, and a projector, whole on ranks that share the images,
  in tiles, whole, or of any shape
- `retro`: a decoder that attends to retrieved neighbors by chunks, with their encoder; some chunks without any

{count} layouts. The table has a row for each set of dimensions larger than one; errors are rounded up to a power of ten.

| dimensions | layouts | largest error |
|---|---|---|
"""


def main() -> int:
    """Run the layouts, write the page if they are all; 1 when a layout disagrees."""
    cases, few = all_layouts(), sys.argv[1:]
    cases = covering(cases, int(few[0])) if few else cases
    journal = Journal(ROOT / "build" / "parity.jsonl", [ROOT / "packages", ROOT / "tests" / "parity"])
    rest = [case for case in cases if case not in journal]
    print(f"{len(cases)} layouts, of which {len(cases) - len(rest)} are known")
    with ProgressBar("parity", total=len(rest), unit="layouts", every=5) as bar:
        for verdict in verify_layout_cases(rest):
            journal.add([verdict])
            bar.advance(1)
    results = [journal.verdict(case) for case in cases]
    problems = [problem for result in results if (problem := result.describe_problem(TOLERANCE))]
    print("\n".join(problems) or f"{len(cases)} layouts agree with one process to {TOLERANCE:g}")
    if not problems and not few:
        with open_atomic_file(PAGE, text=True) as stream:
            stream.write(page(results))
    return 1 if problems else 0


def page(results: Sequence[CaseVerdict]) -> str:
    """docs/parity.md."""
    rows: dict[str, list[CaseVerdict]] = {}
    for result in results:
        rows.setdefault(dimensions(result.case), []).append(result)
    head = INTRODUCTION.format(
        ranks=RANKS, tolerance=TOLERANCE, count=len(results), models=len(MODELS), context=len(WITH_CONTEXT),
        experts=sum("moe" in fields for fields in MODELS.values()),
    )  # fmt: skip
    return head + "".join(
        f"| {name} | {len(held)} | {bound(max(max(one.errors.values()) for one in held))} |\n"
        for name, held in sorted(rows.items(), key=lambda row: (row[0].count("+"), row[0]))
    )


def dimensions(case: LayoutCase) -> str:
    """The dimensions in which a case is larger than one process: `tp + sp + dp + zero-1`."""
    layout = case.layout
    names = {
        "tp": layout["tp"] > 1, "sp": layout["sp"], "pp": layout["pp"] > 1,
        "vp": layout["virtual_stages"] > 1 and layout["schedule"] == "1f1b",
        layout["schedule"]: layout["schedule"] != "1f1b", f"cp {layout.get('cp_kind')}": layout["cp"] > 1,
        "dp": layout["dp"] > 1, f"zero-{layout['zero']}": layout["zero"] > 0 and layout["dp"] * layout["cp"] > 1,
        "ep": layout["ep"] > 1, "expert-tp": layout["expert_tp"] > 1, "copies": "zero3_shard" in layout,
        "overlap": layout.get("overlap_expert_exchange", False),
    }  # fmt: skip
    return " + ".join(name for name, used in names.items() if used) or "one process"


def bound(error: float) -> str:
    """The power of ten above an error, so that the page changes only when results do."""
    return f"1e{math.ceil(math.log10(max(error, SMALLEST)))}"


if __name__ == "__main__":
    sys.exit(main())
