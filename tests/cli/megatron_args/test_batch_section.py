"""Batches that grow by `--step-batch-size-schedule`, which took the place of `--rampup-batch-size` in 2026."""

from __future__ import annotations

import pytest
import yaml

from mega_cli.megatron_args import render_run_yaml, translate_launch_script
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512 "
    "--micro-batch-size 1 --lr 1e-3 --data-path data/text --bf16 --attention-dropout 0 --train-samples 1000 "
)


def translated(arguments: str) -> RunConfig:
    return RunConfig.parse(
        resolve_run_config(yaml.safe_load(render_run_yaml(translate_launch_script(SMALL + arguments))))
    )


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ('"0:8"', [(0, 8), (999, 8)]),
        ('"0:4 640:8"', [(0, 4), (9, 4), (10, 8)]),  # 640 tokens are 10 samples of 64
        ("0:4 640:8", [(0, 4), (9, 4), (10, 8)]),
        ('"0:2 1K:4 3.2K:8"', [(14, 2), (15, 4), (49, 4), (50, 8)]),
        ('"0:2,1k:4,2k:16"', [(14, 2), (15, 4), (30, 4), (31, 16)]),
        ('"640:8 0:4"', [(0, 4), (10, 8)]),
        ('"0:1 1M:2K"', [(15624, 1), (15625, 2000)]),
        ('"0:768 250B:1536 0.5T:3072"', [(3_906_249_999, 768), (3_906_250_000, 1536), (7_812_500_000, 3072)]),
        ('"0:8 640:4 1280:8"', [(9, 8), (10, 4), (20, 8)]),
    ],
)
def test_the_sizes_are_those_of_the_schedule(schedule: str, sizes: list[tuple[int, int]]) -> None:
    batch = translated(f"--step-batch-size-schedule {schedule}").batch
    assert [(consumed, batch.batch_size_after_samples(consumed)) for consumed, _ in sizes] == sizes
    assert batch.global_ == sizes[-1][1]


def test_its_largest_size_may_be_given_as_well() -> None:
    assert translated('--step-batch-size-schedule "0:4 640:8" --global-batch-size 8').batch.global_ == 8


def test_steps_follow_from_the_sizes() -> None:
    run = translated('--step-batch-size-schedule "0:4 640:8" --lr-warmup-fraction 0.1')
    assert (run.batch.samples_after_steps(3), run.train.steps) == (12, 3 + (1000 - 12) // 8)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ('--step-batch-size-schedule "64:8"', "must be"),
        ('--step-batch-size-schedule "0:8 nonsense"', "must be"),
        ('--step-batch-size-schedule "0:8 1:2:3"', "must be"),
        ('--step-batch-size-schedule "0:8 640:x"', "must be"),
        ('--step-batch-size-schedule "0:0"', "must be"),
        ('--step-batch-size-schedule "0:4 10:8 20:16"', "each threshold above the one before"),  # all in sample 0
        ('--step-batch-size-schedule "0:4 inf:8"', "must be"),
        ('--step-batch-size-schedule "0:8 640:4"', "a batch that becomes smaller"),
        ('--step-batch-size-schedule "0:8" --global-batch-size 16', "conflicts with --global-batch-size"),
        ('--step-batch-size-schedule "0:8" --rampup-batch-size 4 4 40', "conflicts with --rampup-batch-size"),
        (
            '--step-batch-size-schedule "0:8" --decrease-batch-size-if-needed',
            "conflicts with --decrease-batch-size-if-needed",
        ),
    ],
)
def test_a_schedule_that_is_none_is_refused_by_name(arguments: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)--step-batch-size-schedule.*{rule}"):
        translate_launch_script(SMALL + arguments)


def test_a_schedule_that_the_script_does_not_set_is_to_be_filled_in() -> None:
    text = render_run_yaml(translate_launch_script(SMALL + '--step-batch-size-schedule "$SCHEDULE"'))
    assert "batch.global: the last size of the schedule" in text
    assert yaml.safe_load(text)["batch"]["global"] is None
