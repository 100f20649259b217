"""Figures as SVG in a page: lines, areas, bars and dots. Colours are the page's (`page.css`), so that they suit dark and light.

A figure is as wide as its column, which on a narrow screen is the screen: its text is large enough to be made smaller by a
quarter. Of many points those are drawn that show the same: the extremes of each piece of the axis, and its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter

from mega_trainer.pages.scale import Scale, short

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 26
PIECES = 240  # of the axis, a figure's lines together have as many times `SHARED`
SHARED = 6
COLOURS = 10
MARKED = 60  # points of a line that may have marks
Point = tuple[float, float | None]
Known = tuple[float, float]
_Y = itemgetter(1)
Write = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A line: y where there is one, by x; in the page's colour of that number, if not in that of its place.

    Attributes:
        marks: draw its points, too, as of a few measurements.
        dashed: as what is expected, beside what is.
    """

    name: str
    points: Sequence[Point]
    colour: int | None = None
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happened at x."""

    x: float
    what: str


def lines(
    title: str,
    series: Sequence[Series],
    *,
    write: Write = short,
    zero: bool = False,
    log_from: float = math.inf,
    events: Sequence[Event] = (),
) -> str:
    """Lines over a common axis; events are dashed lines across. Empty without a point."""
    kept = [(one, drawn) for one in series if (drawn := _finite(one.points))]
    if not kept:
        return ""
    pieces = min(PIECES, PIECES * SHARED // len(kept))
    outlines = [thinned(drawn, pieces) for _, drawn in kept]
    x = _axis_x([at for outline in outlines for at, _ in outline])
    y = _axis_y([value for outline in outlines for _, value in outline], zero=zero, log_from=log_from)
    body = [*_grid(x, y, write), *_events(events, x)]
    names = []
    for place, ((one, drawn), outline) in enumerate(zip(kept, outlines, strict=True)):
        colour = (place if one.colour is None else one.colour) % COLOURS
        body += _line(one, drawn, outline, (x, y), colour, pieces)
        names.append((one.name, colour, one.dashed))
    if events:
        names.append((events[0].what.split(":")[0], -1, True))
    return figure(title, svg(title, body, axes=(x, y)), legend(names) if len(names) > 1 else "")


def areas(title: str, series: Sequence[Series], *, write: Write = short, events: Sequence[Event] = ()) -> str:
    """Series of the same x on top of each other, as means over pieces of the axis. Empty without a point."""
    if not series or not series[0].points:
        return ""
    thin = [_means([(x, y or 0.0) for x, y in one.points], PIECES) for one in series]
    sums = [0.0] * len(thin[0])
    axes = (
        _axis_x([x for x, _ in thin[0]]),
        _axis_y([sum(map(_Y, column)) for column in zip(*thin, strict=True)], zero=True),
    )
    body = [*_grid(*axes, write)]
    names = []
    for place, (one, points) in enumerate(zip(series, thin, strict=True)):
        colour = (place if one.colour is None else one.colour) % COLOURS
        lower = [(x, below) for below, (x, _) in zip(sums, points, strict=True)]
        sums = [below + value for below, (_, value) in zip(sums, points, strict=True)]
        upper = [(x, above) for above, (x, _) in zip(sums, points, strict=True)]
        body.append(f'<path class="area f{colour}" d="{_path([*upper, *reversed(lower)], axes)}Z"/>')
        names.append((one.name, colour, False))
    return figure(title, svg(title, [*body, *_events(events, axes[0])]), legend(names))


@dataclass(frozen=True)
class Bar:
    """A bar of parts: (kind, size), beside its label; `note` stands behind it."""

    label: str
    parts: Sequence[tuple[str, float]]
    note: str = ""


def bars(
    title: str, rows: Sequence[Bar], *, write: Write = short, limit: float | None = None, limit_name: str = "limit"
) -> str:
    """Horizontal bars of stacked parts, the kinds in one colour each; a dashed line at the limit."""
    kinds = list(dict.fromkeys(kind for row in rows for kind, _ in row.parts))
    totals = [sum(size for _, size in row.parts) for row in rows]
    left = 10 + 7.2 * max((len(row.label) for row in rows), default=0)
    high = max([*totals, limit or 0.0]) or 1.0
    x = Scale(0.0, high * 1.02, left, WIDTH - left - 8)
    height = 24 * len(rows) + 12
    body = []
    for place, (row, total) in enumerate(zip(rows, totals, strict=True)):
        top, at = 8 + 24 * place, 0.0
        body.append(_text(left - 6, top + 13, row.label, "end"))
        for kind, size in row.parts:
            wide, colour = x.at(at + size) - x.at(at), kinds.index(kind) % COLOURS
            body.append(
                f'<rect class="f{colour}" x="{x.at(at):.1f}" y="{top}" width="{max(wide, 0):.1f}" height="18">'
                f"<title>{escape(f'{row.label}, {kind}: {write(size)} of {write(total)}')}</title></rect>"
            )
            at += size
        if row.note:
            inside = x.at(total) + 6 + 7 * len(row.note) > WIDTH
            place_x = x.at(total) - 6 if inside else x.at(total) + 6
            body.append(
                _text(place_x, top + 13, row.note, "end" if inside else "start", "inside" if inside else "quiet")
            )
    alike = all([kind for kind, _ in row.parts] == [row.label] for row in rows)  # a legend would say it again
    names = [] if alike else [(kind, index % COLOURS, False) for index, kind in enumerate(kinds)]
    if limit is not None:
        at = x.at(limit)
        body.append(f'<path class="event" d="M{at:.1f},2V{height - 2}"/>')
        names.append((f"{limit_name} {write(limit)}", -1, True))
    return figure(title, svg(title, body, height), legend(names) if names else "")


@dataclass(frozen=True)
class Dot:
    """Something at (x, y): `name` in the legend, `what` to be read where one points at it."""

    x: float
    y: float
    name: str
    what: str
    large: bool = False


def dots(
    title: str, found: Sequence[Dot], *, x_name: str, y_name: str, write_x: Write = short, write_y: Write = short,
    limit: float | None = None,
) -> str:  # fmt: skip
    """Dots, those of a name in one colour; a dashed line at `limit` on the x axis."""
    x = Scale.of([dot.x for dot in found] + ([] if limit is None else [limit]), LEFT, WIDTH - LEFT - RIGHT)
    bottom = BOTTOM + 14
    y = Scale.of([dot.y for dot in found], HEIGHT - bottom, TOP + bottom - HEIGHT)
    names = list(dict.fromkeys(dot.name for dot in found))
    body = [*_grid(x, y, write_y, write_x)]
    body += [
        _text(WIDTH - RIGHT, HEIGHT - 6, x_name, "end", "quiet"),
        _text(LEFT + 6, TOP + 10, y_name, "start", "quiet"),
    ]
    if limit is not None:
        body.append(f'<path class="event" d="M{x.at(limit):.1f},{TOP}V{HEIGHT - bottom}"/>')
    for dot in sorted(found, key=lambda dot: dot.large):
        colour = names.index(dot.name) % COLOURS
        body.append(
            f'<circle class="f{colour} dot" cx="{x.at(dot.x):.1f}" cy="{y.at(dot.y):.1f}" r="{7 if dot.large else 4}">'
            f"<title>{escape(dot.what)}</title></circle>"
        )
    return figure(title, svg(title, body), legend([(name, i % COLOURS, False) for i, name in enumerate(names)]))


def figure(title: str, picture: str, below: str = "") -> str:
    """A picture with its title, and what stands below it."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}{below}</figure>"


def svg(title: str, body: Iterable[str], height: float = HEIGHT, axes: Sequence[Scale] = ()) -> str:
    """The picture itself. With its axes, the page tells the values of its lines where one points."""
    told = " ".join(f"{n:.9g}" for axis in axes for n in (axis.low, axis.high, axis.start, axis.length))
    data = f' data-axes="{told} {axes[-1].log:d}"' if axes else ""
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}"{data}>'
        f"{''.join(body)}</svg>"
    )


def legend(names: Iterable[tuple[str, int, bool]]) -> str:
    """What each colour is; -1 is that of events."""
    items = (
        f'<span><i class="{f"b{colour}" if colour >= 0 else "b-event"}{" dashed" * dashed}"></i>{escape(name)}</span>'
        for name, colour, dashed in names
    )
    return f'<p class="legend">{"".join(items)}</p>'


def thinned(points: Sequence[Known], pieces: int) -> Sequence[Known]:
    """Of each piece of the sequence the lowest and the highest point, in order: all that a line of so many pieces shows."""
    if len(points) <= 2 * pieces:
        return points
    found: list[Known] = []
    for piece in _pieces(points, pieces):
        low, high = min(piece, key=_Y), max(piece, key=_Y)
        found += [low] if low == high else sorted((low, high))
    return found


def _finite(points: Sequence[Point]) -> list[Known]:
    return [(x, y) for x, y in points if y is not None and -math.inf < y < math.inf]


def _means(points: Sequence[Known], pieces: int) -> list[Known]:
    return [
        (sum(x for x, _ in piece) / len(piece), sum(map(_Y, piece)) / len(piece))
        for piece in _pieces(points, min(pieces, len(points)))
    ]


def _pieces(points: Sequence[Known], count: int) -> Iterator[Sequence[Known]]:
    edges = [len(points) * place // count for place in range(count + 1)]
    return (points[begin:end] for begin, end in pairwise(edges))


def _line(
    one: Series, drawn: Sequence[Known], outline: Sequence[Known], axes: tuple[Scale, Scale], colour: int, pieces: int
) -> Iterator[str]:
    """Where points were left out, the extremes in the background and the means before them. A number that is none is a gap."""
    kind = f'class="line s{colour}{" dashed" * one.dashed}" data-name="{escape(one.name)}"'
    if len(drawn) > len(outline):
        yield f'<path class="line faint s{colour}" d="{_path(outline, axes)}"/>'
        yield f'<path {kind} d="{_path(_means(drawn, pieces), axes)}"/>'
        return
    for there, piece in groupby(one.points, key=lambda point: bool(_finite([point]))):
        if there:
            known = _finite([*piece])
            yield f'<path {kind} d="{_path(known, axes)}"/>'
            if (one.marks and len(drawn) <= MARKED) or len(known) == 1:
                yield from (
                    f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in _places(known, axes)
                )


def _places(points: Iterable[Known], axes: tuple[Scale, Scale]) -> Iterator[Known]:
    return ((axes[0].at(x), axes[1].at(y)) for x, y in points)


def _path(points: Iterable[Known], axes: tuple[Scale, Scale]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in _places(points, axes))


def _axis_x(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    return Scale(low, high if high > low else low + 1, LEFT, WIDTH - LEFT - RIGHT)


def _axis_y(values: Sequence[float], *, zero: bool, log_from: float = math.inf) -> Scale:
    return Scale.of(values, HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT, zero=zero, log_from=log_from)


def _grid(x: Scale, y: Scale, write_y: Write, write_x: Write = short) -> Iterator[str]:
    for value in y.ticks(5):
        at = y.at(value)
        yield f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>' + _text(
            LEFT - 6, at + 4, write_y(value), "end"
        )
    yield from _ticks_below(x, y.start, write_x, 6)


def _ticks_below(x: Scale, bottom: float, write: Write, most: int) -> Iterator[str]:
    for value in x.ticks(most):
        at = x.at(value)
        anchor = "middle" if at < WIDTH - 2 * RIGHT else "end"
        place = at if anchor == "middle" else WIDTH - 2
        yield f'<path class="grid" d="M{at:.1f},{TOP}V{bottom:.1f}"/>' + _text(place, bottom + 17, write(value), anchor)


def _events(events: Sequence[Event], x: Scale) -> Iterator[str]:
    for event in events:
        at = x.at(event.x)
        yield f'<path class="event" d="M{at:.1f},{TOP}V{HEIGHT - BOTTOM}"><title>{escape(event.what)}</title></path>'


def _text(x: float, y: float, content: str, anchor: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
