"""Translation of other trainers' settings into a run.yaml, with every setting accounted for; Megatron scripts:
`megatron_args`.
"""

from __future__ import annotations

from mega_cli.moving_in.from_deepspeed import translate_deepspeed
from mega_cli.moving_in.from_huggingface import translate_hf_args

__all__ = ["translate_deepspeed", "translate_hf_args"]
