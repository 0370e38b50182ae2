"""What a run saves and takes up again: weights, optimizer, schedule, generators, progress.

Tensors have global names: `layers.3.mixer.q.weight` for a weight, the same behind
`optimizer.exp_avg.` (`optimizer.main_weight.`, ...) for the state of the optimizer, and `rng.` for
those of random generators. Everything else is JSON beside them.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megadiff.checkpoint import rng
from megadiff.checkpoint.find import find_checkpoint, find_newest
from megadiff.checkpoint.local import load_local
from megadiff.checkpoint.manager import CheckpointManager
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import Tensors, add_piece, flat_pieces
from megadiff.checkpoint.storage import load, read_config, read_metadata, versions
from megadiff.config import Config, ConfigError, ModelConfig, TokenMixer, to_dict
from megadiff.optim.schedule import Schedule
from megadiff.optim.shards import StatePiece
from megadiff.parallel.parameter import record_of
from megadiff.training.engine import Engine, OptimizerState
from megadiff.training.setup import Environment

OPTIMIZER = "optimizer."


@dataclass
class Progress:
    """How far a run is: finished steps and the samples they consumed or passed over."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_windows: list[list[int]] = field(default_factory=list)  # samples [first, end)
    recent_losses: list[float] = field(default_factory=list)  # what a spike is measured against


def optimizer_tensors(optimizer: OptimizerState) -> Tensors:
    """The state of the optimizer by global name, as this rank holds it."""
    tensors: Tensors = {}
    for piece in optimizer.state_pieces():
        add_flat(tensors, piece, f"{OPTIMIZER}{piece.key}.")
    return tensors


def add_flat(tensors: Tensors, piece: StatePiece, prefix: str = "") -> None:
    """Add a flat piece of a parameter, by the global names of its sections behind `prefix`."""
    record = record_of(piece.parameter)
    for section, part in flat_pieces(record, piece.shape, piece.start, piece.values, piece.write):
        add_piece(tensors, prefix + section.name, section.shape, part)


def save(
    manager: CheckpointManager,
    config: Config,
    engine: Engine,
    schedule: Schedule,
    data: dict[str, Any],
    progress: Progress,
    *,
    second: bool,
) -> float:
    """Save a checkpoint of `progress.iteration`, or one in between to the `second` place.

    Returns the seconds that training waited. Raises CheckpointError.
    """
    engine.optimizer.wait_for_parameters()
    metadata = {
        "progress": asdict(progress),
        "optimizer": engine.optimizer.state_scalars(),
        "schedule": asdict(schedule),
        "data": data,
        "config": to_dict(config),
        "versions": versions(),
    }
    return manager.save(progress.iteration, state_tensors(engine), metadata, second=second)


def state_tensors(engine: Engine) -> Tensors:
    """All tensors of a checkpoint, as this rank holds them now."""
    return engine.weights() | optimizer_tensors(engine.optimizer) | rng.rng_tensors()


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been found: its directory and the JSON beside its tensors."""

    path: Path
    metadata: dict[str, dict[str, Any]]

    @property
    def progress(self) -> Progress:
        return Progress(**self.metadata["progress"])


def find(config: Config, env: Environment) -> Saved | None:
    """The checkpoint that `--load` means, None when there is none yet. Raises CheckpointError."""
    settings = config.checkpoint
    if settings.load is None:
        return None
    if Path(settings.load).is_file():
        raise CheckpointError(f"--load {settings.load} is a file; give the folder of checkpoints")
    if settings.ckpt_step is not None or settings.finetune:
        path = find_checkpoint(settings.load, settings.ckpt_step, group=env.control)
    else:
        places = [settings.load, settings.non_persistent_global_ckpt_dir]
        path = find_newest(
            [place for place in places if place is not None],
            group=env.control,
            local=settings.non_persistent_local_ckpt_dir if settings.load_optim else None,
            fits=partial(fits_second, config=config),
        )
    if path is None:
        if settings.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {settings.load}: there is no checkpoint")
        return None
    saved = Saved(path, read_metadata(path))
    differences = model_differences(saved_config(path, saved.metadata), config)
    if differences:
        raise CheckpointError(
            f"{path} is of another model: " + "; ".join(differences) + ". Load it with the model "
            "it was saved with, or start a run of its own without --load"
        )
    return saved


def fits_second(metadata: dict[str, dict[str, Any]], config: Config) -> bool:
    """Whether what is in a second place was saved by this run, whose `--save` names it.

    A node-local one must also be of the same split.
    """
    c = config.checkpoint
    saved = metadata.get("config", {}).get("checkpoint", {}).get("save")
    mine = {Path(place).resolve() for place in (c.load, c.save) if place is not None}
    if saved is None or Path(saved).resolve() not in mine:
        return False
    return "local" not in metadata or same_split(metadata, config)


def same_split(metadata: dict[str, dict[str, Any]], config: Config) -> bool:
    """Whether ranks hold the same pieces as those of the run that saved `metadata`."""
    saved, now = metadata.get("config", {}), to_dict(config)
    return (
        saved.get("parallel") == now["parallel"]
        and saved.get("model") == now["model"]
        and all(
            saved.get(section, {}).get(key) == now[section][key]
            for section, keys in _DECIDE_PIECES.items()
            for key in keys
        )
    )


_DECIDE_PIECES = {
    "optimizer": (
        "optimizer", "use_distributed_optimizer", "main_weights", "sgd_momentum", "exp_avg_dtype",
        "exp_avg_sq_dtype",
    ),
    "training": ("bf16", "fp16", "fp64", "deepspeed", "deepspeed_config"),
}  # fmt: skip


def restore(saved: Saved, engine: Engine, env: Environment, *, weights_only: bool) -> None:
    """Fill the engine's weights, and without `weights_only` all other state.

    Raises CheckpointError on all ranks.
    """
    engine.optimizer.wait_for_parameters()
    tensors = engine.weights()
    if weights_only:
        load(saved.path, tensors, ignore=[OPTIMIZER, rng.PREFIX], group=env.control)
        engine.optimizer.main_weights_from_parameters()
        return
    tensors |= optimizer_tensors(engine.optimizer)
    generators = rng.rng_tensors()
    local = "local" in saved.metadata
    as_many_ranks = local or rng.matches(saved.path, generators)
    if as_many_ranks:  # another number goes on with fresh generators
        tensors |= generators
    if local:
        load_local(saved.path, tensors, env.control)
    else:
        load(saved.path, tensors, ignore=[rng.PREFIX], group=env.control)
    if as_many_ranks:
        rng.set_rng(generators)
    engine.optimizer.load_scalars(saved.metadata["optimizer"])
    engine.optimizer.parameters_from_main_weights()


def saved_config(path: Path, metadata: dict[str, dict[str, Any]]) -> Config:
    """The configuration of the run that saved a checkpoint. Raises CheckpointError."""
    if "config" not in metadata:
        raise CheckpointError(f"{path} has no config.json: it was not saved by a run")
    try:
        return read_config(path, metadata)
    except ConfigError as error:
        raise CheckpointError(f"{error}; was it saved by another version of megadiff?") from error


def model_differences(saved: Config, config: Config) -> list[str]:
    """In what the model of a saved configuration differs from this one's, for people."""
    before = _resolved(saved.model, saved.training.seq_length)
    now = _resolved(config.model, config.training.seq_length)
    return [
        f"{key} is {before[key]} in the checkpoint and {value} here"
        for key, value in now.items()
        if before[key] != value
    ]


def _resolved(m: ModelConfig, seq_length: int) -> dict[str, Any]:
    """The fields that define the weights and what they mean, with their defaults filled in."""
    values = asdict(m)
    for key in (
        "make_vocab_size_divisible_by", "attention_dropout", "hidden_dropout", "init_method_std",
        "diff_lambda_std", "token_mixer", "hybrid_layer_pattern",
    ):  # fmt: skip
        del values[key]
    mixers: list[TokenMixer] = [m.mixer_of_layer(layer) for layer in range(m.num_layers)]
    values["token_mixer"] = mixers[0] if len(set(mixers)) == 1 else " ".join(mixers)
    values["num_query_groups"] = m.query_groups
    values["kv_channels"] = {mixer: m.head_width(mixer) for mixer in dict.fromkeys(mixers)}
    values["delta_num_heads"] = m.delta_heads
    values["ffn_hidden_size"] = m.ffn_size
    learned = m.position_embedding_type == "learned_absolute"
    values["max_position_embeddings"] = m.max_position_embeddings or seq_length if learned else None
    return values


def data_differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what the saved order of samples differs from this run's, for people."""
    found = [
        f"{key} was {saved.get(key)} and is {value}"
        for key, value in now.items()
        if saved.get(key) != value and key != "first_samples"
    ]
    if not found and saved.get("first_samples") != now["first_samples"]:
        found = ["their order is another, as it is when more epochs are asked for"]
    return found


def configuration_changes(saved: dict[str, Any], config: Config) -> list[str]:
    """Every option whose value is not the one of the run that saved the checkpoint."""
    return [
        f"{section}.{key} {saved.get(section, {}).get(key)} -> {value}"
        for section, values in to_dict(config).items()
        for key, value in values.items()
        if saved.get(section, {}).get(key) != value
    ]
