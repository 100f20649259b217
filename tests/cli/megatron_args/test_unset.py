"""What a launch script does not say stays open, and nothing else follows from it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml

from mega_cli.megatron_args import RunYamlTranslation, render_run_yaml, translate_launch_script
from mega_cli.megatron_args.flag_tables import MegatronFlagSpec, load_megatron_flag_specs
from mega_cli.megatron_args.run_draft import load_untranslated_flag_notes
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config

FLAGS = load_megatron_flag_specs()
HANDLING = load_untranslated_flag_notes()
COMPLETE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16
"""


def parsed(translation: RunYamlTranslation) -> RunConfig:
    """As `mega train` reads the file."""
    return RunConfig.parse(resolve_run_config(yaml.safe_load(render_run_yaml(translation))))


@pytest.mark.parametrize("path", ["$DATA_PATH", "$(pwd)/text", "${ROOT}/text", "'<your data>'"])
def test_a_path_that_the_script_does_not_set_is_refused_by_the_check(path: str):
    with pytest.raises(ConfigError, match=r"data\.train = .*: must not contain a shell variable or a placeholder"):
        parsed(translate_launch_script(COMPLETE.replace("data/text", path)))


def test_a_number_that_the_script_does_not_set_is_to_be_filled_in():
    flags = "--distributed-timeout-minutes $MINUTES --train-iters $STEPS"
    translation = translate_launch_script(COMPLETE.replace("--train-iters 10", flags))
    assert translation.run["train"]["steps"] is None
    assert [(note.key, note.text) for note in translation.notes if note.kind == "open"] == [
        ("train.steps", "$STEPS is not set in the script; to be filled in")
    ]
    assert "steps: null  # to be filled in, --train-iters $STEPS" in render_run_yaml(translation)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("$STEPS", "$STEPS is not set in the script"),
        ("${STEPS[0]}", "${STEPS[0]} is not set in the script"),
        ("'<steps>'", "<steps> is not set in the script"),
        ("$((EPOCHS * 10))", "$((EPOCHS * 10)) is computed from variables that the script does not set"),
        ("$(cat steps)", "$(cat steps) is the output of a command, and commands are not executed"),
        ("`cat steps`", "$(cat steps) is the output of a command, and commands are not executed"),
        ("$T", "the value of ${T} could not be followed through the script"),
    ],
)
def test_why_a_value_is_open(value: str, told: str):
    loop = "for T in $LIST; do Q=$T; done\npython pretrain_gpt.py "
    translation = translate_launch_script(
        loop + " ".join(COMPLETE.split()).replace("--train-iters 10", f"--train-iters {value}")
    )
    assert [note.text for note in translation.notes if note.kind == "open" and note.key] == [f"{told}; to be filled in"]


def settings(translation: RunYamlTranslation) -> Any:
    """What `mega train` makes of the file; None where it refuses it."""
    try:
        return parsed(translation)
    except ConfigError:
        return None


RICH = (
    COMPLETE
    + """--swiglu --num-experts 8 --expert-model-parallel-size 2 --group-query-attention --num-query-groups 4 --fp16
    --use-rotary-position-embeddings --lr-decay-style WSD --lr-wsd-decay-iters 2 --moe-router-num-groups 2
    --moe-router-group-topk 1 --recompute-granularity full --recompute-method block --recompute-num-layers 1
    --pipeline-model-parallel-size 2 --window-size 7,0 --tensor-model-parallel-size 2 --context-parallel-size 2
    --attention-dropout 0 """
)
LATENT = (
    COMPLETE
    + """--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --optimizer muon
    --qk-pos-emb-head-dim 4 --v-head-dim 6 --position-embedding-type rope --rotary-scaling-factor 40 --mscale 1.0
    --mscale-all-dim 1.0 --mtp-num-layers 1 --use-megatron-fsdp --data-parallel-sharding-strategy optim """
)


def has_key(flag: MegatronFlagSpec) -> bool:
    """Whether a key may come from a flag."""
    why = next((why for pattern, _, why in HANDLING if fnmatchcase(flag.name, pattern)), "")
    return (flag.type in ("int", "float") or bool(flag.choices)) and (not why or why.startswith("it has no effect"))


@pytest.mark.parametrize("flag", filter(has_key, FLAGS), ids=lambda flag: flag.name)
def test_no_setting_follows_from_a_value_that_the_script_does_not_set(flag: MegatronFlagSpec):
    """Either the result is refused until it is filled in, or any value gives the same."""
    for base in (COMPLETE, RICH, LATENT):
        unset = settings(translate_launch_script(f"{base} {flag.name} $X"))
        if unset is not None:
            values = list(dict.fromkeys(flag.choices.values())) or ["1", "2", "4"]
            given = [settings(translate_launch_script(f"{base} {flag.name} {value}")) for value in values]
            assert {config.model_dump_json() for config in given if config is not None} <= {unset.model_dump_json()}
