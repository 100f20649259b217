"""Adam moments next to a HuggingFace model: `optimizer.pt` of transformers' Trainer, `optimizer.bin` of Accelerate.

Both are the state of a torch optimizer, by the number of a parameter (`numbered_state`), and the files of weights are in another
order. That of the parameters is in transformers alone, which makes the model here without memory. Accelerate's optimizer was given
what a program gave it, here all parameters as one group; the Trainer makes two, of those that decay and of norms and biases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from mega_ckpt.formats.adam_state import BY_NUMBER, NamedAdamState, name_moments
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.torch_archive import load_torch_archive
from mega_common.errors import CheckpointError

FILES = ("optimizer.pt", "optimizer.bin")
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")


def read_trainer_state(folder: Path, weights: Mapping[str, LazyTensor]) -> NamedAdamState | None:
    """Return the weights of a folder with the moments in it, or the reason why they cannot be read; None if there is no
    such file.

    A file of them that cannot be read is no reason to refuse the weights, which do not come from it.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        orders = _parameter_orders(folder)
    except ImportError:
        why = f"{BY_NUMBER}, and transformers, which knows their order, is not installed"
        return NamedAdamState(weights, missing_reason=why)
    except Exception as error:  # noqa: BLE001  # of whatever kind: it is a model's own code that cannot make it
        return NamedAdamState(
            weights, missing_reason=f"{BY_NUMBER}, and transformers cannot tell their order ({error})"
        )
    try:
        optimizer = load_torch_archive(path)
        if not isinstance(optimizer, Mapping):
            raise CheckpointError(f"{path}: not the state of an optimizer of torch")
        return name_moments(path, weights, optimizer, orders)
    except CheckpointError as error:
        return NamedAdamState(weights, missing_reason=error.message)


def _parameter_orders(folder: Path) -> list[list[list[str]]]:
    """Return the possible parameter orders of the optimizer: parameter names by group."""
    import transformers  # here: it takes seconds, and is needed for this alone

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    known = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
            model: nn.Module = known(config)
        else:
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    names = [name for name, _ in model.named_parameters()]
    decayed = [name for name in names if not _UNDECAYED.search(name.lower()) and name.rpartition(".")[0] not in norms]
    return [[names], [decayed, [name for name in names if name not in set(decayed)]]]
