"""Models that multiply in eight bits, or in four, in any layout.

But for the products everything is in fp64, so that what one layout computes in another way than one process shows: blocks
are the same in both, to the last digits; where scales are of tensors and rows, what leaves their range below is not.

`python tests/parity/eight_bits.py` holds every layout of up to four ranks against one process, by blocks of MXFP8;
`python tests/parity/eight_bits.py nvfp4` by those of NVFP4, which has no experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from parity.cases import layouts

from mega_common.progress_logging import ProgressBar
from mega_trainer.config.fp8_config import MULTIPLES
from mega_trainer.verify.case_comparison import TOLERANCE
from mega_trainer.verify.layout_case import LayoutCase
from mega_trainer.verify.local_examination import verify_layout_cases

RANKS = 4


def model(unit: int, layers: int = 2) -> dict[str, Any]:
    """A dense layer, then some of experts, of widths that four ranks can split into multiples of `unit`."""
    return {
        "num_layers": layers, "hidden_size": 2 * unit, "ffn_hidden_size": 4 * unit, "num_attention_heads": 4,
        "num_kv_heads": 4, "head_dim": unit, "vocab_size": 61, "init_std": 0.2, "qkv_bias": True,
        "moe": {
            "num_experts": 4, "top_k": 2, "ffn_hidden_size": 4 * unit, "shared_ffn_hidden_size": 4 * unit,
            "layers": list(range(1, layers)),
        },
    }  # fmt: skip


def latent(unit: int) -> dict[str, Any]:
    """The same with latent attention and a layer that predicts a further token."""
    fields = {name: value for name, value in model(unit).items() if name not in ("num_kv_heads", "head_dim")}
    half = unit // 2
    mla = {
        "q_lora_rank": unit,
        "kv_lora_rank": 2 * unit,
        "qk_nope_head_dim": half,
        "qk_rope_head_dim": half,
        "v_head_dim": unit,
    }
    further = {"mtp_layers": 1, "moe": {**fields["moe"], "layers": [1, 2]}, "rope": {"interleaved": True}}
    return {**fields, **further, "mla": mla}


def case(recipe: str, ranks: int, parallel: dict[str, Any], *, wide: bool = True, **more: Any) -> LayoutCase:
    """A step of four samples with the recipe."""
    unit = MULTIPLES[recipe]
    layers = max(2, parallel.get("pp", 1) * parallel.get("virtual_stages", 1))
    dp = ranks // (parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1))
    fields = {
        "micro": 1 if parallel.get("pp", 1) > 1 else 4 // dp,
        "batch": 4,
        "length": 8 * unit,
        "steps": 1,
        "fp8": {"recipe": recipe},
        **more,
    }
    whole = model(unit, layers)
    if recipe == "nvfp4":
        del whole["moe"]
    return LayoutCase(recipe, whole, ranks, parallel, precision="fp8", wide=wide, **fields)


def all_layouts(recipe: str) -> Sequence[LayoutCase]:
    """Every layout of up to four ranks."""
    kind = "dense" if recipe == "nvfp4" else "moe"
    return [
        case(recipe, ranks, one) for ranks in range(1, RANKS + 1) for one in layouts(kind, ranks) if _fits(ranks, one)
    ]


def _fits(ranks: int, parallel: dict[str, Any]) -> bool:
    return 4 % (ranks // (parallel["tp"] * parallel["pp"] * parallel.get("cp", 1))) == 0


def main(recipe: str = "mxfp8") -> int:
    """All of them; 1 when one disagrees."""
    cases, wrong, worst = all_layouts(recipe), list[str](), 0.0
    with ProgressBar("parity", total=len(cases), unit="layouts", every=5) as bar:
        for one in verify_layout_cases(cases):
            wrong += [problem] if (problem := one.describe_problem(TOLERANCE)) else []
            worst = max(worst, one.largest_error)
            bar.advance(1)
    print("\n".join(wrong) or f"in {recipe}, {len(cases)} layouts agree with one process to {TOLERANCE:g}: {worst:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
