"""Executor of one rank's list of pipeline operations. A model on one rank is the case of one stage, by the same code.

Legend: B micro-batch, S sequence, D model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import CommGroup, PendingCollective
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.parallel.context_parallel import residual_stream_token_ranges
from mega_trainer.parallel.expert_routing import (
    MicroBatchRouting,
    make_step_routings,
    sum_expert_loads,
    sum_indexer_losses,
)
from mega_trainer.parallel.fsdp import list_autograd_leaves
from mega_trainer.parallel.parallel_linear import DeferredWgrad, run_deferred_wgrads
from mega_trainer.parallel.pass_interleaver import PassInterleaver
from mega_trainer.pipeline.schedules import PipelineOp, PipelineSchedule

MicroBatchKey = tuple[int, int]  # (stage, microbatch)
ParamGrads = list[tuple[Tensor, Tensor]]  # parameters, each with its gradient
IN_FLIGHT = 4  # unfinished sends per rank, as a multiple of the ranks: a rank runs ahead of others by about as many
FORWARD_ONLY = frozenset({"F", "SEND_F", "RECV_F"})
PASS_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass
class PipelineExecutor:
    """Executor of one pipeline rank: runs its stages' forwards, backwards and messages in the order of a schedule.

    Attributes:
        schedule: operations of all ranks for one number of micro-batches; it is made again for another number.
        stages: this rank's parts of the model, by stage number.
        group: the pipeline ranks.
        dropout_seed: seed of the dropout masks; None when the model has no dropout.
        around_backward: makes the context of each backward, which reduces the gradients, from the stage's number and a
            flag for the stage's last backward of the step. Of a split backward, the weight half runs in it.
        phase: makes the context of a named part of a step, for timing.
        interleaver: runs the pairs of the schedule, if it has any.
        loads: tokens per expert in the last run, by layer, as in `MicroBatchRouting.loads`.
        indexer_losses: this rank's part of the weighted loss of the indexers of sparse attention in the last run, fp64 [1],
            if they have one.
        losses: loss of each token by micro-batch of the last run, [B, S]; empty except on the last stage.
    """

    schedule: PipelineSchedule
    stages: Mapping[int, Decoder]
    group: CommGroup
    dropout_seed: int | None = None
    around_backward: Callable[[int, bool], AbstractContextManager[None]] = lambda stage, last: nullcontext()
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    interleaver: PassInterleaver | None = None
    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    _schedules: dict[int, PipelineSchedule] = field(default_factory=dict)
    _routings: Sequence[MicroBatchRouting] = ()
    _remaining: dict[int, int] = field(default_factory=dict)
    _inputs: dict[MicroBatchKey, Tensor] = field(default_factory=dict)
    _outputs: dict[MicroBatchKey, Tensor] = field(default_factory=dict)
    _edges: dict[MicroBatchKey, GradientEdge] = field(default_factory=dict)
    _tied_weights: dict[int, Tensor] = field(default_factory=dict)
    _deferred_wgrads: dict[MicroBatchKey, tuple[list[DeferredWgrad], ParamGrads]] = field(default_factory=dict)
    _recvs: dict[tuple[str, MicroBatchKey], tuple[Tensor, PendingCollective]] = field(default_factory=dict)
    _sends: deque[tuple[Tensor, PendingCollective]] = field(default_factory=deque)
    _contexts: dict[int, ForwardContext] = field(default_factory=dict)

    def run_operations(self, batches: Sequence[MicroBatch], scale: float, loss_scale: float = 1.0) -> Tensor:
        """Run this rank's operations of a step (no backwards under `no_grad`); return its loss sums, zero before the last stage.
        The parameters' hooks collect gradients.

        A subsequence of the common order of all ranks that leaves out whole messages (send and receive), such as the
        forwards alone, is as free of deadlock as the whole order.

        Args:
            batches: this rank's micro-batches (every stage has them all: labels, positions, documents).
            scale: factor on the sum of the losses before differentiation, usually 1 / tokens of the step.
            loss_scale: factor on losses that are not sums over tokens.

        Returns:
            Sums of the weighted losses of this rank's micro-batches, fp64 [2], as `Decoder.compute_objective` returns
            them; zero except on the last stage.
        """
        self._total = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens.device)
        model = self.first_local_stage
        has_layer_losses = model.config.moe or model.config.trains_indexer
        self._routings = (
            make_step_routings(batches, model.groups.dp, loss_scale) if has_layer_losses and model.training else ()
        )
        self._remaining, self.losses, self._contexts = dict.fromkeys(self.stages, len(batches)), {}, {}
        schedule = self._schedule_for(len(batches))
        operations = iter(schedule.ranks[self.group.rank])
        for op in operations:
            if not torch.is_grad_enabled() and op.kind not in FORWARD_ONLY:
                continue
            if op in schedule.pairs and self.interleaver is not None and torch.is_grad_enabled():
                runs = [partial(self._run_pass, each, batches, scale) for each in (op, next(operations))]
                with self.phase("forward_backward"):
                    self.interleaver.run_pair(*runs)
            elif op.kind in PASS_PHASES:
                with self.phase(PASS_PHASES[op.kind]):
                    self._run_pass(op, batches, scale)
            else:
                with self.phase("pipeline"):
                    self._run_message(op, batches[op.microbatch])
        with self.phase("pipeline"):
            for _, work in self._sends:
                work.wait()
        self.loads = sum_expert_loads(self._routings)
        trains = model.config.trains_indexer
        self.indexer_losses = [sum_indexer_losses(self._routings, self._total).view(1)] if trains else []
        for buffer in (self._sends, self._contexts, self._inputs, self._tied_weights):
            buffer.clear()
        return self._total

    @property
    def first_local_stage(self) -> Decoder:
        """First of this rank's pipeline stages, for attributes that all stages share."""
        return next(iter(self.stages.values()))

    @property
    def model_config(self) -> ModelConfig:
        """Configuration of the model that the pipeline runs."""
        return self.first_local_stage.config

    @property
    def parallel_groups(self) -> ParallelGroups:
        """Communication groups of this rank for all axes of parallelism."""
        return self.first_local_stage.groups

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Put this rank's stages in evaluation mode, without dropout, for the `with` block, then back in their mode."""
        stages, training = nn.ModuleList(self.stages.values()), self.first_local_stage.training
        stages.eval()
        try:
            yield
        finally:
            stages.train(training)

    @property
    def last_stage_index(self) -> int:
        """Number of the last pipeline stage, which has the output head."""
        return len(self.schedule.owners) - 1

    def _schedule_for(self, microbatches: int) -> PipelineSchedule:
        if not self._schedules:
            self._schedules[self.schedule.microbatches] = self.schedule
        if microbatches not in self._schedules:
            self._schedules[microbatches] = self.schedule.with_microbatches(microbatches)
        return self._schedules[microbatches]

    def _run_pass(self, op: PipelineOp, batches: Sequence[MicroBatch], scale: float) -> None:
        """Run a forward, a backward or half of one; a forward through the last stage adds to the loss sums of the step."""
        key = (op.stage, op.microbatch)
        if op.kind == "F":
            self._forward(key, batches[op.microbatch], scale)
        elif op.kind == "I":
            self._backward_input(key)
        else:
            self._remaining[op.stage] -= 1
            backward = self._backward if op.kind == "B" else self._backward_weights
            with self.around_backward(op.stage, self._remaining[op.stage] == 0):
                backward(key)

    def _forward(self, key: MicroBatchKey, batch: MicroBatch, scale: float) -> None:
        stage, microbatch = key
        model = self.stages[stage]
        context = self._batch_context(microbatch, batch)
        x = None if stage == 0 else self._stage_input(key)
        result = model.run_stage(x, batch, context, self._borrow_embedding(model, microbatch))
        if isinstance(result, Tensor):
            self._pass_output(key, result)
        else:
            self._finish_forward(key, *result, scale)

    def _stage_input(self, key: MicroBatchKey) -> Tensor:
        """Return the hidden states of the previous stage, which require a gradient in training."""
        if ("F", key) in self._recvs:
            self._inputs[key] = self._wait_for_recv("F", key)
        return self._inputs[key].requires_grad_(torch.is_grad_enabled())

    def _finish_forward(self, key: MicroBatchKey, loss: Tensor, sums: Tensor, losses: Tensor, scale: float) -> None:
        """Keep the autograd root of a loss that requires a gradient, and the tokens' losses; add the sums to the step's."""
        self.losses[key[1]] = losses
        if loss.requires_grad:
            self._edges[key] = get_gradient_edge(loss * scale)
        self._total += sums

    def _pass_output(self, key: MicroBatchKey, y: Tensor) -> None:
        """Keep the autograd edge of an output; pass its values to the next stage, on this rank or another."""
        stage, microbatch = key
        if y.requires_grad:
            self._edges[key] = get_gradient_edge(y)
        if self.schedule.owners[stage + 1] == self.group.rank:
            self._inputs[stage + 1, microbatch] = y.detach()
        else:
            self._outputs[key] = y.detach()

    def _borrow_embedding(self, model: Decoder, microbatch: int) -> Tensor | None:
        """Return the first stage's tied embedding as an extra input of a last stage that has no copy, else None.

        As for other inputs, its gradient is kept until the micro-batch's backward reaches the first stage.
        """
        if not model.borrows:
            return None
        weight = self.stages[0].embedding.weight
        borrowed = weight.detach().requires_grad_(torch.is_grad_enabled() and weight.requires_grad)
        if borrowed.requires_grad:
            self._tied_weights[microbatch] = borrowed
        return borrowed

    def _backward(self, key: MicroBatchKey) -> None:
        (edges, grads), tied = self._autograd_roots(key), self._tied_grad(key)
        edges = [*edges, *(get_gradient_edge(weight) for weight, _ in tied)]
        if edges:
            torch.autograd.backward(edges, [*grads, *(gradient for _, gradient in tied)])

    def _autograd_roots(self, key: MicroBatchKey) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """Return the autograd roots of a stage's backward and their gradients; empty for a frozen first stage."""
        gradient = self._output_gradient(key)
        return ([self._edges.pop(key)], [gradient]) if key in self._edges else ([], [])

    def _backward_input(self, key: MicroBatchKey) -> None:
        """Run a backward without the deferred weight gradients; no gradient reaches a parameter yet."""
        model = self.stages[key[0]]
        inputs, parameters = self._differentiable_inputs(key), list_autograd_leaves(model)
        edges, grads = self._autograd_roots(key)
        gradients = torch.autograd.grad(edges, [*inputs, *parameters], grads, allow_unused=True) if edges else ()
        for tensor, gradient in zip(inputs, gradients, strict=False):
            tensor.grad = gradient
        param_grads = zip(parameters, gradients[len(inputs) :], strict=bool(edges))
        assert model.deferred is not None
        self._deferred_wgrads[key] = (
            model.deferred.take_all_wgrads(),
            [(p, gradient) for p, gradient in param_grads if gradient is not None],
        )

    def _backward_weights(self, key: MicroBatchKey) -> None:
        wgrads, param_grads = self._deferred_wgrads.pop(key)
        run_deferred_wgrads(wgrads, [*param_grads, *self._tied_grad(key)])

    def _output_gradient(self, key: MicroBatchKey) -> Tensor | None:
        stage, microbatch = key
        if stage == self.last_stage_index:
            return None
        if self.schedule.owners[stage + 1] == self.group.rank:
            return self._input_gradient((stage + 1, microbatch))
        return self._wait_for_recv("B", key)

    def _differentiable_inputs(self, key: MicroBatchKey) -> list[Tensor]:
        """Return the inputs of a stage that require a gradient."""
        stage, microbatch = key
        inputs = [self._inputs[key]] if key in self._inputs else []
        if self.stages[stage].borrows and microbatch in self._tied_weights:
            inputs.append(self._tied_weights[microbatch])
        return inputs

    def _tied_grad(self, key: MicroBatchKey) -> ParamGrads:
        """Return the tied embedding with the gradient of its use in the last stage; empty except in the first stage."""
        stage, microbatch = key
        if stage > 0 or microbatch not in self._tied_weights:
            return []
        gradient = self._tied_weights.pop(microbatch).grad
        assert gradient is not None
        return [(self.stages[0].embedding.weight, gradient)]

    def _input_gradient(self, key: MicroBatchKey) -> Tensor:
        gradient = self._inputs.pop(key).grad
        assert gradient is not None
        return gradient

    def _run_message(self, op: PipelineOp, batch: MicroBatch) -> None:
        key = (op.stage, op.microbatch)
        match op.kind:
            case "RECV_F":
                self._receive("F", key, op.stage - 1, batch)
            case "RECV_B":
                self._receive("B", key, op.stage + 1, batch)
            case "SEND_F":
                self._send(self._outputs.pop(key), op.stage + 1)
            case "SEND_B":
                self._send(self._input_gradient(key), op.stage - 1)

    def _receive(self, direction: str, key: MicroBatchKey, from_stage: int, batch: MicroBatch) -> None:
        model = self.stages[key[0]]
        tensor = torch.empty(model.pipeline_message_shape(batch), dtype=model.dtype, device=batch.tokens.device)
        self.group.record_call("receive", tensor)
        # Unbatched messages of two ranks have a separate communicator and stream, which their first message makes. Do
        # not pass a `device_id` to `init_process_group`: it would put the messages of all ranks on one stream, where a
        # receive that waits for its sender blocks everything behind it.
        work = dist.irecv(tensor, self.group.ranks[self.schedule.owners[from_stage]], group=self.group.process_group)
        assert work is not None
        self._recvs[direction, key] = (tensor, PendingCollective(work, self.group))

    def _wait_for_recv(self, direction: str, key: MicroBatchKey) -> Tensor:
        tensor, work = self._recvs.pop((direction, key))
        with self.phase("pipeline"):
            work.wait()
        return tensor

    def _send(self, tensor: Tensor, to_stage: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.group.ranks[self.schedule.owners[to_stage]], group=self.group.process_group)
        assert work is not None
        self._sends.append((tensor, PendingCollective(work, self.group)))
        if len(self._sends) > IN_FLIGHT * self.group.size:
            self._sends.popleft()[1].wait()  # safe: in the common order of messages a send may block anywhere

    def _batch_context(self, microbatch: int, batch: MicroBatch) -> ForwardContext:
        """Return positions, masks and dropout of a micro-batch, made once for all stages of this rank."""
        if microbatch not in self._contexts:
            routing = self._routings[microbatch] if self._routings else None
            dropout = partial(self._make_dropout, batch.samples)
            self._contexts[microbatch] = replace(
                self.first_local_stage.make_batch_context(batch, dropout, routing), routes=batch.routes
            )
        return self._contexts[microbatch]

    def _make_dropout(self, samples: Sequence[int], length: int, kind: int) -> SeededDropout | None:
        """Return the dropout of this rank's part of sequences; each `kind` of sequence has its own masks."""
        model, groups = self.first_local_stage, self.parallel_groups
        if self.dropout_seed is None or not model.training:
            return None
        residual, full = (
            residual_stream_token_ranges(length * groups.cp.size, groups.cp, groups.tp, sp=sp)
            for sp in (model.sp, False)
        )
        return SeededDropout(self.dropout_seed + kind, samples, residual, full)
