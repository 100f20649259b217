"""The data of a run that is gone on with: the order it had, and what a change of its blend means.

The rule: where the blend was changed (data sets, weights, temperature, epochs, curriculum), the new one begins at the
sample the run has come to, and each data set goes on with its next sample: nothing is read again or left out for the
change. `data.begun` keeps that begin, so that the run's samples are a function of its settings from then on too. A data
set is known by its path, or, where it was moved, by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mega_common.log import logger
from mega_data.config import Begun, DataConfig
from mega_data.order.blend import StableBlend
from mega_data.order.curriculum import names_of
from mega_data.order.parts import matching


def resumed(config: DataConfig, saved: Mapping[str, Any], consumed: int, read: Mapping[str, int] | None) -> DataConfig:
    """The settings of a run that goes on from a checkpoint.

    Args:
        config: as it is asked for now.
        saved: the `data` section of the run that was saved.
        consumed: samples it had read.
        read: samples it had read of each data set, by path; None: saved by a version that did not tell.

    Raises:
        DataError: when a glob matches nothing.
    """
    order = config.order or saved.get("order") or "stable"  # which was the default before there was another
    config = config.model_copy(update={"order": order, "begun": None})
    try:
        was = DataConfig.model_validate(saved)
    except ValidationError:  # of another version
        return config
    if order == "megatron" or was.sample_order == "megatron":
        return config
    names = _names(config)
    before = dict(read) if read is not None else _plain_counts(was, consumed)
    if _blend(was) == _blend(config) and [*map(_last, before)] == [*map(_last, names)]:
        begun = was.begun and Begun(samples=was.begun.samples, read=_known(was.begun.read, names))
    else:
        begun = Begun(samples=consumed, read=_known(before, names))
        logger.info(
            "the blend changes at sample %d: %s", consumed, _told(begun.read, before.keys() - begun.read.keys())
        )
    return config.model_copy(update={"begun": begun})


def _blend(config: DataConfig) -> object:
    sources = [(source.path.name, source.weights, source.max_epochs) for source in config.train]
    return config.temperature, sources


def _names(config: DataConfig) -> list[str]:
    return names_of(path for source in config.train for path in matching(source))


def _plain_counts(was: DataConfig, consumed: int) -> dict[str, int]:
    """Of a run whose data sets had weights alone, as all had before they could have more."""
    counts = StableBlend([source.weight or 1.0 for source in was.train]).counts(consumed)
    return dict(zip(names_of(source.path for source in was.train), counts, strict=True))


def _known(read: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """What was read of the data sets of these names, in the places where they are now."""
    names = list(names)
    once = [{name for name, count in Counter(map(_last, each)).items() if count == 1} for each in (read, names)]
    moved = {_last(name): count for name, count in read.items() if _last(name) in once[0] & once[1]}
    found = {name: read.get(name, moved.get(_last(name))) for name in names}
    return {name: count for name, count in found.items() if count is not None}


def _last(name: str) -> str:
    return Path(name).name


def _told(read: Mapping[str, int], gone: Iterable[str]) -> str:
    shown = [f"{name} goes on after {count} of its samples" for name, count in read.items()]
    shown += [f"{name} is no more" for name in gone]
    rest = f", and {len(shown) - 8} others" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + rest + "; what is new begins with its first"
