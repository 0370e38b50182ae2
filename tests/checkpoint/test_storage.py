import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megadiff.checkpoint import torch_parts
from megadiff.checkpoint.directory import damage
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors, add_piece
from megadiff.checkpoint.storage import load, read_config, read_metadata, save, versions
from tests.distributed import run_distributed

SHAPES = {
    "matrix": ((13, 6), torch.float32),
    "half": ((8, 5), torch.bfloat16),
    "vector": ((17,), torch.float64),
    "scalar": ((), torch.float32),
    "cube": ((5, 3, 4), torch.float16),
    "bytes": ((4, 9), torch.uint8),
    "counts": ((3,), torch.int64),
    "empty": ((0, 4), torch.float32),
}


def values(name):
    shape, dtype = SHAPES[name]
    return (torch.arange(math.prod(shape)).reshape(shape) * 3 % 251 + len(name)).to(dtype)


def split(full, dim, rank, world, write=True):
    """Uneven pieces of `full`, cut along `dim` where `world` says; every world-th is ours."""
    size = full.shape[dim]
    cuts = sorted({0, size, *(size * (3 * i + 1) // (6 * world) for i in range(2 * world))})
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        if number % world == rank:
            offset = [0] * full.dim()
            offset[dim] = first
            yield Piece(tuple(offset), full.narrow(dim, first, last - first), write)


def state(rank, world, fill=None):
    """Pieces of all tensors: some split on dim 0, some on dim 1, some held by every rank."""
    tensors: Tensors = {}
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        full = values(name) if fill is None else torch.full(shape, fill, dtype=dtype)
        tensors[name] = ShardedTensor(shape, dtype)
        if not shape or number % 3 == 2:
            add_piece(tensors, name, shape, Piece((0,) * len(shape), full, write=rank == 0))
        else:
            for piece in split(full, (number + world) % len(shape), rank, world):
                add_piece(tensors, name, shape, piece)
    return tensors


def save_state(directory):
    tensors = state(dist.get_rank(), dist.get_world_size())
    save(directory, tensors, {"run": {"step": 3}})


def load_state(directory):
    tensors = state(dist.get_rank(), dist.get_world_size(), fill=7)
    load(directory, tensors)
    check_loaded(tensors)
    return sum(piece.data.numel() for tensor in tensors.values() for piece in tensor.pieces)


def check_loaded(tensors):
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            slices = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.sizes, strict=True))
            assert piece.data.equal(values(name)[slices]), name


@pytest.mark.parametrize("saved", [1, 2, 4])
def test_any_number_of_processes_loads_what_any_other_saved(tmp_path, saved):
    run_distributed(saved, save_state, tmp_path)
    for loaded in (1, 2, 4):
        assert sum(run_distributed(loaded, load_state, tmp_path)) > 0
    alone = state(0, 1, fill=7)
    load(tmp_path, alone)
    check_loaded(alone)
    assert damage(tmp_path) == []
    assert read_metadata(tmp_path) == {"run": {"step": 3}}


def test_torch_opens_the_files(tmp_path):
    save(tmp_path, state(0, 1), {})
    plain = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
    del plain["empty"]
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert all(tensor.equal(values(name)) for name, tensor in plain.items())


def test_a_process_writes_large_checkpoints_as_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_parts, "_FILE_SIZE", 100)
    save(tmp_path, state(0, 1), {})
    assert len(list(tmp_path.glob("*.distcp"))) == 4
    assert damage(tmp_path) == []
    tensors = state(0, 1, fill=7)
    load(tmp_path, tensors)
    check_loaded(tensors)


def test_files_of_a_process_are_about_equally_large(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_parts, "_FILE_SIZE", 100)
    rows = [600, 200, 200, 200, 100, 100, 100, 100]
    pieces = [
        Piece((first, 0), torch.ones(size, 64))
        for first, size in zip(itertools.accumulate(rows, initial=0), rows, strict=False)
    ]
    save(tmp_path, {"w": ShardedTensor((sum(rows), 64), torch.float32, pieces)}, {})
    sizes = sorted(path.stat().st_size // (64 * 4) for path in tmp_path.glob("*.distcp"))
    assert [size // 100 * 100 for size in sizes] == [300, 300, 400, 600]


def test_floating_types_are_converted_and_strided_pieces_filled(tmp_path):
    save(tmp_path, state(0, 1), {})
    transposed = torch.zeros(6, 13, dtype=torch.float64)
    wanted = state(0, 1, fill=7)
    wanted["matrix"] = ShardedTensor(
        (13, 6),
        torch.float64,
        [Piece((0, 0), transposed.t()[:, :2]), Piece((0, 2), transposed.t()[:, 2:])],
    )
    load(tmp_path, wanted)
    assert transposed.t().equal(values("matrix").double())


def test_what_does_not_match_is_listed_and_nothing_changes(tmp_path):
    save(tmp_path, state(0, 1), {})
    wanted = state(0, 1, fill=7)
    wanted["more"] = wanted.pop("vector")
    wanted["matrix"] = ShardedTensor((13, 7), torch.float32, [Piece((0, 0), torch.zeros(13, 7))])
    wanted["counts"] = ShardedTensor((3,), torch.float32, [Piece((0,), torch.full((3,), 7.0))])
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, wanted)
    assert "more: not in the checkpoint" in str(error.value)
    assert "vector: in the checkpoint, but not in this run" in str(error.value)
    assert "matrix: shape (13, 6) in the checkpoint, (13, 7) in this run" in str(error.value)
    assert "counts: torch.int64 in the checkpoint, torch.float32 in this run" in str(error.value)
    assert all((p.data == 7).all() for n, t in wanted.items() if n != "matrix" for p in t.pieces)


def test_tensors_may_be_left_out_by_prefix(tmp_path):
    save(tmp_path, state(0, 1), {})
    wanted = state(0, 1, fill=7)
    del wanted["vector"], wanted["counts"]
    load(tmp_path, wanted, ignore=("vec", "counts"))
    check_loaded(wanted)


def save_badly(directory, problem):
    tensors = state(dist.get_rank(), 2)
    if problem == "hole" and dist.get_rank() == 1:
        tensors["matrix"].pieces.pop()
    if problem == "twice" and dist.get_rank() == 1:
        tensors["scalar"].pieces[0].write = True
    if problem == "shape" and dist.get_rank() == 1:
        tensors["vector"] = ShardedTensor(
            (18,), torch.float64, [Piece((17,), torch.zeros(1).double())]
        )
    with pytest.raises(CheckpointError) as error:
        save(directory, tensors, {"a": {}})
    return str(error.value)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("hole", r"matrix \(13, 6\): all ranks together write"),
        ("twice", r"scalar \(\): parts of it are written twice"),
        ("shape", "vector differs in shape or type between ranks"),
    ],
)
def test_tensors_not_covered_once_are_refused_on_every_rank(tmp_path, problem, message):
    for error in run_distributed(2, save_badly, tmp_path, problem):
        assert re.search(message, error)
    assert damage(tmp_path) == ["manifest.json is missing: the save was not finished"]


def test_a_piece_of_another_type_than_declared_is_refused(tmp_path):
    tensors = {"a": ShardedTensor((3,), torch.float32, [Piece((0,), torch.arange(3))])}
    with pytest.raises(
        CheckpointError, match=r"a: a piece is torch.int64 \(3,\), not torch.float32"
    ):
        save(tmp_path, tensors, {})


def test_metadata_is_json(tmp_path):
    with pytest.raises(CheckpointError, match="JSON serializable"):
        save(tmp_path, {}, {"a": {"b": object()}})
    assert damage(tmp_path) == ["manifest.json is missing: the save was not finished"]


def test_the_folder_of_a_run_may_be_gone_or_closed_to_others(tmp_path, monkeypatch):
    """A run whose folder was deleted saves; files are looked for where that is allowed."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert versions()["folder"] == ""
    metadata = {"config": {"data": {"tokenizer_model": "a.model"}}}
    for folder in ("", "/" + "x" * 300):  # longer than names are: an error of another kind
        metadata["versions"] = {"folder": folder}
        assert read_config(Path(), metadata).data.tokenizer_model == "a.model"
