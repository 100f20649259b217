"""An engine on several ranks that share a model: what the first is asked, all do, in the same order, before the same step.

What a step brings is the same on all of them, so that the first alone need tell it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from mega_eval.engine import Engine, Event, Request

Asked = list[Callable[[Engine], object]]  # what was asked since the last step


class LeadingEngine(Engine):
    """That of the first rank; `close` lets the others go. Arguments are those of `Engine`, the same on all ranks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asked: Asked = []

    def add(self, request: Request) -> int:
        """As `Engine.add`; the others are told of requests that are taken."""
        number = super().add(request)
        self._asked.append(partial(Engine.add, request=request))
        return number

    def cancel(self, request: int) -> None:
        """As `Engine.cancel`."""
        super().cancel(request)
        self._asked.append(partial(Engine.cancel, request=request))

    def reset(self) -> None:
        """Reset the engines of all ranks, before their next step."""
        super().reset()
        self._asked = [Engine.reset]

    def step(self, *, isolate: bool = False) -> list[Event]:
        """Run `Engine.step` on all ranks."""
        dist.broadcast_object_list([self._asked])
        self._asked = []
        return super().step(isolate=isolate)

    def close(self) -> None:
        """No more will be asked."""
        dist.broadcast_object_list([None])


def follow(engine: Engine) -> None:
    """Do what the first rank does, until it has no more."""
    while (asked := _heard()) is not None:
        for ask in asked:
            ask(engine)
        engine.step(isolate=True)  # the first rank reports failures


def _heard() -> Asked | None:
    heard: list[Asked | None] = [None]
    dist.broadcast_object_list(heard)
    return heard[0]
