"""Cases of a verification: a tiny model trained in one parallel layout, and the choice of layouts worth running."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.pipeline.schedules import PAIRED

STEPS = 3  # optimizer steps of a case
ZERO_LEVELS = (0, 1, 2, 3)
SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]  # with virtual stages
CONTEXT_KINDS = ("ring", "allgather", "alltoall")
MAX_STAGES = 8
LARGE_BUCKET = 1 << 20  # elements of a gradient bucket that holds any tiny model whole
SMALL_BUCKET = 1000
DECODER_LENGTH = 16  # tokens of a decoder that has an encoder
GATHERS = ["micro_batch", "step"]
RECOMPUTES: list[dict[str, Any]] = [{}, {"kind": "selective"}, {"kind": "full"}, {"kind": "full", "layers": 1}]
OFFLOADS: list[dict[str, Any]] = [{}, {}, {"activations": 1, "min_bytes": 0}]


@dataclass(frozen=True, eq=False)
class LayoutCase:
    """Model trained in one parallel layout, as a case of a verification.

    Attributes:
        model: fields of a `ModelConfig`.
        ranks: number of ranks.
        parallel, recompute, offload, debug: sections of run.yaml.
        micro, batch: samples of a micro-batch on one rank, and of a step.
        rampup: of the batch, whose increments `micro` divides.
        bucket: elements of a gradient bucket.
        closed: attention is restricted to documents.
        length: tokens of a sample.
        fp8: section of that name.
        wide: operations outside of FP8 GEMMs are in fp64.
        decoupled_lr: of the input embedding and the output layer; None: that of the others.
        lr_factors: factors on learning rates, by patterns of names.
        clip: largest gradient norm; 0: no clipping.
        steps: optimizer steps.
        lora: section of that name.
        freeze: patterns of frozen tensors.
        compiled: elementwise functions are compiled.
        sections: further sections of run.yaml, with priority over those above.
    """

    name: str
    model: Mapping[str, Any]
    ranks: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    recompute: Mapping[str, Any] = field(default_factory=dict)
    micro: int = 8
    batch: int = 8
    rampup: Mapping[str, int] | None = None
    bucket: int = LARGE_BUCKET
    closed: bool = True
    length: int = 16
    precision: str = "fp64"
    fp8: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = False
    optimizer: str = "adamw"
    decoupled_lr: float | None = None
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    clip: float = 0.1  # small enough that every step is clipped
    steps: int = STEPS
    debug: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    freeze: Sequence[str] = ()
    compiled: bool = False
    sections: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """Content of the run.yaml that trains this case.

        AdamW's epsilon is large: a usual one magnifies a gradient that is zero except for rounding (a key bias without
        RoPE, on which no softmax depends) to the size of the others.
        """
        pairs = {"kind": "t5", "t5": {"decoder_seq_length": DECODER_LENGTH}} if "encoder" in self.model else {}
        made: dict[str, Any] = {
            "model": dict(self.model),
            "data": {"train": ["none"], "seq_length": self.length, "kind": self.data_kind, **pairs},
            "parallel": {"bucket_elements": self.bucket, **self.parallel},
            "recompute": dict(self.recompute),
            "offload": dict(self.offload),
            "batch": {"micro": self.micro, "global": self.batch, "rampup": self.rampup},
            "optimizer": {
                "name": self.optimizer, "clip_grad": self.clip, "eps": 1e-4, "decoupled_lr": self.decoupled_lr,
                "lr_factors": dict(self.lr_factors),
            },
            "train": {"steps": 10, "freeze": list(self.freeze)},
            **({"lora": dict(self.lora), "init_from": "nowhere"} if self.lora is not None else {}),
            "precision": self.precision,
            "fp8": dict(self.fp8),
            "debug": dict(self.debug),
            "compile": self.compiled,
        }  # fmt: skip
        return made | {
            key: {**made[key], **value} if isinstance(made.get(key), dict) else value
            for key, value in self.sections.items()
        }

    @cached_property
    def config(self) -> RunConfig:
        """Configuration of the run, with its extensions.

        Raises:
            ConfigError: when the layout does not fit the model or the number of ranks.
        """
        config = RunConfig.parse(resolve_run_config(self.raw), source=str(self))
        config.check_world_size(self.ranks)
        return config

    @property
    def data_kind(self) -> str:
        """Kind of data that the model is trained on, as `data.kind` of run.yaml."""
        if self.model.get("causal", True):
            return "retro" if self.model.get("retro") else "text"
        return "bert" if self.model.get("sentence_pairs") else "masked"

    @property
    def single(self) -> LayoutCase:
        """Reference case with the same model and batches in one process and one micro-batch."""
        micro = self.micro if self.rampup else self.batch
        return replace(self, ranks=1, parallel={}, recompute={}, offload={}, micro=micro, bucket=LARGE_BUCKET, debug={})

    @property
    def is_legal(self) -> bool:
        """True if the layout fits the model and the number of ranks."""
        try:
            return bool(self.config)
        except ConfigError:
            return False

    @property
    def layout(self) -> dict[str, Any]:
        """All settings of the tested layout: parallel degrees, recomputation and optimizer."""
        usual = {
            "tp": 1,
            "sp": False,
            "tp_comm_overlap": False,
            "pp": 1,
            "virtual_stages": 1,
            "schedule": "1f1b",
            "cp": 1,
            "zero": 1,
        }
        degrees = {**usual, "ep": 1, "expert_tp": 1, **self.parallel}
        dp = self.ranks // (degrees["tp"] * degrees["pp"] * degrees["cp"])
        return degrees | {"dp": dp, "recompute": self.recompute.get("kind", "none"), "optimizer": self.optimizer}

    @property
    def layout_text(self) -> str:
        """Settings that differ from one process, such as `tp=2 sp=True micro=4 batch=8`."""
        usual, layout = (0, 1, "none", "adamw", "1f1b"), self.layout
        always = "zero3_layers"  # whose 1 is not the default
        used = {key: value for key, value in layout.items() if value is True or value not in usual or key == always}
        used |= {"zero": layout["zero"]} if layout["dp"] * layout["cp"] > 1 else {}
        used |= {"micro": self.micro, "batch": self.batch}
        used |= {"bucket": self.bucket} if self.bucket != LARGE_BUCKET else {}
        used |= {"offload": self.offload["activations"]} if self.offload.get("activations") else {}
        used |= {"recompute_layers": self.recompute["layers"]} if self.recompute.get("layers") else {}
        return " ".join(f"{key}={value}" for key, value in used.items()).replace(", ", ",")

    def __str__(self) -> str:
        return f"{self.name}: {self.layout_text}"


@dataclass(frozen=True, eq=False)
class RunYamlLayoutCase(LayoutCase):
    """Model and parallel layout under test that are given by a run.yaml."""

    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], ranks: int = 1) -> RunYamlLayoutCase:
        """Return the tested layout with these settings, and defaults for all others."""
        return cls("run", settings["model"], ranks, settings=settings)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """Content of the run.yaml that trains this case."""
        return dict(self.settings)

    @property
    def single(self) -> RunYamlLayoutCase:
        """Reference case with the same settings in one process."""
        return self.from_settings({name: value for name, value in self.settings.items() if name != "parallel"})


def iterate_parallel_degrees(ranks: int, tps: Iterable[int], cp: int = 1) -> Iterator[dict[str, Any]]:
    """Yield every combination of tp (of `tps`), sp, pp, schedule and ZeRO level on `ranks` ranks."""
    for tp, pp, (schedule, v) in product(tps, range(1, ranks + 1), SCHEDULES):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or dp < 1 or pp * v > MAX_STAGES or (pp == 1 and (schedule, v) != ("1f1b", 1)):
            continue
        data = dp * cp
        levels = [{"zero": zero} for zero in ZERO_LEVELS] if data > 1 else [{"zero": 0}]
        levels += [{"zero": 3, "zero3_shard": size} for size in range(2, data) if data % size == 0]
        for sp, level in product([False, True] if tp > 1 else [False], levels):
            shape = {"tp": tp, "sp": sp, "pp": pp, "virtual_stages": v, **level}
            yield shape if schedule == "1f1b" else {**shape, "schedule": schedule}


def iterate_layouts(
    ranks: int, *, tps: Sequence[int], cps: Mapping[int, Sequence[int]], eps: Sequence[int], expert_tps: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the `parallel` sections of all layouts on `ranks` ranks.

    Args:
        tps: tensor-parallel degrees without context parallelism; empty for none.
        cps: context-parallel degrees, each with its tensor-parallel degrees.
        eps, expert_tps: expert-parallel degrees; empty for a model without experts.
    """
    shapes = list(iterate_parallel_degrees(ranks, tps))
    shapes += [{**shape, "cp": cp} for cp, own in cps.items() for shape in iterate_parallel_degrees(ranks, own, cp)]
    for shape in shapes:
        stage = ranks // shape["pp"]
        pairs = [(ep, parts) for ep, parts in product(eps, expert_tps) if stage % (ep * parts) == 0]
        experts = [{"ep": ep, "expert_tp": parts} for ep, parts in pairs] if eps else [{}]
        kinds = [{"cp_kind": kind} for kind in CONTEXT_KINDS] if "cp" in shape else [{}]
        for more, kind in product(experts, kinds):
            yield shape | more | kind


def sample_stages_and_batch(ranks: int, parallel: Mapping[str, Any], rng: random.Random) -> tuple[int, dict[str, Any]]:
    """Draw what a layout leaves open: the number of layers, and fields of a `LayoutCase` for stages and batch."""
    stages = parallel["pp"] * parallel["virtual_stages"]
    layers, chosen = max(2, stages), dict(parallel)
    if stages > 1 and rng.random() < 0.3:
        layers, chosen["pipeline_layout"] = sample_uneven_stage_layers(stages, rng)
    batch, micro = sample_batch_sizes(
        ranks // (parallel["tp"] * parallel["pp"] * parallel.get("cp", 1)), parallel["pp"], rng
    )
    if parallel["zero"] == 3:
        chosen |= {"zero3_layers": 1 + ranks % 2, "zero3_gather": rng.choice(GATHERS)}
    elif parallel.get("ep", 1) * parallel.get("expert_tp", 1) > 1 and parallel.get("schedule", "1f1b") in PAIRED:
        pairs = batch * parallel["tp"] * parallel["pp"] * parallel.get("cp", 1) >= 2 * parallel["pp"] * micro * ranks
        chosen |= {"overlap_expert_exchange": True} if pairs and rng.random() < 0.5 else {}
    return layers, {"parallel": chosen, "micro": micro, "batch": batch}


def sample_memory_settings(rng: random.Random) -> dict[str, Any]:
    """Draw recomputation, activation offload and bucket size as fields of a `LayoutCase`."""
    return {
        "recompute": rng.choice(RECOMPUTES), "offload": rng.choice(OFFLOADS),
        "bucket": rng.choice([LARGE_BUCKET, SMALL_BUCKET]),
    }  # fmt: skip


def sample_uneven_stage_layers(stages: int, rng: random.Random) -> tuple[int, list[int]]:
    """Draw a number of layers and of each stage's; at most one stage has two, the first or the last may have none."""
    counts = [1] * stages
    counts[rng.randrange(stages)] = 2
    if stages > 2 and rng.random() < 0.5:
        counts[rng.choice([0, -1])] = 0
    return sum(counts), counts


def sample_batch_sizes(dp: int, pp: int, rng: random.Random) -> tuple[int, int]:
    """Draw (samples of a step, of a micro-batch): about eight samples; a pipeline gets several micro-batches."""
    share = -(-8 // dp)
    sizes = [size for size in range(1, share + 1) if share % size == 0 and (pp == 1 or size < share or share == 1)]
    return share * dp, rng.choice([size for size in sizes if size >= share / 4] or sizes)


def choose_covering_cases(cases: Sequence[LayoutCase], count: int) -> list[LayoutCase]:
    """Return `count` of the cases, each chosen for the most triples of settings that earlier ones do not have."""
    triples = _number_triples(cases)
    left = np.zeros(1 + max((numbers.max() for numbers in triples), default=0), bool)
    for numbers in triples:
        left[numbers] = True
    # the triples that a case adds only become fewer, so that one which still adds the most after a second look is the best
    queue = [(-len(numbers), index) for index, numbers in enumerate(triples)]
    heapify(queue)
    chosen: list[LayoutCase] = []
    while queue and len(chosen) < count:
        _, index = heappop(queue)
        added = int(np.count_nonzero(left[triples[index]]))
        if queue and -added > queue[0][0]:
            heappush(queue, (-added, index))
            continue
        chosen.append(cases[index])
        left[triples[index]] = False
    return chosen


def _number_triples(cases: Sequence[LayoutCase]) -> list[npt.NDArray[np.int64]]:
    """Return the triples of settings of each case, each triple as one number: there are millions of them."""
    settings = [_list_settings(case) for case in cases]
    numbers = {name: number for number, name in enumerate(sorted(set[str]().union(*settings)))}
    found = []
    for names in settings:
        own = np.array(sorted(numbers[name] for name in names))
        first, second, third = own[_index_triples(len(own))]
        found.append((first * len(numbers) + second) * len(numbers) + third)
    return found


@cache
def _index_triples(count: int) -> npt.NDArray[np.int64]:
    """Return every choice of three of `count` positions, int64 [3, n]."""
    return np.array(list(combinations(range(count), 3))).T


def _list_settings(case: LayoutCase) -> set[str]:
    values = {**case.layout, "model": case.name, "small buckets": case.bucket != LARGE_BUCKET}
    return {f"{key}={value is not None if key == 'pipeline_layout' else value}" for key, value in values.items()}


def group_cases_by_rank_count(cases: Sequence[LayoutCase], most: int) -> list[list[LayoutCase]]:
    """Return the cases in groups of at most `most` with equal numbers of ranks, and within these of similar degrees.

    No group then waits long for a slower one, and cases that share process groups run together: each process group of a
    rank has threads that wake a hundred times a second.
    """
    degrees = ("tp", "pp", "cp", "ep", "expert_tp")
    found = []
    for ranks in sorted({case.ranks for case in cases}):
        alike = sorted(
            (case for case in cases if case.ranks == ranks),
            key=lambda case: [case.layout[degree] for degree in degrees],
        )
        found += [alike[start : start + most] for start in range(0, len(alike), most)]
    return found
