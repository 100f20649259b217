"""DeepSpeed's own file of settings counts beside a script's flags, wherever it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.megatron_args.test_forks import SMALL, parsed, texts, value

from mega_cli.megatron_args import RunYamlTranslation, render_run_yaml, translate_launch_script

FLAGS = SMALL.replace("--global-batch-size 8 ", "").replace("--bf16", "--fp16") + "--train-iters 10 --clip-grad 0.5 "
WRITTEN = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 2.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 12},
}  # fmt: skip
TRANSLATED = {
    "batch.micro": 1,
    "batch.global": 16,
    "parallel.zero": 2,
    "optimizer.clip_grad": 2.0,
    "optimizer.offload": True,
    "precision": "fp16",
    "fp16.initial_scale": 4096.0,
    "fp16.growth_interval": 500,
    "fp16.min_scale": 1,
}
RUN = f"deepspeed --num_nodes 1 --num_gpus 4 pretrain_gpt.py {FLAGS} --deepspeed --deepspeed_config $CONFIG --zero-stage 1"


def heredoc(values: dict[str, Any] | str) -> str:
    text = values if isinstance(values, str) else json.dumps(values, indent=1)
    return f"CONFIG=./ds.$SLURM_JOBID.json\ncat <<EOT > $CONFIG\n{text}\nEOT\n{RUN}"


def found(translation: RunYamlTranslation) -> dict[str, Any]:
    return {key: value(translation.run, key) for key in TRANSLATED}


def beside(folder: Path, name: str, text: str) -> Path:
    """The path of a script with a file beside it."""
    (folder / "train.sh").touch()
    (folder / name).write_text(text)
    return folder / "train.sh"


def test_a_file_that_the_script_writes_is_read():
    translation = translate_launch_script(heredoc(WRITTEN))
    assert found(translation) == TRANSLATED
    assert "zero_optimization.stage of ./ds.$SLURM_JOBID.json" in render_run_yaml(translation)
    assert "--zero-stage 1: zero_optimization.stage" in texts(translation, "changes meaning")
    assert "DeepSpeed tolerates 1" in texts(translation, "changes meaning")
    parsed(translation)


def test_a_file_beside_the_script_is_read(tmp_path: Path):
    path = beside(tmp_path, "ds.json", json.dumps(WRITTEN))
    script = f"CONFIG=configs/ds.json\n{RUN}"
    assert found(translate_launch_script(script, path=path)) == TRANSLATED
    missing = translate_launch_script(script)
    assert value(missing.run, "batch.global") == 4, "Megatron's default"
    assert "could not be read beside the script" in texts(missing, "changes meaning")


def test_a_template_beside_the_script_is_filled_by_sed(tmp_path: Path):
    template = json.dumps(WRITTEN).replace('"stage": 2', '"stage": STAGE').replace("2.0", "CLIP")
    path = beside(tmp_path, "template.json", template)
    filled = 'Z=2\nCONFIG=ds.json\nsed "s/STAGE/${Z}/" template.json | sed "s/CLIP/2.0/" > $CONFIG\n' + RUN
    assert found(translate_launch_script(filled, path=path)) == TRANSLATED
    unset = translate_launch_script(filled.replace("Z=2\n", ""), path=path)
    assert value(unset.run, "parallel.zero") == 1, "that of --zero-stage, where the file's is not known"
    assert value(unset.run, "optimizer.clip_grad") == 2.0


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"train_batch_size": None, "gradient_accumulation_steps": 3}, "batch.global", 12),
        ({"train_batch_size": "auto"}, "batch.global", 4),
        ({"fp16": {"enabled": True}}, "fp16.initial_scale", 65_536.0),
        ({"fp16": {"enabled": True, "loss_scale": 100}}, "fp16.initial_scale", 128.0),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "precision", "bf16"),
        ({"gradient_clipping": 0}, "optimizer.clip_grad", 0),
        ({"zero_optimization": {"stage": 0}}, "parallel.zero", 0),
    ],
)
def test_what_the_file_says(change: dict[str, Any], key: str, expected: Any):
    translation = translate_launch_script(heredoc(WRITTEN | change))
    assert value(translation.run, key) == expected
    parsed(translation)


def test_without_a_clip_in_the_file_the_user_is_told_that_deepspeed_does_not_clip():
    translation = translate_launch_script(
        heredoc({name: v for name, v in WRITTEN.items() if name != "gradient_clipping"})
    )
    assert value(translation.run, "optimizer.clip_grad") == 0.5
    assert "does not clip" in texts(translation, "open")


def test_a_batch_that_differs_from_the_flags_is_told():
    translation = translate_launch_script(heredoc(WRITTEN) + " --global-batch-size 32")
    assert value(translation.run, "batch.global") == 32
    assert "train_batch_size of ./ds.$SLURM_JOBID.json is 16, and the flags say 32" in texts(translation, "open")


def test_sections_without_a_counterpart_are_told():
    curriculum = {"curriculum_learning": {"enabled": True}, "progressive_layer_drop": {"enabled": False}}
    told = texts(translate_launch_script(heredoc(WRITTEN | curriculum)), "no equivalent")
    assert "curriculum_learning of ./ds.$SLURM_JOBID.json" in told
    assert "progressive_layer_drop" not in told


@pytest.mark.parametrize("text", ["", "[1]", '{"train_batch_size": 16,', "{'train_batch_size': TRAIN}"])
def test_what_is_no_json_is_not_read(text: str):
    translation = translate_launch_script(heredoc(text))
    assert value(translation.run, "batch.global") == 4
    assert "could not be read" in texts(translation, "changes meaning")
