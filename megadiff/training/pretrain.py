"""A whole run, from its configuration to its end."""

import json
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np

from megadiff.checkpoint.manager import PATIENCE, CheckpointManager
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.storage import read_metadata
from megadiff.config import Config, load_config, to_yaml, validate
from megadiff.data.cache import digest
from megadiff.data.indexed_dataset import DataError
from megadiff.models.flops import ModelSize, model_size, whole_model
from megadiff.models.memory import Memory
from megadiff.optim.groups import describe_groups
from megadiff.optim.schedule import Schedule, make_schedule, resume_schedule
from megadiff.parallel.failure import leave, let_others_end
from megadiff.parallel.mesh import gather_objects
from megadiff.training import checkpointing
from megadiff.training.checkpointing import Progress
from megadiff.training.data import RunData, build_data, first_tokens, set_vocabulary
from megadiff.training.deepspeed import DeepSpeedEngine, read_settings
from megadiff.training.engine import Engine, NativeEngine
from megadiff.training.faults import StepWatch
from megadiff.training.limits import check_sizes
from megadiff.training.log import RunLog
from megadiff.training.loop import Run, train
from megadiff.training.setup import Environment, pick_device, start, world_size
from megadiff.training.stop import StopRequests
from megadiff.training.straggler import OwnTime


def main(argv: list[str]) -> None:
    """Pretrain as the command line says. Nothing is started before the configuration is valid."""
    config = load_config(argv)
    validate(config, world_size())
    pretrain(config)
    leave()


def pretrain(config: Config) -> str:
    """Run a validated configuration on this rank; returns why it ended.

    Raises one of `errors.USER_ERRORS` for what a user can mend.
    """
    t = config.training
    assert t.train_iters is not None and t.global_batch_size is not None
    eod = set_vocabulary(config)
    schedule = make_schedule(
        config.optimizer, train_samples=t.total_samples, global_batch_size=t.global_batch_size
    )
    if t.deepspeed:
        read_settings(config, world_size())  # refuses what contradicts before anything starts
    memory = check_sizes(config, world_size(), pick_device(config))
    env = start(config)
    data = build_data(config, env.mesh.dp, eod, pin_memory=env.device.type == "cuda")
    need_the_same_data(data, env)
    saved = checkpointing.find(config, env)
    with ExitStack() as stack:
        stack.callback(data.train.close)
        manager = None
        if config.checkpoint.save is not None:
            manager = stack.enter_context(open_manager(config, saved))
        log = stack.enter_context(closing(RunLog(config, env.is_main)))
        log.line(to_yaml(config).rstrip())
        if t.device is None and env.device.type == "cpu":
            log.line(" torch finds no GPU here, so the CPU trains")
        engine: Engine = (DeepSpeedEngine if t.deepspeed else NativeEngine)(config, env)
        size = model_size(config.model, t.seq_length)
        progress = Progress()
        if saved is not None:
            progress, schedule = resume(saved, config, schedule, data, engine, env, log)
        describe(size, memory, data, env, log)
        for line in [
            *describe_groups(whole_model(config.model, t.seq_length), config.optimizer),
            *filter(None, engine.notes),
        ]:
            log.line(f" {line}")

        def save(progress: Progress, second: bool) -> None:
            if manager is not None:
                seconds = checkpointing.save(
                    manager, config, engine, schedule, data.identity, progress, second=second
                )
                log.line(
                    f" saved iteration {progress.iteration} in "
                    f"{manager.second if second else manager.root}; training waited "
                    f"{seconds:.3f} s"
                )

        def check_save() -> None:
            if manager is not None:
                manager.check()

        def go_back(before: int) -> Progress | None:
            fits = partial(checkpointing.fits_second, config=config)
            path = manager.go_back(before, fits) if manager is not None else None
            if path is None:
                return None
            found = checkpointing.Saved(path, read_metadata(path))
            checkpointing.restore(found, engine, env, weights_only=False)
            return found.progress

        if manager is not None:
            manager.reserve(checkpointing.state_tensors(engine))

        requests = stack.enter_context(StopRequests.install(t))
        run = Run(
            config, env, engine, size, data, schedule, log, requests,
            save=save, check_save=check_save, go_back=go_back,
            watch=StepWatch(config),
            own_time=OwnTime(env.device, config.logging.log_straggler),
        )  # fmt: skip
        reason = train(run, progress)
        if manager is not None:
            manager.wait()
        let_others_end()  # closing takes each rank its own time
        log.line(f" ended at iteration {progress.iteration}: {reason}")
    return reason


def need_the_same_data(data: RunData, env: Environment) -> None:
    """Raises DataError on all ranks where one reads other data, as from an old copy of them."""
    evaluated = {**data.valid} | ({} if data.test is None else {"test": data.test})
    sets = [(name, n, first_tokens(batches.dataset)) for name, (batches, n) in evaluated.items()]
    text = json.dumps([data.identity, sets]).encode()
    first, *others = gather_objects(digest(np.frombuffer(text, np.uint8)), env.control)
    different = [rank for rank, found in enumerate(others, 1) if found != first]
    if different:
        more = f", and so do {len(different) - 1} more" if different[1:] else ""
        raise DataError(
            f"rank {different[0]} reads other data than rank 0{more}: names of files or contents "
            "differ"
        )


def open_manager(config: Config, saved: checkpointing.Saved | None) -> CheckpointManager:
    """The keeper of `--save`. Raises CheckpointError on all ranks when it cannot be written to."""
    settings, timeout = config.checkpoint, config.parallel.distributed_timeout_minutes
    save, load = settings.save, settings.load
    assert save is not None
    same = load is not None and Path(load).resolve() == Path(save).resolve()
    follows = same and not settings.finetune
    return CheckpointManager(
        save,
        keep_last=settings.keep_last_n_checkpoints,
        keep_every=settings.save_retain_interval,
        background=settings.async_save,
        proven=saved.progress.iteration if saved is not None and follows else None,
        second=settings.non_persistent_global_ckpt_dir or settings.non_persistent_local_ckpt_dir,
        local=settings.non_persistent_local_ckpt_dir is not None,
        patience=max(PATIENCE, timedelta(minutes=timeout)),
    )


def resume(
    saved: checkpointing.Saved,
    config: Config,
    schedule: Schedule,
    data: RunData,
    engine: Engine,
    env: Environment,
    log: RunLog,
) -> tuple[Progress, Schedule]:
    """Load `saved` into `engine`; the progress and the schedule to go on with.

    Raises CheckpointError when it can not be loaded or the data are not those it was trained on.
    """
    if config.checkpoint.finetune:
        checkpointing.restore(saved, engine, env, weights_only=True)
        log.line(f" loaded the weights of {saved.path}, starting at iteration 0")
        return Progress(), schedule
    if "optimizer" not in saved.metadata:
        raise CheckpointError(f"{saved.path} holds weights alone; start from them with --finetune")
    if "data" in saved.metadata:
        differences = checkpointing.data_differences(saved.metadata["data"], data.identity)
    else:  # converted from another engine's
        differences = ["the checkpoint does not tell which"]
    if differences and config.checkpoint.allow_data_change:
        log.line(f" the data change from here on: {'; '.join(differences)}")
    elif differences:
        raise CheckpointError(
            f"{saved.path} was trained on other data or in another order: "
            + "; ".join(differences)
            + ". Go on with the same data, with these from here on (--allow-data-change), or with "
            "the weights alone (--finetune)"
        )
    try:
        schedule = resume_schedule(schedule, saved.metadata.get("schedule", {}), config.optimizer)
    except ValueError as error:
        raise CheckpointError(f"{saved.path}: {error}") from None
    checkpointing.restore(saved, engine, env, weights_only=not config.checkpoint.load_optim)
    progress = saved.progress
    log.line(f" resumed from {saved.path} at iteration {progress.iteration}")
    for change in checkpointing.configuration_changes(saved.metadata["config"], config):
        log.line(f"   changed since: {change}")
    return progress, schedule


def describe(size: ModelSize, memory: Memory, data: RunData, env: Environment, log: RunLog) -> None:
    """Tell what is about to be trained, on what and how."""
    mesh = env.mesh
    log.line(
        f" model: {size.parameters:,} parameters | {mesh.world_size} x {env.device.type}, "
        f"{str(env.dtype).removeprefix('torch.')}: tensor {mesh.tp.size} x pipeline "
        f"{mesh.pp.size} x context {mesh.cp.size} x data {mesh.dp.size}"
    )
    log.line(f" memory: about {memory} on the fullest rank")
    parts = [f"{len(data.train.dataset):,} training"]
    sets = {"validation": data.valid.get("validation"), "test": data.test}
    parts += [f"{found[1]:,} {name}" for name, found in sets.items() if found is not None]
    log.line(f" data: {', '.join(parts)} samples of {data.train.seq_length} tokens")
