"""Settings of other trainers as a run.yaml of mega, every one of them accounted for. (Megatron's scripts: `megatron_args`.)"""

from __future__ import annotations

from mega_cli.moving_in.deepspeed import from_deepspeed
from mega_cli.moving_in.huggingface import from_hf_args

__all__ = ["from_deepspeed", "from_hf_args"]
