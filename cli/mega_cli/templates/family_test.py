"""The family `my_extension`: config.json is written and read, and every tensor has a name on disk."""

from __future__ import annotations

from pathlib import Path

from mega_trainer.extend import ModelConfig, canonical_tensors, load_extensions

(FAMILY,) = load_extensions([str(Path(__file__).parent / "my_extension.py")]).families
MODEL = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=61, qk_norm=True
)


def test_config_json_is_written_and_read() -> None:
    written = FAMILY.write_config_json(MODEL)
    assert written["attention_norms"] is True
    assert FAMILY.write_config_json(FAMILY.read_config_json(written)) == written


def test_every_tensor_has_a_name_on_disk() -> None:
    table = FAMILY.disk_tensor_table(MODEL)
    assert "model.layers.1.attention.key_norm.weight" in table
    assert {slab.name for disk in table.values() for slab in disk.slabs} == set(canonical_tensors(MODEL))
