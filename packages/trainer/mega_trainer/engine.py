"""The trainer as a library, for programs with a loop of their own: reinforcement learning, distillation, research.

    import mega_trainer

    engine = mega_trainer.TrainingEngine({"model": {"from": "path/to/hf-folder"}, "parallel": {"tp": 2}, "data": {"seq_length": 4096}})
    old = engine.log_probs(sequences)                     # one tensor a sequence, the same on every rank
    engine.train_step(sequences, lambda new: policy_loss(new, old, advantages))
    for bucket in engine.stream_weights():                # HuggingFace's names, whole tensors
        inference.load_weights(bucket)

Every method is a collective call: all ranks make it, with the same arguments, and get the same. What this module exports
follows semantic versioning: nothing is taken away or changes its meaning but in a new major version, after a minor one
that warns of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.source import checkpoint_folder, open_source, put_file
from mega_ckpt.store import Place, place, save
from mega_ckpt.vocabulary import with_rows
from mega_common.errors import ConfigError, DataError
from mega_trainer.batch import MicroBatch, micro_batches
from mega_trainer.build import connect, dtype_of
from mega_trainer.comm import all_reduce
from mega_trainer.config import RunConfig, resolve
from mega_trainer.device import pick_device
from mega_trainer.gathered import Bucket, ShareSource, buckets_of
from mega_trainer.mesh import Groups
from mega_trainer.model.init import init_weights
from mega_trainer.model.routing import Routes, expert_layers
from mega_trainer.parallel.context import place_of_tokens
from mega_trainer.parallel.param import local_of
from mega_trainer.ranks import Ranks
from mega_trainer.rows import Rows
from mega_trainer.state import load_stages
from mega_trainer.step import StepResult, train_step
from mega_trainer.train import assemble

# The log-probabilities of some sequences' tokens to what is to be made small, a scalar.
Loss = Callable[[list[Tensor]], Tensor]
BUCKET_BYTES = 1 << 30


class TrainingEngine:
    """A model that is trained by calls, in any layout of ranks.

    Its ranks are those of torch's default process group, if the program has made that (torchrun and
    `dist.init_process_group`); without, this process is the only rank.

    Args:
        config: a run's configuration, or what a run.yaml would say. `model`, `parallel`, `optimizer`, `precision`,
            `recompute` and the like mean what they mean there; `data.seq_length` is the length of rows, and the longest
            sequence; `batch.micro` is how many rows are computed at once. Data, steps and schedules of the learning
            rate are the program's business.
        groups: this rank's process groups, where they exist already; by default they are made.

    Attributes:
        config: as it was read.
        device: of this rank's part of the model.
        step: updates made, skipped ones included.

    Raises:
        ConfigError: for what does not fit: the configuration, or the number of ranks.
        CheckpointError: when the weights to start from cannot be used.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any], groups: Groups | None = None) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        self.config = config if isinstance(config, RunConfig) else _parsed(config, size)
        if self.config.model.has_encoder or not self.config.model.causal:
            raise ConfigError("TrainingEngine: trains decoders, and the model is or has an encoder", hint="mega train")
        rank = dist.get_rank() if dist.is_initialized() else 0
        local = int(os.environ.get("LOCAL_RANK", rank))
        self._groups = groups or connect(self.config, Ranks(rank, size, local))
        self.device = pick_device(self.config.device, local)
        self._state, self._executor = assemble(self.config, self._groups, self.device)
        self._assets: Mapping[str, Path | bytes] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        if self.config.init_from is not None:
            self.load_weights(self.config.init_from)
        else:
            for stage in self._state.stages.values():
                init_weights(stage, self.config.train.seed)
            self._state.optimizer.reload_main()

    @property
    def step(self) -> int:
        """Updates made, skipped ones included."""
        return self._state.step

    # ------------------------------------------------------------------------------------------------------- computing

    def log_probs(self, sequences: Sequence[Sequence[int]], *, routes: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The log-probability of every token but the first, given those before it.

        Args:
            sequences: token ids, each from 2 to `data.seq_length` + 1 of them; packed into rows, closed to each other.
            routes: of a model with experts, which ones to send each token to, as `routes` tells them; weighted by the
                model's own scores.

        Returns:
            For each sequence of L tokens one tensor [L - 1] on `device`, fp32, or fp64 in an fp64 run.

        Raises:
            DataError: for a sequence that is too short or too long, or a token that the model has not.
        """
        rows = self._rows(sequences)
        return self._told(rows, self._log_probs(self._micro(rows, routes=routes), rows))

    def routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Which experts the model sends each token but the last to: what a trainer is given that is to route as a rollout did
        (routing replay, arXiv:2510.11370).

        Returns:
            For each sequence of L tokens one tensor int64 [L - 1, layers with experts, top_k] on `device`.

        Raises:
            ConfigError: when the model has no experts.
        """
        rows = self._rows(sequences)
        batches = self._routed(self._micro(rows), rows, [])
        with torch.no_grad(), self._executor.evaluating():
            self._executor.run(batches, 1.0)
        told = [one.routes.told for one in batches if one.routes is not None]
        whole = told[0].new_zeros(len(rows.tokens), *told[0].shape[1:])
        for one, part in zip(batches, told, strict=True):
            whole[torch.tensor(one.samples, device=self.device)] = part
        all_reduce(whole, self._groups.world)
        return self._told(rows, whole - 1)

    def train_step(
        self,
        sequences: Sequence[Sequence[int]],
        loss: Loss,
        *,
        lr: float | None = None,
        routes: Sequence[Tensor] | None = None,
    ) -> StepResult:
        """One update by a loss of the sequences' log-probabilities.

        They are computed first, for all sequences; then `loss` is called, on every rank, and its gradient with respect to
        each of them is what the tokens' losses are weighted with in the forward and backward that follow. So it may
        be any differentiable function of all of them, and micro-batches, pipelines and context ranks need not know
        it. With dropout it sees the model without.

        Args:
            sequences: as in `log_probs`.
            loss: of the log-probabilities, as `log_probs` gives them, to a scalar; it sees all sequences, and so
                does any mean in it.
            lr: learning rate of this step; `optimizer.lr` by default.
            routes: as in `log_probs`.

        Returns:
            What the step tells; `loss` is the value of `loss`, `tokens` counts those with a gradient.

        Raises:
            DataError: as in `log_probs`.
            TrainingError: when the numbers go wrong and the run's policy says stop.
        """
        rows = self._rows(sequences)
        found = self._log_probs(self._micro(rows, routes=routes), rows)
        given = [each.requires_grad_() for each in self._told(rows, found)]
        value = loss(given)
        torch.autograd.backward([value])
        weights = np.zeros(rows.tokens.shape, np.float64 if self._wide else np.float32)
        for (row, here), each in zip(rows.places, given, strict=True):
            if each.grad is not None:
                weights[row, here] = -each.grad.cpu().numpy()
        settings = self.config.optimizer
        result = train_step(
            self._executor, self._state.optimizer, self._micro(rows, weights, routes),
            tokens=[1.0, *[float("inf")] * self.config.model.mtp_layers],  # of further tokens none is asked for
            lr=settings.lr if lr is None else lr, clip=settings.clip_grad, decoupled_lr=settings.decoupled_lr,
            loss_scale=self._state.loss_scale,
        )  # fmt: skip
        result = replace(result, loss=value.item(), tokens=float(np.count_nonzero(weights)), mtp_loss=None)
        self._state.step += 1
        self._state.guard.check(self._state.step, result)
        return result

    def _rows(self, sequences: Sequence[Sequence[int]]) -> Rows:
        return Rows.of(sequences, self.config.data.seq_length, self._groups.dp.size * self.config.batch.micro)

    @property
    def _wide(self) -> bool:
        return dtype_of(self.config) == torch.float64

    def _micro(
        self, rows: Rows, weights: np.ndarray | None = None, routes: Sequence[Tensor] | None = None
    ) -> list[MicroBatch]:
        """This rank's micro-batches, without loss unless there are `weights` [R, S]."""
        weights = np.zeros(rows.tokens.shape, np.float32) if weights is None else weights
        own = rows.share(self._groups.dp.rank, self._groups.dp.size)
        micro = list(micro_batches(rows.batch(own, weights), self.config, self.device, self._groups.cp))
        return micro if routes is None else self._routed(micro, rows, routes)

    def _routed(self, micro: Sequence[MicroBatch], rows: Rows, routes: Sequence[Tensor]) -> list[MicroBatch]:
        """With the experts of tokens, where `routes` have them, and room to tell what is chosen."""
        model, moe = self.config.model, self.config.model.moe
        if moe is None:
            raise ConfigError("routes are of a model with experts, and this one has none")
        layers = [layer for layer in expert_layers(model) if layer < model.num_layers]
        shape = (len(layers), moe.top_k)
        given = torch.full((*rows.tokens.shape, *shape), -1, device=self.device)
        for number, ((row, here), each) in enumerate(zip(rows.places, routes, strict=bool(routes))):
            if tuple(each.shape) != (here.stop - here.start, *shape):
                wanted = [here.stop - here.start, *shape]
                raise DataError(f"routes of sequence {number} have shape {list(each.shape)} instead of {wanted}")
            given[row, here] = each.to(given)
        parts = [given[torch.tensor(one.samples, device=self.device)] for one in micro]
        return [
            replace(one, routes=Routes(layers, one.places, part if routes else None, torch.zeros_like(part)))
            for one, part in zip(micro, parts, strict=True)
        ]

    @torch.no_grad()
    def _log_probs(self, batches: Sequence[MicroBatch], rows: Rows) -> Tensor:
        """Of all rows, [R, S]."""
        out = torch.zeros(rows.tokens.shape, dtype=torch.float64 if self._wide else torch.float32, device=self.device)
        with self._executor.evaluating():
            self._executor.run(batches, 1.0)
        if self._groups.tp.rank == 0:
            places = place_of_tokens(out.shape[1], self._groups.cp).to(self.device)
            for number, losses in self._executor.losses.items():
                there = torch.tensor(batches[number].samples, device=self.device)
                out[there.unsqueeze(1), places] = -losses.to(out.dtype)
        all_reduce(out, self._groups.world)
        return out

    def _told(self, rows: Rows, found: Tensor) -> list[Tensor]:
        return [found[row, here].clone() for row, here in rows.places]

    # --------------------------------------------------------------------------------------------------------- weights

    def stream_weights(
        self, *, bucket_bytes: int = BUCKET_BYTES, family: str | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[Bucket]:
        """All weights as (name, whole tensor), under HuggingFace's names, in buckets: what vLLM and SGLang load.

        They are byte for byte those of the folder that `mega ckpt convert --to hf` would write. Two buckets at most are in
        memory, that at hand and the one that is made; the tensors of one lie in one piece of memory, for one collective call.
        All ranks go through all buckets.

        Args:
            bucket_bytes: most bytes of a bucket; a tensor that is larger comes alone.
            family: `model_type` whose names to use; None: that of the folder the weights came from, or the first that fits.
            dtype: to cast floating-point weights to; None leaves them in the run's.

        Raises:
            CheckpointError: when no family has all of the model.
        """
        self._state.optimizer.settle()
        source = ShareSource(self.config.model, self._state.stages, self._groups.world, self.device, self._assets)
        return buckets_of(source, bucket_bytes, family=family, dtype=dtype)

    def load_weights(self, path: str | Path) -> None:
        """Take the weights of a checkpoint of mega, a HuggingFace or Megatron folder or a GGUF file; moments stay.

        Where the engine's vocabulary is the larger one, its further rows are the mean of theirs.

        Raises:
            CheckpointError: when they are of another model, or cannot be read.
        """
        source = with_rows(open_source(path), self.config.model.vocab_size)
        load_stages(source, self._state.stages)
        self._assets = source.assets()
        self._state.optimizer.reload_main()

    def save(self, folder: str | Path) -> Place:
        """Write a checkpoint of everything to `folder`/step-..., in any layout's form, with the tokenizer that came with the
        weights; returns that when it is durable."""
        tensors, numbers = self._state.to_save(), self._state.numbers()
        with tempfile.TemporaryDirectory() as assets:
            for name, content in self._assets.items():
                put_file(Path(assets) / name, content)
            return save(
                place(folder), self.step, tensors, model=self.config.model, state=numbers,
                assets=Path(assets) if self._assets else None,
            )  # fmt: skip

    def resume(self, folder: str | Path) -> None:
        """Go on from the newest checkpoint of `folder`, or the one that it is, whatever layout wrote it.

        Raises:
            CheckpointError: when there is none.
            ConfigError: when it is of another model.
        """
        self._state.restore(checkpoint_folder(folder), self._groups.world.handle)

    # ---------------------------------------------------------------------------------------------------------- memory

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory, until `reload`; nothing else may be called before."""
        if self._away:
            raise ConfigError("the engine is offloaded already", hint="call reload first")
        self._state.optimizer.settle()
        for storage in self._storages():
            kept = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            kept.copy_(storage)
            storage.resize_(0)
            self._away.append((storage, kept))

    def reload(self) -> None:
        """Bring back what `offload` moved, to the same addresses of tensors."""
        for storage, kept in self._away:
            storage.resize_(kept.nbytes())
            storage.copy_(kept)
        self._away.clear()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Of all that lives as long as the engine and is on its device, each once."""
        weights = (local_of(p) for stage in self._state.stages.values() for p in stage.parameters())
        tensors = chain(weights, self._state.optimizer.memory())
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == self.device}
        return [storage for storage in found.values() if storage.resizable()]  # not what is in host memory already


def _parsed(raw: Mapping[str, Any], ranks: int) -> RunConfig:
    """With what a run has to say and nobody reads here: its data, and how many samples a step has."""
    data, batch = {"train": ["none"], **raw.get("data", {})}, dict(raw.get("batch", {}))
    batch.setdefault("global", batch.get("micro", 1) * ranks)
    return RunConfig.parse(resolve({**raw, "data": data, "batch": batch}), source="TrainingEngine")
