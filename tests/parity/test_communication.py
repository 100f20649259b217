"""What a step sends is what theory says, to the byte: nothing is sent twice, nothing that need not be.

Legend: B micro-batch, N context ranks, S sequence, D model width, F feed-forward width, V vocabulary, L layers, M micro-batches of a rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from parity.cases import case
from ranks import run_ranks
from torch import Tensor

from mega_trainer.distributed.comm import CommTrafficCounter
from mega_trainer.job.step_result import StepScalars
from mega_trainer.model.expert_router import ExpertRouter
from mega_trainer.parallel.gradient_buckets import SLICE_ELEMENTS
from mega_trainer.pipeline.schedules import place_pipeline_stages
from mega_trainer.verify.case_trainer import CaseTrainer, make_case_process_groups
from mega_trainer.verify.layout_case import CONTEXT_KINDS, DECODER_LENGTH, LayoutCase

S, D, F, V, L = 16, 32, 48, 64, 2
SCALAR = 8
FLAGS = len(fields(StepScalars)) - 1  # all but the numbers of the next step's loss terms, which come ahead
NORM = 2 * SCALAR  # of each rank's part
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
GRADIENT = {"fp64": 8, "fp32": 4, "bf16": 4}


def sent(one: LayoutCase) -> int:
    """Bytes of an element of a gradient on its way between data ranks."""
    return BYTES[one.parallel.get("grad_reduce_dtype", "fp32")] if one.precision != "fp64" else 8


Traffic = dict[tuple[str, str], list[int]]


class Theory(Counter[tuple[tuple[str, str], str]]):
    """Calls and bytes by group and operation."""

    def expect(self, group: str, operation: str, calls: int, size: int) -> None:
        """`calls` calls of `size` bytes each."""
        self[(group, operation), "calls"] += calls
        self[(group, operation), "bytes"] += calls * size

    def traffic(self) -> Traffic:
        """As a `CommTrafficCounter` counts it."""
        return {
            key: [self[key, "calls"], self[key, "bytes"]] for key, what in self if what == "calls" and self[key, what]
        }


def padded(elements: int, ranks: int) -> int:
    """Elements of a bucket whose slices are equal and begin at multiples."""
    unit = ranks * SLICE_ELEMENTS
    return -(-elements // unit) * unit


def microbatches(one: LayoutCase) -> int:
    return one.batch // one.micro // one.layout["dp"]


def numbers(one: LayoutCase) -> Theory:
    """Two sums of losses and four flags, once a step over all ranks; before, in host memory, the numbers of loss terms."""
    theory, further = Theory(), one.model.get("mtp_layers", 0)
    theory.expect("world", "all_reduce", 1, (2 + FLAGS) * SCALAR)
    theory.expect("world", "all_reduce", 1, (1 + further) * SCALAR)
    return theory


def tensor_parallel(one: LayoutCase) -> Traffic:
    """Two sums a layer forward and two backward, one for the embedding and one for the head's input.

    With sequence parallelism each sum is a reduce-scatter and its counterpart an all-gather, as many bytes; a column
    layer gathers its input once more in the backward, rather than keep it. Overlapped with products, the gathers and sums
    of a forward and the gather of a row layer's backward are passes over a ring, of as many bytes as a rank receives.
    """
    theory, m = Theory(), microbatches(one)
    activation = one.micro * S * D * BYTES[one.precision]
    if one.layout["sp"]:
        others, passed = one.layout["tp"] - 1, one.layout["tp_comm_overlap"]
        theory.expect("tp", "all_gather", m * (L * (2 if passed else 2 + 2 + 2) + 1 + 1), activation)
        theory.expect("tp", "reduce_scatter", m * (L * (2 if passed else 2 + 2) + 1 + 1), activation)
        theory.expect("tp", "pass", m * L * (2 + 2 + 2) * others * passed, activation // one.layout["tp"])
        theory.expect("tp", "all_reduce", 1, padded((2 * L + 1) * D, 1) * GRADIENT[one.precision])  # norm gradients
    else:
        # a recomputed layer stops once it has all that the backward needs: before the sum at its end
        again = {"none": 0, "selective": 0, "full": 1}[one.layout["recompute"]]
        theory.expect("tp", "all_reduce", m * (L * (4 + again) + 1 + 1), activation)
    statistic = one.micro * S * GRADIENT[one.precision]  # of each token: the largest logit; the sum and the label's
    theory.expect("tp", "all_reduce", m, statistic)
    theory.expect("tp", "all_reduce", m, 2 * statistic)
    theory.expect("tp", "all_gather", 1, one.layout["tp"] * NORM)
    theory.update(numbers(one))
    return theory.traffic()


def latents(one: LayoutCase) -> Traffic:
    """Under sequence parallelism attention gathers latents, once, rather than the stream, and the MLP as ever.

    A layer that predicts further tokens adds a layer, a look-up and a use of the head.
    """
    theory, m = Theory(), microbatches(one)
    token = one.micro * S * BYTES[one.precision]
    width = 20 + 12 + 4  # of the queries' latent, the other, and the shared part of the key
    layers, uses = L + 1, 2
    theory.expect("tp", "all_gather", m * layers, width * token)
    theory.expect("tp", "reduce_scatter", m * layers, width * token)
    theory.expect("tp", "all_gather", m * (layers * (1 + 3) + uses * 2), D * token)
    theory.expect("tp", "reduce_scatter", m * (layers * (1 + 2) + uses * 2), D * token)
    vectors = layers * (2 * D + (20 + 12) + (20 + 12 + 4)) + D + 3 * D  # norms and biases; the last norms
    for elements in (layers * width * D + 2 * D * D, vectors):
        theory.expect("tp", "all_reduce", 1, padded(elements, 1) * GRADIENT[one.precision])
    statistic = one.micro * S * GRADIENT[one.precision]
    theory.expect("tp", "all_reduce", m * uses, statistic)
    theory.expect("tp", "all_reduce", m * uses, 2 * statistic)
    theory.expect("tp", "all_gather", 1, one.layout["tp"] * NORM)
    theory.update(numbers(one))
    return theory.traffic()


def pipeline(one: LayoutCase, rank: int) -> Traffic:
    """Each boundary between stages of different ranks is crossed once forward and once backward a micro-batch."""
    theory, m, layout = Theory(), microbatches(one), one.layout
    pp = layout["pp"]
    owners = place_pipeline_stages(layout["schedule"], pp, layout["virtual_stages"])
    crossed = [ends for ends in pairwise(owners) if ends[0] != ends[1]]  # in the bend of a V nothing is sent
    arrivals = m * sum(ends.count(rank // layout["tp"]) for ends in crossed)
    share = layout["tp"] if layout["sp"] else 1
    rows = S // share
    if "encoder" in one.model:  # its tokens, the decoder's, and two tables of relative positions
        table = one.model["relative"]["buckets"] * one.model["num_attention_heads"] // layout["tp"]
        rows = (one.length + DECODER_LENGTH) // share + math.ceil(2 * table / D)
    if "retro" in one.model:  # of each chunk, neighbors of twice its length
        rows += 2 * one.model["retro"]["neighbors"] * S // share
    theory.expect("pp", "receive", arrivals, one.micro * rows * D * BYTES[one.precision])
    theory.expect("pp", "all_gather", 1, pp * NORM)
    return theory.traffic()


def data_parallel(one: LayoutCase) -> Traffic:
    """Level 0 sums all gradients once a step; from level 1 on the sum is scattered and the new weights are gathered.

    Level 2 keeps no whole gradients, so it scatters those of every micro-batch.
    """
    theory, ranks, zero = Theory(), one.layout["dp"], one.layout["zero"]
    matrices, vectors = 2 * V * D + L * (4 * D * D + 3 * D * F), (2 * L + 1) * D  # with decay, without
    for elements in (matrices, vectors):
        size = padded(elements, ranks)
        times = microbatches(one) if zero == 2 else 1
        theory.expect("dp_cp", "reduce_scatter" if zero else "all_reduce", times, size * sent(one))
        if zero:
            theory.expect("dp_cp", "all_gather", 1, size * BYTES[one.precision])
    theory.expect("dp_cp", "all_gather", 1 if zero else 0, ranks * NORM)
    theory.update(numbers(one))
    return theory.traffic()


def context_parallel(one: LayoutCase) -> Traffic:
    """What a layer's attention sends: of a rank's tokens q and y are [s, H d], k and v together [s, 2 K d].

    ring        forward k and v to N - 1 ranks in turn; backward again, and their gradients, which also come home
    allgather   forward a gather of k and v; backward again, and a reduce-scatter of their gradients
    alltoall    forward q, k, v and back y; backward the gradients of these. Fewer key/value heads than ranks are sent
                to several

    Gradients of k and v are summed in at least fp32. A layer that is computed again sends its forward once more.
    """
    theory, layout, n = Theory(), one.layout, one.layout["cp"]
    element, wide = BYTES[one.precision], GRADIENT[one.precision]
    heads, keys, size = 8 // layout["tp"], 2 // layout["tp"], 8
    own = one.micro * one.length // n
    keys_values = own * 2 * keys * size
    layers = microbatches(one) * L
    forwards = layers * (2 if layout["recompute"] == "full" else 1)
    match layout["cp_kind"]:
        case "ring":
            theory.expect("cp", "pass", (forwards + layers) * (n - 1), keys_values * element)
            theory.expect("cp", "pass", layers * n, keys_values * wide)
        case "allgather":
            theory.expect("cp", "all_gather", forwards + layers, n * keys_values * element)
            theory.expect("cp", "reduce_scatter", layers, n * keys_values * wide)
        case "alltoall":
            copies = max(keys, n) // keys
            theory.expect("cp", "all_to_all", forwards + layers, (own * heads * size + copies * keys_values) * element)
            theory.expect("cp", "all_to_all", forwards + layers, own * heads * size * element)
    return theory.traffic()


def dispatched(one: LayoutCase, pairs: int) -> Traffic:
    """What all ranks together send to experts and back, of a model with one layer of them.

    Each token that matters goes once to every rank that holds a part of an expert of its, and comes back once; so do the
    gradients. So many `pairs` of a token and a rank there are. With it go its choice and its weights, whose gradient comes
    back. Before, the ranks tell each other how many. A layer that is computed again sends its tokens once more, and
    stops before the way back.
    """
    theory, layout, m = Theory(), one.layout, microbatches(one)
    ranks, again = layout["ep"] * layout["expert_tp"], layout["recompute"] == "full"
    row, ticket = D * BYTES[one.precision], 2 * one.model["moe"]["top_k"] * GRADIENT[one.precision]
    theory.expect("ep", "all_to_all", (1 + again) * m * one.ranks, 2 * ranks * SCALAR)
    theory[("ep", "all_to_all"), "calls"] += (6 + 2 * again) * m * one.ranks
    theory[("ep", "all_to_all"), "bytes"] += pairs * ((4 + again) * row + (2 + again) * ticket)
    theory.expect("ep", "all_gather", one.ranks, ranks * NORM)
    return theory.traffic()


def expert_gradients(one: LayoutCase) -> Traffic:
    """As `data_parallel`, of this rank's experts over the ranks that hold the same."""
    theory, layout = Theory(), one.layout
    experts, width = one.model["moe"]["num_experts"] // layout["ep"], one.model["moe"]["ffn_hidden_size"]
    parts = layout["expert_tp"]
    ranks = one.ranks // layout["pp"] // (layout["ep"] * parts)
    biases = [2 * width // parts + D] if parts == 1 else [2 * width // parts, D]  # the last are summed over the parts
    for elements in (3 * D * width // parts, *biases):
        size = padded(experts * elements, ranks)
        theory.expect("expert_data", "reduce_scatter", 1, size * sent(one))
        theory.expect("expert_data", "all_gather", 1, size * BYTES[one.precision])
    # the bias that the parts share counts on the first of them, with the rest
    theory.expect("expert_data", "all_gather", 1, ranks * NORM)
    return theory.traffic()


def fully_sharded(one: LayoutCase) -> Traffic:
    """Level 3 gathers each unit of layers before its forward and before its backward and scatters its gradients after, in
    each micro-batch; the rest of the model stays from forward to backward. Copies are summed once a step, unit by unit.
    """
    theory, m, tp = Theory(), microbatches(one), one.layout["tp"]
    ranks = one.layout.get("zero3_shard", one.layout["dp"])
    copies = one.layout["dp"] // ranks
    group = "shard" if copies > 1 else "dp_cp"
    layer = [(3 * D // tp, D), (D, D // tp), (2 * F // tp, D), (D, F // tp), (D,), (D,)]
    rest = [(V // tp, D), (V // tp, D), (D,)]
    together = one.layout["zero3_layers"]
    for unit, times, gathers in ((layer * together, L // together, 2), (rest, 1, 1)):
        elements = ranks * sum(share_of_rows(shape, ranks) for shape in unit)
        gathered = 1 if one.layout.get("zero3_gather") == "step" else m * gathers
        theory.expect(group, "all_gather", times * gathered, elements * BYTES[one.precision])
        theory.expect(group, "reduce_scatter", m * times, elements * sent(one))
        theory.expect("replicate", "all_reduce", times if copies > 1 else 0, elements // ranks * sent(one))
    theory.expect(group, "all_gather", 1, ranks * NORM)
    theory.update(numbers(one))
    return theory.traffic()


def share_of_rows(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a rank's rows, as many as the first has."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


HALVED = {"grad_reduce_dtype": "bf16"}
TENSOR = [
    case("dense", tp, parallel={"tp": tp, "sp": sp}, micro=micro, precision=precision, recompute={"kind": kind})
    for tp, sp, micro, precision, kind in [
        (2, False, 4, "fp64", "none"), (4, False, 8, "bf16", "none"), (2, True, 2, "fp32", "none"),
        (4, True, 8, "bf16", "selective"), (2, False, 4, "fp32", "full"), (2, False, 8, "bf16", "selective"),
    ]
]  # fmt: skip
TENSOR.append(case("dense", 4, parallel={"tp": 4, "sp": True, "tp_comm_overlap": True}, micro=4, precision="bf16"))
LATENT = [case("mla", tp, parallel={"tp": tp, "sp": True}, micro=4, precision="fp32") for tp in (2, 4)]
PIPELINE = [
    case(
        "dense", pp * tp, layers=4, micro=2, precision="bf16",
        parallel={"pp": pp, "virtual_stages": v, "tp": tp, "sp": sp, "schedule": schedule},
    )
    for schedule, pp, v, tp, sp in [
        ("1f1b", 2, 1, 1, False), ("1f1b", 4, 1, 1, False), ("1f1b", 2, 2, 1, False), ("1f1b", 2, 1, 2, True),
        ("1f1b", 2, 1, 2, False), ("zb-h1", 4, 1, 1, False), ("zb-h1", 2, 1, 2, True), ("zb-h1", 2, 1, 2, False),
        ("zbv", 2, 2, 1, False), ("zbv", 2, 2, 2, True), ("dualpipev", 2, 2, 1, False),
    ]
]  # fmt: skip
PIPELINE += [
    case("t5", pp * tp, layers=4, micro=2, precision="bf16", parallel={"pp": pp, "tp": tp, "sp": tp > 1, **more})
    for pp, tp, more in [
        (4, 1, {}), (2, 2, {"schedule": "zb-h1"}), (2, 1, {"virtual_stages": 2}), (2, 1, {"virtual_stages": 2, "schedule": "zbv"}),
    ]
]  # fmt: skip
PIPELINE += [
    case("retro", pp * tp, layers=4, micro=2, precision="bf16", parallel={"pp": pp, "tp": tp, "sp": tp > 1, **more})
    for pp, tp, more in [(2, 2, {"schedule": "zb-h1"}), (2, 1, {"virtual_stages": 2})]
]  # fmt: skip
DATA = [
    case("dense", dp, parallel={"zero": zero, **more}, micro=1, precision=precision)
    for dp, zero, precision, more in [
        (2, 0, "bf16", {}), (4, 0, "fp32", {}), (2, 1, "fp64", {}), (4, 1, "bf16", {}), (4, 2, "bf16", {}),
        (2, 0, "fp32", HALVED), (4, 1, "bf16", HALVED), (4, 2, "bf16", HALVED),
    ]
]  # fmt: skip
CONTEXTS = [
    case("gqa", n * tp, parallel={"cp": n, "cp_kind": kind, "tp": tp}, micro=micro, precision=precision,
         recompute={"kind": recompute})
    for kind in CONTEXT_KINDS
    for n, tp, micro, precision, recompute in [
        (2, 1, 8, "fp64", "none"), (4, 1, 4, "bf16", "selective"), (2, 2, 8, "fp32", "full")
    ]
]  # fmt: skip
EXPERTS = [
    case("moe", ranks, parallel=parallel, micro=micro, precision=precision, recompute={"kind": recompute})
    for ranks, parallel, micro, precision, recompute in [
        (4, {"ep": 2}, 1, "fp64", "none"), (4, {"ep": 2, "tp": 2}, 2, "bf16", "selective"),
        (4, {"ep": 2, "tp": 2, "sp": True}, 4, "fp32", "full"), (4, {"expert_tp": 2}, 2, "fp32", "none"),
        (4, {"ep": 2, **HALVED}, 1, "bf16", "none"),
    ]
]  # fmt: skip
SHARDED = [
    case("dense", ranks, parallel={"zero": 3, "zero3_layers": 1, **parallel}, micro=1, batch=batch, precision=precision, recompute=recompute)
    for ranks, parallel, batch, precision, recompute in [
        (2, {}, 2, "fp32", {}), (4, {}, 8, "bf16", {}), (3, {}, 6, "fp64", {}), (4, {}, 8, "bf16", {"kind": "full"}),
        (4, {"tp": 2}, 4, "bf16", {}), (4, {"zero3_shard": 2}, 8, "bf16", {}), (2, {"zero3_gather": "step"}, 8, "bf16", {}),
        (2, HALVED, 2, "fp32", {}), (4, {"zero3_shard": 2, **HALVED}, 8, "bf16", {}),
        (2, {"zero3_layers": 2}, 4, "bf16", {}), (4, {"zero3_shard": 2, "zero3_layers": 2}, 8, "bf16", {"kind": "full"}),
    ]
]  # fmt: skip


def noted(log: CommTrafficCounter, one: LayoutCase) -> Callable[..., Tensor]:
    """The router's own, which also counts pairs of a token and a rank that holds a part of an expert of its."""
    real = ExpertRouter._attach_losses

    def with_losses(
        self: ExpertRouter, weights: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor, *rest: Any
    ) -> Tensor:
        holders = one.layout["ep"] * chosen // self.moe.num_experts
        pairs = sum(len(set(token) - {-1}) for token in holders.tolist()) * one.layout["expert_tp"]
        entry = log.counts.setdefault(("router", "pairs"), [0, 0])
        entry[0], entry[1] = entry[0] + 1, entry[1] + pairs
        return real(self, weights, logits, scores, chosen, *rest)

    return with_losses


def traffic(cases: Sequence[LayoutCase]) -> list[Traffic]:
    """On each rank: what passed in one step of each case."""
    rank, maker, out = dist.get_rank(), make_case_process_groups(cases), []
    for one in cases:
        log = CommTrafficCounter()
        if rank < one.ranks:
            trainer = CaseTrainer.build(one, rank, maker, log)
            with mock.patch.object(ExpertRouter, "_attach_losses", noted(log, one)):
                trainer.step()
            trainer.optimizer.wait_for_params()
        out.append(log.counts)
    return out


@pytest.fixture(scope="module")
def counted() -> dict[LayoutCase, list[Traffic]]:
    """By case, what each of its ranks counted."""
    cases = [*TENSOR, *LATENT, *PIPELINE, *DATA, *SHARDED, *CONTEXTS, *EXPERTS]
    results = zip(*run_ranks(traffic, 4, cases, timeout=100), strict=True)
    return {one: list(ranks[: one.ranks]) for one, ranks in zip(cases, results, strict=True)}


def select_group(counts: Traffic, group: str) -> Traffic:
    return {key: value for key, value in counts.items() if key[0] == group}


@pytest.mark.parametrize("one", TENSOR, ids=str)
def test_tensor_parallel(counted: Any, one: LayoutCase) -> None:
    for counts in counted[one]:
        assert counts == tensor_parallel(one)


@pytest.mark.parametrize("one", LATENT, ids=str)
def test_latents(counted: Any, one: LayoutCase) -> None:
    for counts in counted[one]:
        assert counts == latents(one)


@pytest.mark.parametrize("one", PIPELINE, ids=str)
def test_pipeline(counted: Any, one: LayoutCase) -> None:
    for rank, counts in enumerate(counted[one]):
        assert select_group(counts, "pp") == pipeline(one, rank)


@pytest.mark.parametrize("sp", [False, True])
def test_a_backward_in_two_halves_sends_what_a_whole_one_does(counted: Any, sp: bool) -> None:
    whole, halves = (
        [select_group(counts, "tp") for counts in counted[one]]
        for schedule in ("1f1b", "zb-h1")
        for one in PIPELINE
        if (one.name, one.layout["tp"], one.layout["sp"], one.layout["schedule"]) == ("dense", 2, sp, schedule)
    )
    assert halves == whole


@pytest.mark.parametrize("one", DATA, ids=str)
def test_data_parallel(counted: Any, one: LayoutCase) -> None:
    for counts in counted[one]:
        assert counts == data_parallel(one)


@pytest.mark.parametrize("one", CONTEXTS, ids=str)
def test_context_parallel(counted: Any, one: LayoutCase) -> None:
    for counts in counted[one]:
        assert select_group(counts, "cp") == context_parallel(one)


@pytest.mark.parametrize("one", EXPERTS, ids=str)
def test_experts(counted: Any, one: LayoutCase) -> None:
    together: Counter[tuple[str, str, int]] = Counter()
    for counts in counted[one]:
        assert select_group(counts, "expert_data") == expert_gradients(one)
        for key, numbers in select_group(counts, "ep").items():
            together.update({(*key, index): number for index, number in enumerate(numbers)})
    computed = 2 if one.layout["recompute"] == "full" else 1
    pairs = sum(counts["router", "pairs"][1] for counts in counted[one]) // computed
    theory = {(*key, index): n for key, numbers in dispatched(one, pairs).items() for index, n in enumerate(numbers)}
    assert together == theory


@pytest.mark.parametrize("one", SHARDED, ids=str)
def test_fully_sharded(counted: Any, one: LayoutCase) -> None:
    for counts in counted[one]:
        assert {key: value for key, value in counts.items() if key[0] != "tp"} == fully_sharded(one)
