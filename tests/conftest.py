"""What all tests share: one thread per process, since their ranks and workers share the cores, no clocks, the same numbers, a fresh log."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in every process that is started
import torch

settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", settings.get_profile("random"), derandomize=True)
settings.load_profile("house")


MEMORY_FOLDER = "/dev/shm"
ROOM = 4 << 30  # bytes; all tests together keep less than a tenth of it at a time


def pytest_configure() -> None:
    """Set up this process, and by its environment all that it starts."""
    keep_files_in_memory()
    reset_ignored_signals()


def pytest_collection_finish() -> None:
    """Exclude the objects of all test modules from garbage collections: every run of a test has one at its start."""
    gc.collect()
    gc.freeze()


def keep_files_in_memory() -> None:
    """Keep the folders of tests in memory where there is room: they mostly wait for a disk's fsync."""
    if os.path.isdir(MEMORY_FOLDER) and shutil.disk_usage(MEMORY_FOLDER).free >= ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY_FOLDER)


def reset_ignored_signals() -> None:
    """Start child processes with the default dispositions of SIGINT and SIGHUP, also under `nohup` and in CI runners.

    An ignored signal stays ignored in a program that is started, a handler does not. So a handler that does nothing takes
    the place of an ignored signal, and the tests themselves still outlive a hang-up.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """A test draws the same numbers alone, after any others, and on any machine."""
    torch.manual_seed(0)


@pytest.fixture
def no_excluded_objects() -> Iterator[None]:
    """Python's garbage collection has all objects, as in a process that has just started."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(scope="module")
def quick_harness() -> Iterator[None]:
    """lm-evaluation-harness fetches nothing, and does not ask half the machine what it is, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    """A command sets up the log of its process: here that ends with the test, and `caplog` hears each record once."""
    yield
    logger = logging.getLogger("mega")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
