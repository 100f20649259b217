"""`--split`, of which Megatron reads what looks like a number and passes over all else."""

from __future__ import annotations

import pytest

from mega_cli.megatron_args import translate_launch_script
from mega_common.errors import ConfigError

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --data-path data/text --train-iters 10 "
)


@pytest.mark.parametrize(
    ("text", "shares", "named"),
    [
        ("969,30,1", [969, 30, 1], ""),
        ("'98, 2, 0'", [98, 2, 0], ""),
        ("99/1/0", [99, 1, 0], ""),
        ("[9.5,.5,0]", [9.5, 0.5, 0], ""),
        ("'[0.9, 0.1]'", [0.9, 0.1], ""),
        ("\"'99,1,0'\"", [99, 1, 0], ""),
        ("100", [100], ""),
        ("99,1,", [99, 1], ""),
        ("-1,1,0", [1, 1, 0], "reads the numbers 1, 1, 0 from it"),
        ("90,abc5,5", [90, 5, 5], "reads the numbers 90, 5, 5"),
        ("9e1,1e1", None, "must be one to three shares"),
        ("1e2", [1, 2], "reads the numbers 1, 2 "),
        ("90%,10%", [90, 10], "reads the numbers 90, 10"),
        ("+90,10", [90, 10], "reads the numbers 90, 10"),
        ("'train=9;valid=1'", [9, 1], "reads the numbers 9, 1"),
        ("'90;10'", [90, 10], "reads the numbers 90, 10"),
        ("1.2.3,4", None, "must be one to three shares"),
        ("1,2,3,4", None, "must be one to three shares"),
        ("0,0,0", None, "not all of them 0"),
        ("all", None, "must be one to three shares"),
    ],
)
def test_split(text: str, shares: list[float] | None, named: str) -> None:
    script = f"{SMALL} --split={text}"
    if shares is None:
        with pytest.raises(ConfigError, match=named):
            translate_launch_script(script)
        return
    made = translate_launch_script(script)
    notes = [note.text for note in made.notes if note.flag and note.flag.startswith("--split")]
    assert made.run["data"]["split"] == shares
    assert bool(named) == any("reads the numbers" in note for note in notes)
    assert any(named in note for note in notes)
