"""Runs one rank's list of operations. A model on one rank is the case of one stage, by the same code.

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
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mega_common.model_config import ModelConfig
from mega_trainer.batch import MicroBatch
from mega_trainer.comm import Group, Pending
from mega_trainer.mesh import Groups
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.routing import Routing, routings, summed_loads
from mega_trainer.parallel.context import places_of_residual
from mega_trainer.parallel.deferred import Product, deliver
from mega_trainer.parallel.param import trains
from mega_trainer.pipeline.schedules import Op, Schedule
from mega_trainer.rng import Dropout

Key = tuple[int, int]  # (stage, microbatch)
Known = list[tuple[Tensor, Tensor]]  # parameters and gradients of theirs
IN_FLIGHT = 4  # messages of a rank that may be under way, in numbers of ranks: it runs ahead of others by about as many
FORWARD_ONLY = frozenset({"F", "SEND_F", "RECV_F"})


@dataclass
class Executor:
    """Executes the operations of one rank for one step.

    Attributes:
        schedule: who does what, in order, for some number of micro-batches; for another one it is made again.
        stages: this rank's parts of the model, by stage number.
        group: the pipeline ranks.
        dropout_seed: seed of the dropout masks; None when the model has no dropout.
        around_backward: what each backward runs in, given the stage's number and whether it is the stage's last of the
            step; it takes the gradients. Where a backward is cut in two, that is the half of the weights.
        phase: what parts of a step run in, given their names.
        loads: what the routers of each layer did with this rank's tokens in the last run, as in `Routing.loads`.
        losses: of each token of each micro-batch of the last run, [B, S]; none but on the last stage.
    """

    schedule: Schedule
    stages: Mapping[int, Decoder]
    group: Group
    dropout_seed: int | None = None
    around_backward: Callable[[int, bool], AbstractContextManager[None]] = lambda stage, last: nullcontext()
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    loads: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _routings: Sequence[Routing] = ()
    _inputs: dict[Key, Tensor] = field(default_factory=dict)
    _outputs: dict[Key, Tensor] = field(default_factory=dict)
    _edges: dict[Key, GradientEdge] = field(default_factory=dict)
    _borrowed: dict[int, Tensor] = field(default_factory=dict)
    _put_off: dict[Key, tuple[list[Product], Known]] = field(default_factory=dict)
    _arriving: dict[tuple[str, Key], tuple[Tensor, Pending]] = field(default_factory=dict)
    _leaving: deque[tuple[Tensor, Pending]] = field(default_factory=deque)
    _contexts: dict[int, Context] = field(default_factory=dict)

    def run(self, batches: Sequence[MicroBatch], scale: float, loss_scale: float = 1.0) -> Tensor:
        """All operations of a step; gradients end up where the parameters' hooks put them.

        Where gradients are disabled only the forward operations run: any part of the common order of all ranks that
        leaves out whole messages is as free of deadlock as the whole.

        Args:
            batches: this rank's micro-batches (every stage has them all: labels, positions, documents).
            scale: factor on the sum of the losses before differentiation, usually 1 / tokens of the step.
            loss_scale: factor on losses that are no sums over tokens.

        Returns:
            Sums of the weighted losses of this rank's micro-batches, fp64 [2], as `Decoder.objective` tells them; zero
            but on the last stage.
        """
        total = torch.zeros(2, dtype=torch.float64, device=batches[0].tokens.device)
        model = self.model
        self._routings = routings(batches, model.groups.dp, loss_scale) if model.config.moe and model.training else ()
        left, self.losses = dict.fromkeys(self.stages, len(batches)), {}
        for op in self._schedule_of(len(batches)).ranks[self.group.rank]:
            key = (op.stage, op.microbatch)
            if not torch.is_grad_enabled() and op.kind not in FORWARD_ONLY:
                continue
            match op.kind:
                case "F":
                    with self.phase("forward"):
                        total += self._forward(key, batches[op.microbatch], scale)
                case "I":
                    with self.phase("backward"):
                        self._backward_of_input(key)
                case "B" | "W":
                    left[op.stage] -= 1
                    backward = self._backward if op.kind == "B" else self._backward_of_weights
                    with self.phase("backward"), self.around_backward(op.stage, left[op.stage] == 0):
                        backward(key)
                case _:
                    with self.phase("pipeline"):
                        self._message(op, batches[op.microbatch])
        with self.phase("pipeline"):
            for _, work in self._leaving:
                work.wait()
        self.loads = summed_loads(self._routings)
        for left_over in (self._leaving, self._contexts, self._inputs, self._borrowed):
            left_over.clear()
        return total

    @property
    def model(self) -> Decoder:
        """One of this rank's stages, for what they have in common."""
        return next(iter(self.stages.values()))

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self.model.config

    @property
    def groups(self) -> Groups:
        """This rank's."""
        return self.model.groups

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around forwards that are no training's: this rank's stages in evaluation mode."""
        training = self.model.training
        for stage in self.stages.values():
            stage.eval()
        yield
        for stage in self.stages.values():
            stage.train(training)

    @property
    def last_stage(self) -> int:
        """Number of the stage with the head."""
        return len(self.schedule.owners) - 1

    def _schedule_of(self, microbatches: int) -> Schedule:
        if not self._schedules:
            self._schedules[self.schedule.microbatches] = self.schedule
        if microbatches not in self._schedules:
            self._schedules[microbatches] = self.schedule.resized(microbatches)
        return self._schedules[microbatches]

    def _forward(self, key: Key, batch: MicroBatch, scale: float) -> Tensor | float:
        stage, microbatch = key
        model = self.stages[stage]
        context = self._context(microbatch, batch)
        if self.last_stage == 0:
            return self._ended(key, *model.whole(batch, context), scale)
        if stage == 0:
            x = model.begin(batch, context)
        else:
            if ("F", key) in self._arriving:
                self._inputs[key] = self._arrived("F", key)
            x = self._inputs[key].requires_grad_(torch.is_grad_enabled())
        y = model(x, context)
        if stage < self.last_stage:
            self._hand_on(key, y)
            return 0.0
        return self._ended(key, *model.objective(y, batch, context, self._borrow(model, microbatch)), scale)

    def _ended(self, key: Key, loss: Tensor, sums: Tensor, losses: Tensor, scale: float) -> Tensor:
        """Keep the way back of a loss, if there is one, and the tokens' losses; returns the sums it is made of."""
        self.losses[key[1]] = losses
        if loss.requires_grad:
            self._edges[key] = get_gradient_edge(loss * scale)
        return sums

    def _hand_on(self, key: Key, y: Tensor) -> None:
        """Keep of an output only what its backward needs; the values go to the next stage, here or elsewhere."""
        stage, microbatch = key
        if y.requires_grad:
            self._edges[key] = get_gradient_edge(y)
        if self.schedule.owner(stage + 1) == self.group.rank:
            self._inputs[stage + 1, microbatch] = y.detach()
        else:
            self._outputs[key] = y.detach()

    def _borrow(self, model: Decoder, microbatch: int) -> Tensor | None:
        """The embedding for a last stage that has none of its own: one more input of it, from the first stage.

        Like other inputs, its gradient waits until the micro-batch's backward comes to the stage it is from.
        """
        if not model.borrows:
            return None
        weight = self.stages[0].embedding.weight
        lent = weight.detach().requires_grad_(torch.is_grad_enabled() and weight.requires_grad)
        if lent.requires_grad:
            self._borrowed[microbatch] = lent
        return lent

    def _backward(self, key: Key) -> None:
        (edges, given), returned = self._ways_back(key), self._returned(key)
        edges = [*edges, *(get_gradient_edge(weight) for weight, _ in returned)]
        if edges:
            torch.autograd.backward(edges, [*given, *(gradient for _, gradient in returned)])

    def _ways_back(self, key: Key) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """Where a stage's backward begins, and with what gradient; nowhere in a first stage that is frozen."""
        gradient = self._output_gradient(key)
        return ([self._edges.pop(key)], [gradient]) if key in self._edges else ([], [])

    def _backward_of_input(self, key: Key) -> None:
        """Everything of a backward but the products that the stage puts off; no gradient reaches a parameter yet."""
        model = self.stages[key[0]]
        inputs, parameters = self._inputs_of(key), list(filter(trains, model.parameters()))
        edges, given = self._ways_back(key)
        gradients = torch.autograd.grad(edges, [*inputs, *parameters], given, allow_unused=True) if edges else ()
        for tensor, gradient in zip(inputs, gradients, strict=False):
            tensor.grad = gradient
        rest = zip(parameters, gradients[len(inputs) :], strict=bool(edges))
        assert model.deferred is not None
        self._put_off[key] = model.deferred.take(), [(p, gradient) for p, gradient in rest if gradient is not None]

    def _backward_of_weights(self, key: Key) -> None:
        products, known = self._put_off.pop(key)
        deliver(products, [*known, *self._returned(key)])

    def _output_gradient(self, key: Key) -> Tensor | None:
        stage, microbatch = key
        if stage == self.last_stage:
            return None
        here = self.schedule.owner(stage + 1) == self.group.rank
        return self._input_gradient((stage + 1, microbatch)) if here else self._arrived("B", key)

    def _inputs_of(self, key: Key) -> list[Tensor]:
        """What a stage was given that wants a gradient."""
        stage, microbatch = key
        given = [self._inputs[key]] if key in self._inputs else []
        return (
            [*given, self._borrowed[microbatch]]
            if self.stages[stage].borrows and microbatch in self._borrowed
            else given
        )

    def _returned(self, key: Key) -> Known:
        """The embedding and the gradient of its use in the last stage, in the stage that lent it."""
        stage, microbatch = key
        if stage > 0 or microbatch not in self._borrowed:
            return []
        gradient = self._borrowed.pop(microbatch).grad
        assert gradient is not None
        return [(self.stages[0].embedding.weight, gradient)]

    def _input_gradient(self, key: Key) -> Tensor:
        gradient = self._inputs.pop(key).grad
        assert gradient is not None
        return gradient

    def _message(self, op: Op, batch: MicroBatch) -> None:
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

    def _receive(self, what: str, key: Key, from_stage: int, batch: MicroBatch) -> None:
        model = self.stages[key[0]]
        tensor = torch.empty(model.message_shape(batch), dtype=model.dtype, device=batch.tokens.device)
        self.group.count("receive", tensor)
        # Unbatched, messages of two ranks have a communicator and a stream of their own, made by the first of them. So they
        # must stay: `init_process_group` with a `device_id` would put those of all ranks on one stream, where one that
        # waits for its sender holds up all behind it.
        work = dist.irecv(tensor, self.group.ranks[self.schedule.owner(from_stage)], group=self.group.handle)
        assert work is not None
        self._arriving[what, key] = (tensor, Pending(work, self.group))

    def _arrived(self, what: str, key: Key) -> Tensor:
        tensor, work = self._arriving.pop((what, key))
        with self.phase("pipeline"):
            work.wait()
        return tensor

    def _send(self, tensor: Tensor, to_stage: int) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.group.ranks[self.schedule.owner(to_stage)], group=self.group.handle)
        assert work is not None
        self._leaving.append((tensor, Pending(work, self.group)))
        if len(self._leaving) > IN_FLIGHT * self.group.size:
            self._leaving.popleft()[1].wait()  # the common order of messages lets a send block anywhere

    def _context(self, microbatch: int, batch: MicroBatch) -> Context:
        """Positions, masks and dropout of a micro-batch, made once for all stages of this rank."""
        if microbatch not in self._contexts:
            routing = self._routings[microbatch] if self._routings else None
            dropout = partial(self._dropout, batch.samples)
            self._contexts[microbatch] = replace(self.model.context_of(batch, dropout, routing), routes=batch.routes)
        return self._contexts[microbatch]

    def _dropout(self, samples: Sequence[int], length: int, kind: int) -> Dropout | None:
        """Of this rank's part of sequences of some samples, each kind of which has masks of its own."""
        model, groups = self.model, self.groups
        if self.dropout_seed is None or not model.training:
            return None
        places, whole = (
            places_of_residual(length * groups.cp.size, groups.cp, groups.tp, sp=sp) for sp in (model.sp, False)
        )
        return Dropout(self.dropout_seed + kind, samples, places, whole)
