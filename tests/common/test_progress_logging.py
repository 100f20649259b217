from __future__ import annotations

import logging
import math
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.progress_logging import ProgressBar, configure_logging, format_with_decimal_unit, logger


def test_rank_0_tells_all_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    logger.info("step 1")
    logger.debug("detail")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(" step 1\n")


def test_other_ranks_tell_warnings_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=3, world_size=4)
    logger.info("step 1")
    logger.warning("slow")
    err = capsys.readouterr().err
    assert "step 1" not in err
    assert err.endswith(f"[rank 3 on {socket.gethostname()}] slow\n")


def test_verbose_tells_details_and_setting_up_twice_tells_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(verbose=True)
    configure_logging(verbose=True)
    logger.debug("detail")
    assert capsys.readouterr().err.count("detail") == 1
    assert logger.isEnabledFor(logging.DEBUG)


def test_progress_is_plain_lines_when_not_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("tokenizing", total=4000, unit="bytes", every=0.0) as bar:
        bar.advance(1000)
        bar.advance(1000)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 2
    assert lines[0].startswith("tokenizing: 1k bytes of 4k (25 %, ")
    assert lines[1].startswith("tokenizing: 2k bytes of 4k (50 %, ")
    assert lines[1].endswith(" bytes/s")
    assert "\x1b" not in err


def test_progress_without_a_total_or_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("reading", every=0.0) as bar:
        bar.advance(3)
    assert capsys.readouterr().err.startswith("reading: 3, ")


def test_short_work_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("reading", total=10, every=3600.0) as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (7, "7"), (999, "999"), (0.123456, "0.123"), (1000, "1k"), (1234567, "1.23M"), (-1234, "-1.23k"),
        (999.9, "1k"), (999_999, "1M"), (8.03e9, "8.03G"), (1.5e21, "1.5Z"), (math.nan, "nan"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_human(number: float, text: str) -> None:
    assert format_with_decimal_unit(number) == text


@given(st.floats(1e-3, 9e26))
def test_human_keeps_three_digits(number: float) -> None:
    text = format_with_decimal_unit(number)
    factor = dict(zip("kMGTPEZY", (10.0 ** (3 * i) for i in range(1, 9)), strict=True)).get(text[-1], 1.0)
    assert float(text.rstrip("kMGTPEZY")) * factor == pytest.approx(number, rel=5.1e-3)
    assert "e" not in text
