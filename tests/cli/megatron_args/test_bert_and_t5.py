"""Launch scripts of BERT."""

from __future__ import annotations

from mega_cli.megatron_args.translate import translate_launch_script
from mega_trainer.config.run_config import RunConfig

SCRIPT = """
torchrun --nproc_per_node 8 examples/bert/pretrain_bert.py --tensor-model-parallel-size 2 --num-layers 24 --hidden-size 1024 \\
  --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 \\
  --lr 0.0001 --train-iters 1000000 --lr-decay-style linear --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 \\
  --data-path my-bert_text_sentence --vocab-size 30522 --tokenizer-type BertWordPieceLowerCase --split 949,50,1 --bf16 {more}
"""


def test_a_bert_is_an_encoder_with_two_heads_and_its_own_data() -> None:
    run = translate_launch_script(SCRIPT.format(more="--mask-prob 0.2")).run
    config = RunConfig.parse(run, source="run.yaml")
    model, data = config.model, config.data
    assert (model.causal, model.token_types, model.pooler, model.sentence_pairs) == (False, 2, True, True)
    assert model.masked_lm is not None
    assert (model.norm_position, model.position) == ("pre", "learned")
    assert (data.kind, data.order, data.bert.mask_probability, data.bert.short_probability) == (
        "bert",
        "megatron",
        0.2,
        0.1,
    )


def test_without_the_binary_head_there_is_one_segment() -> None:
    config = RunConfig.parse(
        translate_launch_script(SCRIPT.format(more="--bert-no-binary-head")).run, source="run.yaml"
    )
    assert (config.model.token_types, config.model.sentence_pairs, config.data.bert.sentence_pairs) == (0, False, False)
