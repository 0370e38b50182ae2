import itertools
import math

import pytest
import torch
from torch import nn

from megadiff.checkpoint.state import Piece, Tensors, add_piece, flat_pieces, module_tensors
from megadiff.parallel.parameter import (
    Init,
    Section,
    as_copy,
    make_parameter,
    record_of,
    set_record,
)


def parameter(local_shape, *sections, dim=0, tie=None):
    """A parameter with sections (name, global shape, start, length, offset[, copies, index])."""
    made = [
        Section(name, shape, start, length, offset, "matrix", Init(), *copies)
        for name, shape, start, length, offset, *copies in sections
    ]
    result = make_parameter(local_shape, made, dim=dim, tie=tie, dtype=torch.float32, device="cpu")
    nn.init.normal_(result)
    return result


def assemble(pieces, shape):
    """The global tensor that pieces make, NaN where none is."""
    full = torch.full(shape, math.nan)
    for piece in pieces:
        place = full[tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.sizes, strict=True))]
        assert place.isnan().all(), "pieces overlap"
        place.copy_(piece.data)
    return full


CASES = {
    "vector": parameter((11,), ("a", (22,), 0, 11, 11)),
    "rows": parameter((7, 5), ("a", (14, 5), 0, 7, 7)),
    "columns": parameter((4, 6), ("a", (4, 18), 0, 6, 12), dim=1),
    "fused rows": parameter((9, 4), ("q", (10, 4), 0, 5, 5), ("k", (6, 4), 5, 3, 0)),
    "fused columns": parameter((3, 8), ("q", (3, 4), 0, 4, 0), ("k", (3, 9), 5, 3, 6), dim=1),
    "convolution": parameter((4, 3, 5), ("a", (8, 3, 5), 0, 4, 4)),
    "middle dim": parameter((3, 4, 2), ("a", (3, 8, 2), 0, 4, 2), dim=1),
    "one column": parameter((6, 1), ("a", (6, 1), 0, 6, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_flat_ranges_of_a_parameter_together_are_its_sections(name):
    local = CASES[name].detach()
    record = record_of(CASES[name])
    size = local.numel()
    for first, second in itertools.combinations_with_replacement(range(size + 1), 2):
        found: dict[str, list[Piece]] = {}
        for start, stop in itertools.pairwise([0, first, second, size]):
            here: dict[str, int] = {}
            for section, piece in flat_pieces(
                record, local.shape, start, local.reshape(-1)[start:stop]
            ):
                found.setdefault(section.name, []).append(piece)
                here[section.name] = here.get(section.name, 0) + 1
            assert all(count <= 2 * local.dim() - 1 for count in here.values())
        for section in record.sections:
            full = assemble(found[section.name], section.shape)
            held = full.narrow(record.dim, section.offset, section.length)
            assert held.equal(local.narrow(record.dim, section.start, section.length))
            assert (~full.isnan()).sum() == held.numel()


def test_flat_pieces_are_views_that_a_load_fills():
    record = record_of(CASES["fused rows"])
    flat = torch.zeros(20)
    for _, piece in flat_pieces(record, (9, 4), 3, flat):
        piece.data.fill_(1)
    assert flat.sum() == 20


def test_copies_and_padding_are_not_written():
    padded = parameter((5, 2), ("a", (3, 2), 0, 3, 0, 2, 1))
    pieces = list(flat_pieces(record_of(padded), (5, 2), 0, torch.zeros(10)))
    assert [piece.sizes for _, piece in pieces] == [(3, 2)]
    assert not pieces[0][1].write


def test_replicas_share_the_writing_of_a_module():
    module = nn.Module()
    for i, rows in enumerate([8, 1, 4, 4, 2]):
        module.register_parameter(f"p{i}", parameter((rows, 3), (f"w{i}", (rows, 3), 0, rows, 0)))
    written = [
        {name for name, t in module_tensors(module, r, 3).items() if t.pieces[0].write}
        for r in range(3)
    ]
    assert sorted(itertools.chain(*written)) == [f"w{i}" for i in range(5)]
    assert written[0] == {"w0"}
    assert all(len(module_tensors(module, r, 3)) == 5 for r in range(3))


def test_a_second_holder_of_tied_weights_reads_but_does_not_write():
    module = nn.Module()
    module.first = parameter((4, 2), ("embedding.weight", (4, 2), 0, 4, 0), tie="embedding")
    module.last = parameter((4, 2), ("embedding.weight", (4, 2), 0, 4, 0), tie="embedding")
    set_record(module.last, as_copy(record_of(module.last)))
    (tensor,) = module_tensors(module).values()
    assert [piece.write for piece in tensor.pieces] == [True, False]


def test_pieces_outside_of_the_shape_are_refused():
    tensors: Tensors = {}
    add_piece(tensors, "a", (4, 2), Piece((0, 0), torch.zeros(2, 2)))
    for bad in [
        Piece((3, 0), torch.zeros(2, 2)),
        Piece((0,), torch.zeros(2)),
        Piece((2, 0), torch.zeros(2, 2, dtype=torch.float64)),
    ]:
        with pytest.raises(ValueError, match="a: a piece of"):
            add_piece(tensors, "a", (4, 2), bad)
    with pytest.raises(ValueError, match="a: a piece of"):
        add_piece(tensors, "a", (4, 3), Piece((0, 0), torch.zeros(2, 2)))
