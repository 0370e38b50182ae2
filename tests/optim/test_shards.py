import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from megadiff.optim.buckets import Bucket, Buckets
from megadiff.optim.shards import Treatment, owned_ranges
from megadiff.parallel.parameter import (
    Group,
    Init,
    ParameterRecord,
    Section,
    make_parameter,
    record_of,
    set_record,
)

GROUPS: list[Group] = ["matrix", "embedding", "vector", "lambda"]


def treatment(section: Section) -> Treatment:
    return Treatment("adam", section.group, section.copy_index == 0)


def random_parameter(rng: random.Random, name: str) -> nn.Parameter:
    """A matrix of one to four sections along its rows, with rows of padding behind or between."""
    columns, row = rng.randint(1, 9), 0
    sections = []
    for part in range(rng.randint(1, 4)):
        row += rng.choice([0, 0, 0, 2])  # padding
        rows, copy = rng.randint(1, 6), rng.randint(0, 1)
        shape = (rows, columns)
        group = rng.choice(GROUPS)
        full = f"{name}.{part}"
        sections.append(Section(full, shape, row, rows, 0, group, Init(), 1 + copy, copy))
        row += rows
    row += rng.choice([0, 3])
    return make_parameter((row, columns), sections, dtype=torch.float32, device="cpu")


def expected_treatments(bucket: Bucket) -> list[Treatment | None]:
    """Of every element: how its section is treated, None for padding and alignment."""
    found: list[Treatment | None] = [None] * len(bucket.parameters)
    for slot in bucket.slots:
        columns = slot.parameter.shape[1]
        for section in record_of(slot.parameter).sections:
            begin = slot.start + section.start * columns
            for i in range(begin, begin + section.length * columns):
                found[i] = treatment(section)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_all_ranks_cover_every_section_once(seed: int) -> None:
    rng = random.Random(seed)
    parameters = [(f"p{i}", random_parameter(rng, f"p{i}")) for i in range(rng.randint(1, 8))]
    buckets = Buckets(parameters, alignment=rng.choice([1, 8]), bucket_size=rng.randint(1, 200))
    for bucket, ranks in ((b, n) for b in buckets.buckets for n in (1, 2, 3, 7)):
        length = len(bucket.parameters)
        own = -(-length // ranks)
        seen: list[Treatment | None] = [None] * length
        count = 0
        for rank in range(ranks):
            bounds = {"shard_start": rank * own, "shard_end": min((rank + 1) * own, length)}
            for how, start, end in owned_ranges(replace(bucket, **bounds), treatment):
                assert bounds["shard_start"] <= start < end <= bounds["shard_end"]
                for i in range(start, end):
                    assert seen[i] is None
                    seen[i] = how
                count += 1
        expected = expected_treatments(bucket)
        for slot in bucket.slots:  # between them lies alignment, which a range may cross
            assert seen[slot.start : slot.end] == expected[slot.start : slot.end]
        sections = sum(len(record_of(s.parameter).sections) for s in bucket.slots)
        assert count <= sections + ranks


def test_neighbours_of_one_group_are_one_range() -> None:
    def plain(name: str, group: Group) -> tuple[str, nn.Parameter]:
        section = Section(name, (3, 4), 0, 3, 0, group, Init())
        return name, make_parameter((3, 4), [section], dtype=torch.float32, device="cpu")

    order: list[Group] = ["matrix", "matrix", "vector", "matrix"]
    buckets = Buckets([plain(f"p{i}", group) for i, group in enumerate(order)])
    groups = [how.group for how, _, _ in owned_ranges(buckets.buckets[0], treatment)]
    assert groups == ["matrix", "vector", "matrix"]


def test_sections_along_columns_must_be_treated_alike() -> None:
    sections = [
        Section("a", (3, 4), 0, 4, 0, "matrix", Init()),
        Section("b", (3, 2), 4, 2, 0, "lambda", Init()),
    ]
    parameter = nn.Parameter(torch.zeros(3, 6))
    set_record(parameter, ParameterRecord(tuple(sections), 1))
    buckets = Buckets([("fused", parameter)])
    with pytest.raises(ValueError, match="lay them along dim 0"):
        list(owned_ranges(buckets.buckets[0], treatment))
