"""A blend: samples of several datasets in Megatron's proportion-keeping order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadiff.data.errors import DataError
from megadiff.data.gpt_dataset import PiecewiseDataset, Sample

SURPLUS = 0.005  # Megatron asks each dataset for 0.5 % more samples than its share
_CHUNK = 4096  # steps whose shares are multiplied at once
MOST_DATASETS = 32767  # dataset numbers are int16


@dataclass(frozen=True)
class BlendOrder:
    """`dataset_index` int16 `[size]` and `dataset_sample_index` int64 `[size]`: sample k of the
    blend is sample `dataset_sample_index[k]` of dataset `dataset_index[k]`."""

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1; each must be a finite number above 0."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"blend weight {weight}: every weight must be above 0")
    values = np.array(weights, dtype=np.float64)
    return (values / values.sum()).tolist()


def blend_size(weights: Sequence[float], samples: int) -> int:
    """Samples in a blend of normalized `weights` that is asked for `samples`."""
    return sum(math.ceil(samples * weight) for weight in weights)


def samples_to_request(weight: float, samples: int) -> int:
    """What a dataset of normalized `weight` must hold for a blend of `samples` samples."""
    return math.ceil(math.ceil(samples * weight) * (1 + SURPLUS))


def build_blend_order(weights: Sequence[float], size: int) -> BlendOrder:
    """At each step the dataset that lags its share the most gives its next sample."""
    if len(weights) >= MOST_DATASETS:
        raise DataError(f"a blend of {len(weights)} datasets: at most {MOST_DATASETS - 1}")
    share = np.array(weights, dtype=np.float64)
    counts = np.zeros(len(share), dtype=np.float64)
    order = BlendOrder(np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64))
    for begin in range(0, size, _CHUNK):
        steps = np.arange(begin, min(begin + _CHUNK, size), dtype=np.float64)
        due = np.maximum(steps, 1.0)[:, None] * share
        for step, lag in enumerate(due, begin):
            np.subtract(lag, counts, out=lag)
            chosen = lag.argmax()
            order.dataset_index[step] = chosen
            order.dataset_sample_index[step] = counts[chosen]
            counts[chosen] += 1.0
    return order


class BlendedDataset:
    """Item k is sample k of the blend."""

    def __init__(self, datasets: Sequence[PiecewiseDataset], order: BlendOrder) -> None:
        self.datasets = list(datasets)
        self.order = order

    def __len__(self) -> int:
        return len(self.order.dataset_index)

    def locate(self, index: int) -> tuple[PiecewiseDataset, int]:
        """The dataset and the sample in it that sample `index` of the blend is."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        dataset = self.datasets[int(self.order.dataset_index[index])]
        return dataset, int(self.order.dataset_sample_index[index])

    def __getitem__(self, index: int) -> Sample:
        dataset, sample = self.locate(index)
        return dataset[sample]
