"""Run a function on a few ranks: `run_ranks(function, 4, argument, ...)`, with the modules that tests import preloaded."""

from __future__ import annotations

from functools import partial

from mega_trainer.launch import function_ranks
from mega_trainer.launch.function_ranks import PRELOADED, RankError

__all__ = ["PRELOAD", "RankError", "run_ranks"]
PRELOAD = [*PRELOADED, "mega_eval.model_loading", "pytest", "hypothesis", "mega_trainer.launch.frozen_imports"]
run_ranks = partial(function_ranks.run_ranks, preload=PRELOAD)
