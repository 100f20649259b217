"""SVG figures for a page: lines, areas, bars and scatter plots. Colours come from `page.css`, for dark and light mode.

A figure is as wide as its column, or as a narrow screen; its text is still readable when scaled down by a quarter. Long
series are downsampled to the extremes and the mean of each piece of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError
from mega_trainer.pages.axis_scale import AxisScale, format_compact

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
PIECES = 240  # maximum number of pieces of the axis for a line
SHARED = 6  # the lines of a figure have at most `SHARED * PIECES` pieces together
COLOURS = 10
MARKED = 60  # maximum number of points of a line with marks
CurvePoint = tuple[float, float | None]
AxisLimits = tuple[float, float]
_Y = itemgetter(1)
FormatNumber = Callable[[float], str]


@dataclass(frozen=True)
class LineSeries:
    """Series of (x, y) points that a figure draws as one line; a y of None is a gap.

    Attributes:
        name: entry of the legend.
        points: (x, y) pairs.
        colour: number of the colour; None: position among the lines.
        marks: draw a mark at each point, for a line with few measurements.
        dashed: dash the line, for predictions.
    """

    name: str
    points: Sequence[CurvePoint]
    colour: int | None = None
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class FigureEvent:
    """Event at position x of a figure, drawn as a dashed vertical line labelled with the text `what`."""

    x: float
    what: str


def draw_line_figure(
    title: str,
    series: Sequence[LineSeries],
    *,
    write: FormatNumber = format_compact,
    zero: bool = False,
    log_from: float = math.inf,
    events: Sequence[FigureEvent] = (),
) -> str:
    """Return an HTML figure with lines over a common x axis, or "" if no series has a point.
    Events are dashed vertical lines.
    """
    kept = [(line, drawn) for line in series if (drawn := _finite_points(line.points))]
    if not kept:
        return ""
    pieces = min(PIECES, PIECES * SHARED // len(kept))
    extremes = [downsample_extremes(drawn, pieces) for _, drawn in kept]
    x = _axis_x([at for points in extremes for at, _ in points])
    y = _axis_y([value for points in extremes for _, value in points], zero=zero, log_from=log_from)
    body = [*_draw_grid(x, y, write), *_draw_events(events, x)]
    names = []
    for index, ((line, drawn), points) in enumerate(zip(kept, extremes, strict=True)):
        colour = (index if line.colour is None else line.colour) % COLOURS
        body += _draw_line(line, drawn, points, (x, y), colour, pieces)
        names.append((line.name, colour, line.dashed))
    if events:
        names.append((events[0].what.split(":")[0], -1, True))
    return format_figure(title, format_svg(title, body, axes=(x, y)), format_legend(names) if len(names) > 1 else "")


def draw_area_figure(
    title: str,
    series: Sequence[LineSeries],
    *,
    write: FormatNumber = format_compact,
    events: Sequence[FigureEvent] = (),
) -> str:
    """Return an HTML figure with stacked areas of series with equal x, or "" if the series have no points.
    The values are means over intervals of the axis.
    """
    if not series or not series[0].points:
        return ""
    thin = [_piece_means([(x, y or 0.0) for x, y in area.points], PIECES) for area in series]
    sums = [0.0] * len(thin[0])
    axes = (
        _axis_x([x for x, _ in thin[0]]),
        _axis_y([sum(map(_Y, column)) for column in zip(*thin, strict=True)], zero=True),
    )
    body = [*_draw_grid(*axes, write)]
    names = []
    for index, (area, points) in enumerate(zip(series, thin, strict=True)):
        colour = (index if area.colour is None else area.colour) % COLOURS
        lower = [(x, below) for below, (x, _) in zip(sums, points, strict=True)]
        sums = [below + value for below, (_, value) in zip(sums, points, strict=True)]
        upper = [(x, above) for above, (x, _) in zip(sums, points, strict=True)]
        body.append(f'<path class="area f{colour}" d="{_svg_path([*upper, *reversed(lower)], axes)}Z"/>')
        names.append((area.name, colour, False))
    return format_figure(title, format_svg(title, [*body, *_draw_events(events, axes[0])]), format_legend(names))


@dataclass(frozen=True)
class StackedBar:
    """Bar of a figure, made of stacked segments (kind, size), with a label before it and a `note` after it."""

    label: str
    parts: Sequence[tuple[str, float]]
    note: str = ""


def draw_bar_figure(
    title: str,
    rows: Sequence[StackedBar],
    *,
    write: FormatNumber = format_compact,
    limit: float | None = None,
    limit_name: str = "limit",
) -> str:
    """Return an HTML figure with horizontal bars of stacked segments, one colour for each kind.
    A dashed line marks `limit`.
    """
    kinds = list(dict.fromkeys(kind for row in rows for kind, _ in row.parts))
    totals = [sum(size for _, size in row.parts) for row in rows]
    left = 10 + 7.2 * max((len(row.label) for row in rows), default=0)
    high = max([*totals, limit or 0.0]) or 1.0
    x = AxisScale(0.0, high * 1.02, left, WIDTH - left - 8)
    height = 24 * len(rows) + 12
    body = []
    for index, (row, total) in enumerate(zip(rows, totals, strict=True)):
        top, at = 8 + 24 * index, 0.0
        body.append(draw_svg_text(left - 6, top + 13, row.label, "end"))
        for kind, size in row.parts:
            wide, colour = x.to_position(at + size) - x.to_position(at), kinds.index(kind) % COLOURS
            body.append(
                f'<rect class="f{colour}" x="{x.to_position(at):.1f}" y="{top}" width="{max(wide, 0):.1f}" height="18">'
                f"<title>{escape(f'{row.label}, {kind}: {write(size)} of {write(total)}')}</title></rect>"
            )
            at += size
        if row.note:
            inside = x.to_position(total) + 6 + 7 * len(row.note) > WIDTH
            note_x = x.to_position(total) - 6 if inside else x.to_position(total) + 6
            body.append(
                draw_svg_text(note_x, top + 13, row.note, "end" if inside else "start", "inside" if inside else "quiet")
            )
    labelled = all([kind for kind, _ in row.parts] == [row.label] for row in rows)  # no need for a legend
    names = [] if labelled else [(kind, index % COLOURS, False) for index, kind in enumerate(kinds)]
    if limit is not None:
        at = x.to_position(limit)
        body.append(f'<path class="event" d="M{at:.1f},2V{height - 2}"/>')
        names.append((f"{limit_name} {write(limit)}", -1, True))
    return format_figure(title, format_svg(title, body, height), format_legend(names) if names else "")


@dataclass(frozen=True)
class ScatterPoint:
    """Point of a scatter figure at (x, y): `name` is its legend entry, the text `what` its tooltip."""

    x: float
    y: float
    name: str
    what: str
    large: bool = False


def draw_scatter_figure(
    title: str, found: Sequence[ScatterPoint], *, x_name: str, y_name: str, write_x: FormatNumber = format_compact, write_y: FormatNumber = format_compact,
    limit: float | None = None, log_from: float = math.inf,
) -> str:  # fmt: skip
    """Return an HTML figure with points, one colour for each name, and a dashed line at `limit` on the x axis.
    The x axis is logarithmic if its largest value is at least `log_from` times the smallest.
    """
    shown = [dot.x for dot in found] + ([] if limit is None else [limit])
    x = AxisScale.from_values(shown, LEFT, WIDTH - LEFT - RIGHT, log_from=log_from)
    bottom = BOTTOM + 14
    y = AxisScale.from_values([dot.y for dot in found], HEIGHT - bottom, TOP + bottom - HEIGHT)
    names = list(dict.fromkeys(dot.name for dot in found))
    body = [*_draw_grid(x, y, write_y, write_x)]
    body += [
        draw_svg_text(WIDTH - RIGHT, HEIGHT - 6, x_name, "end", "quiet"),
        draw_svg_text(LEFT + 6, TOP + 10, y_name, "start", "quiet"),
    ]
    if limit is not None:
        body.append(f'<path class="event" d="M{x.to_position(limit):.1f},{TOP}V{HEIGHT - bottom}"/>')
    for dot in sorted(found, key=lambda dot: dot.large):
        colour = names.index(dot.name) % COLOURS
        body.append(
            f'<circle class="f{colour} dot" cx="{x.to_position(dot.x):.1f}" cy="{y.to_position(dot.y):.1f}" r="{7 if dot.large else 4}">'
            f"<title>{escape(dot.what)}</title></circle>"
        )
    legend = format_legend([(name, i % COLOURS, False) for i, name in enumerate(names)]) if any(names) else ""
    return format_figure(title, format_svg(title, body), legend)


def format_figure(title: str, picture: str, below: str = "") -> str:
    """Return the HTML of a figure: a picture with its title above and the content `below` under it."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}{below}</figure>"


def format_svg(
    title: str, body: Iterable[str], height: float = HEIGHT, axes: Sequence[AxisScale] = (), width: float = WIDTH
) -> str:
    """Return an SVG picture with a title and the elements `body`.
    With its `axes`, the page shows the values of its lines at the mouse pointer.
    """
    numbers = " ".join(f"{n:.9g}" for axis in axes for n in (axis.low, axis.high, axis.start, axis.length))
    data = f' data-axes="{numbers} {axes[-1].log:d}"' if axes else ""
    return (
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}"{data}>'
        f"{''.join(body)}</svg>"
    )


def format_legend(names: Iterable[tuple[str, int, bool]]) -> str:
    """Return the HTML legend of a figure from (name, colour number, dashed) entries; -1 is the colour of events."""
    items = (
        f'<span><i class="{f"b{colour}" if colour >= 0 else "b-event"}{" dashed" * dashed}"></i>{escape(name)}</span>'
        for name, colour, dashed in names
    )
    return f'<p class="legend">{"".join(items)}</p>'


def downsample_extremes(points: Sequence[AxisLimits], pieces: int) -> Sequence[AxisLimits]:
    """Return the lowest and highest point of each of `pieces` equal intervals of a sequence, or all if they are few."""
    if len(points) <= 2 * pieces:
        return points
    found: list[AxisLimits] = []
    for piece in _split_pieces(points, pieces):
        low, high = min(piece, key=_Y), max(piece, key=_Y)
        found += [low] if low == high else sorted((low, high))
    return found


def _finite_points(points: Sequence[CurvePoint]) -> list[AxisLimits]:
    """Return the points with a finite y."""
    return [(x, y) for x, y in points if y is not None and -math.inf < y < math.inf]


def _piece_means(points: Sequence[AxisLimits], pieces: int) -> list[AxisLimits]:
    """Return the mean point of each piece of the sequence."""
    return [
        (sum(x for x, _ in piece) / len(piece), sum(map(_Y, piece)) / len(piece))
        for piece in _split_pieces(points, min(pieces, len(points)))
    ]


def _split_pieces(points: Sequence[AxisLimits], count: int) -> Iterator[Sequence[AxisLimits]]:
    """Return the sequence in `count` pieces."""
    edges = [len(points) * index // count for index in range(count + 1)]
    return (points[begin:end] for begin, end in pairwise(edges))


def _draw_line(
    line: LineSeries,
    drawn: Sequence[AxisLimits],
    extremes: Sequence[AxisLimits],
    axes: tuple[AxisScale, AxisScale],
    colour: int,
    pieces: int,
) -> Iterator[str]:
    """Yield the SVG of a line; if points were left out, extremes in the background and means in front. A non-finite
    number is a gap.
    """
    kind = f'class="line s{colour}{" dashed" * line.dashed}" data-name="{escape(line.name)}"'
    if len(drawn) > len(extremes):
        yield f'<path class="line faint s{colour}" d="{_svg_path(extremes, axes)}"/>'
        yield f'<path {kind} d="{_svg_path(_piece_means(drawn, pieces), axes)}"/>'
        return
    for finite, piece in groupby(line.points, key=lambda point: bool(_finite_points([point]))):
        if finite:
            points = _finite_points([*piece])
            yield f'<path {kind} d="{_svg_path(points, axes)}"/>'
            if (line.marks and len(drawn) <= MARKED) or len(points) == 1:
                yield from (
                    f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
                    for x, y in _point_positions(points, axes)
                )


def _point_positions(points: Iterable[AxisLimits], axes: tuple[AxisScale, AxisScale]) -> Iterator[AxisLimits]:
    """Return the positions of points in the picture."""
    return ((axes[0].to_position(x), axes[1].to_position(y)) for x, y in points)


def _svg_path(points: Iterable[AxisLimits], axes: tuple[AxisScale, AxisScale]) -> str:
    """Return an SVG path through points."""
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in _point_positions(points, axes))


def _axis_x(values: Sequence[float]) -> AxisScale:
    """Return the x axis of these values."""
    low, high = min(values), max(values)
    return AxisScale(low, high if high > low else low + 1, LEFT, WIDTH - LEFT - RIGHT)


def _axis_y(values: Sequence[float], *, zero: bool, log_from: float = math.inf) -> AxisScale:
    """Return the y axis of these values."""
    return AxisScale.from_values(values, HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT, zero=zero, log_from=log_from)


def _draw_grid(
    x: AxisScale, y: AxisScale, write_y: FormatNumber, write_x: FormatNumber = format_compact
) -> Iterator[str]:
    """Yield the grid lines and tick labels of both axes."""
    for value in y.compute_ticks(5):
        at = y.to_position(value)
        yield f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>' + draw_svg_text(
            LEFT - 6, at + 4, write_y(value), "end"
        )
    yield from _draw_x_ticks(x, y.start, write_x, 6)


def _draw_x_ticks(x: AxisScale, bottom: float, write: FormatNumber, most: int) -> Iterator[str]:
    """Yield the grid lines and tick labels of the x axis."""
    for value in x.compute_ticks(most):
        at = x.to_position(value)
        anchor = "middle" if at < WIDTH - 2 * RIGHT else "end"
        label_x = at if anchor == "middle" else WIDTH - 2
        label = draw_svg_text(label_x, bottom + 17, write(value), anchor)
        yield f'<path class="grid" d="M{at:.1f},{TOP}V{bottom:.1f}"/>{label}'


def _draw_events(events: Sequence[FigureEvent], x: AxisScale) -> Iterator[str]:
    """Yield the lines of events."""
    for event in events:
        at = x.to_position(event.x)
        yield f'<path class="event" d="M{at:.1f},{TOP}V{HEIGHT - BOTTOM}"><title>{escape(event.what)}</title></path>'


def draw_svg_text(x: float, y: float, content: str, anchor: str, name: str = "") -> str:
    """Return an SVG text element."""
    kind = f' class="{name}"' if name else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


@dataclass(frozen=True)
class PageSection:
    """Section of an HTML page: heading, text, and figures or tables in HTML; empty figures and tables are left out."""

    title: str
    parts: Sequence[str]
    text: str = ""
    wide: bool = False

    def render_html(self) -> str:
        """Return the section as HTML; "" if it has no figure or table."""
        parts = [part for part in self.parts if part]
        if not parts:
            return ""
        text = f'<p class="quiet">{escape(self.text)}</p>' if self.text else ""
        body = "".join(parts) if self.wide else f'<div class="grid">{"".join(parts)}</div>'
        return f"<section><h2>{escape(self.title)}</h2>{text}{body}</section>\n"


def render_page(title: str, subtitle: str, tiles: Iterable[tuple[str, str]], sections: Iterable[PageSection]) -> str:
    """Return a whole page as HTML from its title, subtitle and sections; `tiles` are (name, value) pairs shown first."""
    here = files(__package__ or "mega_trainer.pages")
    css, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    first = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    made = datetime.now().astimezone().isoformat(" ", "minutes")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(subtitle)}</p></header>\n'
        f'<div class="tiles">{first}</div>\n{"".join(section.render_html() for section in sections)}'
        f"<footer>made by mega, {escape(made)}</footer>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


LONG_TEXT = 30  # letters of a table's cell, from which it has a minimum width of several words


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return an HTML table from the column names `head` and the rows, or "" without a row.
    The columns `numbers` (by index) are right-aligned.
    """

    def render_row(cells: Sequence[str], tag: str) -> str:
        kinds = (
            "number" if column in numbers else "long" if len(cell) > LONG_TEXT else ""
            for column, cell in enumerate(cells)
        )
        marked = (
            f"<{tag}{f' class={kind}' * bool(kind)}>{escape(cell)}</{tag}>"
            for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(render_row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table>{render_row(head, "th") if head else ""}{body}</table></div>' if body else ""


def wrap_wide_picture(picture: str) -> str:
    """Return the HTML of a picture in a container that scrolls horizontally."""
    return f'<div class="scroll wide">{picture}</div>'


def write_html_page(path: Path, text: str, option: str) -> None:
    """Write an HTML page to `path` atomically; errors name the command-line `option` that gave the path.

    Raises:
        ConfigError: when the file cannot be written; the message names the `option` with its path.
    """
    try:
        with open_atomic_file(path, text=True) as stream:
            stream.write(text)
    except OSError as error:
        message = f"{option} {path}: the file cannot be written ({error.strerror})"
        raise ConfigError(message, hint="use another file") from error
