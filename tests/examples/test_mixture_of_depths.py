"""The example of a mixture of depths: every layout computes what one process computes."""

from __future__ import annotations

from extension_cases import CONTEXT, LAYOUTS, extended_cases, find_differences


def test_every_layout_computes_what_one_process_computes() -> None:
    run = {"model": {"feed_forwards": {"depths": {"bias": 0.0}}, "layers": ["attention+depths", "attention+mlp"]}}
    assert not find_differences(extended_cases("mixture_of_depths.py", run, LAYOUTS + CONTEXT[:2]))
