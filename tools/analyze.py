#!/usr/bin/env python3
"""Draw what people look at in differential attention, as PNG and JSON.

    python tools/analyze.py lambda --metrics runs/x/metrics.jsonl --output lambda
    python tools/analyze.py maps --load runs/x/checkpoints --prompt "Once upon a time" --output maps
    python tools/analyze.py spans --load runs/x/checkpoints --prompt "A is [[7]]. A:" --output spans
    python tools/analyze.py outliers --load runs/x/checkpoints --text-file text.txt --output top

lambda: mean lambda of each layer over training. maps: attention of both branches and their
difference in one layer. spans: attention of the last token to the marked span (between [[ and ]])
against the rest, per layer and over prompts. outliers: largest attention scores and hidden states.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megadiff.config import ConfigError
from megadiff.data.tokenizers import Tokenizer
from megadiff.models.analysis import Maps, Outliers, observe, span_attention
from megadiff.models.decoder import Decoder
from megadiff.training.errors import run
from tools.generate import (
    add_model_flags,
    checkpoint_tokenizer,
    load_model,
    read_prompts,
    read_text,
)
from tools.plot_metrics import plot_lambdas, read_metrics

Drawn = tuple[Any, dict[str, Any]]
"""A figure, and the values in it for the JSON file."""


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--output", required=True, help="writes OUTPUT.png and OUTPUT.json")
        if name != "lambda":
            add_model_flags(sub)
        return sub

    sub = command("lambda", "mean lambda of each layer over training")
    sub.add_argument("--metrics", required=True, help="metrics.jsonl of a run")
    sub = command("maps", "attention of both branches and their difference")
    sub.add_argument("--prompt", required=True)
    sub.add_argument("--layer", type=int, default=0, help="0-based; -1 is the last")
    sub.add_argument("--head", type=int, help="output head; the mean over heads by default")
    sub = command("spans", "attention of the last token to a marked span")
    sub.add_argument("--prompt", action="append", default=[], help="with [[span]]; repeatable")
    sub.add_argument("--prompt-file", help="a prompt on each line, as JSON strings or plain")
    sub = command("outliers", "largest attention scores and hidden states")
    sub.add_argument("--text-file", required=True)
    sub.add_argument("--seq-length", type=int, default=512)
    sub.add_argument("--sequences", type=int, default=8, help="at most as many of the text")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    arguments = parse_arguments(words)
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.command == "lambda":
        figure, values = draw_lambda(Path(arguments.metrics))
    else:
        config, _, model = load_model(arguments)
        tokenizer = checkpoint_tokenizer(config, arguments.tokenizer_model)
        make = {"maps": draw_maps, "spans": draw_spans, "outliers": draw_outliers}
        figure, values = make[arguments.command](arguments, model, tokenizer)
    output.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    figure.savefig(output.with_suffix(".png"), dpi=150)
    plt.close(figure)
    print(f"wrote {output.with_suffix('.png')} and {output.with_suffix('.json')}")


def draw_lambda(path: Path) -> Drawn:
    entries = [e for e in read_metrics(path).get("train", []) if e.get("lambda")]
    if not entries:
        raise ConfigError(f"{path}: no lambda in it; the model has no differential layers")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    by_layer = plot_lambdas(axes, entries)
    axes.set(xlabel="iteration", ylabel="mean lambda", title="lambda of each layer")
    axes.legend(fontsize=8, ncols=2)
    return figure, {"iterations": [e["iteration"] for e in entries], "lambda": by_layer}


def draw_maps(arguments: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> Drawn:
    tokens = list(tokenizer.encode(arguments.prompt))
    layer = arguments.layer % model.config.num_layers
    if not -model.config.num_layers <= arguments.layer < model.config.num_layers:
        raise ConfigError(f"--layer {arguments.layer}: the model has {model.config.num_layers}")
    shown = seen_maps(model, tokens).get(layer)
    if shown is None:
        raise ConfigError(f"--layer {layer} is {model.config.mixer_of_layer(layer)}, without maps")
    heads = shown.first.shape[0]
    if arguments.head is not None and not 0 <= arguments.head < heads:
        raise ConfigError(f"--head {arguments.head}: layer {layer} has {heads} heads, from 0")
    rows = slice(None) if arguments.head is None else slice(arguments.head, arguments.head + 1)
    panels = {"branch 1": shown.first[rows].mean(0)}
    if shown.second is not None and shown.lam is not None:
        panels["branch 2"] = shown.second[rows].mean(0)
        panels["branch 1 - lambda x branch 2"] = shown.difference[rows].mean(0)
    words = [tokenizer.decode([token]) for token in tokens]
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 5.5), layout="constrained", squeeze=False
    )
    for axes, (title, values) in zip(all_axes[0], panels.items(), strict=True):
        bound = values.abs().max().item()
        image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-bound, vmax=bound)
        axes.set(title=title, xlabel="key", ylabel="query")
        if len(words) <= 40:
            axes.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
            axes.set_yticks(range(len(words)), words, fontsize=7)
        figure.colorbar(image, ax=axes, shrink=0.7)
    which = "mean of heads" if arguments.head is None else f"head {arguments.head}"
    figure.suptitle(f"layer {layer}, {which}")
    values = {title: panel.tolist() for title, panel in panels.items()}
    lam = None if shown.lam is None else shown.lam[rows].mean(0).tolist()
    return figure, {"layer": layer, "head": arguments.head, "tokens": words, "lambda": lam} | values


def seen_maps(model: Decoder, tokens: list[int]) -> dict[int, Maps]:
    """The maps of all layers with attention."""
    seen: dict[int, Maps] = {}

    def look(layer: int, maps: Maps | None, hidden: Any) -> None:
        if maps is not None:
            seen[layer] = maps

    observe(model, tokens, look)
    return seen


def marked(prompt: str, tokenizer: Tokenizer) -> tuple[list[int], range]:
    """The tokens of a prompt, and those among them of the span between [[ and ]]."""
    before, opened, rest = prompt.partition("[[")
    inside, closed, after = rest.partition("]]")
    if not (opened and closed and inside) or "[[" in after:
        raise ConfigError(f"the prompt {prompt!r} needs exactly one span marked as [[span]]")
    parts = [list(tokenizer.encode(part)) for part in (before, inside, after)]
    if not parts[2]:
        raise ConfigError(
            f"the prompt {prompt!r} ends with its span: whose attention is asked for?"
        )
    begin = len(parts[0])
    return [*parts[0], *parts[1], *parts[2]], range(begin, begin + len(parts[1]))


def draw_spans(arguments: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> Drawn:
    prompts = arguments.prompt + read_prompts(arguments.prompt_file)
    if not prompts:
        raise ConfigError("no prompts: give --prompt or --prompt-file")
    table: dict[int, dict[str, float]] = {}  # by layer
    for prompt in prompts:
        tokens, span = marked(prompt, tokenizer)
        for layer, maps in seen_maps(model, tokens).items():
            row = table.setdefault(layer, {"span": 0.0, "rest": 0.0})
            for key, share in zip(row, span_attention(maps, span), strict=True):
                row[key] += share / len(prompts)
    if not table:
        raise ConfigError("the model has no layers with attention")
    mean, places = {}, range(len(table))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, shift in (("span", -0.2), ("rest", 0.2)):
        shares = [row[key] for row in table.values()]
        mean[key] = sum(shares) / len(shares)
        axes.bar([x + shift for x in places], shares, 0.4, label=key)
    axes.set_xticks(places, [str(layer) for layer in table])
    axes.set(xlabel="layer", ylabel="attention of the last token", title="attention to the span")
    axes.legend()
    print(f"attention of the last token, mean over layers: span {mean['span']:.3f}, "
          f"rest {mean['rest']:.3f} ({len(prompts)} prompts)")  # fmt: skip
    return figure, {"prompts": len(prompts), "layers": table, "mean": mean}


def draw_outliers(arguments: argparse.Namespace, model: Decoder, tokenizer: Tokenizer) -> Drawn:
    ids = list(tokenizer.encode(read_text("--text-file", arguments.text_file)))
    length = arguments.seq_length
    sequences = [ids[at : at + length] for at in range(0, len(ids), length)][: arguments.sequences]
    if not sequences:
        raise ConfigError(f"--text-file {arguments.text_file} holds no tokens")
    scores: dict[int | str, Outliers] = defaultdict(Outliers)  # by layer, and of "all"
    hidden: dict[int | str, Outliers] = defaultdict(Outliers)

    def look(layer: int, maps: Maps | None, output: Any) -> None:
        for place in (layer, "all"):
            hidden[place].add(output)
            if maps is not None:
                scores[place].add(maps.scores)

    for sequence in sequences:
        observe(model, sequence, look)
    figure, all_axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    values: dict[str, Any] = {"tokens": sum(map(len, sequences))}
    named = {"attention scores": scores, "hidden states": hidden}
    for axes, (title, by_layer) in zip(all_axes, named.items(), strict=True):
        whole = by_layer.pop("all", Outliers()).summary()
        layers = {layer: outliers.summary() for layer, outliers in by_layer.items()}
        for key in ("top-1", "top-10", "median"):
            points = {layer: summary[key] for layer, summary in layers.items() if key in summary}
            axes.plot(list(points), list(points.values()), marker="o", ms=4, label=key)
        axes.set(title=f"largest {title}", xlabel="layer", ylabel="absolute value", yscale="log")
        axes.legend()
        values[title] = {"all": whole, "layers": layers}
    return figure, values


if __name__ == "__main__":
    run(main, sys.argv[1:])
