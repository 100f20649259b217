"""Write docs/families.md: the supported model families, and the models of transformers that are not supported.

`python tools/families_page.py` rewrites the page; a test compares it with the code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from mega_ckpt.families import FAMILIES, MODULE_FAMILIES, VISION_FAMILIES
from mega_ckpt.families.vision_modules import REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "families.md"

KINDS = {
    "dense": "Dense decoders",
    "moe": "Mixture-of-experts decoders",
    "recurrent": "Hybrid and recurrent decoders",
    "encoder": "Encoders",
    "encoder-decoder": "Encoder-decoder models",
    "vision": "Vision-language models",
}
MODELS = {
    "Decoders": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "Encoders": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "Encoder-decoder models": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "Vision-language models": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
# What a type lacks, by patterns of the keys of its configuration and of the names of its modules; the first that match.
REASONS: tuple[tuple[str, str], ...] = (
    (r"key:(audio_config|sampling_rate|codec_|num_codebooks|max_source_positions)", "sound"),
    (r"key:(vision_config|vq_config|vision_feature_layer|image_token_id)", "a vision encoder or projector of its own"),
    (r"key:(index_topk|index_n_heads|indexer_types)|module:.*Indexer", "sparse attention with an indexer in a block of another form"),
    (r"key:(hc_mult|hc_eps)|module:.*Hyper[Cc]onnection", "hyper-connections in a block of another form"),
    (r"module:.*(KimiDelta|DeltaAttention|KDA)", "Kimi Delta Attention in a layer of another form"),
    (r"module:.*LightningAttention", "lightning attention in a layer of another form"),
    (r"key:(conv_L_cache)|module:.*ShortConv", "short convolutions in a block of another form"),
    (r"key:(mamba_dt_rank|time_step_rank|state_size|mamba_d_state|ssm_)|module:.*(Mamba|SSM)", "Mamba in a layer of another form"),
    (r"module:.*(Rwkv|xLSTM|mLSTM|RecurrentBlock|RGLRU|Lru)", "another recurrent mixer"),
    (r"key:(attention_chunk_size|no_rope_layer_interval)|module:.*ChunkedAttention", "chunked attention in a block of another form"),
    (r"key:hidden_size_per_layer_input", "embeddings in every layer in a block of another form"),
    (r"module:.*(Differential|DiffAttn)|key:lambda_std_dev", "differential attention"),
    (r"key:(num_hashes|lsh_|axial_pos|block_size|num_random_blocks)", "hashed or block-sparse attention"),
    (r"key:(xielu)|default:xielu", "the activation xIELU"),
    (r"function:sparsemixer", "SparseMixer routing"),
    (r"key:(num_attention_heads_per_layer|num_kv_heads_per_layer|attention_value_scale)", "heads that differ by layer or by value size"),
    (r"key:(clip_qkv)", "clipped queries, keys and values"),
    (r"module:.*(ByteLatent|Patcher|GlobalTransformer)", "byte patches"),
    (r"key:(ngram|split_ngram)", "n-gram embeddings"),
    (r"key:(linear_num_key_heads|linear_key_head_dim)", "gated delta nets in a layer of another form"),
    (r"key:(alibi|attn_config)", "ALiBi in a block of another form"),
    (r"key:(is_encoder_decoder=True|encoder_layers)", "an encoder-decoder model, or its decoder alone"),
    (r"key:(type_vocab_size|relative_attention|position_biased_input)", "an encoder's block of another form"),
    (r"key:kv_lora_rank", "latent attention in a block of another form"),
    (r"key:(moe|num_experts|num_local_experts|n_routed_experts)", "a router or experts of another form"),
)  # fmt: skip
HEAD = """# Model families

`python tools/families_page.py` writes this page from the declarations in `mega_ckpt.families`; a test compares the two. Do not edit.

Every family converts in both directions: `mega ckpt convert FOLDER out --to mega` and back with `--to hf`. The round trip
gives byte-identical weight files, and logits agree with transformers {version} to 1e-5 in fp32; for decoders also the loss,
all gradients and greedy text (`tests/ckpt/test_convert.py`, `tests/interop/test_hf_logits.py`, `test_hf_families.py`). The family of a folder is the `model_type` of its config.json.
"""
SETTINGS = """
## Differences from transformers

- Nemotron-H and Nemotron-3: `mega` bounds the time step by `time_step_limit` of config.json; transformers 5.23 uses `time_step_min`.
- Phi-3.5-MoE: `mega` chooses SparseMixer's experts without sampling in training, and has no input jitter; past the original length it uses
  the long factors of the rotary frequencies, transformers 5.23 the short ones.
- DBRX: `mega` reads the base frequency in `attn_config` if there is no other; transformers 5.23 uses 10,000 then. `mega` has no router jitter.
- MiniMax-Text-01: transformers stores the decays of lightning attention, which follow from the number of layer and head. `mega` derives them; of a
  folder they are carried, and of models trained here not written: transformers then derives them, too.
- Gemma 3n: `mega` reads the text model; the vision encoder requires timm, and it, the sound encoder and their embeddings are carried. In training, weights
  of AltUp's coefficients count as clipped; transformers also stores those of predictions clipped.
- Ling 3: the MTP layer of a folder is carried, not trained; transformers does not load it.
- OLMo Hybrid: transformers 5.23 saves the convolution of queries, keys and values in three parts of equal size; `mega` reads these and those of the
  hub, which have the sizes of queries, keys and values, and writes the latter for models trained here. `rope_type: null` means no positions, as on the hub.
- LongCat-Flash: transformers 5.23 has unused matrices for the experts that return their input, and loads no folder without them, such as those of
  the hub. `mega` reads folders with and without them, carries them, and writes none for models trained here. MTP layers of a folder are carried, not trained.
- A layer's experts are one tensor in a `mega` checkpoint, and one tensor per expert in most HuggingFace folders. Conversion needs memory for one
  expert at a time.

## Settings that are not supported

A config.json may have a supported `model_type` and still use a setting that `mega` cannot express, for example an unknown
`rope_type`. `mega` then refuses the folder and names every such key. It never drops a setting that changes the result. Keys that
transformers does not read for this family are kept and listed once in a warning.

AWQ, GPTQ, bitsandbytes, sparse and rotated weights are refused by name. [Checkpoints](checkpoints.md#quantized-weights-pytorch_modelbin-gguf)
lists the quantized formats that are read, and [Megatron checkpoints](megatron-checkpoints.md) the settings of Megatron that convert.
"""


# Open models in use (name, `model_type` of its config.json, name of one of its sizes in `CONFIGS`, or "" if none stands there).
CURRENT: tuple[tuple[str, str, str], ...] = (
    ("Llama 3.1, 3.2, 3.3", "llama", "meta-llama/Llama-3.1-405B"),
    ("Llama 4", "llama4", "meta-llama/Llama-4-Maverick-17B-128E (text)"),
    ("Qwen 2.5, QwQ", "qwen2", "Qwen/Qwen2.5-72B"),
    ("Qwen 3, dense", "qwen3", "Qwen/Qwen3-32B"),
    ("Qwen 3, with experts", "qwen3_moe", "Qwen/Qwen3-235B-A22B"),
    ("Qwen3-Next", "qwen3_next", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    ("Qwen 3.5, dense", "qwen3_5", "Qwen/Qwen3.5-27B"),
    ("Qwen 3.5, with experts", "qwen3_5_moe", "Qwen/Qwen3.5-35B-A3B"),
    ("Qwen2-VL", "qwen2_vl", ""),
    ("Qwen2.5-VL", "qwen2_5_vl", ""),
    ("Qwen3-VL", "qwen3_vl", ""),
    ("Qwen3-VL, with experts", "qwen3_vl_moe", ""),
    ("DeepSeek-V2", "deepseek_v2", "deepseek-ai/DeepSeek-V2"),
    ("DeepSeek-V3, R1", "deepseek_v3", "deepseek-ai/DeepSeek-V3"),
    ("DeepSeek-V3.2", "deepseek_v32", "deepseek-ai/DeepSeek-V3.2"),
    ("DeepSeek-V4", "deepseek_v4", ""),
    ("Kimi K2", "kimi_k2", "moonshotai/Kimi-K2-Instruct"),
    ("Kimi K2.5", "kimi_k25", ""),
    ("Kimi Linear", "kimi_linear", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    ("GLM-4.5, 4.6, 4.7", "glm4_moe", "zai-org/GLM-4.5"),
    ("GLM-4.7-Flash", "glm4_moe_lite", "GLM-4.7-Flash, as transformers' class has it"),
    ("GLM-5", "glm_moe_dsa", "zai-org/GLM-5"),
    ("MiniMax-Text-01, M1", "minimax", "MiniMaxAI/MiniMax-Text-01-hf"),
    ("MiniMax-M2, M2.5", "minimax_m2", "MiniMaxAI/MiniMax-M2.5"),
    ("gpt-oss", "gpt_oss", "openai/gpt-oss-120b"),
    ("Gemma 2", "gemma2", "google/gemma-2-27b"),
    ("Gemma 3", "gemma3", "google/gemma-3-1b-it"),
    ("Gemma 3n", "gemma3n", "google/gemma-3n-E4B (text)"),
    ("Gemma 4", "gemma4", ""),
    ("Mistral 7B, Nemo, Large 2", "mistral", "mistralai/Mistral-Large-Instruct-2407"),
    ("Ministral 3", "ministral3", "Ministral-3-3B, its text model"),
    ("Mistral Small 3", "mistral3", ""),
    ("Mixtral", "mixtral", "mistralai/Mixtral-8x22B-v0.1"),
    ("Phi-3, Phi-4", "phi3", "microsoft/phi-4"),
    ("Phi-3.5-MoE", "phimoe", "microsoft/Phi-3.5-MoE-instruct"),
    ("OLMo 2", "olmo2", "allenai/OLMo-2-0325-32B"),
    ("OLMo 3", "olmo3", "allenai/Olmo-3.1-32B-Instruct"),
    ("OLMo Hybrid", "olmo_hybrid", "allenai/Olmo-Hybrid-7B"),
    ("Granite 3", "granite", "ibm-granite/granite-3.3-8b-instruct"),
    ("Granite 4", "granitemoehybrid", "ibm-granite/granite-4.0-h-small"),
    ("Falcon-H1", "falcon_h1", "tiiuae/Falcon-H1-0.5B-Base"),
    ("Nemotron-H, Nemotron 3 Nano and Super", "nemotron_h", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
    ("Jamba", "jamba", "ai21labs/Jamba-v0.1"),
    ("SmolLM3", "smollm3", "HuggingFaceTB/SmolLM3-3B"),
    ("LFM2, dense", "lfm2", "LiquidAI/LFM2-1.2B"),
    ("EXAONE 4", "exaone4", "LGAI-EXAONE/EXAONE-4.0-32B"),
    ("K-EXAONE", "exaone_moe", "LGAI-EXAONE/K-EXAONE-236B-A23B"),
    ("ERNIE 4.5, with experts", "ernie4_5_moe", "baidu/ERNIE-4.5-21B-A3B-PT"),
    ("Hunyuan A13B", "hunyuan_v1_moe", "tencent/Hunyuan-A13B-Instruct"),
    ("dots.llm1", "dots1", "rednote-hilab/dots.llm1.inst"),
    ("Seed-OSS", "seed_oss", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    ("Apertus", "apertus", "swiss-ai/Apertus-8B-2509"),
    ("MiMo-V2-Flash", "mimo_v2_flash", "XiaomiMiMo/MiMo-V2-Flash"),
    ("LongCat-Flash", "longcat_flash", "meituan-longcat/LongCat-Flash-Chat"),
    ("Ling 2, Ring", "bailing_moe_v2", ""),
    ("Ling 3", "bailing_hybrid", "inclusionAI/Ling-3.0-Flash"),
    ("Solar Open", "solar_open", "Solar-Open-100B, as transformers' class has it"),
    ("Trinity", "afmoe", "arcee-ai/Trinity-Mini"),
    ("Step 3.5", "step3p5", ""),
    ("InternVL 3", "internvl", ""),
)  # fmt: skip
CONFIGS = Path(__file__).parent.parent / "tests" / "ckpt" / "data" / "hub_configs.jsonl"


def describe_support(model_type: str) -> str:
    """Return how mega takes a model type: natively, its text model alone, as a module of transformers, or not."""
    native = {name for family in FAMILIES for name in (family.name, *family.aliases)}
    if model_type in {family.name for family in MODULE_FAMILIES}:
        return "natively, with the vision encoder of transformers"
    if model_type in native | {family.name for family in VISION_FAMILIES}:
        return "natively"
    if model_type in {family.outer_model_type for family in FAMILIES}:
        return "its text model natively, without images"
    if model_type not in CONFIG_MAPPING:
        return f"not: transformers {transformers.__version__} has no such model"
    lacks, text = missing_parts(model_type), getattr(CONFIG_MAPPING[model_type](), "text_config", None)
    if text is not None:
        supported_text = f"its text model `{text.model_type}` is supported by itself"
        lacks += "; " + (
            supported_text if text.model_type in native else f"in its text model: {missing_parts(text.model_type)}"
        )
    if model_type in MODELS["Decoders"]:
        return f"by `implementation: transformers`; natively lacks: {lacks}"
    return f"not; lacks: {lacks}"


def current_models() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, `model_type`, support and parameter count of the models of `CURRENT`."""
    listed = [json.loads(line) for line in CONFIGS.read_text(encoding="utf-8").splitlines()]
    known = {entry["name"]: entry.get("parameters") for entry in listed}
    for name, model_type, config in CURRENT:
        count = f"{known[config] / 1e9:,.2f} B: {config}" if config else ""
        yield name, model_type, describe_support(model_type), count


def current_table() -> list[str]:
    """Return the lines of the section about current open models."""
    rows = list(current_models())
    count = sum(support.startswith("natively") for _, _, support, _ in rows)
    text = sum(support.startswith("its text") for _, _, support, _ in rows)
    more = f", and the text model of {text} more." if text else "."
    return [
        "## Current open models", "",
        f"`mega` takes {count} of {len(rows)} natively{more} Parameters are those of a published size, without",
        "a vision encoder, whose config.json, written down from memory or from the hub, is read and counted in `tests/ckpt/test_hub_configs.py`.", "",
        "| model | `model_type` | how `mega` takes it | parameters |", "|---|---|---|---|",
        *(f"| {name} | `{model_type}` | {support} | {size} |" for name, model_type, support, size in rows), "",
    ]  # fmt: skip


def kind_of(model_type: str) -> str:
    """Return the kind of a supported family, by its configuration class in transformers."""
    if model_type in MODELS["Encoder-decoder models"]:
        return "encoder-decoder"
    if model_type in MODELS["Encoders"]:
        return "encoder"
    keys = " ".join(CONFIG_MAPPING[model_type]().to_dict())
    if any(part in keys for part in ("mamba", "ssm_", "state_size", "linear_")):
        return "recurrent"
    return "moe" if "expert" in keys else "dense"


def supported() -> dict[str, list[tuple[str, str, str]]]:
    """Return (model_type, class in transformers, model_type of the enclosing model) of every family, by kind."""
    rows: dict[str, list[tuple[str, str, str]]] = {kind: [] for kind in KINDS}
    for family in FAMILIES:
        rows[kind_of(family.name)].append((family.name, family.architecture, family.outer_model_type))
    rows["vision"] = [(family.name, family.architecture, "") for family in VISION_FAMILIES]
    return rows


LIMITS = {  # settings of a listed type that are refused by name
    "gemma4": "; without sound and videos",
    "kimi_k25": "; without videos",
    "qwen3_5": "; its MTP layer is carried",
    "qwen3_5_moe": "; its MTP layer is carried",
}


def table(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of one kind's table."""
    yield from ("| `model_type` | class in transformers |", "|---|---|")
    for name, architecture, outer in sorted(rows):
        note = (f"; also the text model of `{outer}`" if outer else "") + LIMITS.get(name, "")
        yield f"| `{name}` | `{architecture}`{note} |"


def list_features(model_type: str) -> Iterator[str]:
    """Yield the keys of a type's configuration (`key:name`), its text settings (`default:value`), and the classes
    (`module:name`) and functions (`function:name`) of its modelling code.
    """
    for key, value in vars(CONFIG_MAPPING[model_type]()).items():
        yield f"key:{key}={value is True}"
        if isinstance(value, str):
            yield f"default:{value}"
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    for path in sorted(folder.glob("modeling_*.py")):
        for word, name in re.findall(r"^(class|def) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield f"{'module' if word == 'class' else 'function'}:{name}"


def missing_parts(model_type: str) -> str:
    """Return what mega lacks for a type of transformers, by `REASONS`, else the keys of its configuration that no
    supported family has.
    """
    if model_type in REFUSED:
        return REFUSED[model_type]
    try:
        features = sorted(set(list_features(model_type)))
    except (
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:  # some configurations cannot be made without arguments
        return f"transformers makes no configuration of it without settings ({type(error).__name__})"
    found = [text for pattern, text in REASONS if any(re.match(pattern, feature) for feature in features)]
    if found:
        return "; ".join(found[:3])
    known = frozenset().union(*(family.known_config_keys for family in FAMILIES))
    keys = {feature.split(":")[1].split("=")[0] for feature in features if feature.startswith("key:")}
    unknown = sorted(key for key in keys - known if not key.startswith("_"))
    if not unknown:
        return "a block of another form; its settings are known"
    return "settings that no supported family has: " + ", ".join(f"`{key}`" for key in unknown[:6])


def families_page() -> str:
    """Return the text of docs/families.md."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    lines = [HEAD.format(version=transformers.__version__)]
    lines += current_table()
    rows = supported()
    for kind, title in KINDS.items():
        lines += [f"## {title}", "", *table(rows[kind]), ""]
    aliases = {name: family.name for family in FAMILIES for name in family.aliases}
    lines += [f"`{name}` is read as `{of}`." for name, of in sorted(aliases.items())] + [""]
    known = {name for kind in rows.values() for family in kind for name in (family[0], family[2])}
    same = {name for name in CONFIG_MAPPING if CONFIG_MAPPING[name].model_type in known}
    lines += ["## Models that are not supported", ""]
    lines += [
        f"These `model_type`s of transformers {transformers.__version__} are refused with the nearest supported name. What they",
        "lack is derived from their configuration and modelling code.",
    ]
    listed = known | same
    for title, names in MODELS.items():
        missing = sorted(set(names) - listed)
        listed |= set(missing)
        lines += ["", f"### {title}", "", "| `model_type` | lacks |", "|---|---|"]
        lines += [f"| `{name}` | {missing_parts(name)} |" for name in missing]
    return "\n".join([*lines, SETTINGS])


if __name__ == "__main__":
    PAGE.write_text(families_page(), encoding="utf-8")
