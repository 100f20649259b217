"""Several adapters of low rank beside one model, of which each text has one or none (as in arXiv:2311.03285)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from mega_ckpt.adapter import AdaptedSource, Adapter
from mega_ckpt.pieces import Piece, boxes_of
from mega_ckpt.source import load_adapter, open_adapted
from mega_common.errors import CheckpointError
from mega_common.lora import is_adapter
from mega_common.remote import Place
from mega_trainer.model.adapters import Choice
from mega_trainer.parallel.lora import Selected, Selection
from mega_trainer.parallel.param import info_of
from mega_trainer.tokens import token_numbers


@dataclass(frozen=True)
class Beside:
    """Adapters of one model, by the names that texts choose them by."""

    adapters: Mapping[str, Adapter]
    choice: Choice

    @classmethod
    def open(cls, base: str | Place, folders: Mapping[str, str]) -> Beside:
        """Those in `folders`: runs or checkpoints with `lora`, or PEFT's folders, that were trained beside `base`.

        Raises:
            CheckpointError: when one is of another model, or changes what texts with other adapters share.
        """
        found = {name: _apart(open_adapted(folder, base), str(base), folder) for name, folder in folders.items()}
        choice = Choice(Selection(list(found)), {name: one.modules for name, one in found.items()})
        return cls(found, choice)

    def load(self, model: nn.Module) -> None:
        """Fill the adapters of `model`, which was built for this choice."""
        layers = [layer for layer in model.modules() if isinstance(layer, Selected)]
        for name, adapter in self.adapters.items():
            own = [one for layer in layers if (one := layer.of(name)) is not None]
            load_adapter(adapter, boxes_of([held for one in own for held in held_by(one, adapters=True)]))


def held_by(model: nn.Module, *, adapters: bool) -> list[tuple[Tensor, Sequence[Piece]]]:
    """The parameters of a model, or those of its adapters, and where they lie."""
    every = [(parameter.detach(), info_of(parameter).pieces) for parameter in model.parameters()]
    return [held for held in every if any(is_adapter(piece.name) for piece in held[1]) == adapters]


def _apart(source: AdaptedSource, base: str, folder: str) -> Adapter:
    """The adapter of `source`, if it can stay beside the base."""
    adapter = source.adapter
    _check_tokenizer(source, folder)
    whole = [name for name in adapter.shapes if not is_adapter(name)]
    experts = [name for name, of in adapter.modules.items() if of.experts is not None]
    latent = [name for name in adapter.modules if name.endswith(".kv_b_proj")]
    encoder = [*adapter.modules] if source.model.encoder else []
    for names, why in (
        (whole, "is replaced whole, and texts with other adapters need it as it was"),
        (experts, "are experts, whose tokens come sorted by expert, not by adapter"),
        (latent, "widens a latent that the cache keeps in place of keys and values"),
        (encoder, "is beside a model with an encoder, which reads one text at a time"),
    ):
        if names:
            raise CheckpointError(
                f"{folder}: {names[0]} {why}",
                hint=f"put it into the weights: mega ckpt merge-adapter {base} {folder} OUT, and serve OUT",
            )
    return adapter


def _check_tokenizer(source: AdaptedSource, folder: str) -> None:
    """Refuse an adapter that came with another tokenizer than its base: all texts are encoded by the base's.

    Raises:
        CheckpointError: when a token has another number in one of the two.
    """
    files = [held.get("tokenizer.json") for held in (source.base.assets(), source.adapter.tokenizer)]
    base, own = (file.read_bytes() if isinstance(file, Path) else file for file in files)
    if base is not None and own is not None and base != own and token_numbers(base) != token_numbers(own):
        raise CheckpointError(
            f"{folder}: the adapter's tokenizer.json has other tokens than the base's, by which all texts are encoded",
            hint="put the adapter into the weights (mega ckpt merge-adapter), and serve the merged model",
        )
