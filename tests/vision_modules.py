"""Tiny vision-language models whose vision encoder runs as a module of transformers: folders, processors and images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mega_ckpt.families import detect_model_family
from mega_ckpt.families.image_processor import add_image_prompt_text_settings, update_config_from_image_processor
from mega_data.images.image_inputs import ImageInputs
from mega_data.tokenizer import train_tokenizer

VOCAB, IMAGE = 320, 300
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", **TOWER, "head_dim": 12, "image_size": 64}
NATIVE = {
    "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "num_key_value_heads": 1, "patch_size": 4,
    "window_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [1],
}  # fmt: skip
GRIDS = [[16, 16], [16, 32], [32, 16], [32, 32]]
TILES = {
    "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}, "crop_to_patches": True,
    "max_patches": 4,
}  # fmt: skip
PATCHES = {"patch_size": 4, "spatial_merge_size": 2}
SIDE = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}


def text(kind: str, **more: Any) -> dict[str, Any]:
    """A `text_config` of a family."""
    return {"model_type": kind, **TEXT, **more}


# By model type: config.json, the image processor, the processor, and the tokens that the processor reads by name.
# Without an image processor where transformers' one requires a package that the tests lack.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "mistral3": (
        {"vision_config": PIXTRAL, "text_config": text("mistral", head_dim=8), "image_token_index": IMAGE},
        {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 48}, "patch_size": 4},
        PATCHES, {"image_token": "[IMG]"},
    ),
    "internvl": (
        {
            "vision_config": {"model_type": "internvl_vision", **TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            "text_config": text("qwen2"), "image_token_id": IMAGE, "image_seq_length": 4,
        },
        TILES, {"image_seq_length": 4}, {
            "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
            "video_token": "<video>",
        },
    ),
    "idefics3": (
        {"vision_config": {"model_type": "idefics3_vision", **TOWER}, "text_config": text("llama"), "image_token_id": IMAGE},
        {"image_processor_type": "Idefics3ImageProcessor", **SIDE}, {"image_seq_len": 4}, {
            "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    ),
    "smolvlm": (
        {"vision_config": {"model_type": "smolvlm_vision", **TOWER}, "text_config": text("llama"), "image_token_id": IMAGE},
        {}, {}, {"image_token": "<image>"},
    ),
    "llava_onevision": (
        {
            "vision_config": SIGLIP, "text_config": text("qwen2"), "image_token_index": IMAGE, "image_grid_pinpoints": GRIDS,
            "tie_word_embeddings": True,
        },
        {
            "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": GRIDS,
        },
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}, {"image_token": "<image>"},
    ),
    "aya_vision": (
        {"vision_config": SIGLIP, "text_config": text("cohere2", sliding_window=8), "image_token_index": IMAGE},
        TILES, {"patch_size": 4, "img_size": 16, "downsample_factor": 2}, {"patch_token": "<|IMG_PATCH|>"},
    ),
    "cohere2_vision": (
        {
            "vision_config": SIGLIP, "text_config": text("cohere2", sliding_window=8), "image_token_id": IMAGE,
            "alignment_intermediate_size": 64,
        },
        {}, {}, {"image_token": "<image>"},
    ),
    "lfm2_vl": (
        {
            "vision_config": {
                "model_type": "siglip2_vision_model", **TOWER, "image_size": None, "num_patches": 16, "vision_use_head": True,
            },
            "text_config": text("lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
            "image_token_id": IMAGE, "projector_hidden_size": 40,
        },
        {}, {}, {"image_token": "<image>"},
    ),
    "aria": (
        {
            "vision_config": {"model_type": "idefics3_vision", **TOWER, "image_size": 980, "patch_size": 98},
            "text_config": text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            "image_token_index": IMAGE, "projector_patch_to_query_dict": {"25": 4, "100": 8},
        },
        {"image_processor_type": "AriaImageProcessor", "max_image_size": 490}, {"size_conversion": {"490": 4, "980": 8}},
        {"image_token": "<|img|>"},
    ),
    "got_ocr2": (
        {
            "vision_config": {
                **TOWER, "model_type": "got_ocr2_vision", "output_channels": 16, "image_size": 64, "window_size": 2,
                "global_attn_indexes": [1], "mlp_dim": 40,
            },
            "text_config": text("qwen2"), "image_token_index": IMAGE, "image_seq_length": 16,
        },
        {}, {}, {"image_token": "<imgpad>"},
    ),
    "lighton_ocr": (
        {"vision_config": PIXTRAL, "text_config": text("qwen3", head_dim=8), "image_token_id": IMAGE},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48}, "patch_size": 8}, PATCHES,
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    ),
    "vipllava": (
        {
            "vision_config": {"model_type": "clip_vision_model", **TOWER}, "text_config": text("llama"),
            "image_token_index": IMAGE, "vision_feature_layer": [-1, -2, 1],
        },
        {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
        },
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>"},
    ),
    "exaone4_5": (
        {"vision_config": NATIVE, "text_config": text("exaone4", sliding_window=8), "image_token_id": IMAGE, "video_token_id": 301},
        {
            "image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 64, "longest_edge": 1024},
            "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        },
        {}, {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ),
    "deepseek_vl": (
        {"vision_config": SIGLIP, "text_config": text("llama"), "image_token_id": IMAGE},
        {"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 16, "width": 16}, "min_size": 8},
        {"num_image_tokens": 16}, {"image_token": "<image_placeholder>"},
    ),
}  # fmt: skip
CASES["gemma4"] = (
    {
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64, "standardize": True,
            "use_clipped_linears": True,
        },
        "text_config": text(
            "gemma4_text", initializer_range=0.05, num_hidden_layers=3, head_dim=8, global_head_dim=16, sliding_window=8, num_kv_shared_layers=1,
            hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
        "image_token_id": IMAGE, "video_token_id": 310, "audio_token_id": 311, "audio_config": None,
    },
    {
        "image_processor_type": "Gemma4ImageProcessorPil", "patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70,
    },
    {}, {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>",
    },
)  # fmt: skip
CASES["gemma4:together"] = (  # placeholders of an image attend to each other
    {
        **CASES["gemma4"][0], "text_config": {
            **CASES["gemma4"][0]["text_config"], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 3.0,
        },
    },
    *CASES["gemma4"][1:],
)  # fmt: skip
CASES["paligemma"] = (
    {
        "vision_config": SIGLIP, "text_config": text("gemma2", head_dim=8, sliding_window=37, query_pre_attn_scalar=10, attn_logit_softcapping=3.0),
        "image_token_index": IMAGE, "projection_dim": 32, "hidden_size": 32, "vocab_size": VOCAB,
    },
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}, "image_seq_length": 16},
    {}, {"image_token": "<image>"},
)  # fmt: skip
CASES["paligemma:1"] = (
    {**CASES["paligemma"][0], "text_config": text("gemma", head_dim=8)}, *CASES["paligemma"][1:],
)  # fmt: skip
CASES["llama4"] = (
    {
        "vision_config": {
            "hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
            "vision_output_dim": 20, "projector_input_dim": 20, "projector_output_dim": 20, "pixel_shuffle_ratio": 0.5,
        },
        "text_config": text(
            "llama4_text", num_hidden_layers=4, head_dim=8, intermediate_size_mlp=64, attention_chunk_size=16, num_local_experts=4,
            interleave_moe_layer_step=2, floor_scale=4,
        ),
        "image_token_index": IMAGE,
    },
    {}, {}, {"image_token": "<|patch|>"},
)  # fmt: skip
CASES["kimi_k25"] = (
    {
        "vision_config": {**{key: value for key, value in TOWER.items() if key != "image_size"}, "pos_emb_height": 6, "pos_emb_width": 6},
        "text_config": text(
            "deepseek_v3", num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16,
            n_group=2, topk_group=1, first_k_dense_replace=1, num_nextn_predict_layers=0,
        ),
        "image_token_id": IMAGE, "projection_hidden_size": 24, "tie_word_embeddings": False,
    },
    {}, {}, {"image_token": "<|media_pad|>"},
)  # fmt: skip
CASES["qwen2_vl"] = (
    {
        "vision_config": {"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        "text_config": text("qwen2_vl_text", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}),
        "image_token_id": IMAGE, "video_token_id": 301,
    },
    *CASES["exaone4_5"][1:],
)  # fmt: skip


_GLM_VISION = {
    "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "image_size": 32, "patch_size": 4,
    "out_hidden_size": 32, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4},
}  # fmt: skip
_GLM_IMAGES = (
    {"image_processor_type": "Glm46VImageProcessorPil", **CASES["exaone4_5"][1], "size": {"shortest_edge": 128, "longest_edge": 2048}},
    {}, {"image_token": "<|image|>", "video_token": "<|video|>"},
)  # fmt: skip
_GLM_TEXT = {"num_attention_heads": 2, "num_key_value_heads": 1}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_GLM_EXPERTS = text(
    "glm4v_moe_text", **_GLM_TEXT, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
    rope_parameters=_GLM_ROPE,
)  # fmt: skip
CASES |= {
    kind: (
        {
            "vision_config": {**_GLM_VISION, **vision},
            "text_config": inner,
            "image_token_id": IMAGE,
            "video_token_id": 301,
        },
        _GLM_IMAGES[0],
        {"processor_class": "Glm46VProcessor"},
        _GLM_IMAGES[2],
    )
    for kind, inner, vision in (
        ("glm4v", text("glm4v_text", **_GLM_TEXT, rope_parameters=_GLM_ROPE), {}),
        ("glm4v_moe", _GLM_EXPERTS, {}),
        ("glm46v", _GLM_EXPERTS, {"model_type": "glm4v_moe_vision"}),
        ("glm_ocr", text("glm_ocr_text", **_GLM_TEXT, rope_parameters=_GLM_ROPE), {}),
    )
}
CASES["glmga"] = (
    CASES["glm46v"][0], {**_GLM_IMAGES[0], "image_processor_type": "GlmgaImageProcessorPil"}, *CASES["glm46v"][2:]
)  # fmt: skip
CASES["pp_chart2table"] = (
    {
        **CASES["got_ocr2"][0],
        "vision_config": {**CASES["got_ocr2"][0]["vision_config"], "model_type": "pp_chart2table_vision"},
        "tie_word_embeddings": False,
    },
    *CASES["got_ocr2"][1:],
)  # fmt: skip
CASES["video_llama_3"] = (
    {
        "vision_config": {
            "model_type": "video_llama_3_vision", **{key: value for key, value in TOWER.items() if key != "image_size"},
        },
        "text_config": text("qwen2"), "image_token_id": IMAGE, "video_token_id": 301,
    },
    {
        **CASES["exaone4_5"][1], "image_processor_type": "VideoLlama3ImageProcessorPil", "temporal_patch_size": 1,
    },
    {}, {"image_token": "<image>", "video_token": "<video>"},
)  # fmt: skip
_QWEN3_5_TEXT = {
    "initializer_range": 0.1,
    "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
CASES |= {
    kind: (
        {
            "vision_config": {
                "depth": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
            "text_config": text(f"{kind}_text", **_QWEN3_5_TEXT, **more), "image_token_id": IMAGE, "video_token_id": 301,
        },
        *CASES["exaone4_5"][1:],
    )
    for kind, more in (
        ("qwen3_5", {}),
        ("qwen3_5_moe", {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}),
    )
}  # fmt: skip
PREPARED = [kind for kind, (_, image_processor, *_) in CASES.items() if image_processor]


def model_type_of(kind: str) -> str:
    """The model type of a case, which may be followed by the name of a variant."""
    return kind.partition(":")[0]


def save_model(kind: str, folder: Path) -> Any:
    """A tiny model of a type with its tokenizer, its image processor and its processor; the model of transformers."""
    config, image_processor, processor, named = CASES[kind]
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING[model_type_of(kind)](**json.loads(json.dumps(config))),
        attn_implementation="eager" if kind == "paligemma" else None,  # with soft caps
    ).eval()
    with torch.no_grad():  # numbers by which each part is seen in the result
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():  # bounds and statistics of Gemma 4's encoder
            if name.endswith(("_min", "_max")):
                buffer.fill_(-1.5 if name.endswith("_min") else 1.5)
            elif name.endswith(("std_bias", "std_scale")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    if kind == "kimi_k25":
        rename_as_published(folder)
    train_tokenizer(["what is it? the end of the story"] * 3, 290, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    while backend.get_vocab_size() < IMAGE:
        backend.add_tokens([f"<fill {backend.get_vocab_size()}>"])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named.values()])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text()) | {"extra_special_tokens": named}
    tokenizer["pad_token"] = tokenizer["eos_token"]
    files = {"tokenizer_config.json": tokenizer}
    if image_processor:
        files |= {"preprocessor_config.json": image_processor, "processor_config.json": processor}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return model


def rename_as_published(folder: Path) -> None:
    """Give tensors of Kimi-K2.5 the names of the published model, which transformers reads and changes when it saves."""
    tensors = load_file(folder / "model.safetensors")
    parts = ("language_model.model.blocks", "language_model.model.layers"), ("encoder.patch_embed", "patch_embed")
    for name in list(tensors):
        new = name.removeprefix("model.")
        for old, part in parts:
            new = new.replace(old, part)
        tensors[new] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def read_vision(kind: str) -> dict[str, Any]:
    """The section `vision` of a type, for any text model as wide as its own."""
    config, image_processor, processor, named = CASES[kind]
    made = CONFIG_MAPPING[model_type_of(kind)](**config)
    raw = json.loads(made.to_json_string(use_diff=False)) | {"model_type": model_type_of(kind)}
    vision = detect_model_family(raw).read_config_json(raw).vision
    assert vision is not None
    files = {"processor_config.json": processor, "tokenizer_config.json": {"extra_special_tokens": named}}
    vision = add_image_prompt_text_settings(
        update_config_from_image_processor(vision, image_processor), lambda name: files.get(name, {})
    )
    found: dict[str, Any] = vision.model_dump(mode="json", exclude_unset=True)
    return found


def draw_picture(number: int, size: tuple[int, int] = (20, 15)) -> Image.Image:
    """An image of noise, of (height, width) pixels."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8))


def draw_inputs(kind: str, number: int) -> ImageInputs:
    """Inputs of an image for a type whose processor the tests lack, or whose processor makes too many features for them."""
    draw = np.random.default_rng(number).standard_normal
    if kind in ("got_ocr2", "pp_chart2table"):
        return ImageInputs({"pixel_values": draw((1, 3, 64, 64), np.float32)}, (1, 1, 16))
    if kind == "lfm2_vl":
        arrays = {
            "pixel_values": draw((2, 16, 48), np.float32),
            "pixel_attention_mask": np.array([[1] * 16, [1] * 8 + [0] * 8]),
            "spatial_shapes": np.array([[4, 4], [4, 2]]),
        }
        return ImageInputs(arrays, (1, 1, 6))
    if kind == "kimi_k25":
        high, wide = 4, 4 + 2 * (number % 3)
        arrays = {
            "pixel_values": draw((high * wide, 3, 4, 4), np.float32),
            "image_grid_thw": np.array([[1, high, wide]]),
        }
        return ImageInputs(arrays, (1, 1, high * wide // 4))
    if kind == "smolvlm":
        tiles = 1 + number % 3
        mask = np.ones((1, tiles, 16, 16), bool)
        return ImageInputs(
            {"pixel_values": draw((1, tiles, 3, 16, 16), np.float32), "pixel_attention_mask": mask}, (1, 1, 4 * tiles)
        )
    return ImageInputs({"pixel_values": draw((2, 3, 16, 16), np.float32)}, (1, 1, 8))


def join_inputs(kind: str, images: list[ImageInputs], tokens: Tensor) -> dict[str, Tensor]:
    """Inputs of several images for transformers, which are padded to the largest one; some with the kind of each token."""
    found = {name: _pad_and_join([torch.from_numpy(one.arrays[name]) for one in images]) for name in images[0].arrays}
    kinds = (
        {"mm_token_type_ids": (tokens == IMAGE).long()} if kind.startswith(("qwen", "gemma4:together", "glm")) else {}
    )
    if kind.startswith("paligemma"):  # all of them a prompt
        kinds = {"token_type_ids": torch.zeros_like(tokens), "attention_mask": torch.ones_like(tokens)}
    return found | kinds


def _pad_and_join(parts: list[Tensor]) -> Tensor:
    shape = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].dim())]
    out = parts[0].new_zeros(sum(map(len, parts)), *shape)
    at = 0
    for part in parts:
        out[(slice(at, at + len(part)), *(slice(0, size) for size in part.shape[1:]))] = part
        at += len(part)
    return out
