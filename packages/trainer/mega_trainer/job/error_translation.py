"""Error messages for external faults of a rank: out of memory, and lost connections to other ranks."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from mega_common.errors import MegaError, TrainingError
from mega_common.progress_logging import format_with_decimal_unit
from mega_trainer.distributed.comm import connection_error_reason, is_lost_connection
from mega_trainer.job.metrics_log import get_peak_allocated_bytes
from mega_trainer.plan.memory_advice import PredictedMemoryNeeds

OUT_OF_MEMORY = "out of memory"
# the host allocator of torch raises a plain RuntimeError
_HOST_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
MAX_SUGGESTIONS = 6  # those that free most memory
LOST_HINT = "see the output of the rank that ended first for the cause; run the same command again to resume from the last checkpoint"


@contextlib.contextmanager
def convert_oom_and_lost_rank_errors(
    rank: int, step: Callable[[], str], needs: Callable[[], PredictedMemoryNeeds]
) -> Iterator[None]:
    """Translate torch's errors of exhausted memory or lost ranks in the `with` block into a `TrainingError`.
    The error has the rank, the step and a remedy.

    Args:
        rank: of this process.
        step: returns the current step as text, such as "step 12".
        needs: returns the memory estimate of this rank.

    Other errors are internal; they get a note with the location.

    Raises:
        TrainingError: in place of torch's error.
    """
    where = f"rank {rank} on {socket.gethostname()}, {{}}"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _out_of_memory_error(
            f"{where.format(step())}: {_device_message(error)}", needs(), _memory_on_device()
        ) from error
    except MemoryError as error:
        message = f"{where.format(step())}: {OUT_OF_MEMORY} on the host"
        raise _out_of_memory_error(message, _without_offload(needs()), _memory_on_host()) from error
    except RuntimeError as error:
        if requested := _HOST_MEMORY.search(str(error)):
            message = (
                f"{OUT_OF_MEMORY} on the host: cannot allocate {format_with_decimal_unit(int(requested[1]))}B more"
            )
            raise _out_of_memory_error(
                f"{where.format(step())}: {message}", _without_offload(needs()), _memory_on_host()
            ) from error
        if is_lost_connection(error):
            raise TrainingError(
                f"{where.format(step())}: lost the connection to other ranks ({connection_error_reason(error)})",
                hint=LOST_HINT,
            ) from error
        _add_location_note(error, where.format(step()))
        raise
    except Exception as error:
        _add_location_note(error, where.format(step()))
        raise


def _add_location_note(error: Exception, where: str) -> None:
    if not isinstance(error, MegaError) and not hasattr(error, "__notes__"):
        error.add_note(where)


def _out_of_memory_error(message: str, needs: PredictedMemoryNeeds, used: Mapping[str, int]) -> TrainingError:
    """Return an error with the memory used by each owner, the predicted memory, and the settings that would free most."""
    used = {**used, "other than predicted": max(0, next(iter(used.values())) - sum(needs.predicted.values()))}
    lines = [
        message,
        f"  used: {_format_sizes(used)}",
        f"  predicted peak of this rank: {_format_sizes(needs.predicted)}",
    ]
    most = [
        f"{' '.join(advice.settings)} ({format_with_decimal_unit(advice.freed)}B)"
        for advice in needs.suggestions[:MAX_SUGGESTIONS]
    ]
    hint = f"settings that free most on a rank, as predicted: --set {', '.join(most)}" if most else "use more ranks"
    return TrainingError("\n".join(lines), hint=f"{hint}; mega train --find-micro-batch finds the largest micro-batch")


def _without_offload(needs: PredictedMemoryNeeds) -> PredictedMemoryNeeds:
    """Return the needs without advice that would take more of the host's memory."""
    return replace(
        needs, suggestions=[advice for advice in needs.suggestions if "offload" not in " ".join(advice.settings)]
    )


def _format_sizes(kinds: Mapping[str, int]) -> str:
    return ", ".join(
        f"{kind} {format_with_decimal_unit(size)}B"
        for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1])
        if size
    )


def _memory_on_host() -> dict[str, int]:
    return {"by this process": get_peak_allocated_bytes()}


def _memory_on_device() -> dict[str, int]:
    """Return the bytes used by tensors, by torch's free blocks, and by communicators, CUDA and other processes."""
    free, total = torch.cuda.mem_get_info(torch.cuda.current_device())
    tensors, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return {
        "tensors": tensors, "torch's free blocks": reserved - tensors,
        "communicators, CUDA and other processes": total - free - reserved,
    }  # fmt: skip


def _device_message(error: torch.OutOfMemoryError) -> str:
    """Return the requested size and device of an error such as `CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0
    has a total capacity of ...`, with the free memory.
    """
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    requested = re.search(r"allocate ([\d.]+ \w+)", str(error))
    failed = f": cannot allocate {requested[1]} more" if requested else ""
    return f"{OUT_OF_MEMORY} on cuda:{device}{failed}, {format_with_decimal_unit(free)}B of {format_with_decimal_unit(total)}B are free"
