import pytest
import torch

from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.staging import HostBuffers
from megadiff.checkpoint.state import Piece, ShardedTensor, Tensors
from megadiff.checkpoint.storage import load


def pieces(device) -> Tensors:
    """Contiguous and strided, of several types, one that another rank writes, one that is empty."""
    matrix = torch.randn(30, 20, device=device)
    half = torch.randn(7, device=device).bfloat16()
    strided = Piece((0, 4), matrix[:, 4:])
    copy = Piece((0, 0), matrix[:, :4].contiguous(), write=False)
    return {
        "matrix": ShardedTensor((30, 20), torch.float32, [copy, strided]),
        "half": ShardedTensor((7,), torch.bfloat16, [Piece((0,), half)]),
        "scalar": ShardedTensor((), torch.float32, [Piece((), torch.tensor(3.0, device=device))]),
        "empty": ShardedTensor((0, 4), torch.float32, [Piece((0, 0), torch.empty(0, 4))]),
    }


def check_copies(device):
    buffers, tensors = HostBuffers(), pieces(device)
    copies = buffers.copy(tensors)
    expected = {"matrix": [(0, 4)], "half": [(0,)], "scalar": [()], "empty": []}
    assert {n: [p.offset for p in t.pieces] for n, t in copies.items()} == expected
    for name, tensor in copies.items():
        for piece in tensor.pieces:
            (source,) = (p.data for p in tensors[name].pieces if p.write)
            assert piece.data.device.type == "cpu"
            assert piece.data.is_contiguous()
            assert piece.data.equal(source.cpu())
    before = [p.data.data_ptr() for t in copies.values() for p in t.pieces]
    again = buffers.copy(tensors)
    assert [p.data.data_ptr() for t in again.values() for p in t.pieces] == before
    buffers.free()


def test_copies_are_what_is_written_in_memory_that_stays():
    check_copies("cpu")


@pytest.mark.gpu
def test_copies_from_a_gpu():
    check_copies("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("background", [False, True])
def test_a_state_on_a_gpu_is_saved_as_it_was_and_loaded_again(tmp_path, background):
    tensors = pieces("cuda")
    del tensors["empty"]
    tensors["matrix"].pieces[0].write = True
    tensors["large"] = ShardedTensor((1 << 13, 1 << 12), torch.float32)
    large = torch.randn(1 << 13, 1 << 12, device="cuda")
    tensors["large"].pieces.append(Piece((0, 0), large.clone()))
    expected = {n: [p.data.clone() for p in t.pieces] for n, t in tensors.items()}
    with CheckpointManager(tmp_path, background=background) as manager:
        manager.reserve(tensors)
        manager.save(1, tensors, {})
        for tensor in tensors.values():
            for piece in tensor.pieces:
                piece.data.zero_()  # training goes on
    path = find_checkpoint(tmp_path)
    assert path is not None
    load(path, tensors)
    for name, tensor in tensors.items():
        for piece, values in zip(tensor.pieces, expected[name], strict=True):
            assert piece.data.equal(values), name
