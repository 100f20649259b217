"""Functions that a worker process of the server runs, with limits of CPU time and memory.

This module has no heavy imports, since every worker process loads it first.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mega_common.vision_config import VisionConfig
    from mega_data.chat.chat_records import Conversation
    from mega_data.chat.chat_template import ChatTemplate
    from mega_data.images.image_pixels import PreparedImage

T = TypeVar("T")

MEMORY = 4 * 2**30  # bytes of address space
NICE = 10

# anyio removes the main module of a worker process, and replaces it by that of the parent only if that is a .py file.
# Libraries that are loaded next import it.
sys.modules.setdefault("__main__", ModuleType("__main__"))


def run_with_cpu_and_memory_limits(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`; beyond `seconds` of CPU time or the memory limit, this worker process ends.
    The operating system kills the process after `seconds` of CPU time, and without memory it ends.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) < NICE:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = MEMORY if hard == resource.RLIM_INFINITY else min(hard, MEMORY)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return work()
    except MemoryError:
        os._exit(1)  # what it holds would be missing for the next task
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def render_with_limits(
    seconds: float, template: ChatTemplate, conversation: Conversation, begins: bool, continues: bool
) -> str:
    """Return the prompt text that a chat template renders; beyond `seconds` of CPU time, this worker process ends."""
    return run_with_cpu_and_memory_limits(
        seconds,
        lambda: template.render_prompt(conversation, add_generation_prompt=begins, continue_final_message=continues),
    )


def prepare_images_with_limits(seconds: float, pictures: Sequence[bytes], vision: VisionConfig) -> list[PreparedImage]:
    """Return image files prepared for a vision encoder; beyond `seconds` of CPU time, this worker process ends."""

    def prepare_all() -> list[PreparedImage]:
        from mega_data.images.image_pixels import prepare_image

        return [prepare_image(picture, vision) for picture in pictures]

    return run_with_cpu_and_memory_limits(seconds, prepare_all)


def check_grammar_with_limits(seconds: float, grammar: str, tokenizer_json: str, ends: frozenset[int]) -> None:
    """Raise DataError unless a grammar compiles and generates text; beyond `seconds` of CPU time, this process ends."""

    def run_check() -> None:
        from mega_eval.grammar_compiler import check_grammar  # its libraries are loaded with the lower priority, too

        check_grammar(grammar, tokenizer_json, ends)

    run_with_cpu_and_memory_limits(seconds, run_check)
