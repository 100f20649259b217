"""Detection of the program that a file with HuggingFace's names belongs to, and its defaults.

Facts: transformers 5.23 (training_args.py), TRL 1.16 (SFTConfig, DPOConfig, KTOConfig, RewardConfig, ModelConfig),
Axolotl 0.18 (utils/schemas), LLaMA-Factory 0.9 (hparams), Accelerate 1.15 (`accelerate config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_cli.moving_in.settings_file import SettingsFile

Program = Literal["transformers", "TRL", "Axolotl", "LLaMA-Factory"]
AXOLOTL = (
    "base_model", "sequence_len", "micro_batch_size", "adapter", "lora_target_linear", "rl", "rl_beta", "val_set_size",
    "sample_packing", "pad_to_sequence_len", "lr_scheduler", "context_parallel_size", "sequence_parallel_degree",
)  # fmt: skip
TRL = (
    "use_peft", "loss_type", "beta", "max_prompt_length", "dataset_text_field", "assistant_only_loss", "completion_only_loss",
    "packing", "model_init_kwargs", "precompute_ref_log_probs", "center_rewards_coefficient", "desirable_weight",
    "undesirable_weight", "simpo_gamma", "cpo_alpha", "num_generations", "dataset_name",
)  # fmt: skip
LLAMA_FACTORY = (
    "stage", "finetuning_type", "cutoff_len", "lora_rank", "lora_target", "template", "dataset_dir", "additional_target",
    "train_on_prompt", "mask_history", "neat_packing", "quantization_bit",
)  # fmt: skip
ACCELERATE = ("compute_environment", "distributed_type")


@dataclass(frozen=True)
class ToolDefaults:
    """Training program that a settings file with HuggingFace's names is for, and the defaults of this program.

    Attributes:
        micro: micro-batch size; None if the training program sets it.
        epochs: epochs of a run without max_steps.
        lr: learning rate; None if the file must have one.
        schedule: name of the scheduler.
        seq_length: tokens per sequence; None for the model's or mega's default.
    """

    program: Program
    micro: int | None = 8
    epochs: float = 3.0
    lr: float | None = 5e-5
    schedule: str = "linear"
    seq_length: int | None = None


def find_dialect(given: SettingsFile) -> ToolDefaults:
    """Return the program that a settings file is for, with its defaults, by keys that only this program has; by default
    transformers.
    """
    if given.has_key(*AXOLOTL):
        return ToolDefaults("Axolotl", micro=1, epochs=1.0, lr=None, schedule="cosine", seq_length=512)
    if given.has_key(*LLAMA_FACTORY):
        return ToolDefaults("LLaMA-Factory", seq_length=2048)
    if given.has_key(*TRL):
        return ToolDefaults("TRL", lr=2e-5)
    known = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs")
    if given.has_key(*ACCELERATE) and not given.has_key(*known):
        return ToolDefaults("transformers", micro=None)
    return ToolDefaults("transformers")
