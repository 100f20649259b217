"""The family BioGPT (arXiv:2210.10341), which mega does not know: HuggingFace folders are read, trained and written.

A GPT-2 with separate query, key and value projections, scaled embeddings, and learned positions whose first two rows are unused.
A family is a declaration of how config.json and the tensors on disk map to mega's.
"""

from __future__ import annotations

from mega_trainer.extend import (
    AllowedValuesEntry,
    Extension,
    FixedFieldsEntry,
    KeyEntry,
    ModelFamily,
    MultiHeadEntry,
    TensorRule,
    weight_bias_rules,
)

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
LAYER, BLOCK = "model.layers.{i}", "biogpt.layers.{i}"

BIOGPT = ModelFamily(
    name="biogpt",
    architecture="BioGptForCausalLM",
    prefix="biogpt.",
    head="output_projection.weight",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("num_hidden_layers", "num_layers"),
        KeyEntry("num_attention_heads", "num_attention_heads"),
        KeyEntry("intermediate_size", "ffn_hidden_size"),
        KeyEntry("max_position_embeddings", "max_position", 1024),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-12),
        KeyEntry("hidden_act", "activation", "gelu", ACTIVATIONS),
        KeyEntry("scale_embedding", "scale_embeddings", True),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("hidden_dropout_prob", "embedding_dropout residual_dropout", 0.1),
        KeyEntry("attention_probs_dropout_prob", "attention_dropout", 0.1),
        KeyEntry("initializer_range", "init_std", 0.02),
        AllowedValuesEntry({"layerdrop": (0.0,), "activation_dropout": (0.0,)}),
        MultiHeadEntry(),
        FixedFieldsEntry(
            {
                "norm": "layernorm", "position": "learned", "position_offset": 2, "qkv_bias": True,
                "attention_out_bias": True, "mlp_bias": True, "qk_norm": False, "sliding_window": None,
            }
        ),
    ),
    rules=(
        TensorRule("biogpt.embed_tokens.weight", ("model.embed_tokens.weight",)),
        TensorRule("biogpt.embed_positions.weight", ("model.embed_positions.weight",)),
        TensorRule("output_projection.weight", ("lm_head.weight",)),
        *weight_bias_rules(f"{BLOCK}.self_attn_layer_norm", f"{LAYER}.input_layernorm"),
        *(
            rule
            for part, name in {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}.items()
            for rule in weight_bias_rules(f"{BLOCK}.self_attn.{part}", f"{LAYER}.self_attn.{name}")
        ),
        *weight_bias_rules(f"{BLOCK}.final_layer_norm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{BLOCK}.fc1", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{BLOCK}.fc2", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("biogpt.layer_norm", "model.norm"),
    ),
)  # fmt: skip

EXTENSION = Extension(name="biogpt", version="1.0", api=1, families=(BIOGPT,))
