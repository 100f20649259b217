"""Launch scripts of Megatron's T5."""

from __future__ import annotations

import yaml

from mega_cli.megatron_args import render_run_yaml, translate_launch_script
from mega_trainer.config.run_config import RunConfig, resolve_run_config

SCRIPT = """
torchrun --nproc-per-node 8 pretrain_t5.py --encoder-num-layers 12 --decoder-num-layers 6 --hidden-size 768 --num-attention-heads 12
    --kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
    --micro-batch-size 16 --global-batch-size 512 --train-iters 1000 --lr 0.0001 --bf16 --vocab-extra-ids 100 --vocab-size 29056
    --data-path text_sentence --tokenizer-type BertWordPieceCase --short-seq-prob 0.2
"""


def test_a_script_of_t5() -> None:
    told = render_run_yaml(translate_launch_script(SCRIPT.replace("\n    ", " ")))
    config = RunConfig.parse(resolve_run_config(yaml.safe_load(told)), source="run.yaml")
    model, data = config.model, config.data
    assert (model.num_layers, model.encoder and model.encoder.num_layers, model.position) == (18, 12, "learned")
    assert model.has_output_bias  # of a tied embedding
    assert (data.kind, data.seq_length, data.t5.decoder_seq_length) == ("t5", 512, 128)
    assert data.t5.short_probability == 0.2
    assert "--vocab-extra-ids 100: the tokenizer must have the sentinels" in told


def test_relative_positions() -> None:
    flags = (
        "--position-embedding-type relative --relative-attention-num-buckets 16 --untie-embeddings-and-output-weights"
    )
    told = render_run_yaml(translate_launch_script(SCRIPT.replace("\n    ", " ").replace("--bf16", f"--bf16 {flags}")))
    model = RunConfig.parse(resolve_run_config(yaml.safe_load(told)), source="run.yaml").model
    assert (model.position, model.relative.buckets, model.relative.max_distance) == ("relative", 16, 128)
    assert not model.has_output_bias
