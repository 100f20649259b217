"""Checkpoints of other trainers next to a config.json: weights, and Adam moments if they are named.

    FSDP, torchtitan, Accelerate      .metadata and *.distcp, in the folder or in one below it (`dcp`)
    DeepSpeed                         latest, global_step100/..., or zero/<name>/... (`deepspeed_checkpoint`)
    Lightning, LitGPT                 one *.ckpt or *.pth

Names are HuggingFace's or those of `families.trainer_naming`, possibly with a common prefix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from mega_ckpt.formats import dcp
from mega_ckpt.formats.adam_state import NamedAdamState, attach_adam_moments, parse_integer, to_lazy_tensor
from mega_ckpt.formats.deepspeed_checkpoint import MODEL_STATES, read_universal_checkpoint, read_zero_checkpoint
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive
from mega_common.errors import CheckpointError

LATEST = "latest"
# Parts of a name that torch.compile, DDP, FSDP, activation checkpointing and Lightning insert around a module.
WRAPPERS = frozenset({"_forward_module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module"})
_OPTIMIZER = re.compile(r"(?:.*\.)?(?:optimizer|optim|optimizers)[._]")
_LOOP = re.compile(r"(train_state|lr_scheduler|dataloader)\..*")  # torchtitan's
_MOMENT = re.compile(_OPTIMIZER.pattern + r"(?:state\.)?(?P<weight>.+)\.(?P<kind>exp_avg|exp_avg_sq|step)")


def read_foreign_checkpoint(folder: Path) -> NamedAdamState | None:
    """Read weights and Adam moments that another trainer (such as DeepSpeed or FSDP) saved in `folder`; None if there are none.
    Supported are torch.distributed.checkpoint, DeepSpeed, and .ckpt or .pth files. Names have no module wrappers.

    Raises:
        CheckpointError: when files are missing, damaged or ambiguous.
    """
    for inside in _candidate_folders(folder):
        if (inside / dcp.METADATA).is_file():
            return _read_dcp_state(inside).rename_weights(remove_module_wrapper_parts)
        if (inside / "zero").is_dir():
            return read_universal_checkpoint(inside).rename_weights(remove_module_wrapper_parts)
        if any(inside.glob(MODEL_STATES)):
            return read_zero_checkpoint(inside).rename_weights(remove_module_wrapper_parts)
    archives = sorted(path for pattern in ("*.ckpt", "*.pth") for path in folder.glob(pattern))
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives)
        raise CheckpointError(f"{folder}: has several checkpoints: {names}", hint="keep only one in the folder")
    return _read_archive_state(archives[0]).rename_weights(remove_module_wrapper_parts) if archives else None


def remove_module_wrapper_parts(name: str) -> str:
    """Return a tensor's name without the parts that module wrappers such as DDP insert (`WRAPPERS`)."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def strip_common_prefix(tensors: Mapping[str, LazyTensor], expected: Collection[str]) -> Mapping[str, LazyTensor]:
    """Return `tensors` with the prefix removed from their names that makes most of them match the `expected` names."""
    counts = Counter(name[:at] for name in tensors for at in _part_offsets(name) if name[at:] in expected)
    best = max(["", *counts], key=lambda prefix: (counts[prefix], -len(prefix)))
    return {name.removeprefix(best): stored for name, stored in tensors.items()}


def _part_offsets(name: str) -> list[int]:
    """Return the offsets at which the dotted parts of a name begin."""
    return [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]


def _candidate_folders(folder: Path) -> Iterator[Path]:
    """Yield the folder, the one named in its `latest`, and the one subfolder that is a checkpoint of torch.distributed."""
    yield folder
    if (folder / LATEST).is_file():
        name = (folder / LATEST).read_text().strip()
        if not re.fullmatch(r"[\w.+-]+", name) or not (folder / name).is_dir():
            raise CheckpointError(f"{folder / LATEST}: {name!r} must be a folder next to it")
        yield folder / name
    below = [path.parent for path in sorted(folder.glob(f"*/{dcp.METADATA}")) if not _is_optimizer_folder(path.parent)]
    if len(below) > 1:
        names = ", ".join(path.name for path in below)
        raise CheckpointError(f"{folder}: has several checkpoints: {names}", hint="put config.json into one of them")
    yield from below


def _is_optimizer_folder(folder: Path) -> bool:
    """Return whether the folder is Accelerate's optimizer folder, next to the model's."""
    return _OPTIMIZER.match(f"{folder.name}_") is not None


def _read_dcp_state(folder: Path) -> NamedAdamState:
    """Read a checkpoint of torch.distributed.checkpoint; Accelerate has the optimizer state in a sibling folder."""
    weights: dict[str, LazyTensor] = {}
    kinds: dict[str, dict[str, LazyTensor]] = {"exp_avg": {}, "exp_avg_sq": {}, "step": {}}
    siblings = (path.parent for path in folder.parent.glob(f"*/{dcp.METADATA}") if _is_optimizer_folder(path.parent))
    for source in (folder, *siblings):
        for key, one in dcp.read_dcp_folder(source).tensors.items():
            stored = LazyTensor(source / dcp.METADATA, one.dtype, one.shape, one.read, costly=len(one.chunks) > 1)
            if moment := _MOMENT.fullmatch(key):
                kinds[moment["kind"]][moment["weight"]] = stored
            elif source == folder and not _OPTIMIZER.match(key) and not _LOOP.match(key):
                weights[key] = stored
    steps = {parse_integer(stored) for stored in kinds.pop("step").values()}
    return NamedAdamState(weights, kinds, steps.pop() if len(steps) == 1 else None)


def _read_archive_state(path: Path) -> NamedAdamState:
    """Read a file of `torch.save`: Lightning has the weights in `state_dict` and a list of optimizer states, LitGPT has
    the weights in `model` or at the top level and one optimizer state.
    """
    saved = load_torch_archive(path)
    held = saved if isinstance(saved, Mapping) else {}
    state = next((held[key] for key in ("state_dict", "model") if isinstance(held.get(key), Mapping)), held)
    weights = {str(name): one for name, one in state.items() if isinstance(one, StoredTensor)}
    if not weights:
        raise CheckpointError(f"{path}: requires a `state_dict`, as in checkpoints of Lightning and LitGPT")
    optimizers = held.get("optimizer_states", [held["optimizer"]] if "optimizer" in held else [])
    if len(optimizers) == 1 and state is not held:
        return attach_adam_moments(path, weights, optimizers[0])
    return NamedAdamState({name: to_lazy_tensor(path, one) for name, one in weights.items()})
