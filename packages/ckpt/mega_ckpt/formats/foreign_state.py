"""What other trainers leave beside a model's config.json: weights, and Adam's moments where they have names.

    FSDP, torchtitan, Accelerate      .metadata and *.distcp, in the folder or in one below it (`dcp`)
    DeepSpeed                         latest, global_step100/..., or zero/<name>/... (`deepspeed_state`)
    Lightning, LitGPT                 one *.ckpt or *.pth

Names are HuggingFace's, or those of `families.dialects`, under what wraps the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from mega_ckpt.formats import dcp
from mega_ckpt.formats.deepspeed_state import MODEL_STATES, universal_state, zero_state
from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.named_state import NamedState, number, plain
from mega_ckpt.formats.numbered_state import with_moments
from mega_ckpt.formats.torch_archive import StoredTensor, load_archive
from mega_common.errors import CheckpointError

LATEST = "latest"
# Parts of a name that torch.compile, DDP, FSDP, activation checkpointing and Lightning insert around a module.
WRAPPERS = frozenset({"_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"})
_OPTIMIZER = re.compile(r"(?:.*\.)?(?:optimizer|optim|optimizers)[._]")
_LOOP = re.compile(r"(train_state|lr_scheduler|dataloader)\..*")  # torchtitan's
_MOMENT = re.compile(_OPTIMIZER.pattern + r"(?:state\.)?(?P<weight>.+)\.(?P<kind>exp_avg|exp_avg_sq|step)")


def foreign_state(folder: Path) -> NamedState | None:
    """What a folder of one of these kinds holds, by names without wrappers; None where it is of none.

    Raises:
        CheckpointError: when files are missing or damaged, or hold what is none of these.
    """
    for inside in _places(folder):
        if (inside / dcp.METADATA).is_file():
            return _sharded(inside).renamed(unwrapped)
        if (inside / "zero").is_dir():
            return universal_state(inside).renamed(unwrapped)
        if any(inside.glob(MODEL_STATES)):
            return zero_state(inside).renamed(unwrapped)
    archives = sorted(path for pattern in ("*.ckpt", "*.pth") for path in folder.glob(pattern))
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives)
        raise CheckpointError(f"{folder}: holds several checkpoints: {names}", hint="leave one there")
    return _archive(archives[0]).renamed(unwrapped) if archives else None


def unwrapped(name: str) -> str:
    """Return a tensor's name without the parts that wrappers of modules insert (`WRAPPERS`)."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unprefixed(tensors: Mapping[str, Stored], expected: Collection[str]) -> Mapping[str, Stored]:
    """Strip the prefix from all names after which most of them are among the `expected` names."""
    counts = Counter(name[:at] for name in tensors for at in _starts(name) if name[at:] in expected)
    best = max(["", *counts], key=lambda prefix: (counts[prefix], -len(prefix)))
    return {name.removeprefix(best): stored for name, stored in tensors.items()}


def _starts(name: str) -> list[int]:
    """Return the offsets at which the dotted parts of a name begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]


def _places(folder: Path) -> Iterator[Path]:
    """The folder, what its `latest` names, and the one folder below it that is a checkpoint of torch.distributed."""
    yield folder
    if (folder / LATEST).is_file():
        name = (folder / LATEST).read_text().strip()
        if not re.fullmatch(r"[\w.+-]+", name) or not (folder / name).is_dir():
            raise CheckpointError(f"{folder / LATEST}: names {name!r}, which is no folder beside it")
        yield folder / name
    below = [path.parent for path in sorted(folder.glob(f"*/{dcp.METADATA}")) if not _is_optimizer(path.parent)]
    if len(below) > 1:
        names = ", ".join(path.name for path in below)
        raise CheckpointError(f"{folder}: holds several checkpoints: {names}", hint="put config.json into one of them")
    yield from below


def _is_optimizer(folder: Path) -> bool:
    """Whether it is the folder in which Accelerate has the optimizer, beside the model's."""
    return _OPTIMIZER.match(f"{folder.name}_") is not None


def _sharded(folder: Path) -> NamedState:
    """Of torch.distributed.checkpoint; Accelerate has the optimizer's state in a folder beside that of the weights."""
    weights: dict[str, Stored] = {}
    kinds: dict[str, dict[str, Stored]] = {"exp_avg": {}, "exp_avg_sq": {}, "step": {}}
    beside = (path.parent for path in folder.parent.glob(f"*/{dcp.METADATA}") if _is_optimizer(path.parent))
    for place in (folder, *beside):
        for key, one in dcp.read(place).tensors.items():
            stored = Stored(place / dcp.METADATA, one.dtype, one.shape, one.read, costly=len(one.chunks) > 1)
            if moment := _MOMENT.fullmatch(key):
                kinds[moment["kind"]][moment["weight"]] = stored
            elif place == folder and not _OPTIMIZER.match(key) and not _LOOP.match(key):
                weights[key] = stored
    steps = {number(stored) for stored in kinds.pop("step").values()}
    return NamedState(weights, kinds, steps.pop() if len(steps) == 1 else None)


def _archive(path: Path) -> NamedState:
    """A file of `torch.save`: Lightning has the weights under `state_dict`, LitGPT under `model` or by themselves.

    Lightning has a list of optimizers' states beside, LitGPT one.
    """
    saved = load_archive(path)
    held = saved if isinstance(saved, Mapping) else {}
    state = next((held[key] for key in ("state_dict", "model") if isinstance(held.get(key), Mapping)), held)
    weights = {str(name): one for name, one in state.items() if isinstance(one, StoredTensor)}
    if not weights:
        raise CheckpointError(f"{path}: has no `state_dict`, as checkpoints of Lightning and LitGPT have")
    optimizers = held.get("optimizer_states", [held["optimizer"]] if "optimizer" in held else [])
    if len(optimizers) == 1 and state is not held:
        return with_moments(path, weights, optimizers[0])
    return NamedState({name: plain(path, one) for name, one in weights.items()})
