"""Makes the plots of docs/scaling.md from the results of `bench.fleet`: `python -m docs.scaling_plots`.

It needs matplotlib: `pip install slora[plots]`.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "fleet-2026-11-24.json"
IMAGES = ROOT / "docs" / "images"


def plot_policies(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    names = [row["policy"] for row in rows]
    for axes, (column, title) in zip(
        panels,
        (
            ("of the bound %", "goodput, % of the fluid bound"),
            ("first token s", "mean time to first token, s (log)"),
            ("loads per adapter", "loads per requested adapter"),
        ),
        strict=True,
    ):
        colors = ["#3f51b5" if name == "slora" else "#b0b4c8" for name in names]
        bars = axes.barh(names, [row[column] for row in rows], color=colors)
        axes.bar_label(bars, fmt="%.2f" if column != "of the bound %" else "%.1f", padding=2, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.2)
        if column == "first token s":
            axes.set_xscale("log")
    return figure


def plot_sizes(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    loads = [row["of capacity %"] for row in rows]
    for column, label in (("first p50", "p50"), ("first token s", "mean"), ("first p99", "p99")):
        axes.plot(loads, [row[column] for row in rows], marker="o", label=label)
    axes.axhline(6.0, color="gray", linestyle="--", label="target, 6 s")
    axes.set_yscale("log")
    axes.set_xlabel("load, % of the fluid capacity")
    axes.set_ylabel("time to first token, s")
    axes.legend()
    return figure


def main() -> None:
    tables = json.loads(RESULTS.read_text(encoding="utf-8"))["tables"]
    plot_policies(tables["policies"]).savefig(IMAGES / "scaling-policies.png", dpi=110)
    plot_sizes(tables["sizes"]).savefig(IMAGES / "scaling-load.png", dpi=110)


if __name__ == "__main__":
    main()
