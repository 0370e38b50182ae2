"""The order of samples, compared with Megatron-LM's own arrays."""

import json
from pathlib import Path

import numpy as np
import pytest

from megadiff.data.blended_dataset import build_blend_order
from megadiff.data.build import build_train_valid_test_datasets
from megadiff.data.errors import DataError
from megadiff.data.gpt_dataset import GPTDataset, build_order, plan_epochs
from megadiff.data.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "gpt_dataset.json").read_text())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = str(tmp_path_factory.mktemp("golden") / "docs")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in GOLDEN["docs"]:
            builder.add_document(document)
    return prefix


@pytest.mark.parametrize("wanted", GOLDEN["out"])
@pytest.mark.parametrize("cached", [False, True])
def test_orders_equal_megatron(prefix: str, wanted: str, cached: bool, tmp_path: Path) -> None:
    datasets = build_train_valid_test_datasets(
        data_path=[prefix],
        split=GOLDEN["split"],
        samples=(int(wanted), 1, 1),
        seq_length=GOLDEN["seq"],
        seed=GOLDEN["seed"],
        cache_path=str(tmp_path / "cache") if cached else None,
    )
    for dataset, golden in zip(datasets, GOLDEN["out"][wanted], strict=True):
        assert isinstance(dataset, GPTDataset)
        assert len(dataset) == golden["len"]
        np.testing.assert_array_equal(dataset.order.document_index, golden["doc"])
        np.testing.assert_array_equal(dataset.order.sample_index, golden["sample"])
        np.testing.assert_array_equal(dataset.order.shuffle_index, golden["shuffle"])


def test_samples_are_the_stream_of_documents(prefix: str) -> None:
    (dataset, _, _) = build_train_valid_test_datasets(
        data_path=[prefix],
        split="1",
        samples=(7000, 0, 0),
        seq_length=GOLDEN["seq"],
        seed=1,
    )
    assert isinstance(dataset, GPTDataset)
    stream = np.concatenate([GOLDEN["docs"][i] for i in dataset.order.document_index])
    for index in range(0, len(dataset), 97):
        begin = int(dataset.order.shuffle_index[index]) * dataset.seq_length
        sample = dataset[index]
        np.testing.assert_array_equal(sample.tokens, stream[begin : begin + dataset.seq_length + 1])
        # every later start follows the end of a document
        assert (sample.tokens[sample.starts[1:] - 1] == 99).all()


def test_blend_equals_megatron() -> None:
    golden = json.loads((HERE / "blend.json").read_text())
    order = build_blend_order(golden["w"], golden["size"])
    np.testing.assert_array_equal(order.dataset_index, golden["dataset_index"])
    np.testing.assert_array_equal(order.dataset_sample_index, golden["dataset_sample_index"])


def test_epochs_are_counted_in_integers() -> None:
    # Megatron's float32 count gives 16384 samples here when the last partial one is kept.
    assert plan_epochs(16_777_218, None, 1024).samples == 16384
    assert plan_epochs(2**40 + 1, None, 1).samples == 2**40


def test_no_tokens_is_an_error_and_not_a_loop() -> None:
    lengths = np.array([5, 5], dtype=np.int32)
    with pytest.raises(DataError, match="no tokens"):
        build_order(lengths, (2, 2), 10, 4, 1)
    with pytest.raises(DataError, match="less than the 17"):
        build_order(lengths, (0, 2), None, 16, 1)
