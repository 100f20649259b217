"""Translation of settings of other trainers into a run.yaml, with a note for every setting.

Launch scripts of Megatron-LM are translated by `megatron_args`.
"""

from __future__ import annotations

from mega_cli.moving_in.from_deepspeed import translate_deepspeed
from mega_cli.moving_in.from_huggingface import translate_hf_training_args

__all__ = ["translate_deepspeed", "translate_hf_training_args"]
