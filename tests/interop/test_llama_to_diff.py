"""A trained Llama as the start of a differential model, under any split."""

from pathlib import Path

import pytest
import torch

from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import module_tensors
from megadiff.checkpoint.storage import load
from megadiff.config import load_config
from megadiff.interop.checkpoint import read_checkpoint
from megadiff.interop.hf.convert import export_checkpoint, import_folder
from megadiff.interop.hf.start import VECTORS
from megadiff.interop.tensors import InteropError
from megadiff.models.decoder import Decoder
from megadiff.parallel.mesh import ParallelMesh, build_mesh
from tests.distributed import run_distributed
from tests.interop.models import MODELS, decoder, save_checkpoint, tokens
from tests.training.small import flags, train, write_data
from tests.training.small import losses as run_losses

LLAMA = MODELS["standard_scaled_rope_biases"]
EXACT = ("v1_doubled", "v2")


def losses(model: Decoder, steps: int) -> list[float]:
    """Of the same sequences before each of `steps` steps of training."""
    ids = tokens(4, 12)
    positions = torch.arange(11).expand(4, 11)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids[:, :-1], positions, ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, float]:
    """A Llama that has learned something, in a Hugging Face folder, and its loss."""
    root = tmp_path_factory.mktemp("llama")
    model = decoder(LLAMA)
    losses(model, 10)
    save_checkpoint(root / "checkpoint", model)
    export_checkpoint(root / "checkpoint", root / "hf")
    return root / "hf", losses(model, 1)[0]


def continued(root: Path, mesh: ParallelMesh, steps: int = 5) -> list[float]:
    config, _ = read_checkpoint(root)
    model = Decoder(config.model, mesh)
    for parameter in model.parameters():
        parameter.data.zero_()
    path = find_checkpoint(root)
    assert path is not None
    load(path, module_tensors(model))
    return losses(model, steps)


def split_job(root: Path) -> list[float]:
    return continued(root, build_mesh(tensor=2))


@pytest.mark.parametrize("variant", EXACT)
def test_training_goes_on_from_the_loss_of_the_model(tmp_path, llama, variant):
    folder, before = llama
    chance = torch.tensor(LLAMA.vocab_size).log().item()
    assert before < 0.5 * chance
    import_folder(folder, tmp_path, variant=variant, exact=True)
    alone = continued(tmp_path, ParallelMesh())
    assert alone[0] == pytest.approx(before, rel=1e-5)
    assert alone[-1] < alone[0]
    for split in run_distributed(2, split_job, tmp_path):
        assert split == pytest.approx(alone, rel=1e-4)


def test_pretraining_goes_on_from_a_llama(tmp_path):
    """Through the command line's configuration, on another split, in float64."""
    data = write_data(tmp_path)
    first = ["--token-mixer", "standard", "--fp64", "--save", str(tmp_path / "first")]
    train(flags(data, *first, "--log-dir", str(tmp_path / "log")))
    folder = export_checkpoint(tmp_path / "first", tmp_path / "hf").path
    import_folder(folder, tmp_path / "standard")
    import_folder(folder, tmp_path / "v2", variant="v2", exact=True)
    seen = {}
    for name, world in (("standard", 1), ("v2", 2)):
        root = str(tmp_path / name)
        argv = flags(data, "--fp64", "--config", f"{root}/model.yaml", "--load", root)
        argv += ["--log-dir", f"{root}/log", "--tensor-model-parallel-size", str(world)]
        if world == 1:
            with pytest.raises(CheckpointError, match=r"holds weights alone.*--finetune"):
                train(argv)
            train([*argv, "--finetune"])
        else:
            run_distributed(world, train, [*argv, "--finetune"])
        seen[name] = run_losses(Path(root) / "log")
    assert seen["v2"][1] == pytest.approx(seen["standard"][1], rel=1e-9)
    assert seen["v2"][1] < run_losses(tmp_path / "log")[1] - 0.3
    assert seen["v2"][6] < seen["v2"][1]


def test_a_random_start_keeps_the_first_branch(tmp_path, llama):
    folder, before = llama
    import_folder(folder, tmp_path / "v2", variant="v2")
    import_folder(folder, tmp_path / "standard")
    _, new = read_checkpoint(tmp_path / "v2")
    config, old = read_checkpoint(tmp_path / "standard")
    width = config.model.head_width("standard")
    name = "layers.0.mixer.q.weight"
    pairs = new[name].make().unflatten(0, (-1, 2, width))
    assert torch.equal(pairs[:, 0].flatten(0, 1), old[name].make())
    assert pairs[:, 1].std().item() == pytest.approx(LLAMA.init_method_std, rel=0.2)
    assert torch.equal(new["layers.0.mixer.v.weight"].make(), old["layers.0.mixer.v.weight"].make())
    assert continued(tmp_path / "v2", ParallelMesh(), 1)[0] > before


def test_split_heads_change_no_shape(tmp_path, llama):
    folder, _ = llama
    import_folder(folder, tmp_path / "split", variant="v1_split")
    import_folder(folder, tmp_path / "standard")
    config, new = read_checkpoint(tmp_path / "split")
    before, old = read_checkpoint(tmp_path / "standard")
    for name, tensor in old.items():
        assert torch.equal(new[name].make(), tensor.make())
    assert 2 * config.model.head_width("diff_v1") == before.model.head_width("standard")


def test_lambda_starts_at_zero_and_can_move(tmp_path, llama):
    import_folder(llama[0], tmp_path, variant="v1_doubled", exact=True)
    config, new = read_checkpoint(tmp_path)
    q1, k1, q2, k2 = (new[f"layers.1.mixer.{name}"].make() for name in VECTORS)
    assert torch.equal(q1, q2) and torch.equal(k1, k2)
    assert q1.norm() > 0 and k1.norm() > 0 and not torch.equal(q1, k1)
    assert config.model.diff_lambda_init == 0.0 and config.model.diff_head_norm == "none"


def test_the_written_options_are_the_models(tmp_path, llama):
    import_folder(llama[0], tmp_path, variant="v2", exact=True)
    config, _ = read_checkpoint(tmp_path)
    assert load_config(["--config", str(tmp_path / "model.yaml")]).model == config.model
    assert config.model.use_rope_scaling and config.model.mlp_bias


def test_what_can_not_be_exact_is_refused(tmp_path, llama):
    with pytest.raises(InteropError, match="no exact start"):
        import_folder(llama[0], tmp_path, variant="v1_split", exact=True)
    with pytest.raises(InteropError, match="norm destroys"):
        import_folder(llama[0], tmp_path, variant="v1_doubled", exact=True, head_norm="weight")
    assert not list(tmp_path.iterdir())
    import_folder(llama[0], tmp_path / "v2", variant="v2")
    export_checkpoint(tmp_path / "v2", tmp_path / "hf")
    with pytest.raises(InteropError, match="only a model with standard attention"):
        import_folder(tmp_path / "hf", tmp_path / "again", variant="v2")
