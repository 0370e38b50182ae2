#!/usr/bin/env python3
"""Draw a run's metrics.jsonl: loss, learning rate, throughput and the lambda of each layer.

python tools/plot_metrics.py runs/x/metrics.jsonl --output runs/x/metrics.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN = "#2563eb", "#d97706", "#059669"


Metrics = dict[str, list[dict[str, Any]]]


def read_metrics(path: Path) -> Metrics:
    """Entries by kind, in order of iterations; of two entries of one iteration the later holds."""
    by_kind: dict[str, dict[int, dict[str, Any]]] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                by_kind.setdefault(entry["kind"], {})[entry["iteration"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                reason = f"error: {path}, line {number}: not a metrics entry ({error})"
                raise SystemExit(reason) from None
    return {kind: [e for _, e in sorted(entries.items())] for kind, entries in by_kind.items()}


def draw(
    metrics: Metrics,
    output: Path,
    title: str,
    marks: Sequence[tuple[int, str]] = (),
    references: Sequence[tuple[float, str]] = (),
) -> None:
    """Write the picture. `marks` are labelled iterations, `references` labelled losses."""
    train = metrics.get("train", [])
    if not train:
        raise SystemExit("error: no training metrics to draw")
    steps = [e["iteration"] for e in train]
    plt.rcParams.update(
        {
            "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": MUTED,
            "xtick.color": MUTED, "ytick.color": MUTED, "text.color": INK, "axes.titlesize": 11,
        }
    )  # fmt: skip
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    loss, rate, speed, lambdas = axes.flat

    style(loss, "loss per token (nats)")
    loss.plot(steps, [e["lm_loss"] for e in train], color=BLUE, lw=1.4, label="training")
    validation = metrics.get("validation", [])
    if validation:
        loss.plot(
            [e["iteration"] for e in validation],
            [e["lm_loss"] for e in validation],
            color=ORANGE, marker="o", ms=4, lw=1.4, label="held-out documents",
        )  # fmt: skip
    for value, label in references:
        loss.axhline(value, color=INK, lw=1.2, ls="--", label=f"{label}: {value:.3f}")
    loss.legend(frameon=False)

    style(rate, "learning rate")
    rate.plot(steps, [e["learning_rate"] for e in train], color=GREEN, lw=1.6)
    rate.ticklabel_format(axis="y", scilimits=(-3, 3))
    rate.set_ylim(bottom=0)

    style(speed, "tokens per second, each device")
    values = [e["tokens_per_second_per_device"] for e in train]
    speed.plot(steps, values, color=BLUE, lw=1.4)
    speed.set_ylim(0, 1.15 * max(values))

    style(lambdas, "lambda of each layer (mean)")
    if plot_lambdas(lambdas, train):
        low, high = lambdas.get_ylim()
        lambdas.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
        lambdas.legend(frameon=False, ncols=4, loc="upper right")
    else:
        lambdas.text(0.5, 0.5, "no differential layers", ha="center", transform=lambdas.transAxes)

    for axis in axes.flat:
        for iteration, label in marks:
            axis.axvline(iteration, color=MUTED, lw=1, ls=":")
            if axis is rate:
                axis.text(iteration, 0.94, f"  {label}", color=MUTED,
                          transform=axis.get_xaxis_transform())  # fmt: skip
    figure.savefig(output, dpi=120)
    plt.close(figure)


def plot_lambdas(axes: Axes, train: list[dict[str, Any]]) -> dict[int, list[float | None]]:
    """Draw the mean lambda of each layer over the entries `train`; the values by layer."""
    layers = sorted({int(layer) for e in train for layer in e["lambda"]})
    by_layer = {layer: [e["lambda"].get(str(layer)) for e in train] for layer in layers}
    steps, colors = [e["iteration"] for e in train], plt.get_cmap("viridis")
    for number, (layer, values) in enumerate(by_layer.items()):
        color = colors(0.9 * number / max(len(layers) - 1, 1))
        axes.plot(steps, values, color=color, lw=1.6, label=f"layer {layer}")
    return by_layer


def style(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left")
    axis.set_xlabel("iteration")
    axis.grid(color=GRID, lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run's --log-dir")
    parser.add_argument("--output", type=Path, help="PNG; beside the metrics by default")
    parser.add_argument("--title")
    arguments = parser.parse_args(words)
    if not arguments.metrics.is_file():
        hint = "give the metrics.jsonl of a run's --log-dir"
        raise SystemExit(f"error: {arguments.metrics}: no such file; {hint}")
    output = arguments.output or arguments.metrics.with_suffix(".png")
    draw(read_metrics(arguments.metrics), output, arguments.title or str(arguments.metrics))
    print(f"wrote {output}")


if __name__ == "__main__":
    main(sys.argv[1:])
