"""Model family `my_extension`: HuggingFace folders of a Llama with norms of queries and keys, under other names. Change it to
yours.

A family maps config.json and the tensors on disk to mega's, in both directions: folders are read, trained and written.
"""

from __future__ import annotations

from dataclasses import replace

from mega_trainer.extend import LLAMA, Extension, KeyEntry, TensorRule

LAYER, NORMS = "model.layers.{i}", KeyEntry("attention_norms", "qk_norm", True)

FAMILY = replace(
    LLAMA,
    name="my_extension",  # model_type in config.json
    architecture="MyExtensionForCausalLM",
    # the entries of Llama for all other keys; docs/extensions.md lists kinds of entries
    entries=(*(entry for entry in LLAMA.entries if "qk_norm" not in entry.handled_model_fields), NORMS),
    # tensors without a rule have mega's names, as in Llama
    rules=(
        TensorRule(f"{LAYER}.attention.query_norm.weight", (f"{LAYER}.self_attn.q_norm.weight",)),
        TensorRule(f"{LAYER}.attention.key_norm.weight", (f"{LAYER}.self_attn.k_norm.weight",)),
    ),
)

EXTENSION = Extension(name="my-extension", version="0.1", api=1, families=(FAMILY,))
