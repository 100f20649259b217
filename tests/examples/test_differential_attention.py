"""The example of differential attention: every layout computes what one process computes."""

from __future__ import annotations

from extension_cases import CONTEXT, LAYOUTS, extended_cases, find_differences

FILE = "differential_attention.py"
RUN = {"model": {"mixers": {"differential": {}}, "layers": ["differential+mlp"]}}


def test_every_layout_computes_what_one_process_computes() -> None:
    assert not find_differences(extended_cases(FILE, RUN, LAYOUTS + CONTEXT))
