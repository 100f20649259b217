"""Adapters of PEFT, TRL, Axolotl and LLaMA-Factory as `lora`, with 4-bit base weights if the file has them (QLoRA)."""

from __future__ import annotations

import re

from mega_cli.moving_in.dialects import ToolDefaults
from mega_cli.moving_in.settings_file import SettingsFile

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


def set_lora_section(given: SettingsFile, dialect: ToolDefaults) -> None:
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
    found = given.current_value("lora.rank")
    if dialect.program == "LLaMA-Factory" and isinstance(found, int | float):
        alpha = int(2 * found)
    saved = given.current_value("lora.modules_to_save")
    if isinstance(saved, str):
        given.set_key("lora.modules_to_save", [name.strip() for name in saved.split(",")], "additional_target")
    given.write_defaults({"lora.rank": rank, "lora.alpha": alpha, "lora.dropout": dropout}, f"{dialect.program}'s")
    _put_modules(given, dialect)
    if four or adapter == "qlora":
        _put_bits(given, dialect)


def _llama_factory(given: SettingsFile) -> tuple[str | None, bool]:
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


def _trains_adapter(given: SettingsFile, dialect: ToolDefaults, adapter: str | None) -> bool:
    """Return True if the run trains an adapter: by `adapter` (Axolotl), `use_peft` (TRL), else by its settings."""
    use_peft = given.take_value("use_peft")
    if dialect.program in ("Axolotl", "LLaMA-Factory"):
        return adapter is not None
    if use_peft is not None:
        return use_peft in (True, "true")
    return adapter is not None or given.has_key(
        "lora_r", "peft_config.r", "lora_target_modules", "peft_config.target_modules"
    )


def _put_modules(given: SettingsFile, dialect: ToolDefaults) -> None:
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


def _put_bits(given: SettingsFile, dialect: ToolDefaults) -> None:
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
    if given.current_value("parallel.zero") == 3:
        given.set_key("parallel.zero", 2, "weights in 4 bits are not sharded")
        given.add_note("changes meaning", "is 2, because 4-bit weights are not sharded", "parallel.zero")
