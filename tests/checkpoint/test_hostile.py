"""A checkpoint from a stranger is data: whatever is in it, nothing of it runs."""

import builtins
import io
import json
import math
import os
import pickle
import struct
import subprocess
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from megadiff.checkpoint.directory import damage
from megadiff.checkpoint.files import INDEX, read_index
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import Piece, ShardedTensor
from megadiff.checkpoint.storage import CheckpointReader, load, save


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def checkpoint(tmp_path):
    data = torch.arange(6.0).reshape(2, 3)
    save(tmp_path, {"w": ShardedTensor((2, 3), data.dtype, [Piece((0, 0), data)])}, {"run": {}})
    return tmp_path


def wanted():
    return {"w": ShardedTensor((2, 3), torch.float32, [Piece((0, 0), torch.full((2, 3), 7.0))])}


def refused(checkpoint, match):
    tensors = wanted()
    with pytest.raises(CheckpointError, match=match):
        load(checkpoint, tensors)
    assert tensors["w"].pieces[0].data.eq(7).all()


def edit_index(checkpoint, change):
    index = read_index(checkpoint)
    change(index)
    (checkpoint / INDEX).write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {marker}"),
        (subprocess.getoutput, "touch {marker}"),
        (builtins.eval, "open('{marker}', 'w').close()"),
        (builtins.getattr, "{marker}", "upper"),
        (io.open, "{marker}", "w"),
        (torch.load, "{marker}"),
        (torch.hub.load_state_dict_from_url, "file://{marker}"),
        (torch.serialization._open_zipfile_writer, "{marker}"),
        (torch.empty, 1 << 45),
    ],
    ids=lambda call: call[0].__name__,
)
def test_a_call_in_the_index_is_not_made(checkpoint, tmp_path, call):
    marker = tmp_path / "executed"
    arguments = [a.format(marker=marker) if isinstance(a, str) else a for a in call[1:]]
    for payload in (Calls(call[0], *arguments), {"w": [Calls(call[0], *arguments)]}):
        (checkpoint / INDEX).write_bytes(pickle.dumps(payload))
        refused(checkpoint, "which no checkpoint needs")
        assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04]\x94.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 50) + b"x.",  # a string of 2**50 bytes
        b"\x80\x04B" + struct.pack("<I", (1 << 32) - 1) + b"x.",
        b"(" * 100_000,
        b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        pickle.dumps({"state_dict_metadata": {}}),
        os.urandom(4096),
    ],
    ids=["empty", "nothing", "list", "long string", "long bytes", "marks", "deep", "dict", "noise"],
)
def test_an_index_of_junk_is_refused(checkpoint, content):
    (checkpoint / INDEX).write_bytes(content)
    refused(checkpoint, "not the index of a checkpoint")


def test_objects_saved_by_torch_are_refused(tmp_path, recwarn):
    dcp.save(
        {"w": torch.zeros(2, 3), "object": Calls(os.getpid)}, checkpoint_id=tmp_path, no_dist=True
    )
    refused(tmp_path, "BytesStorageMetadata, which no checkpoint needs")


@pytest.mark.parametrize("path", ["../w", "/etc/passwd", "a/b", "..", ""])
def test_files_outside_of_the_checkpoint_are_not_opened(checkpoint, path):
    def change(index):
        index.storage_data[MetadataIndex("w", (0, 0))].relative_path = path

    edit_index(checkpoint, change)
    refused(checkpoint, "lies outside|Is a directory|not the index")


def test_stream_transforms_are_refused(checkpoint):
    def change(index):
        index.storage_data[MetadataIndex("w", (0, 0))].transform_descriptors = ["stream.zstd"]

    edit_index(checkpoint, change)
    refused(checkpoint, "lies outside")


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", 1 << 60), ("offset", -5), ("length", 0), ("length", 1 << 60), ("offset", "x")],
)
def test_places_that_are_not_there_are_refused(checkpoint, field, value):
    edit_index(
        checkpoint,
        lambda index: setattr(index.storage_data[MetadataIndex("w", (0, 0))], field, value),
    )
    refused(checkpoint, "damaged at byte|not the index")


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (2, -3), (2, 3, 1)])
def test_parts_that_do_not_make_the_tensor_are_refused(checkpoint, sizes):
    def change(index):
        index.state_dict_metadata["w"].chunks[0].sizes = torch.Size(sizes)

    edit_index(checkpoint, change)
    refused(checkpoint, "not the index of a checkpoint")


def test_a_part_that_stands_for_another_is_refused(checkpoint):
    def change(index):
        tensor = index.state_dict_metadata["w"]
        tensor.chunks[0].sizes = torch.Size((1, 3))
        tensor.chunks.append(tensor.chunks[0])

    edit_index(checkpoint, change)
    refused(checkpoint, "w has a part twice")


def test_a_shape_larger_than_its_values_is_refused(checkpoint):
    def change(index):
        index.state_dict_metadata["w"].size = torch.Size((1 << 40, 3))
        index.state_dict_metadata["w"].chunks[0].sizes = torch.Size((1 << 40, 3))

    edit_index(checkpoint, change)
    with pytest.raises(CheckpointError, match="no tensor of"):
        CheckpointReader(checkpoint).read("w", (0, 0), (2, 3))


def rewrite_tensor(checkpoint, records, compression=zipfile.ZIP_STORED):
    """Replace the tensor's archive by one of these records."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", compression) as file:
        for name, content in records.items():
            file.writestr(f"archive/{name}", content)
    index = read_index(checkpoint)
    info = index.storage_data[MetadataIndex("w", (0, 0))]
    info.offset, info.length = 0, len(archive.getvalue())
    (checkpoint / INDEX).write_bytes(pickle.dumps(index))
    (checkpoint / info.relative_path).write_bytes(archive.getvalue())


def test_pickles_in_tensor_files_are_never_read(checkpoint, tmp_path):
    marker = tmp_path / "executed"
    values = torch.arange(6.0).numpy().tobytes()
    payload = pickle.dumps(Calls(os.system, f"touch {marker}"))
    rewrite_tensor(checkpoint, {"data.pkl": payload, "data/0": values})
    tensors = wanted()
    load(checkpoint, tensors)
    assert tensors["w"].pieces[0].data.equal(torch.arange(6.0).reshape(2, 3))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("records", "compression"),
    [
        ({"data.pkl": b""}, zipfile.ZIP_STORED),
        ({"data/0": b"x" * 23}, zipfile.ZIP_STORED),
        ({"data/0": b"\0" * 24}, zipfile.ZIP_DEFLATED),
        ({"data/0": b"x" * 24, "more/data/0": b"x" * 24}, zipfile.ZIP_STORED),
    ],
    ids=["no values", "too short", "compressed", "two of them"],
)
def test_archives_of_another_make_are_refused(checkpoint, records, compression):
    rewrite_tensor(checkpoint, records, compression)
    refused(checkpoint, "damaged at byte|no tensor of 24 bytes")


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": 1, "files": {"../x": {"bytes": 1, "crc32": "0"}}},
        {"format": 1, "files": {"x": {"bytes": "many", "crc32": "0"}}},
        {"format": 1, "files": ["x"]},
        {"format": 99, "files": {}},
        {"files": {}},
        [],
        math.nan,
    ],
    ids=str,
)
def test_hostile_manifests_are_damage(checkpoint, manifest):
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert damage(checkpoint) != []
