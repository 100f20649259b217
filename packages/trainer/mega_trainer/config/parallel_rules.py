"""Rules of the section `parallel:` of run.yaml: the model, the sequence length, the batch and the number of ranks. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mega_common.lora_config import LoraConfig
from mega_common.model_config import ModelConfig
from mega_common.strict_config import ConfigProblem
from mega_trainer.config.batch_size import BatchConfig
from mega_trainer.config.parallel_layout import (
    can_split_heads,
    can_split_model,
    format_head_counts,
    list_expert_degrees,
    list_tensor_degrees,
    max_head_count,
    suggest_parallel_degree,
    tensor_degree_rule,
)
from mega_trainer.config.sections import ParallelConfig

# virtual stages of the schedules that have a fixed number
FIXED_VIRTUAL_STAGES = {"zb-h1": 1, "zbv": 2, "dualpipev": 2}

_OVERLAP = "parallel.overlap_expert_exchange"
_LAST_STAGE = (
    "requires the last {} layers on the last pipeline stage, as they share keys and values (model.shared_kv_layers)"
)
_FIRST_STAGE = (
    "requires {} layers on the first pipeline stage, as image features are added to the outputs of the first layers "
    "(model.vision.native.deepstack) or the first layer widens the embeddings (model.hyper_connections)"
)


@dataclass(frozen=True)
class ParallelRules:
    """Rules that the degrees of parallelism must follow for one model, batch, sequence length and precision."""

    parallel: ParallelConfig
    model: ModelConfig
    batch: BatchConfig
    seq_length: int
    precision: str

    def find_parallel_degree_problems(self) -> Iterator[ConfigProblem]:
        """Yield degrees of parallelism that do not fit the model, whatever the number of ranks."""
        model, tp = self.model, self.parallel.tp
        if not can_split_model(model, tp):
            hint = suggest_parallel_degree("parallel.tp", tp, list_tensor_degrees(model))
            yield ConfigProblem("parallel.tp", tensor_degree_rule(model), tp, hint)
        yield from self._context_problems()
        yield from self._expert_problems()
        yield from self._stage_problems()
        yield from self._schedule_problems()
        yield from self._overlap_problems()

    def find_world_size_problems(self, world_size: int) -> Iterator[ConfigProblem]:
        """Yield degrees of parallelism and batch sizes that do not fit `world_size` ranks."""
        parallel, batch = self.parallel, self.batch
        model_ranks = parallel.tp * parallel.pp * parallel.cp
        if world_size % model_ranks:
            product = f"tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp} = {model_ranks}"
            rule = f"must fit {world_size} rank(s): {product} does not divide {world_size}"
            yield ConfigProblem("parallel", rule, hint=self._suggest_degrees(world_size))
            return
        dp = world_size // model_ranks
        if parallel.dp not in (None, dp):
            hint = f"remove parallel.dp, or start {model_ranks * (parallel.dp or 1)} ranks"
            yield ConfigProblem("parallel.dp", f"must be {dp} on {world_size} ranks", parallel.dp, hint)
        stage, block = dp * parallel.cp * parallel.tp, parallel.ep * parallel.expert_tp
        if stage % block:
            product = f"ep {parallel.ep} x expert_tp {parallel.expert_tp} = {block}"
            rule = f"must fit the {stage} ranks of a stage: {product} does not divide {stage}"
            yield ConfigProblem("parallel.ep", rule, parallel.ep, _set_degrees(self._fit_expert_degrees(stage)))
        ranks, shard = dp * parallel.cp, parallel.zero3_shard
        if shard is not None and ranks % shard:
            fitting = [size for size in range(2, ranks + 1) if ranks % size == 0]
            key = "parallel.zero3_shard"
            hint = suggest_parallel_degree(key, shard, fitting) if fitting else f"remove {key}"
            yield ConfigProblem(key, f"must divide the {ranks} data ranks", shard, hint)
        count = batch.global_ // (batch.micro * dp)
        if parallel.overlap_expert_exchange and count < 2 * parallel.pp:
            rule = f"requires 2 x parallel.pp = {2 * parallel.pp} micro-batches per step, found {count}"
            hint = f"set {_OVERLAP}=false, or a larger batch.global or smaller batch.micro"
            yield ConfigProblem(_OVERLAP, rule, True, hint)
        unit = batch.micro * dp
        for problem in batch.find_divisibility_problems(unit, f"batch.micro {batch.micro} x dp {dp} = {unit}"):
            yield replace(problem, path=f"batch.{problem.path}")

    @property
    def minimum_ranks(self) -> int:
        """Smallest number of ranks that the configured degrees allow, with all experts in each pipeline stage."""
        parallel = self.parallel
        ranks, block = parallel.tp * parallel.cp * (parallel.dp or 1), parallel.ep * parallel.expert_tp
        return parallel.pp * (ranks if parallel.dp else math.lcm(ranks, block))

    def with_degrees(self, degrees: Mapping[str, int | str]) -> ParallelRules:
        """Return a copy of the parallelism rules with other degrees of parallelism.
        `degrees`, {field of run.yaml's `parallel` section: value}, replace the present values.
        """
        return replace(self, parallel=self.parallel.model_copy(update=dict(degrees)))

    def _stage_problems(self) -> Iterator[ConfigProblem]:
        """Yield numbers of stages that the layers do not fill."""
        parallel, layers = self.parallel, self.model.num_layers
        stages, layout = parallel.pp * parallel.virtual_stages, parallel.pipeline_layout
        first, last = self.model.first_stage_layers, self.model.last_stage_layers
        if layout is None:
            if layers < stages:
                product = f"parallel.pp {parallel.pp} x parallel.virtual_stages {parallel.virtual_stages} = {stages}"
                rule = f"requires a layer for each stage: {product}, found model.num_layers = {layers}"
                yield ConfigProblem("parallel.pp", rule, parallel.pp, self._suggest_stages())
            elif self._most_stages < stages:
                rule = _LAST_STAGE.format(last) if last > first else _FIRST_STAGE.format(first)
                needed = stages + layers - self._most_stages
                rule += f": {stages} stages need {needed} layers, found {layers}"
                yield ConfigProblem("parallel.pp", rule, parallel.pp, self._suggest_stages())
            return
        key = "parallel.pipeline_layout"
        fits = self._most_stages >= stages
        even = _even_layout(layers, stages)
        if first > layers // stages:
            even = [first, *_even_layout(layers - first, stages - 1)]
        elif last > layers // stages:
            even = [*_even_layout(layers - last, stages - 1), last]
        hint = f"set {key}={even}" if fits else f"remove {key} and {self._suggest_stages()}"
        if len(layout) != stages:
            rule = f"must have parallel.pp x parallel.virtual_stages = {stages} stages, found {len(layout)}"
            yield ConfigProblem(key, rule, layout, hint)
        elif sum(layout) != layers:
            rule = f"must have model.num_layers = {layers} layers, found {sum(layout)}"
            yield ConfigProblem(key, rule, layout, hint)
        elif 0 in layout[1:-1]:
            rule = "must have at least one layer in each stage; only the first and the last may have none"
            yield ConfigProblem(key, rule, layout, hint)
        elif layout[0] < first:
            yield ConfigProblem(key, _FIRST_STAGE.format(first), layout, hint)
        elif layout[-1] < last:
            yield ConfigProblem(key, _LAST_STAGE.format(last), layout, hint)

    @property
    def _most_stages(self) -> int:
        """Largest number of pipeline stages: each has a layer, and the first and the last one those that must be on it."""
        return self.model.most_pipeline_stages

    def _schedule_problems(self) -> Iterator[ConfigProblem]:
        """Yield virtual stages and schedules that conflict with each other or need a pipeline."""
        parallel, stages = self.parallel, self.parallel.virtual_stages
        if parallel.pp == 1 and stages > 1:
            rule, hint = "requires pipeline parallelism (parallel.pp > 1)", "set parallel.virtual_stages=1"
            if FIXED_VIRTUAL_STAGES.get(parallel.schedule) == stages:
                hint += " and parallel.schedule=1f1b"
            yield ConfigProblem("parallel.virtual_stages", rule, stages, hint)
        if parallel.pp == 1 and parallel.schedule != "1f1b":
            rule = "requires pipeline parallelism (parallel.pp > 1)"
            yield ConfigProblem("parallel.schedule", rule, parallel.schedule, "set parallel.schedule=1f1b")
            return
        fixed = FIXED_VIRTUAL_STAGES.get(parallel.schedule, stages)
        if fixed != stages:
            fits = parallel.pipeline_layout is None and self._most_stages >= parallel.pp * fixed
            own = f"set parallel.virtual_stages={fixed}, or " if fits else ""
            rule = f"requires parallel.virtual_stages = {fixed}, found {stages}"
            yield ConfigProblem("parallel.schedule", rule, parallel.schedule, f"{own}set parallel.schedule=1f1b")

    def _suggest_stages(self) -> str:
        """Return the hint for a pipeline of more stages than layers: the nearest one that fits."""
        parallel, layers = self.parallel, self._most_stages
        fixed = FIXED_VIRTUAL_STAGES.get(parallel.schedule)
        if fixed is None and layers >= parallel.pp:
            return f"set parallel.virtual_stages={layers // parallel.pp}"
        stages = fixed or 1
        if layers >= 2 * stages:
            return _set_degrees({"pp": layers // stages, "virtual_stages": stages})
        return _set_degrees({"pp": layers, "virtual_stages": 1, "schedule": "1f1b"})

    def _context_problems(self) -> Iterator[ConfigProblem]:
        """Yield splits of the sequence, over context ranks and under sequence parallelism, that do not fit the model."""
        model, parallel, length = self.model, self.parallel, self.seq_length
        cp, tp = parallel.cp, parallel.tp
        unit = (2 * cp if cp > 1 else 1) * (tp if parallel.sp else 1)
        if length % unit:
            factors = [f"2 x parallel.cp {cp}"] * (cp > 1) + [f"parallel.tp {tp} (with sp)"] * parallel.sp
            hint, product = f"set data.seq_length={length // unit * unit or unit}", f"{' x '.join(factors)} = {unit}"
            if cp == 1:
                yield ConfigProblem(
                    "data.seq_length", f"must be a multiple of {product}", length, f"{hint}, or set parallel.sp=false"
                )
            else:
                fits = next((n for n in range(cp - 1, 1, -1) if length % (unit // cp * n) == 0), 1)
                rule = f"requires data.seq_length to be a multiple of {product}, found {length}"
                yield ConfigProblem("parallel.cp", rule, cp, f"set parallel.cp={fits}, or {hint}")
        if cp == 1:
            return
        for name, block in {**model.mixers, **model.feed_forwards}.items():
            if block.declares is not None and not block.declares.context_parallel:
                rule = f"requires blocks that compute their part of a sequence split over context ranks, and {name} declares that it does not"
                yield ConfigProblem("parallel.cp", rule, cp, "set parallel.cp=1")
        fits = not can_split_model(model, tp) or can_split_heads(model, tp, cp)
        if model.attention_dropout and parallel.cp_kind != "alltoall":
            rule = f"is not supported with attention dropout (model.attention_dropout = {model.attention_dropout:g})"
            hint = "set parallel.cp_kind=alltoall, or " * fits + "set model.attention_dropout=0"
            yield ConfigProblem("parallel.cp_kind", rule, parallel.cp_kind, hint)
        if parallel.cp_kind == "alltoall" and not fits:
            heads, keys = format_head_counts(model, tp)
            degrees = [n for n in range(1, max_head_count(model) // tp + 1) if can_split_heads(model, tp, n)]
            rule = (
                f"must divide the {heads} of a tensor rank, and divide or be a multiple of its {keys}, with "
                "parallel.cp_kind = alltoall"
            )
            ring = "set parallel.cp_kind=ring" + " and model.attention_dropout=0" * bool(model.attention_dropout)
            hint = suggest_parallel_degree("parallel.cp", cp, degrees) + f", or {ring}" * (not model.has_position_bias)
            yield ConfigProblem("parallel.cp", rule, cp, hint)

    def _expert_problems(self) -> Iterator[ConfigProblem]:
        """Yield expert-parallel degrees that do not fit the model."""
        moe, parallel = self.model.moe, self.parallel
        if moe is None:
            for name in ("ep", "expert_tp"):
                if (degree := getattr(parallel, name)) > 1:
                    rule = "requires a model with experts (model.moe)"
                    yield ConfigProblem(f"parallel.{name}", rule, degree, f"set parallel.{name}=1")
            return
        if moe.num_experts % parallel.ep:
            hint = suggest_parallel_degree("parallel.ep", parallel.ep, list_expert_degrees(self.model))
            yield ConfigProblem("parallel.ep", f"must divide the {moe.num_experts} experts", parallel.ep, hint)
        if moe.ffn_hidden_size % parallel.expert_tp:
            widths = [n for n in range(1, 17) if moe.ffn_hidden_size % n == 0]
            rule = f"must divide the experts' ffn_hidden_size {moe.ffn_hidden_size}"
            hint = suggest_parallel_degree("parallel.expert_tp", parallel.expert_tp, widths)
            yield ConfigProblem("parallel.expert_tp", rule, parallel.expert_tp, hint)
        if parallel.dispatch in ("nvshmem", "te") and parallel.dispatch_bound is None:
            rule = f"is required with parallel.dispatch = {parallel.dispatch}"
            hint = "set parallel.dispatch_bound=1.25, or set parallel.dispatch=alltoall"
            yield ConfigProblem("parallel.dispatch_bound", rule, None, hint)
        if rule := self._dispatch_rule():
            yield ConfigProblem("parallel.dispatch", rule, parallel.dispatch, "set parallel.dispatch=alltoall")

    def _overlap_problems(self) -> Iterator[ConfigProblem]:
        """Yield the setting with which the expert exchange cannot be hidden under another micro-batch's computation."""
        parallel = self.parallel
        if not parallel.overlap_expert_exchange:
            return
        needs = {
            "expert parallelism (parallel.ep or parallel.expert_tp > 1)": parallel.ep * parallel.expert_tp > 1,
            "parallel.dispatch = alltoall or deepep": parallel.dispatch in ("alltoall", "deepep"),
            "parallel.schedule = 1f1b or dualpipev": parallel.schedule in ("1f1b", "dualpipev"),
            "parallel.zero < 3": parallel.zero < 3,
        }
        for need in (need for need, holds in needs.items() if not holds):
            yield ConfigProblem(_OVERLAP, f"requires {need}", True, f"set {_OVERLAP}=false")

    def _dispatch_rule(self) -> str:
        """Return the rule of the expert dispatch library that the run violates, or an empty string."""
        parallel, width = self.parallel, self.model.hidden_size
        ranks, library = parallel.ep * parallel.expert_tp, parallel.dispatch
        if library in ("deepep", "te") and (parallel.expert_tp > 1 or self.precision not in ("bf16", "fp8")):
            found = f"found precision = {self.precision}, parallel.expert_tp = {parallel.expert_tp}"
            return f"requires precision = bf16 or fp8 and parallel.expert_tp = 1, {found}"
        if library == "nvshmem" and (ranks & (ranks - 1) or width % 32):  # its kernel shares bytes evenly among blocks
            found = f"found ep x expert_tp = {ranks}, model.hidden_size = {width}"
            return f"requires a power of two of expert ranks and a width that is a multiple of 32, {found}"
        return ""

    def _suggest_degrees(self, world_size: int) -> str:
        """Return the hint with degrees near the given ones that fit this model, this batch and the number of ranks.

        Degrees under which a rank holds no more weights and no more tokens than under the given ones come first.
        """
        parallel, model = self.parallel, self.model
        near = sorted(
            (
                tp * pp < parallel.tp * parallel.pp or tp * cp < parallel.tp * parallel.cp,
                abs(tp - parallel.tp) + abs(pp - parallel.pp) + abs(cp - parallel.cp), tp, pp, cp,
            )
            for tp in range(1, min(world_size, max_head_count(model)) + 1)
            if can_split_model(model, tp)
            for pp in range(1, min(world_size // tp, model.num_layers) + 1)
            for cp in range(1, parallel.cp + 1)
            if world_size % (tp * pp * cp) == 0
        )  # fmt: skip
        for more_memory, _, tp, pp, cp in near:
            split = {"cp": cp} if parallel.cp > 1 else {}
            degrees: dict[str, int | str] = {"tp": tp, "pp": pp, **split, "dp": world_size // (tp * pp * cp)}
            if pp == 1:
                without_pipeline: dict[str, int | str] = {"virtual_stages": 1, "schedule": "1f1b"}
                degrees |= {k: value for k, value in without_pipeline.items() if getattr(parallel, k) != value}
            degrees |= self._fit_expert_degrees(world_size // pp)
            changed = self.with_degrees(degrees)
            if not [*changed.find_parallel_degree_problems(), *changed.find_world_size_problems(world_size)]:
                return _set_degrees(degrees) + (self._suggest_world_sizes(world_size) if more_memory else "")
        fitting = self._list_fitting_world_sizes(world_size)
        return f"start {fitting} ranks" if fitting else "change the number of ranks, and batch.global to fit it"

    def _suggest_world_sizes(self, world_size: int) -> str:
        """Return a hint with numbers of ranks that the given degrees fit, as other degrees need more memory on each rank."""
        fitting = self._list_fitting_world_sizes(world_size)
        return ", which needs more memory on each rank" + (f"; or start {fitting} ranks" if fitting else "")

    def _list_fitting_world_sizes(self, world_size: int) -> str:
        """Return the next smaller and the next larger number of ranks that the given degrees fit, as text."""
        unit = self.minimum_ranks
        near = [n for n in (world_size // unit * unit, -(-world_size // unit) * unit) if n]
        return " or ".join(str(n) for n in near if not list(self.find_world_size_problems(n)))

    def _fit_expert_degrees(self, stage: int) -> dict[str, int | str]:
        """Return the smallest changes of ep and expert_tp that fit a stage of `stage` ranks."""
        parallel = self.parallel
        if stage % (parallel.ep * parallel.expert_tp) == 0:
            return {}
        parts = parallel.expert_tp if stage % parallel.expert_tp == 0 else 1
        ep = max(n for n in list_expert_degrees(self.model) if n <= parallel.ep and stage % (n * parts) == 0)
        return {"ep": ep} if parts == parallel.expert_tp else {"ep": ep, "expert_tp": parts}


def _set_degrees(degrees: Mapping[str, int | str]) -> str:
    return "set " + ", ".join(f"parallel.{name}={degree}" for name, degree in degrees.items())


def _even_layout(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, spread evenly; later stages have the remaining ones."""
    return [(layers + stage) // stages for stage in range(stages)]


def find_zero_problems(parallel: ParallelConfig, lora: LoraConfig | None) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with the ZeRO level, `parallel.zero`."""
    zero, quantized = parallel.zero, lora.quantize if lora else None
    for key in ("zero3_shard", "zero3_layers", "zero3_gather"):
        if (value := getattr(parallel, key)) is not None and zero != 3:
            hint = f"set parallel.zero=3, or remove parallel.{key}"
            yield ConfigProblem(f"parallel.{key}", f"requires parallel.zero = 3, found {zero}", value, hint)
    if zero != 3:
        return
    if quantized:
        rule = f"is not supported with lora.quantize = {quantized}"
        yield ConfigProblem("parallel.zero", rule, zero, "set parallel.zero=2, or remove lora.quantize")


def find_comm_overlap_problems(
    parallel: ParallelConfig, precision: str, linear: str, *, ordered: bool
) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with `parallel.tp_comm_overlap`: GEMMs that overlap tensor-parallel collectives.
    `linear` is the configured library of linear layers, `ordered` is `debug.ordered_reductions`.
    """
    if not parallel.tp_comm_overlap:
        return
    key, off = "parallel.tp_comm_overlap", "set parallel.tp_comm_overlap=false"
    if not parallel.sp or parallel.tp == 1:
        rule = f"requires sequence parallelism over several tensor ranks, found tp = {parallel.tp}, sp = {parallel.sp}"
        yield ConfigProblem(key, rule, True, off)
    if precision == "fp8":
        rule = "is not supported with precision = fp8, whose GEMMs quantise whole matrices"
        yield ConfigProblem(key, rule, True, f"{off}, or set precision=bf16")
    if linear == "te":
        rule = "is not supported with kernels.linear = te, as only GEMMs of torch are split into pieces"
        yield ConfigProblem(key, rule, True, f"{off}, or set kernels.linear=torch")
    if ordered:
        rule = "is not supported with debug.ordered_reductions, as a ring adds the ranks' sums in its own order"
        yield ConfigProblem(key, rule, True, f"{off}, or set debug.ordered_reductions=false")
