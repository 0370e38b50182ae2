"""The training loop: one global batch after another, until the last step or a reason to stop."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megadiff.config import Config
from megadiff.data.loader import MicroBatch
from megadiff.models.flops import ModelSize
from megadiff.optim.replicas import check_replicas
from megadiff.optim.schedule import Schedule, learning_rate, weight_decay
from megadiff.training import metrics
from megadiff.training.checkpointing import Progress
from megadiff.training.data import Batches, RunData
from megadiff.training.engine import Engine
from megadiff.training.log import RunLog
from megadiff.training.setup import Environment
from megadiff.training.stop import StopRequests, agree


@dataclass(frozen=True)
class Run:
    """All that the loop works with."""

    config: Config
    env: Environment
    engine: Engine
    size: ModelSize
    data: RunData
    schedule: Schedule
    log: RunLog
    requests: StopRequests
    save: Callable[[Progress, bool], None]  # True: to the second place; nothing without --save
    check_save: Callable[[], None]  # raises the error of a save in the background


def train(run: Run, progress: Progress) -> str:
    """Train from `progress` on, which follows the run; returns why it ended.

    Ends after the last step ("finished"), at `--exit-interval` or `--exit-duration-in-mins`, or by
    a signal; always at a step's boundary, with a save. Evaluates on the way and after the last
    step.
    """
    t, logging = run.config.training, run.config.logging
    assert t.train_iters is not None
    interval, clock = metrics.Interval(), metrics.Clock()
    saved_at = progress.iteration
    reason = "finished"
    while progress.iteration < t.train_iters:
        size = t.batch_size(progress.consumed_samples)
        batches = run.data.train.step(progress.consumed_samples, size)
        agreement = agree(unmasked(batches), run.requests, run.env.control, copies(run.env))
        if agreement.stop is not None:
            reason = agreement.stop
            break
        rate = learning_rate(run.schedule, progress.consumed_samples)
        decay = weight_decay(run.schedule, progress.consumed_samples)
        loss = run.engine.forward_backward(batches, max(agreement.tokens, 1))
        interval.add(loss, run.engine.step(rate, decay), rate, size)
        progress.iteration += 1
        progress.consumed_samples += size
        last = progress.iteration == t.train_iters
        if progress.iteration % logging.log_interval == 0:
            _log_interval(run, progress, interval, clock)
            interval = metrics.Interval()
        with clock.paused():
            if between_steps(run, progress, last):
                saved_at = progress.iteration
        if t.exit_interval and progress.iteration % t.exit_interval == 0 and not last:
            reason = "exit interval"
            break
    if interval.losses:
        _log_interval(run, progress, interval, clock)
    if progress.iteration > saved_at:
        run.save(progress, False)
    if reason == "finished":
        validate(run, progress)
        evaluate(run, progress, "test", run.data.test, run.data.test_samples)
    return reason


def between_steps(run: Run, progress: Progress, last: bool) -> bool:
    """Checks, evaluation and saves that are due after a step; whether it was saved."""
    t, c, step = run.config.training, run.config.checkpoint, progress.iteration

    def due(interval: int | None) -> bool:
        return bool(interval) and step % (interval or 1) == 0

    if due(t.check_weight_hash_across_dp_replicas_interval):
        run.engine.optimizer.wait_for_parameters()
        model = run.engine.model
        check_replicas(model, run.env.mesh, run.env.control, model.tied_parameters())
    if due(t.eval_interval) and not last:
        validate(run, progress)
    run.check_save()
    if due(c.save_interval):
        run.save(progress, False)
        return True
    if due(c.non_persistent_save_interval):
        run.save(progress, True)
    return False


def unmasked(batches: list[MicroBatch]) -> int:
    """Tokens of these micro-batches that count in the loss."""
    return int(sum(float(batch.loss_mask.sum(dtype=torch.float64)) for batch in batches))


def copies(env: Environment) -> int:
    """Ranks that read the same samples as this one, itself included."""
    return env.mesh.world_size // env.mesh.dp.size


def _log_interval(
    run: Run, progress: Progress, interval: metrics.Interval, clock: metrics.Clock
) -> None:
    t = run.config.training
    assert t.train_iters is not None
    steps = len(interval.losses)
    values: dict[str, Any] = {"consumed_samples": progress.consumed_samples}
    values |= interval.read(run.env)
    seconds = clock.lap() / steps
    samples = sum(interval.batch_sizes) / steps
    tokens = samples * t.seq_length / seconds / run.env.mesh.world_size
    values |= {
        "global_batch_size": interval.batch_sizes[-1],
        "iteration_ms": 1000 * seconds,
        "tokens_per_second_per_device": tokens,
        "tflops_per_device": tokens * run.size.training_flops_per_token / 1e12,
        "memory_bytes": metrics.peak_memory(run.env.device),
        "seconds_left": seconds * (t.train_iters - progress.iteration),
        "lambda": metrics.mean_lambdas(run.engine.model, run.env),
    }
    run.log.line(metrics.train_line(values, progress.iteration, t.train_iters))
    run.log.record("train", progress.iteration, values)


def validate(run: Run, progress: Progress) -> None:
    """Evaluate the validation samples, and the further sets that have names of their own."""
    evaluate(run, progress, "validation", run.data.valid, run.data.valid_samples)
    for name, (batches, samples) in run.data.named.items():
        evaluate(run, progress, f"validation/{name}", batches, samples)


def evaluate(
    run: Run, progress: Progress, name: str, batches: Batches | None, samples: int
) -> float | None:
    """The mean token loss over the first `samples`, exact over all ranks; None if there are none.

    Every evaluation of a run reads the same samples. A signal ends it early, without a result.
    """
    if batches is None or samples == 0:
        return None
    loss, tokens = _mean_loss(run, batches, samples)
    if loss is None:
        run.log.line(f" {name} at iteration {progress.iteration} stopped early")
        return None
    run.log.line(metrics.evaluation_line(name, loss, progress.iteration))
    values = {"lm_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
    run.log.record(name, progress.iteration, values)
    return loss


def _mean_loss(run: Run, batches: Batches, samples: int) -> tuple[float | None, int]:
    size = run.config.training.global_batch_size
    assert size is not None
    total = torch.zeros((), dtype=torch.float64, device=run.env.device)
    tokens = 0
    for step in batches.once(samples, size):
        agreement = agree(unmasked(step), run.requests, run.env.control, copies(run.env))
        if agreement.stop is not None:
            return None, tokens
        total += run.engine.evaluate(step)
        tokens += agreement.tokens
    return metrics.sum_over_data(total, run.env).item() / max(tokens, 1), tokens
