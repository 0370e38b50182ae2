"""Data paths, splits, blends: what is built, and what is refused with which words."""

import json
from pathlib import Path

import numpy as np
import pytest

from megadiff.data.blended_dataset import BlendedDataset
from megadiff.data.build import (
    Dataset,
    build_train_valid_test_datasets,
)
from megadiff.data.data_path import (
    Blend,
    parse_blend,
    parse_split,
    read_data_args,
    read_per_split_data_args,
)
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDatasetBuilder

SEQ = 10


def write(prefix: Path, documents: int, first: int = 0, length: int = 25) -> str:
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for number in range(first, first + documents):
            builder.add_document([number] * length)
    return str(prefix)


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Documents 0 to 99, 1000 to 1199, and a tiny one: 2000."""
    return [
        write(tmp_path / "a", 100),
        write(tmp_path / "b", 200, 1000),
        write(tmp_path / "tiny", 1, 2000),
    ]


def build(samples: tuple, **paths) -> tuple[Dataset | None, ...]:
    return build_train_valid_test_datasets(samples=samples, seq_length=SEQ, seed=1, **paths)


def documents_of(dataset: Dataset | None) -> set[int]:
    assert dataset is not None
    return {int(t) for i in range(len(dataset)) for t in dataset[i].tokens}


def test_splits_share_no_document(three: list[str]) -> None:
    datasets = build((300, 20, 10), data_path=[three[0]], split="90,7,3")
    train, valid, test = map(documents_of, datasets)
    assert train == set(range(90)) and valid <= set(range(90, 97)) and test <= set(range(97, 100))
    assert [len(d) >= n for d, n in zip(datasets, (300, 20, 10), strict=True) if d] == [True] * 3


def test_absent_parts_are_none(three: list[str]) -> None:
    train, valid, test = build((5, 5, 5), data_path=[three[0]], split="99,1")
    assert train and valid and test is None
    assert build((5, 0, 0), data_path=[three[0]], split="98,1,1")[1:] == (None, None)
    train, valid, test = build((5, 5, 5), train_data_path=[three[0]], test_data_path=[three[1]])
    assert train and valid is None and documents_of(test) <= set(range(1000, 1200))


def test_an_empty_share_for_testing_is_left_out(
    three: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train, valid, test = build((5, 5, 5), data_path=[three[0]], split="98,1.6,0.4")
    assert train and valid and test is None
    said = capsys.readouterr().err
    assert said.startswith("no test set: ") and "(sequences 100 to 100): no tokens" in said
    # no samples wanted: nothing to say
    assert build((5, 0, 0), data_path=[three[0]], split="98,1.6,0.4")[2] is None
    assert capsys.readouterr().err == ""
    with pytest.raises(DataError, match=r"train split \(sequences 0 to 0\): no tokens"):
        build((5, 5, 5), data_path=[three[0]], split="0.4,98,1.6")


def test_weighted_blend(three: list[str]) -> None:
    (train, _, _) = build((1000, 0, 0), data_path=["3", three[0], "1", three[1]], split="1")
    assert isinstance(train, BlendedDataset) and len(train) == 1000
    of_a = sum(train[i].tokens[0] < 1000 for i in range(1000))
    assert of_a == 750
    for size in (10, 100, 500):  # at every point of the run, not only at its end
        assert sum(train[i].tokens[0] < 1000 for i in range(size)) == pytest.approx(
            0.75 * size, abs=1
        )


def test_blend_without_weights_is_by_size(three: list[str]) -> None:
    (train, _, _) = build((None, 0, 0), data_path=three[:2], split="1")
    assert isinstance(train, BlendedDataset)
    assert [len(d) for d in train.datasets] == [249, 499] and len(train) == 748
    used = [train.locate(i) for i in range(len(train))]
    assert len({(id(d), i) for d, i in used}) == 748  # each sample once


def test_a_tiny_source_is_left_out_of_a_split_it_has_nothing_for(
    three: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["1", three[0], "1", three[2]]
    train, valid, _ = build((100, 20, 0), data_path=paths, split="90,10,0")
    assert isinstance(train, BlendedDataset) and isinstance(valid, BlendedDataset)
    assert 2000 in documents_of(train)
    assert len(valid) == 20 and documents_of(valid) <= set(range(90, 100))
    assert f"{three[2]} has nothing for the valid split" in capsys.readouterr().err


def test_samples_are_a_function_of_seed_and_data_alone(three: list[str]) -> None:
    def tokens(seed: int) -> list[list[int]]:
        train, _, _ = build_train_valid_test_datasets(
            samples=(400, 0, 0),
            seq_length=SEQ,
            seed=seed,
            data_path=["1", three[0], "2", three[1]],
            split="1",
        )
        assert train is not None
        return [train[i].tokens.tolist() for i in range(len(train))]

    assert tokens(1) == tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (["a"], Blend(("a",))),
        (["a", "b", "c"], Blend(("a", "b", "c"))),
        (["0.3", "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7))),
        (["1", "a"], Blend(("a",), (1.0,))),
        (["1e2", "a", ".5", "b"], Blend(("a", "b"), (100.0, 0.5))),
    ],
)
def test_blend_words(words: list[str], blend: Blend) -> None:
    assert parse_blend(words) == blend


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "empty list"),
        (["0.3", "a", "b"], "0.3 looks like a weight"),
        (["a", "0.3", "b", "0.7"], "0.3 looks like a weight"),
        (["0", "a", "1", "b"], "weight 0.0: every weight must be above 0"),
        (["-1", "a", "1", "b"], "must be above 0"),
        (["1", "a", "2", "a"], "names a twice"),
    ],
)
def test_blend_words_that_make_no_sense(words: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_blend(words)


def test_split_words() -> None:
    assert parse_split("1") == ((0.0, 1.0), None, None)
    assert parse_split("1,0,1") == ((0.0, 0.5), None, (0.5, 1.0))
    assert parse_split(" 8 / 1 / 1 ")[0] == (0.0, 0.8)


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "", "1,,1", "1,2,3,4", "0,0", "nan,1"])
def test_split_words_that_make_no_sense(split: str) -> None:
    with pytest.raises(DataError, match="--split"):
        parse_split(split)


def test_data_args_files(tmp_path: Path) -> None:
    plain, per_split = tmp_path / "args.txt", tmp_path / "args.json"
    plain.write_text("0.5 a\n0.5 b\n")
    assert read_data_args(str(plain)) == ["0.5", "a", "0.5", "b"]
    per_split.write_text(json.dumps({"train": [1, "a", 2, "b"], "valid": "c d"}))
    assert read_per_split_data_args(str(per_split)) == {
        "train": ["1", "a", "2", "b"],
        "valid": ["c", "d"],
        "test": None,
    }
    per_split.write_text(json.dumps({"training": ["a"]}))
    with pytest.raises(DataError, match="keys train, valid, test"):
        read_per_split_data_args(str(per_split))
    with pytest.raises(DataError, match="absent"):
        read_data_args(str(tmp_path / "absent"))


def test_contradictions_are_refused(three: list[str]) -> None:
    with pytest.raises(DataError, match="not both"):
        build((1, 1, 1), data_path=[three[0]], split="1", train_data_path=[three[1]])
    with pytest.raises(DataError, match="needs --split"):
        build((1, 1, 1), data_path=[three[0]])
    with pytest.raises(DataError, match="--split belongs to --data-path"):
        build((1, 1, 1), train_data_path=[three[0]], split="1")
    with pytest.raises(DataError, match="needs a number of samples"):
        build((None, 0, 0), data_path=["1", three[0], "1", three[1]], split="1")
