"""Objective and adapters of a file with HuggingFace's names, and the program that the file belongs to.

The program is detected, since its defaults apply. Preference pairs and reward models of Axolotl and TRL become `objective`;
other objectives are rejected. Adapters of PEFT, TRL, Axolotl and LLaMA-Factory become `lora`, with 4-bit base weights if the
file has them (QLoRA).

Facts: transformers 5.23 (training_args.py), TRL 1.16 (SFTConfig, DPOConfig, KTOConfig, RewardConfig, CPOConfig, ModelConfig),
Axolotl 0.18 (utils/schemas, core/builders/rl.py, core/builders/causal.py), LLaMA-Factory 0.9 (hparams), Accelerate 1.15
(`accelerate config`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from mega_cli.moving_in.settings_file import ForeignSettingsFile

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
class TrainingProgramDefaults:
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


def detect_training_program(given: ForeignSettingsFile) -> TrainingProgramDefaults:
    """Return the program that a settings file is for, with its defaults, by keys that only this program has.
    The default is transformers.
    """
    if given.has_key(*AXOLOTL):
        return TrainingProgramDefaults("Axolotl", micro=1, epochs=1.0, lr=None, schedule="cosine", seq_length=512)
    if given.has_key(*LLAMA_FACTORY):
        return TrainingProgramDefaults("LLaMA-Factory", seq_length=2048)
    if given.has_key(*TRL):
        return TrainingProgramDefaults("TRL", lr=2e-5)
    known = ("per_device_train_batch_size", "learning_rate", "max_steps", "num_train_epochs")
    if given.has_key(*ACCELERATE) and not given.has_key(*known):
        return TrainingProgramDefaults("transformers", micro=None)
    return TrainingProgramDefaults("transformers")


KINDS = ("dpo", "ipo", "kto", "simpo")
HINT = "mega supports cross entropy, dpo, ipo, kto, simpo, reward models and distillation: docs/objectives.md"
BETA, GAMMA, CPO_ALPHA = 0.1, 0.5, 1.0  # TRL's defaults; SimPO's of TRL are not the paper's
LEARNING_RATES = {"cross_entropy": 2e-5, "reward": 1e-4}  # TRL's; of preference pairs 1e-6
PLAIN_LOSSES = (None, "nll", "chunked_nll")
# Settings that change the objective, and their neutral values.
OTHERS: dict[str, tuple[Any, ...]] = {
    "process_reward_model": (False,), "kd_trainer": (False,), "diffusion": (False,), "use_eaft": (False,), "stage": ("sft", "pt"),
    "num_generations": (), "reward_funcs": (), "reward_model_path": (), "teacher_model_name_or_path": (), "lmbda": (),
    "orpo_alpha": (), "rpo_alpha": (), "ld_alpha": (), "dpo_loss_weights": (), "loss_weights": (), "use_weighting": (False,),
    "dpo_use_weighting": (False,), "dpo_use_logits_to_keep": (False,), "dpo_norm_loss": (False,), "reference_free": (False,),
    "sync_ref_model": (False,), "f_divergence_type": ("reverse_kl",), "trainer_cls": (),
}  # fmt: skip

# Settings that only trainers of other objectives have: TRL's online and offline RL, distillation, process rewards, TPO, BCO.
FOREIGN = (
    "temperature", "missing_eos_penalty", "total_episodes", "num_ppo_epochs", "min_density_ratio", "step_separator",
    "train_on_last_step_only", "tpo_alpha", "num_value_samples", "seq_kd", "generation_batch_size", "max_new_tokens",
)  # fmt: skip

PLUGINS = re.compile(r"diffusion|\bkd\b|distill|grpo|nemo_gym|ebft|\brl\b", re.IGNORECASE)


def translate_hf_objective(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> str:
    """Translate the objective and data settings of a HuggingFace trainer to run.yaml, and return the objective's kind.
    The kind is, for example, dpo; `dialect` is the program of the file.

    Raises:
        ConfigError: for an unsupported objective.
    """
    for key, neutral in OTHERS.items():
        value = given.take_value(key)
        if value is not None and value not in neutral:
            given.refuse_value(key, "selects an objective, or a variant, that is not supported", HINT)
    if foreign := next((key for key in FOREIGN if given.has_key(key)), None):
        given.refuse_value(foreign, "belongs to an objective that is not supported", HINT)
    if PLUGINS.search(str(given.peek_value("plugins"))):
        given.refuse_value("plugins", "selects an objective that is not supported", HINT)
    kind = _axolotl_kind(given) if dialect.program == "Axolotl" else _trl_kind(given)
    if kind == "cross_entropy":
        return kind
    given.set_key("data.kind", "pairs", f"an objective of preference pairs: {kind}")
    if kind is None:
        text = "beta belongs to several objectives, and the file does not set which one: dpo, kto or another"
        given.leave_open("objective.kind", text)
        return "dpo"
    given.set_key("objective.kind", kind, "the file's objective")
    if kind == "reward":
        given.set_key("model.score", True, "a reward model")
        given.set_key("objective.center", given.take_number("center_rewards_coefficient"), "center_rewards_coefficient")
    else:
        _put_preference(given, kind)
    return kind


def _axolotl_kind(given: ForeignSettingsFile) -> str:
    kind = given.take_value("rl")
    if kind is None:
        return "reward" if given.take_value("reward_model") is True else "cross_entropy"
    if kind not in KINDS:
        given.refuse_value("rl", "is an objective that is not supported", HINT)
    loss = _single_loss(given, "dpo_loss_type")
    if kind == "dpo" and loss not in (None, "sigmoid"):
        kind = loss if loss == "ipo" else given.refuse_value("dpo_loss_type", "is a loss that is not supported", HINT)
    return str(kind)


def _trl_kind(given: ForeignSettingsFile) -> str | None:
    """Return the kind of objective of TRL's settings, or None if they belong to several."""
    loss, raw = _single_loss(given, "loss_type"), given.peek_value("loss_type")
    if given.has_key("desirable_weight", "undesirable_weight") or loss == "kto":
        return "kto" if loss in (None, "kto") else given.refuse_value("loss_type", f"({raw}) is not supported", HINT)
    if given.has_key("simpo_gamma", "cpo_alpha"):
        return (
            "simpo" if loss == "simpo" else given.refuse_combination("CPO is an objective that is not supported", HINT)
        )
    if given.has_key("center_rewards_coefficient"):
        return "reward"
    if loss in ("sigmoid", "ipo"):
        return "dpo" if loss == "sigmoid" else "ipo"
    if loss not in PLAIN_LOSSES:
        given.refuse_value("loss_type", "is a loss that is not supported", HINT)
    if given.has_key("precompute_ref_log_probs", "ref_model_mixup_alpha", "discopop_tau"):
        return "dpo"
    return None if given.has_key("beta") else "cross_entropy"


def _single_loss(given: ForeignSettingsFile, key: str) -> Any:
    """Return the loss of a key, given as a name or a list of one name."""
    value = given.take_value(key)
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        given.refuse_value(key, "is a sum of losses, which is not supported", HINT)
    return value[0]


def _put_preference(given: ForeignSettingsFile, kind: str) -> None:
    beta = given.take_number("trl.beta", "rl_beta", "beta")
    given.set_key("objective.beta", BETA if beta is None else beta, "beta")
    smoothing = given.take_number("dpo_label_smoothing", "label_smoothing")
    if kind in ("dpo", "simpo"):
        given.set_key("objective.label_smoothing", smoothing or None, "label_smoothing")
    if kind == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            given.set_key(f"objective.{name}", given.take_number(f"kto_{name}", name), name)
        text = "estimates its divergence over all samples of a step, and TRL over one micro-batch of all ranks; rated answers"
        text += " (prompt, completion, label) are read as they are"
        given.add_note("changes meaning", text, "objective.kind: kto")
    if kind == "simpo":
        gamma, alpha = given.take_number("simpo_gamma"), given.take_number("cpo_alpha")
        given.set_key("objective.gamma", GAMMA if gamma is None else gamma, "simpo_gamma")
        alpha = CPO_ALPHA if alpha is None else alpha
        if alpha:
            text = f"= {alpha:g}: TRL adds the cross entropy of the chosen answers to the loss, mega's simpo does not"
            given.add_note("no equivalent", text, "cpo_alpha")


SAME = {
    "lora.rank": "lora_r lora_rank peft_config.r",
    "lora.alpha": "lora_alpha peft_config.lora_alpha",
    "lora.dropout": "lora_dropout peft_config.lora_dropout",
    "lora.rslora": "peft_use_rslora use_rslora peft_config.use_rslora",
    "lora.dora": "peft_use_dora use_dora peft_config.use_dora",
    "lora.init_from": "lora_model_dir",
    "lora.modules_to_save": "lora_modules_to_save additional_target peft_config.modules_to_save",
}
# Defaults of each program: rank, alpha, dropout.
DEFAULTS = {
    "TRL": (16, 32, 0.05), "Axolotl": (8, 8, 0.0), "LLaMA-Factory": (8, 16, 0.0), "transformers": (8, 8, 0.0),
}  # fmt: skip
ADAPTERS = ("lora", "qlora")
BITS_4 = ("load_in_4bit", "quantization_config.load_in_4bit")
QUANT_TYPES = (
    "quantization_type",
    "bnb_4bit_quant_type",
    "bnb_config_kwargs.bnb_4bit_quant_type",
    "quantization_config.bnb_4bit_quant_type",
)
DOUBLE = (
    "double_quantization",
    "use_bnb_nested_quant", "bnb_4bit_use_double_quant", "bnb_config_kwargs.bnb_4bit_use_double_quant",
    "quantization_config.bnb_4bit_use_double_quant",
)  # fmt: skip


def translate_hf_lora_settings(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> None:
    """Set `lora` of run.yaml if a settings file with HuggingFace's names trains a LoRA adapter.

    Raises:
        ConfigError: for an unsupported kind of adapter or number of bits.
    """
    adapter, four = given.take_value("adapter"), given.take_value(*BITS_4) is True
    if dialect.program == "LLaMA-Factory":
        adapter, four = _llama_factory(given)
    if adapter is not None and adapter not in ADAPTERS:
        given.refuse_value("adapter", "is not supported", f"mega trains {' and '.join(ADAPTERS)}")
    if not _trains_adapter(given, dialect, adapter):
        for names in SAME.values():
            if given.take_value(*names.split()) is not None:
                given.add_note("not needed", "has no effect, because the file trains no adapter", names.split()[0])
        if four:
            given.refuse_value(
                "load_in_4bit", "requires a LoRA adapter", "add adapter: qlora (Axolotl) or use_peft: true (TRL)"
            )
        return
    given.copy_settings(SAME)
    rank, alpha, dropout = DEFAULTS[dialect.program]
    found = given.get_run_yaml_value("lora.rank")
    if dialect.program == "LLaMA-Factory" and isinstance(found, int | float):
        alpha = int(2 * found)
    saved = given.get_run_yaml_value("lora.modules_to_save")
    if isinstance(saved, str):
        given.set_key("lora.modules_to_save", [name.strip() for name in saved.split(",")], "additional_target")
    given.set_missing_keys_to_defaults(
        {"lora.rank": rank, "lora.alpha": alpha, "lora.dropout": dropout}, f"{dialect.program}'s"
    )
    _put_modules(given, dialect)
    if four or adapter == "qlora":
        _put_bits(given, dialect)


def _llama_factory(given: ForeignSettingsFile) -> tuple[str | None, bool]:
    """Return LLaMA-Factory's adapter, by default LoRA, and True if the weights have 4 bits.

    Raises:
        ConfigError: for an unsupported kind of adapter or number of bits.
    """
    kind, bits = given.take_value("finetuning_type"), given.take_integer("quantization_bit")
    if kind not in (None, "lora", "full"):
        given.refuse_value("finetuning_type", "is not supported", "use full or lora")
    if bits not in (None, 4):
        given.refuse_value("quantization_bit", "is not supported", "use quantization_bit: 4")
    return None if kind == "full" else "lora", bits == 4


def _trains_adapter(given: ForeignSettingsFile, dialect: TrainingProgramDefaults, adapter: str | None) -> bool:
    """Return True if the run trains an adapter: by `adapter` (Axolotl), `use_peft` (TRL), else by its settings."""
    use_peft = given.take_value("use_peft")
    if dialect.program in ("Axolotl", "LLaMA-Factory"):
        return adapter is not None
    if use_peft is not None:
        return use_peft in (True, "true")
    return adapter is not None or given.has_key(
        "lora_r", "peft_config.r", "lora_target_modules", "peft_config.target_modules"
    )


def _put_modules(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> None:
    modules = given.take_value("lora_target_modules", "peft_config.target_modules", "lora_target")
    if dialect.program == "LLaMA-Factory":
        modules = [name.strip() for name in modules.split(",")] if isinstance(modules, str) else modules or ["all"]
    if given.take_value("lora_target_linear") is True or modules in ("all-linear", ["all"]):
        given.set_key("lora.modules", [".*_proj"], "all linear layers")
    elif isinstance(modules, list):
        given.set_key(
            "lora.modules", [_module_suffix_pattern(str(module)) for module in modules], "lora_target_modules"
        )
    elif modules is not None:
        given.set_key("lora.modules", [str(modules)], "lora_target_modules")
    else:
        text = "is not in the file: PEFT uses a default for the model's type, e.g. q_proj and v_proj for Llama"
        given.leave_open("lora.modules", text)


def _module_suffix_pattern(module: str) -> str:
    """Return the pattern of modules that PEFT selects by a name: this name, or names that end with a dot and it."""
    return f".*{module}" if re.fullmatch(r"[a-z]\w*_proj", module) else re.escape(module)


def _put_bits(given: ForeignSettingsFile, dialect: TrainingProgramDefaults) -> None:
    kind, double = given.take_value(*QUANT_TYPES), given.take_value(*DOUBLE)
    if kind is None and dialect.program == "transformers":
        kind = "fp4"
    if kind not in (None, "nf4"):
        given.refuse_combination(f"the 4-bit type {kind} is not supported", "use bnb_4bit_quant_type: nf4")
    given.set_key("lora.quantize", "nf4", "4 bits")
    if double if double is not None else dialect.program in ("Axolotl", "LLaMA-Factory"):
        given.add_note(
            "changes meaning", "the scales of 4-bit blocks are not quantised (no double quantisation)", "4 bits"
        )
    if given.get_run_yaml_value("parallel.zero") == 3:
        given.set_key("parallel.zero", 2, "weights in 4 bits are not sharded")
        given.add_note("changes meaning", "is 2, because 4-bit weights are not sharded", "parallel.zero")
