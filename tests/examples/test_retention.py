"""The example of retention: its recurrence, and the same steps in every layout."""

from __future__ import annotations

from functools import partial

import torch
from extension_cases import CONTEXT, EXAMPLES, LAYOUTS, SIZES, extended_cases, find_differences

from mega_trainer.config.extensions import load_extensions
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parallel_linear import ALONE
from mega_trainer.parallel.recurrent_state import pass_recurrent_states

FILE = "retention.py"
MIXERS = {"retention": {"heads": 8, "key_size": 3, "value_size": 5, "chunk_size": 4, "conv_kernel": 2}}


def test_the_chunks_compute_the_recurrence() -> None:
    registry = load_extensions([str(EXAMPLES / FILE)])
    model = {**SIZES, "mixers": MIXERS, "layers": ["retention+mlp"]}
    raw = {"extensions": [str(EXAMPLES / FILE)], "model": model, "data": {"train": "none"}}
    config = RunConfig.parse(resolve_run_config(raw)).model
    layer = registry.make_block_factories(config)["retention"](LayerBuilder(config, dtype=torch.float64), 0)
    q, k, v = (torch.randn(2, 11, 8, n, dtype=torch.float64) for n in (3, 3, 5))

    def pass_states(maps: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return pass_recurrent_states(maps, added, None, ALONE)[0]

    found = layer.retain([q, k, v], (), slice(None), SequenceChunks(1, 4, None, True, None), partial(pass_states))
    gamma, state = 1 - 2.0 ** (-5 - torch.arange(8, dtype=torch.float64)), torch.zeros(2, 8, 5, 3, dtype=torch.float64)
    for t in range(11):
        state = gamma[:, None, None] * state + v[:, t, :, :, None] * k[:, t, :, None]
        torch.testing.assert_close(found[:, t], (state @ q[:, t, :, :, None])[..., 0] * 3**-0.5)


def test_every_layout_computes_what_one_process_computes() -> None:
    run = {"model": {"mixers": MIXERS, "layers": ["retention+mlp"], "position": "none"}}
    assert not find_differences(extended_cases(FILE, run, LAYOUTS + CONTEXT))
