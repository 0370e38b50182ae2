"""Whole runs: the same on every split, repeatable, and resumed as if never interrupted."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import Piece, ShardedTensor, module_tensors
from megadiff.checkpoint.storage import CheckpointReader, read_metadata, save
from megadiff.config import ConfigError, load_config, to_dict
from megadiff.data.indexed_dataset import DataError
from megadiff.models.decoder import Decoder
from megadiff.parallel import failure
from megadiff.training import pretrain
from megadiff.training.data import Batches
from megadiff.training.engine import compute_in_float8
from tests.distributed import run_distributed
from tests.training.small import VOCABULARY, flags, losses, read, train, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run on one process in float64."""
    log = tmp_path_factory.mktemp("alone")
    assert train(flags(data, "--fp64", "--log-dir", str(log))) == "finished"
    return log


def test_a_run_learns_and_its_log_says_so(alone: Path) -> None:
    entries = read(alone)
    train_losses = list(losses(alone).values())
    assert train_losses[-1] < train_losses[0]
    assert list(losses(alone, "validation")) == [3, 6]
    assert [e["consumed_samples"] for e in entries if e["kind"] == "train"][-1] == 48
    log = (alone / "log.txt").read_text()
    assert "num_layers: 2" in log and "validation loss at iteration 6" in log
    assert (alone / "config.yaml").read_text() in log


def test_a_rank_that_closes_slowly_is_not_ended_by_its_watch(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first rank has ended, and the ranks' store with it."""
    told: list[bool] = []
    monkeypatch.setattr(failure, "_left", threading.Event())
    monkeypatch.setattr(Batches, "close", lambda _: told.append(failure._left.is_set()))
    train(flags(data, "--eval-iters", "0"))
    assert told == [True]


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, ["--micro-batch-size", "8"]),
        (2, ["--tensor-model-parallel-size", "2", "--micro-batch-size", "4"]),
        (2, ["--micro-batch-size", "1"]),
        (4, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        (2, ["--pipeline-model-parallel-size", "2"]),
    ],
)
def test_every_split_and_micro_batch_trains_alike(
    world: int, more: list[str], data: str, alone: Path, tmp_path: Path
) -> None:
    argv = flags(data, "--fp64", "--log-dir", str(tmp_path), *more)
    if world == 1:
        train(argv)
    else:
        run_distributed(world, train, argv)
    for kind in ("train", "validation"):
        assert losses(tmp_path, kind) == pytest.approx(losses(alone, kind), rel=1e-9)
    norms = [
        [e["grad_norm"] for e in read(log) if e["kind"] == "train"] for log in (tmp_path, alone)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    rules = [
        [line for line in (log / "log.txt").read_text().splitlines() if " decay" in line]
        for log in (tmp_path, alone)
    ]
    assert rules[0] == rules[1] and len(rules[0]) == 3  # of the whole model, whatever the split


@pytest.mark.parametrize("mixer", [["diff_v2"], ["diff_v1", "--diff-lambda-per-head"]])
def test_lambda_is_the_mean_over_the_heads_of_all_ranks(
    mixer: list[str], data: str, tmp_path: Path
) -> None:
    argv = flags(data, "--fp64", "--train-iters", "2", "--eval-iters", "0", "--token-mixer", *mixer)
    train([*argv, "--log-dir", str(tmp_path / "one")])
    split = ["--tensor-model-parallel-size", "2", "--log-dir", str(tmp_path / "two")]
    run_distributed(2, train, [*argv, *split])
    one, two = (read(tmp_path / name)[-1]["lambda"] for name in ("one", "two"))
    assert list(one) == ["0", "1"]
    assert two == pytest.approx(one, rel=1e-9)


def test_two_runs_are_equal_bit_for_bit(data: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_distributed(2, train, flags(data, "--log-dir", str(tmp_path / name)))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a", "validation") == losses(tmp_path / "b", "validation")


def test_a_run_resumes_on_another_split(data: str, alone: Path, tmp_path: Path) -> None:
    argv = flags(data, "--fp64", "--save", str(tmp_path / "saved"), "--log-dir", str(tmp_path))
    run_distributed(2, train, [*argv, "--tensor-model-parallel-size", "2", "--exit-interval", "2"])
    argv += ["--load", str(tmp_path / "saved")]
    sharded = ["--use-distributed-optimizer", "--exit-interval", "4"]
    run_distributed(2, train, [*argv, *sharded])
    train(argv)
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-9)
    text = (tmp_path / "log.txt").read_text()
    assert "changed since: parallel.tensor_model_parallel_size 2 -> 1" in text


def patience_of_a_save(folder: str, minutes: str) -> float:
    argv = ["--save", folder, "--distributed-timeout-minutes", minutes]
    with pretrain.open_manager(load_config(argv), None) as manager:
        backend = manager._ranks.group._get_backend(torch.device("cpu"))  # type: ignore
        return backend.options._timeout.total_seconds()


@pytest.mark.parametrize(("minutes", "expected"), [("5", 3600), ("90", 5400)])
def test_ranks_wait_for_a_save_an_hour_and_longer_where_they_are_told(tmp_path, minutes, expected):
    assert run_distributed(1, patience_of_a_save, str(tmp_path), minutes) == [expected]


def test_the_schedule_at_resume_follows_megatrons_rules(data: str, tmp_path: Path) -> None:
    """Another rate is refused, or taken, or given up for that of the checkpoint."""

    def rates(name: str) -> list[float]:
        return [e["learning_rate"] for e in read(tmp_path / name) if e["kind"] == "train"]

    saved = ["--save", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "whole")]
    train(flags(data, *saved, "--save-interval", "3"))
    argv = flags(data, "--load", str(tmp_path / "saved"), "--ckpt-step", "3", "--lr", "0.02")
    with pytest.raises(CheckpointError, match=r"lr 0\.02 \(checkpoint: 0\.01\).*--override-opt_"):
        train(argv)
    for name, flag in [("new", "override"), ("old", "use-checkpoint")]:
        train([*argv, f"--{flag}-opt_param-scheduler", "--log-dir", str(tmp_path / name)])
    assert rates("old") == rates("whole")[3:]
    assert rates("new") == pytest.approx([2 * rate for rate in rates("old")])


def test_weights_alone_start_a_run_of_its_own(data: str, tmp_path: Path) -> None:
    argv = flags(data, "--save", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "first"))
    train(argv)
    more = ["--load", str(tmp_path / "saved"), "--finetune", "--lr", "0.001", "--seed", "7"]
    train(flags(data, "--log-dir", str(tmp_path / "second"), *more))
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert min(second) == 1
    assert second[1] < first[1]


def test_another_optimizer_goes_on_from_the_weights(data: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    train(flags(data, "--save", saved, "--exit-interval", "4", "--log-dir", str(tmp_path / "1")))
    muon = flags(data, "--load", saved, "--optimizer", "muon", "--log-dir", str(tmp_path / "2"))
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        train(muon)
    train([*muon, "--no-load-optim"])
    first, second = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert min(second) == 5 and second[5] < first[1]


def test_losses_do_not_hang_on_how_many_tokens_each_rank_has(data: str, tmp_path: Path) -> None:
    """The mean is over the tokens of the global batch: a mean of ranks' means is another number."""
    logs = [tmp_path / "one", tmp_path / "two"]
    train(flags(data, "--fp64", "--log-dir", str(logs[0]), "--global-batch-size", "2"))
    run = ["--fp64", "--log-dir", str(logs[1]), "--global-batch-size", "2"]
    run_distributed(2, train, flags(data, *run, "--micro-batch-size", "1"))
    assert losses(logs[1]) == pytest.approx(losses(logs[0]), rel=1e-9)


class TestRefusals:
    """What a user can mend is told in one line, before anything is written."""

    def refused(self, error: type[Exception], words: str, argv: list[str]) -> None:
        with pytest.raises(error, match=words):
            train(argv)

    def test_of_data_of_a_larger_vocabulary(self, data: str) -> None:
        argv = flags(data, "--vocab-size", "30")
        self.refused(DataError, "hold token 60, but the vocabulary has 31", argv)

    def test_of_missing_data(self, tmp_path: Path) -> None:
        self.refused(DataError, "no such dataset", flags(str(tmp_path / "nothing")))

    @pytest.mark.parametrize(
        ("suffix", "keep", "words"),
        [
            ("idx", slice(0, 0), "data.idx"),
            ("idx", slice(1, None), "data.idx"),
            ("idx", slice(0, 50), "data.idx"),
            ("bin", slice(0, 100), "data.bin"),
        ],
        ids=["empty index", "wrong magic", "truncated index", "truncated data"],
    )
    def test_of_damaged_data(self, suffix: str, keep: slice, words: str, tmp_path: Path) -> None:
        prefix = write_data(tmp_path)
        file = Path(f"{prefix}.{suffix}")
        file.write_bytes(file.read_bytes()[keep])
        self.refused(DataError, words, flags(prefix))

    def test_of_a_split_without_a_training_sample(self, data: str) -> None:
        argv = flags(data, "--split", "1,999,0")
        self.refused(DataError, "train.* --split", argv)

    def test_of_a_run_without_data(self) -> None:
        argv = [f for f in flags("nothing") if f not in ("--data-path", "nothing")]
        self.refused(ConfigError, "give --data-path", argv)

    @pytest.mark.parametrize(
        ("flag", "size", "message"),
        [
            ("--micro-batch-size", 10**7, "fullest rank would need about .* GB .weights"),
            ("--seq-length", 10**12, "fullest rank would need about"),
            ("--hidden-size", 2**40, r"x --hidden-size 1099511627776 x .* parameters: .* GB on"),
            ("--num-layers", 10**15, r"--num-layers 1000000000000000 x .* parameters"),
            ("--train-iters", 10**15, r"--train-iters 1000000000000000 x .* order alone takes"),
        ],
    )
    def test_of_absurd_sizes(
        self, data: str, flag: str, size: int, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pretrain, "start", None)  # which makes buffers of the messages' size
        argv = flags(data, "--global-batch-size", str(10**7 if "batch" in flag else 8))
        self.refused(ConfigError, message, [*argv, "--train-iters", "2", flag, str(size)])

    def test_of_an_unknown_vocabulary(self, data: str) -> None:
        argv = [f for f in flags(data) if f not in ("--vocab-size", "60")]
        self.refused(ConfigError, "vocabulary", argv)

    def test_of_a_checkpoint_of_another_model(self, data: str, tmp_path: Path) -> None:
        saved = str(tmp_path / "saved")
        train(flags(data, "--save", saved, "--train-iters", "2"))
        before = {p: p.read_bytes() for p in Path(saved).rglob("*") if p.is_file()}
        argv = flags(data, "--train-iters", "2", "--load", saved, "--save", saved)
        wrong = ["--num-layers", "3", "--token-mixer", "diff_v1"]
        words = "num_layers is 2 in the checkpoint and 3 here; .*token_mixer is diff_v2"
        self.refused(CheckpointError, words, [*argv, *wrong])
        assert {p: p.read_bytes() for p in Path(saved).rglob("*") if p.is_file()} == before

    def test_of_a_checkpoint_without_a_run(self, data: str, tmp_path: Path) -> None:
        config = load_config(flags(data))
        config.model.vocab_size = VOCABULARY
        tensors = module_tensors(Decoder(config.model))
        progress = {"iteration": 0, "consumed_samples": 0}
        save(tmp_path / "iter_0000001", tensors, {"config": to_dict(config), "progress": progress})
        save(tmp_path / "iter_0000002", tensors, {})
        argv = flags(data, "--load", str(tmp_path), "--ckpt-step")
        self.refused(CheckpointError, "weights alone; .*--finetune", [*argv, "1"])
        self.refused(CheckpointError, "no config.json", [*argv, "2"])

    def test_of_other_data_at_resume(self, data: str, tmp_path: Path) -> None:
        saved = str(tmp_path / "saved")
        train(flags(data, "--save", saved, "--train-iters", "2"))
        other = write_data(tmp_path, seed=1)
        argv = flags(other, "--train-iters", "2", "--load", saved)
        self.refused(CheckpointError, "other data.*datasets was .*--allow-data-change", argv)
        log = tmp_path / "log"
        train([*argv, "--train-iters", "3", "--allow-data-change", "--log-dir", str(log),
               "--override-opt_param-scheduler"])  # fmt: skip
        assert list(losses(log)) == [3]

    def test_of_a_checkpoint_that_tells_no_data(self, data: str, tmp_path: Path) -> None:
        """One converted from another engine's: it goes on with the data that are asked for."""
        argv = flags(data, "--train-iters", "4", "--log-dir", str(tmp_path / "log"))
        train([*argv, "--save", str(tmp_path / "saved"), "--save-interval", "2"])
        source = tmp_path / "saved" / "iter_0000002"
        reader = CheckpointReader(source)
        tensors = {
            name: ShardedTensor(shape, dtype, [Piece((0,) * len(shape), reader.read(name))])
            for name, (shape, dtype) in reader.tensors.items()
        }
        metadata = read_metadata(source)
        del metadata["data"], metadata["schedule"]
        save(tmp_path / "converted" / source.name, tensors, metadata)
        argv = flags(data, "--train-iters", "4", "--load", str(tmp_path / "converted"))
        self.refused(CheckpointError, "does not tell which.*--allow-data-change", argv)
        train([*argv, "--allow-data-change", "--log-dir", str(tmp_path / "again")])
        expected = losses(tmp_path / "log")
        assert losses(tmp_path / "again") == {step: expected[step] for step in (3, 4)}

    def test_of_more_epochs_at_resume(self, data: str, tmp_path: Path) -> None:
        """More epochs are shuffled together, so that other samples come first."""
        saved = str(tmp_path / "saved")
        train(flags(data, "--save", saved, "--train-iters", "2"))
        argv = flags(data, "--train-iters", "40", "--load", saved)
        self.refused(CheckpointError, "their order is another", argv)

    def test_of_a_missing_checkpoint_where_one_is_a_must(self, data: str, tmp_path: Path) -> None:
        argv = flags(data, "--load", str(tmp_path), "--exit-on-missing-checkpoint")
        self.refused(CheckpointError, "there is no checkpoint", argv)

    def test_of_a_log_directory_that_is_a_file(self, data: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        self.refused(ConfigError, "cannot log", flags(data, "--log-dir", str(tmp_path / "file")))

    def test_of_a_save_directory_that_cannot_be_written(self, data: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        argv = flags(data, "--save", str(tmp_path / "file"))
        self.refused(CheckpointError, "cannot save checkpoints in", argv)


@pytest.mark.gpu
def test_a_run_on_a_gpu_resumes_bit_for_bit(data: str, tmp_path: Path) -> None:
    more = ["--device", "cuda", "--hidden-size", "128", "--bf16", "--deterministic-mode"]
    argv = flags(data, *more)
    train([*argv, "--log-dir", str(tmp_path / "whole")])
    parts = [*argv, "--save", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "parts")]
    assert train([*parts, "--exit-interval", "4"]) == "exit interval"
    train([*parts, "--load", str(tmp_path / "saved")])
    for kind in ("train", "validation"):
        assert losses(tmp_path / "parts", kind) == losses(tmp_path / "whole", kind)


def test_float8_is_refused_by_name_where_it_can_not_be(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--fp8 needs a GPU of the Hopper .* this is a CPU"):
        train(flags(data, "--bf16", "--fp8", "--seq-length", "16"))
    model, gpu = torch.nn.ModuleList(), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="this is NVIDIA A100"):
        compute_in_float8(model, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "megadiff.parallel.float8", None)
    with pytest.raises(ConfigError, match=r"pip install 'megadiff\[fp8\]'"):
        compute_in_float8(model, gpu)
