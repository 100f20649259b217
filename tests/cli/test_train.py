"""The command's own part; runs are tested in tests/trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mega_ckpt.store import save_sharded_checkpoint
from mega_cli.main import main
from mega_trainer.config.run_config import load_run_config
from mega_trainer.job.resume import inherit_data_order


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


def test_a_checked_configuration_is_printed_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"preset": "tiny"}, "data": {"train": "tokens"}}))
    status, out, _ = call(capsys, str(path), "--check", "--no-data", "--set", "batch.global=16")
    resolved = yaml.safe_load(out)
    assert status == 0
    assert resolved["batch"] == {"micro": 1, "global": 16, "stages": []}
    assert resolved["model"]["num_layers"] == 2
    assert out.splitlines()[-1] == "# ok: the configuration can be used"


def test_a_check_covers_the_checkpoint_that_a_run_resumes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "run.yaml", tmp_path / "run"
    settings = {
        "model": {"preset": "tiny"},
        "data": {"train": "tokens"},
        "train": {"steps": 100},
        "output": str(output),
    }
    path.write_text(yaml.safe_dump(settings))
    config = inherit_data_order(load_run_config(path), {})
    state = {"settings": config.model_dump(mode="json", by_alias=True), "consumed_samples": 80 * config.batch.global_}
    save_sharded_checkpoint(config.checkpoint_root, 80, {}, model=config.model, state=state)
    status, out, _ = call(capsys, str(path), "--check", "--no-data", "--set", "log.every=7")
    assert status == 0
    assert "step-00000080\n# changed: log.every: 1 -> 7\n" in out
    status, _, err = call(capsys, str(path), "--check", "--no-data", "--set", "train.steps=1000")
    assert status == 2
    assert "would make a jump of the learning rate of the next step" in err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--schema")
    assert status == 0
    assert "parallel" in json.loads(out)["properties"]


def test_a_launch_script_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "TP=2\ntorchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 "
        "--lr 1e-3 --vocab-size 1000 --data-path wiki --tensor-model-parallel-size $TP\n"
    )
    status, out, _ = call(capsys, "--from-megatron-args", str(script))
    run = yaml.safe_load(out)
    assert status == 0
    assert (run["model"]["num_layers"], run["parallel"]["tp"], run["data"]["seq_length"]) == (4, 2, 128)


SCRIPT = (
    "# \xe9\nTP=1; LAYERS=$1\ntorchrun --nproc-per-node $GPUS pretrain_gpt.py --num-layers $LAYERS --hidden-size 64 --lr $LR "
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 10 --vocab-size 1000 --data-path $2 --tensor-model-parallel-size $TP\n"
)


def test_definitions_and_arguments_of_a_launch_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(SCRIPT, encoding="latin-1")
    definitions = ("--define", "GPUS=4", "--define", "TP=2", "--define", "LR=1e-3")
    status, out, _ = call(capsys, "--from-megatron-args", str(script), *definitions, "--", "6", "-wiki/")
    run = yaml.safe_load(out)
    assert status == 0
    assert (run["model"]["num_layers"], run["parallel"]["tp"], run["optimizer"]["lr"]) == (6, 2, 1e-3)
    assert run["data"]["train"] == [{"path": "-wiki/"}]
    assert "1 x 4 = 4 ranks" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run.yaml", "--define", "A=1"), "--define requires --from-megatron-args"),
        (("run.yaml", "--strict"), "--strict requires --from-megatron-args"),
        (("run.yaml", "other.yaml"), "other.yaml"),
        (("--from-megatron-args", __file__, "--define", "A"), "--define must have the form NAME=VALUE, found 'A'"),
        (("--from-megatron-args", __file__, "--define", "1=2"), "--define must have the form NAME=VALUE"),
        (("--from-megatron-args", "nowhere.sh"), "nowhere.sh: cannot be read"),
    ],
)
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    status, _, error = call(capsys, *arguments)
    assert status == 2
    assert words in error


@pytest.mark.parametrize(
    ("arguments", "words"), [((), "mega train requires a run.yaml"), (("nowhere.yaml",), "cannot be read")]
)
def test_what_is_missing_is_told(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    status, _, error = call(capsys, *arguments)
    assert status == 2
    assert words in error


SHAPE = {
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "use_mrope": False,
    "unsloth_version": "2025.3.14", "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_model_alone_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with pytest.raises(SystemExit) as end:
        main(["plan", str(tmp_path / name), "--set", "parallel.tp=2", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (end.value.code, told["parameters"], told["ranks"]["tp"]) == (0, 16464, 2)


@pytest.mark.parametrize(("name", "starts_from"), [("", True), ("config.json", False)])
@pytest.mark.parametrize("command", ["--check", "plan"])
def test_a_shape_needs_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, starts_from: bool, command: str
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"model": {"from": str(folder / name)}, "data": {"train": "tokens"}}))
    if command == "--check":
        status, out, error = call(capsys, str(run), "--check", "--no-data")
        resolved = yaml.safe_load(out)
        assert resolved["model"]["num_layers"] == 3
        assert (resolved.get("init_from") == str(folder)) is starts_from
    else:
        with pytest.raises(SystemExit) as end:
            main(["plan", str(run), "--json"])
        status, (out, error) = int(end.value.code or 0), capsys.readouterr()
        assert json.loads(out)["parameters"] == 16464
    assert status == 0
    assert error.count("reads unsloth_version, use_mrope; kept unchanged") == 1
