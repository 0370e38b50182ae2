"""The run's text: tokenizer, datasets and the micro-batches of each step."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megadiff.config import Config, ConfigError, DataConfig
from megadiff.data.blended_dataset import BlendedDataset
from megadiff.data.build import Dataset, build_train_valid_test_datasets, note
from megadiff.data.cache import digest
from megadiff.data.data_path import parse_blend, read_data_args, read_per_split_data_args
from megadiff.data.gpt_dataset import PiecewiseDataset
from megadiff.data.indexed_dataset import DataError, origin_path
from megadiff.data.loader import BatchLoader, DocumentRules, MicroBatch, pad_cu_seqlens
from megadiff.data.tokenizers import TokenizerSettings
from megadiff.parallel.mesh import Axis


def set_vocabulary(config: Config) -> int | None:
    """Fill `model.vocab_size` from the tokenizer; returns the id of its end of document, if any.

    Raises ConfigError when neither a tokenizer nor `--vocab-size` is given or they contradict each
    other, DataError when the tokenizer can not be read.
    """
    d, m = config.data, config.model
    files = d.tokenizer_model or d.vocab_file or d.tokenizer_type == "ByteTokenizer"
    if d.tokenizer_type == "NullTokenizer" and m.vocab_size is not None:
        if d.tokenizer_model != str(m.vocab_size - 1):  # else a run's config.yaml, read back
            d.tokenizer_model = str(m.vocab_size)
            m.vocab_size += 1  # as in Megatron-LM, the end of document comes on top
        return m.vocab_size - 1
    if not files and m.vocab_size is None:
        raise ConfigError(
            "the vocabulary is not known: give --tokenizer-type and its file (--tokenizer-model), "
            "or --vocab-size"
        )
    if not files:
        return None
    tokenizer = TokenizerSettings.of(d, m.vocab_size).build()
    if m.vocab_size is None:
        m.vocab_size = tokenizer.vocab_size
    if m.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {m.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}"
        )
    if m.vocab_size - tokenizer.vocab_size >= m.make_vocab_size_divisible_by:
        note(
            f"the vocabulary has {m.vocab_size:,} entries (--vocab-size, or that of the preset), "
            f"the tokenizer {tokenizer.vocab_size:,}: the others stay unused"
        )
    return tokenizer.eod


class Batches(BatchLoader):
    """Micro-batches of one data-parallel rank, each token checked against the vocabulary."""

    def __init__(
        self,
        dataset: Dataset,
        name: str,
        config: Config,
        dp: Axis,
        eod: int | None,
        pin_memory: bool = False,
    ) -> None:
        assert config.model.vocab_size is not None
        d = config.data
        self.name, self.vocab_size = name, config.model.vocab_size
        self.seq_length = config.training.seq_length
        super().__init__(
            dataset,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=dp.rank,
            data_parallel_size=dp.size,
            rules=DocumentRules(eod, d.reset_position_ids, d.reset_attention_mask, d.eod_mask_loss),
            num_workers=d.num_workers,
            pin_memory=pin_memory,
            check=self._check_tokens,
        )
        self.dataset: Dataset = dataset

    def once(self, samples: int, global_batch_size: int) -> Iterator[list[MicroBatch]]:
        """The first `samples` samples in global batches; what fills up the last one has no loss."""
        for first in range(0, samples, global_batch_size):
            numbers = self._numbers(first, global_batch_size)
            batches = [self._make([min(n, samples - 1) for n in run]) for run in numbers]
            pad_cu_seqlens(batches, self.pin_memory)
            for batch, run in zip(batches, numbers, strict=True):
                batch.loss_mask[max(samples - run.start, 0) :] = 0.0
            yield batches

    def _check_tokens(self, batch: MicroBatch) -> None:
        largest = max(int(batch.tokens.max()), int(batch.labels.max()))
        smallest = min(int(batch.tokens.min()), int(batch.labels.min()))
        if smallest < 0:
            raise DataError(f"the {self.name} data hold token {smallest}: they are damaged")
        if largest >= self.vocab_size:
            raise DataError(
                f"the {self.name} data hold token {largest}, but the vocabulary has "
                f"{self.vocab_size}: they were made with another tokenizer than "
                "--tokenizer-model or --vocab-size says"
            )


Evaluated = tuple[Batches, int]
"""What an evaluation reads: the first so many samples."""


@dataclass(frozen=True)
class RunData:
    """What a run reads; in `valid` are `validation`, and `validation/NAME` for further sets."""

    train: Batches
    valid: dict[str, Evaluated]
    test: Evaluated | None
    identity: dict[str, Any]


def build_data(config: Config, dp: Axis, eod: int | None, *, pin_memory: bool = False) -> RunData:
    """The three datasets of the configuration, for a rank of the data-parallel axis.

    `pin_memory` makes copies to a GPU that do not wait. Raises ConfigError and DataError.
    """
    t, d = config.training, config.data
    assert t.train_iters is not None and t.global_batch_size is not None
    _read_data_args(d)
    if not d.data_path and not d.train_data_path:
        raise ConfigError("no training data: give --data-path, or --train-data-path")
    wanted = t.eval_iters * t.global_batch_size

    def evaluated(words: list[str]) -> int | None:
        """One epoch, of which an evaluation reads the beginning; weighted blends have no epoch."""
        if wanted == 0:
            return 0
        return wanted if words and parse_blend(words).weights is not None else None

    build = partial(
        build_train_valid_test_datasets,
        seq_length=t.seq_length,
        seed=t.seed,
        cache_path=d.data_cache_path,
        mmap=d.mmap_bin_files,
        packing=d.packing,
    )
    train, valid, test = build(
        samples=(
            t.total_samples,
            evaluated(d.data_path or d.valid_data_path),
            evaluated(d.data_path or d.test_data_path),
        ),
        data_path=d.data_path or None,
        split=d.split if d.data_path else None,
        train_data_path=d.train_data_path or None,
        valid_data_path=d.valid_data_path or None,
        test_data_path=d.test_data_path or None,
    )
    if train is None:
        raise ConfigError(f"--split {d.split} leaves nothing to train on")
    if len(train) < t.total_samples:
        raise ConfigError(
            f"the training data hold {len(train)} samples, fewer than the run's {t.total_samples}: "
            "prefixes without weights are read once; give each a weight to read them again"
        )
    sets = {"validation": valid, "test": test}
    for name, words in _named_sets(d.valid_data_sets).items():
        samples = (0, evaluated(words), 0)
        _, sets[f"validation/{name}"], _ = build(samples=samples, valid_data_path=words)
    batches = partial(Batches, config=config, dp=dp, eod=eod, pin_memory=pin_memory)
    there = {
        name: (batches(dataset, name), min(wanted, len(dataset)))
        for name, dataset in sets.items()
        if dataset is not None
    }
    if dp.rank == 0:  # of many ranks on one file system few need to look
        _tell_other_tokenizers(d, [train, *(batches.dataset for batches, _ in there.values())])
    return RunData(
        train=batches(train, "training"),
        test=there.pop("test", None),
        valid=there,
        identity=data_identity(config, train),
    )


def _named_sets(entries: list[str]) -> dict[str, list[str]]:
    """`name=prefix` and `name=weight,prefix,...` as lists of words by name."""
    sets: dict[str, list[str]] = {}
    for entry in entries:
        name, equals, words = entry.partition("=")
        if not (name and equals and words) or name in sets:
            raise ConfigError(
                f"--valid-data-sets {entry}: give each set as name=prefix, with a name of its own"
            )
        sets[name] = words.split(",")
    return sets


def _tell_other_tokenizers(d: DataConfig, datasets: list[Dataset]) -> None:
    """Note the data of which is known that their tokenizer was not the run's."""
    if not (d.tokenizer_model or d.vocab_file) or d.tokenizer_type == "NullTokenizer":
        return
    try:
        tokenizer = TokenizerSettings.of(d, None).contents()
    except OSError:  # the tokenizer is built: this file is none that its type reads
        return
    for prefix in dict.fromkeys(part.dataset.prefix for data in datasets for part in parts(data)):
        origin = Path(origin_path(prefix))
        try:
            other = origin.is_file() and json.loads(origin.read_text())["tokenizer"] != tokenizer
        except (OSError, ValueError, LookupError, TypeError):
            note(f"{origin} is damaged and passed over")
            continue
        if other:
            note(
                f"warning: {prefix} was made with another tokenizer than this run's, or with other "
                "files of the same"
            )


def parts(dataset: Dataset) -> list[PiecewiseDataset]:
    """The datasets of a blend; another is its only part."""
    return list(dataset.datasets) if isinstance(dataset, BlendedDataset) else [dataset]


def _read_data_args(d: DataConfig) -> None:
    """Replace the files that hold data paths by what they hold."""
    if d.data_args_path:
        if d.data_path:
            raise ConfigError("give --data-path or --data-args-path, not both")
        d.data_path, d.data_args_path = read_data_args(d.data_args_path), None
    if d.per_split_data_args_path:
        if d.data_path or d.train_data_path or d.valid_data_path or d.test_data_path:
            raise ConfigError("--per-split-data-args-path takes the place of all other data paths")
        lists = read_per_split_data_args(d.per_split_data_args_path)
        d.train_data_path = lists["train"] or []
        d.valid_data_path = lists["valid"] or []
        d.test_data_path = lists["test"] or []
        d.per_split_data_args_path = None


def data_identity(config: Config, train: Dataset) -> dict[str, Any]:
    """What decides which sample comes when: by content of the data, not by where they lie."""
    words = config.data.data_path or config.data.train_data_path
    weights = parse_blend(words).weights
    return {
        "seq_length": config.training.seq_length,
        "seed": config.training.seed,
        "split": config.data.split if config.data.data_path else None,
        "packing": config.data.packing,
        "weights": None if weights is None else list(weights),
        "datasets": [
            {
                "name": Path(part.dataset.prefix).name,
                "sequences": len(part.dataset),
                "lengths": digest(part.dataset.lengths),
            }
            for part in parts(train)
        ],
        "first_samples": [first_tokens(dataset) for dataset in (train, *parts(train))],
    }


def sample_ids(dataset: Dataset, number: int) -> dict[str, Any]:
    """Which sample of which dataset the run's sample `number` is, and of which documents."""
    part, index = dataset, number
    if isinstance(dataset, BlendedDataset):
        part, index = dataset.locate(number)
    assert not isinstance(part, BlendedDataset)
    sequences = [piece.sequence for piece in part.pieces(index)]
    documents = np.searchsorted(part.dataset.documents, sequences, side="right") - 1
    return {
        "sample": number,
        "dataset": part.dataset.prefix,
        "sample_of_dataset": index,
        "documents": documents.tolist(),
    }


def first_tokens(dataset: Dataset) -> str:
    """The order of samples depends on how many epochs there are: the first ones tell it apart."""
    return digest(np.stack([dataset[i].tokens for i in range(min(4, len(dataset)))]))
