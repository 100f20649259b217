"""Drawing of a pipeline schedule: one row per rank, time to the right, idle time left empty, messages as lines. Plain
SVG, no library.

A page's style sheet can override the colours by class: `paper` and `idle` are backgrounds, `quiet` is text and lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mega_trainer.pipeline.schedules import (
    PipelineOp,
    PipelineOpKind,
    PipelineSchedule,
    PipelineTimeline,
    compute_closed_form_bubble,
    peak_in_flight_microbatches,
)

RgbColour = tuple[int, int, int]

# Okabe and Ito's palette, which colour-blind readers can distinguish: blue, orange, green.
_COLOURS: dict[str, RgbColour] = {"F": (0, 114, 178), "B": (230, 159, 0), "I": (230, 159, 0), "W": (0, 158, 115)}
_LEGEND = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weights"}
_INK, _QUIET, _EMPTY = "#222222", "#666666", "#f0f0f0"
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 132, 58, 44
_ROW, _GAP = 28, 6
_CHART = 1000
_MESSAGES = 400  # most operations with which messages are drawn; the lines of more would hide everything else
_TOOLTIP_WIDTH = 3.0  # least width of a box with a tooltip


def draw_schedule_svg(schedule: PipelineSchedule, timeline: PipelineTimeline, unit: str = "units of time") -> str:
    """Return an SVG drawing of a pipeline schedule over time.
    Times are from `timeline`, in this `unit`; each rectangle is one operation, with its micro-batch as number and its stage on the rank
    as shade.

    The right margin shows the share of idle time of each rank, and the most activations it holds at once (in
    micro-batches, counted once per chunk).
    """
    width = _LEFT + _CHART + _RIGHT
    height = _TOP + schedule.pp * (_ROW + _GAP) + _BOTTOM
    body = [*_title(schedule, timeline, unit), *_rank_rows(schedule, timeline), *_op_boxes(schedule, timeline)]
    body += _message_lines(schedule, timeline)
    body += _legend(schedule, height - _BOTTOM + 14)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{_INK}">\n'
        f'<rect class="paper" width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _title(schedule: PipelineSchedule, timeline: PipelineTimeline, unit: str) -> Iterator[str]:
    formula = compute_closed_form_bubble(schedule, timeline.costs)
    stages = "" if schedule.virtual_stages == 1 else f" of {schedule.virtual_stages} stages"
    name = f"{schedule.name}: {schedule.pp} ranks{stages}, {schedule.microbatches} microbatches"
    bubble = f"bubble {timeline.mean_bubble_share:.1%} simulated"
    bubble += f", {formula:.1%} by formula" if formula is not None else ""
    yield _svg_text(_LEFT, 22, name, 'font-size="16" font-weight="bold"')
    yield _svg_text(_LEFT, 42, f"{bubble}; {timeline.makespan:.4g} {unit}", f'class="quiet" fill="{_QUIET}"')
    yield _svg_text(_LEFT + _CHART + 12, _TOP - 8, "idle", f'class="quiet" fill="{_QUIET}"')
    yield _svg_text(_LEFT + _CHART + 66, _TOP - 8, "holds", f'class="quiet" fill="{_QUIET}"')


def _rank_rows(schedule: PipelineSchedule, timeline: PipelineTimeline) -> Iterator[str]:
    for rank, (idle, held) in enumerate(zip(timeline.bubble, peak_in_flight_microbatches(schedule), strict=True)):
        top = _row_top(rank)
        yield _svg_text(_LEFT - 10, top + 19, f"rank {rank}", 'text-anchor="end"')
        yield f'<rect x="{_LEFT}" y="{top}" width="{_CHART}" height="{_ROW}" class="idle" fill="{_EMPTY}"/>'
        yield _svg_text(_LEFT + _CHART + 12, top + 19, f"{idle:.1%}")
        yield _svg_text(_LEFT + _CHART + 66, top + 19, str(held))


def _op_boxes(schedule: PipelineSchedule, timeline: PipelineTimeline) -> Iterator[str]:
    scale = _CHART / timeline.makespan
    digits = len(str(schedule.microbatches - 1))
    for rank in range(schedule.pp):
        chunks = {stage: chunk for chunk, stage in enumerate(schedule.stages_of_rank(rank))}
        for before, op in zip([None, *schedule.orders[rank]], schedule.orders[rank], strict=False):
            start, end = timeline.spans[op]
            colour = _shade(_COLOURS[op.kind], chunks[op.stage], schedule.virtual_stages)
            # of a pair, the forward is above the backward
            upper, lower = op in schedule.pairs, before in schedule.pairs
            height, top = _ROW / (1 + (upper or lower)), _row_top(rank) + _ROW / 2 * lower
            yield _op_box(op, (_LEFT + start * scale, top, (end - start) * scale, height), colour, digits)


def _op_box(op: PipelineOp, box: tuple[float, float, float, float], colour: RgbColour, digits: int) -> str:
    """Return a rectangle with a tooltip and, if a legible number of `digits` fits, the number of the micro-batch.
    `box` has left, top, width and height.
    """
    x, y, width, height = box
    size = min(12.0, (width - 2) / (0.6 * digits))
    number = ""
    if size >= 7:
        style = f'text-anchor="middle" font-size="{size:.3g}" fill="{_text_colour(colour)}"'
        number = _svg_text(x + width / 2, y + height / 2 + size * 0.36, str(op.microbatch), style)
    edge = min(0.75, width / 8)
    tooltip = f"<title>{escape(str(op))}</title>" if width >= _TOOLTIP_WIDTH else ""
    return (
        f'<g>{tooltip}<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{_hex_colour(colour)}" stroke="#ffffff" '
        f'stroke-width="{edge:.2g}"/>{number}</g>'
    )


def _message_lines(schedule: PipelineSchedule, timeline: PipelineTimeline) -> Iterator[str]:
    """Yield lines from the end of an operation to the start of the one on another rank that uses its output or
    gradient.
    """
    if len(timeline.spans) > _MESSAGES:
        return
    back: PipelineOpKind = "I" if schedule.splits_backward else "B"
    for kind, step in (("F", 1), (back, -1)):
        moves = []
        for op in timeline.spans:
            there = op._replace(stage=op.stage + step)
            if (
                op.kind != kind
                or there not in timeline.spans
                or schedule.owners[op.stage] == schedule.owners[there.stage]
            ):
                continue
            ends = ((op, timeline.spans[op][1]), (there, timeline.spans[there][0]))
            moves.append(
                "L".join(
                    f"{_LEFT + at * _CHART / timeline.makespan:.1f},{_row_top(schedule.owners[one.stage]) + _ROW / 2:.0f}"
                    for one, at in ends
                )
            )
        if moves:
            title = "outputs to the next stage" if step > 0 else "gradients to the stage before"
            yield (
                f'<path class="quiet" d="M{"M".join(moves)}" fill="none" stroke="{_QUIET}" stroke-width="0.7" '
                f'opacity="0.8"><title>{title}</title></path>'
            )


def _legend(schedule: PipelineSchedule, y: float) -> Iterator[str]:
    used = {op.kind for op in schedule.ranks[0]}
    x = float(_LEFT)
    for kind, meaning in _LEGEND.items():
        if kind not in used:
            continue
        for chunk in range(schedule.virtual_stages):
            colour = _hex_colour(_shade(_COLOURS[kind], chunk, schedule.virtual_stages))
            yield f'<rect x="{x:.0f}" y="{y}" width="14" height="14" fill="{colour}"/>'
            x += 16
        yield _svg_text(x + 4, y + 11, meaning)
        x += 24 + 6.4 * len(meaning)
    yield f'<rect class="idle" x="{x:.0f}" y="{y}" width="14" height="14" fill="{_EMPTY}"/>'
    yield _svg_text(x + 20, y + 11, "idle")
    notes = ["lines: messages"] * (len(schedule.orders[0]) * schedule.pp <= _MESSAGES and schedule.pp > 1)
    notes += ["lighter: a later chunk of the rank"] * (schedule.virtual_stages > 1)
    if notes:
        yield _svg_text(x + 62, y + 11, "; ".join(notes), f'class="quiet" fill="{_QUIET}"')


def _row_top(rank: int) -> int:
    return _TOP + rank * (_ROW + _GAP)


def _shade(colour: RgbColour, chunk: int, chunks: int) -> RgbColour:
    """Return `colour` mixed with up to six tenths of white for later chunks."""
    white = 0.6 * chunk / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in colour)
    return red, green, blue


def _text_colour(colour: RgbColour) -> str:
    red, green, blue = colour
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 130 else _INK


def _hex_colour(colour: RgbColour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _svg_text(x: float, y: float, content: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'
