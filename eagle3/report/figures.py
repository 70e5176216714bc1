"""The figures of the report: plain numbers in, one matplotlib figure out.

Every figure's title states what it shows; an empty panel says so. Colours are Okabe and Ito's, or cividis where they
represent an order, so that colour-blind readers can tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

Series = Mapping[str, Sequence[float | None]]

BLUE, ORANGE, GREY = "#0072b2", "#e69f00", "#777777"
GREEN = "#009e73"
# Measurements of acceptance; `sampled` is served at a temperature, `served` greedily.
KINDS = {"simulated": BLUE, "served": ORANGE, "sampled": GREEN}
MARKERS = {"simulated": "o", "served": "s", "sampled": "^"}
# The same bytes for the same numbers: ids from a fixed salt, text as text, no date.
STYLE = {
    "svg.hashsalt": "eagle3",
    "svg.fonttype": "none",
    # Names of sources may contain dollar signs.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
# Curves with more points than this are averaged, to show the trend rather than the noise.
_POINTS = 100


def training(
    steps: Sequence[int],
    loss: Sequence[Sequence[float | None]],
    acceptance: Sequence[Sequence[float | None]],
    evaluations: Sequence[tuple[int, float]],
    norms: Sequence[float | None],
    rates: Sequence[float],
    skipped: Sequence[int],
) -> Figure:
    """Draw a training over its optimiser steps: loss, acceptance, held-out acceptance length, gradient.

    Args:
        steps: optimiser steps of the log's lines [n].
        loss: at each of them, the mean loss of every unroll step [n][T].
        acceptance: likewise the share of draft tokens that would be accepted, given all before were [n][T].
        evaluations: (optimiser step, acceptance length on the held-out split).
        norms: norm of the gradient before clipping [n]; None where it was not finite.
        rates: learning rate [n].
        skipped: how many steps were skipped so far [n].
    """
    figure = Figure(figsize=(8, 11))
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 2, 2))
    _curves(panels[0], steps, loss)
    panels[0].set(title="Training loss by draft position", ylabel="mean loss")
    _curves(panels[1], steps, acceptance)
    panels[1].set(title="Draft tokens accepted in training, by draft position", ylabel="share of those reached")
    if handles := panels[0].get_legend_handles_labels()[0]:
        _percent(panels[1], "y")
        figure.legend(handles=handles, title="draft\nposition", loc="outside right upper")
    _held_out(panels[2], evaluations)
    _gradient(panels[3], steps, norms, rates, skipped)
    panels[3].set_xlabel("optimiser step")
    panels[3].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return figure


def positions(lengths: Mapping[str, float | None], per_position: Series) -> Figure:
    """Draw the conditional acceptance of every draft position, measured in each way.

    Args:
        lengths: kind of measurement -> acceptance length.
        per_position: kind of measurement -> share of draft tokens accepted, given all before were [k].
    """
    known = [f"{length:.2f} {kind}" for kind, length in lengths.items() if length is not None]
    figure, axes = _canvas(f"Acceptance length {', '.join(known)}" if known else "Acceptance by draft position", 4)
    drafts = max(map(len, per_position.values()), default=0)
    if not drafts:
        _nothing(axes)
        return figure
    width = 0.8 / len(per_position)
    for index, (kind, shares) in enumerate(per_position.items()):
        at = [position + 1 + (index - (len(per_position) - 1) / 2) * width for position in range(len(shares))]
        bars = axes.bar(at, [share or 0 for share in shares], width * 0.95, color=KINDS.get(kind, GREY), label=kind)
        axes.bar_label(bars, ["" if share is None else f"{share:.0%}" for share in shares], padding=2, fontsize=9)
    axes.set(xlabel="draft position", ylabel="share accepted, given all before accepted", ylim=(0, 1.05))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    _percent(axes, "y")
    axes.legend(loc="upper right")
    return figure


def sources(per_source: Mapping[str, Mapping[str, float | None]], drafts: int) -> Figure:
    """Draw the acceptance length of every source, measured in each way, longest first.

    Args:
        per_source: source -> kind of measurement -> acceptance length.
        drafts: draft tokens per step (k); the length is between 1 and k + 1.
    """
    known = {source: {k: v for k, v in row.items() if v is not None} for source, row in per_source.items()}
    rows = {source: row for source, row in known.items() if row}
    order = sorted(rows, key=lambda source: (-_mean([*rows[source].values()]), source))
    title = "Acceptance length by source"
    if len(order) > 1:
        title = f"Acceptance length is highest for {order[0]}, lowest for {order[-1]}"
    figure, axes = _canvas(title, 1.6 + 0.4 * len(order))
    if not order:
        _nothing(axes)
        return figure
    _dots(axes, {source: rows[source] for source in order}, "{:.2f}")
    axes.set(xlabel="acceptance length (tokens per verification step)", xlim=(0.85, drafts + 1.15))
    figure.legend(loc="outside lower right", ncols=len(KINDS))
    return figure


def lengths(counts: Mapping[str, Mapping[int, int]]) -> Figure:
    """Draw histograms of lengths, one below the other.

    Args:
        counts: what is counted -> largest length of a bin, in tokens -> samples. Bins are powers of two, and 0.
    """
    known = {name: bins for name, bins in counts.items() if any(bound and n for bound, n in bins.items())}
    used = [bound for bins in known.values() for bound, n in bins.items() if n] or [0]
    bounds = [bound for bound in (0, *(1 << power for power in range(32))) if min(used) <= bound <= max(used)]
    figure = Figure(figsize=(8, 1 + 2 * max(1, len(known))))
    panels = figure.subplots(max(1, len(known)), 1, sharex=True, squeeze=False)[:, 0]
    if not known:
        _nothing(panels[0])
        return figure
    for axes, (name, bins) in zip(panels, known.items(), strict=True):
        bars = axes.bar(range(len(bounds)), [bins.get(bound, 0) for bound in bounds], 0.92, color=BLUE)
        axes.bar_label(bars, [f"{bins[b]:,}" if bins.get(b) else "" for b in bounds], padding=2, fontsize=9)
        axes.set(title=f"{name.capitalize()}: half have at most {_median(bins):,} tokens", ylabel="samples")
        axes.margins(y=0.15)
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    panels[-1].set_xticks(range(len(bounds)), [f"≤ {bound:,}" for bound in bounds], rotation=30 * (len(bounds) > 9))
    panels[-1].set_xlabel("tokens")
    return figure


def rejects(counts: Mapping[str, int], kept: int) -> Figure:
    """Draw how many generations were rejected for each reason, most frequent first."""
    total = sum(counts.values())
    share = total / (total + kept) if total + kept else 0
    title = f"{total:,} of {total + kept:,} generations rejected ({share:.1%})"
    reasons = sorted(counts, key=lambda reason: (counts[reason], reason))
    figure, axes = _canvas(title, 1.4 + 0.35 * len(reasons))
    if not total:
        _nothing(axes, "nothing was rejected")
        return figure
    bars = axes.barh(reasons, [counts[reason] for reason in reasons], color=BLUE)
    axes.bar_label(bars, [f"{counts[reason]:,}" for reason in reasons], padding=3)
    axes.set(xlabel="generations")
    axes.margins(x=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="y")
    return figure


def coverage(size: int, overall: float | None, per_source: Mapping[str, float | None]) -> Figure:
    """Draw the share of each source's generated tokens that the draft vocabulary holds, lowest first."""
    rows = {source: {"": share} for source, share in per_source.items() if share is not None}
    order = sorted(rows, key=lambda source: (rows[source][""], source))
    found = "" if overall is None else f" cover {overall:.2%} of the generated tokens"
    figure, axes = _canvas(f"{size:,} draft tokens{found}", 1.6 + 0.35 * len(order))
    if not order:
        _nothing(axes)
        return figure
    _dots(axes, {source: rows[source] for source in order}, "{:.2%}")
    lowest = rows[order[0]][""]
    axes.set(xlabel="share of generated tokens", xlim=(max(0, 1 - 1.6 * (1 - lowest) - 0.005), 1.0005))
    _percent(axes, "x", None if lowest > 0.98 else 0)
    return figure


def concurrency(levels: Sequence[int], speeds: Sequence[float], best: int) -> Figure:
    """Draw tokens per second against the requests in flight, and which number is recommended."""
    figure, axes = _canvas(f"{best} requests in flight are almost as fast as any number", 4)
    axes.plot(levels, speeds, color=BLUE, marker="o")
    axes.axvline(best, color=ORANGE, linestyle="--", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="requests in flight", ylabel="tokens per second", ylim=(0, None))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG; the same figure gives the same bytes (under `STYLE`)."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _canvas(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure, figure.subplots()


def _nothing(axes: Axes, text: str = "no figures") -> None:
    """Write into an empty panel that there is nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_axis_off()


def _curves(axes: Axes, steps: Sequence[int], rows: Sequence[Sequence[float | None]]) -> None:
    """Draw one line per unroll step, dark to light."""
    count = max(map(len, rows), default=0)
    if not count:
        _nothing(axes)
        return
    groups = _groups(steps)
    at = [_mean(steps[group]) for group in groups]
    colours = mpl.colormaps["cividis"]
    for position in range(count):
        values = [_mean([row[position] for row in rows[group]]) for group in groups]
        axes.plot(at, values, color=colours(position / max(count, 2)), linewidth=1.6, label=str(position + 1))


def _held_out(axes: Axes, evaluations: Sequence[tuple[int, float]]) -> None:
    """Draw the acceptance length on the held-out split, with a ring around the best."""
    title = "Held-out acceptance length"
    if evaluations:
        best = max(evaluations, key=lambda found: found[1])
        title += f": {best[1]:.2f} at its best, after step {best[0]:,}"
        axes.plot(*zip(*evaluations, strict=True), color=BLUE, marker="o", markersize=4)
        axes.scatter(*best, s=70, facecolors="none", edgecolors=ORANGE, linewidths=2, zorder=3)
        axes.margins(y=0.25)
    else:
        _nothing(axes)
    axes.set(title=title, ylabel="tokens per step")


def _gradient(
    axes: Axes, steps: Sequence[int], norms: Sequence[float | None], rates: Sequence[float], skipped: Sequence[int]
) -> None:
    """Draw the gradient's norm, in a band of its extremes where lines are averaged; a cross for skipped steps."""
    if not steps:
        _nothing(axes)
        return
    groups = _groups(steps)
    at = [_mean(steps[group]) for group in groups]
    known = [[norm for norm in norms[group] if norm is not None] for group in groups]
    nan = float("nan")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    lowest, highest = ([bound(group, default=nan) for group in known] for bound in (min, max))
    axes.fill_between(at, lowest, highest, color=BLUE, alpha=0.25, linewidth=0)
    axes.plot(at, [_mean(group) for group in known], color=BLUE, linewidth=1.6)
    totals = [0, *(skipped[group][-1] for group in groups)]
    marked = [step for step, before, after in zip(at, totals, totals[1:], strict=False) if after > before]
    axes.scatter(
        marked, [0.06] * len(marked), color="black", marker="x", transform=axes.get_xaxis_transform(), zorder=3
    )
    right = axes.twinx()
    right.plot(at, [_mean(rates[group]) for group in groups], color=ORANGE, linewidth=1.6, linestyle="--")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.set_ylim(0, None)
    right.grid(visible=False)
    count = f"{totals[-1]:,} step{'' if totals[-1] == 1 else 's'}" if totals[-1] else "no step"
    axes.set(title=f"Gradient and learning rate: {count} skipped{' (×)' if marked else ''}")
    axes.set_ylabel("norm before clipping", color=BLUE)
    right.set_ylabel("learning rate (dashed)", color=ORANGE)


def _groups(steps: Sequence[int]) -> list[slice]:
    """Return which lines of a log make one point of a curve."""
    size = -(-len(steps) // _POINTS)
    return [slice(start, start + size) for start in range(0, len(steps), size)]


def _dots(axes: Axes, rows: Mapping[str, Mapping[str, float]], form: str) -> None:
    """Draw one line per row, first on top, with a dot for each value; the smallest and the largest are labelled."""
    heights = {name: len(rows) - 1 - index for index, name in enumerate(rows)}
    for name, row in rows.items():
        height, values = heights[name], sorted(row.values())
        axes.plot(values, [height] * len(values), color=GREY, linewidth=1.2, zorder=1)
        ends = {values[0]: (-7, "right")} | ({values[-1]: (7, "left")} if len(values) > 1 else {})
        for value, (offset, align) in ends.items():
            text = form.format(value)
            axes.annotate(
                text, (value, height), (offset, 0), "data", "offset points", ha=align, va="center", fontsize=9
            )
    for kind in dict.fromkeys(kind for row in rows.values() for kind in row):
        found = {heights[name]: row[kind] for name, row in rows.items() if kind in row}
        colour, marker = KINDS.get(kind, BLUE), MARKERS.get(kind, "o")
        axes.scatter([*found.values()], [*found], s=45, color=colour, marker=marker, label=kind, zorder=2)
    axes.set_yticks([*heights.values()], [*heights])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.grid(visible=False, axis="y")


def _percent(axes: Axes, axis: str, decimals: int | None = 0) -> None:
    getattr(axes, f"{axis}axis").set_major_formatter(PercentFormatter(1, decimals))


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of what is known; nan, which leaves a gap in a line, if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def _median(bins: Mapping[int, int]) -> int:
    """Return the bound below which at least half of the samples are."""
    half = sum(bins.values()) / 2
    total = 0
    for bound, count in sorted(bins.items()):
        total += count
        if total >= half:
            return bound
    return 0
