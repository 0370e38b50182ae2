"""The training loop: one global batch after another, until the last step or a reason to stop."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from megadiff.training.errors import NotFiniteError
from megadiff.training.faults import Spike, StepWatch, passed_over, window_to_skip
from megadiff.training.log import RunLog
from megadiff.training.nonfinite import first_origin, report, watch_modules
from megadiff.training.setup import Environment
from megadiff.training.stop import StopRequests, agree
from megadiff.training.straggler import OwnTime, slowest_rank, straggler_line


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
    go_back: Callable[[int], Progress | None]  # to the newest checkpoint before a step, if any
    watch: StepWatch
    own_time: OwnTime


def train(run: Run, progress: Progress) -> str:
    """Train from `progress` on, which follows the run; returns why it ended.

    Ends after the last step ("finished"), at `--exit-interval` or `--exit-duration-in-mins`, or by
    a signal; always at a step's boundary, with a save. Evaluates on the way and after the last
    step. Raises NotFiniteError where `--max-consecutive-skipped-iters` is reached, and at the last
    step when no step was finite.
    """
    t, c = run.config.training, run.config.checkpoint
    assert t.train_iters is not None
    interval, clock = metrics.Interval(), metrics.Clock(run.env.device)
    saved_at = progress.iteration
    reason = None
    while reason is None and progress.iteration < t.train_iters:
        reason = step(run, progress, interval)
        last = progress.iteration == t.train_iters
        due = partial(is_due, progress.iteration if reason is None else 0)
        if due(t.exit_interval) and not last:
            reason = "exit interval"
        ends = last or reason is not None
        checks = due(t.check_weight_hash_across_dp_replicas_interval)
        evaluates = due(t.eval_interval) and not last
        saves = due(c.save_interval)
        saves_second = due(c.non_persistent_save_interval) and not (saves or ends)
        logs = ends or due(run.config.logging.log_interval)
        if logs or saves or saves_second:
            outcomes = interval.read(run.env)
            if logs and interval.outcomes:
                _log_interval(run, progress, interval, clock)
                interval = metrics.Interval()
            with clock.paused():  # also when it goes back
                if judge(run, progress, outcomes):
                    interval, saved_at = metrics.Interval(), progress.iteration
                    run.own_time.lap()
                    reason = None if reason == "exit interval" else reason
                    continue
        run.check_save()
        if checks or evaluates or saves or saves_second:
            with clock.paused():
                if checks:
                    run.engine.optimizer.wait_for_parameters()
                    model = run.engine.model
                    check_replicas(model, run.env.mesh, run.env.control, model.tied_parameters())
                if evaluates:
                    validate(run, progress)
                if saves or saves_second:
                    run.save(progress, saves_second)
                if saves:  # the second place may be lost: the end of the run saves once more
                    saved_at = progress.iteration
    if progress.iteration > saved_at:
        run.save(progress, False)
    if reason is None:
        validate(run, progress)
        if run.data.test is not None:
            evaluate(run, progress, "test", *run.data.test)
    return reason or "finished"


def is_due(iteration: int, interval: int | None) -> bool:
    """Whether what is done every `interval` steps is done after step `iteration`; 0 is no step."""
    return iteration > 0 and bool(interval) and iteration % interval == 0


def step(run: Run, progress: Progress, interval: metrics.Interval) -> str | None:
    """Take the next step, or pass over its data; why the run is to stop instead, if it is."""
    size = run.config.training.batch_size(progress.consumed_samples)
    first = progress.consumed_samples
    if passed_over(progress, size, run.config):
        run.log.line(
            f" iteration {progress.iteration + 1} is passed over, samples {first} to "
            f"{first + size - 1}"
        )
    else:
        with run.own_time.data():
            batches = run.data.train.step(first, size)
        agreement = agree(unmasked(batches), run.requests, run.env)
        if agreement.stop is not None:
            return agreement.stop
        rate = learning_rate(run.schedule, first)
        decay = weight_decay(run.schedule, first)
        with run.own_time.compute():
            loss = run.engine.forward_backward(batches, max(agreement.tokens, 1))
        result = run.engine.step(rate, decay)
        interval.add(progress.iteration + 1, first, size, loss, result, rate)
    progress.iteration += 1
    progress.consumed_samples += size
    return None


def judge(run: Run, progress: Progress, outcomes: list[metrics.Outcome]) -> bool:
    """Look at steps that were read; whether the run went back to before one of them.

    Going back comes before the end by steps that are not finite, which often follow a spike.
    """
    spikes = run.watch.judge(outcomes, progress)
    for spike in spikes:
        run.log.line(f" {spike}")
        run.log.record("loss_spike", spike.step.iteration, {"lm_loss": spike.step.loss})
    skip = run.config.training.loss_spike_skip_iters
    went_back = bool(spikes) and skip is not None and go_back(run, progress, spikes[0], skip)
    at_end = progress.iteration == run.config.training.train_iters
    if run.watch.too_many_bad or (at_end and run.watch.all_bad):
        raise explain(run)
    return went_back


def go_back(run: Run, progress: Progress, spike: Spike, skip: int) -> bool:
    """To the newest checkpoint before `spike`, to pass over the data of `skip` steps, if any."""
    window = window_to_skip(spike, skip)
    found = run.go_back(spike.step.iteration - 1)
    if found is None:
        run.log.line(" there is no whole checkpoint from before it; the run goes on")
        return False
    run.log.line(
        f" back to iteration {found.iteration}; samples {window[0]} to {window[1] - 1} will be "
        "passed over"
    )
    progress.skipped_windows.append(list(window))
    progress.iteration, progress.consumed_samples = found.iteration, found.consumed_samples
    progress.recent_losses = found.recent_losses
    run.watch.forget()
    return True


def explain(run: Run) -> NotFiniteError:
    """Run the first bad step again (the later ones changed nothing) to see where it breaks."""
    bad = run.watch.bad
    batches = run.data.train.step(bad[0].first_sample, bad[0].batch_size)
    tokens = agree(unmasked(batches), run.requests, run.env).tokens
    with watch_modules(run.engine.model.chunks, run.env.mesh) as origins:
        run.engine.forward_backward(batches, max(tokens, 1))
    origin = first_origin(origins, run.env)
    return report(bad, origin, run.config, run.env, run.data.train)


def unmasked(batches: list[MicroBatch]) -> int:
    """Tokens of these micro-batches that count in the loss."""
    return int(sum(float(batch.loss_mask.sum(dtype=torch.float64)) for batch in batches))


def _log_interval(
    run: Run, progress: Progress, interval: metrics.Interval, clock: metrics.Clock
) -> None:
    t = run.config.training
    assert t.train_iters is not None
    steps = len(interval.outcomes)
    seconds = clock.lap() / steps
    samples = sum(o.batch_size for o in interval.outcomes) / steps
    tokens = samples * t.seq_length / seconds / run.env.mesh.world_size
    values: dict[str, Any] = {
        "consumed_samples": progress.consumed_samples,
        **interval.summary(),
        "global_batch_size": interval.outcomes[-1].batch_size,
        "iteration_ms": 1000 * seconds,
        "tokens_per_second_per_device": tokens,
        "tflops_per_device": tokens * run.size.training_flops_per_token / 1e12,
        "memory_bytes": metrics.peak_memory(run.env.device),
        "seconds_left": seconds * (t.train_iters - progress.iteration),
        "lambda": metrics.mean_lambdas(run.engine.model, run.env),
    }
    run.log.line(metrics.train_line(values, progress.iteration, t.train_iters))
    if run.config.logging.log_straggler:
        values["straggler"] = slowest_rank(run.own_time, run.env, steps, seconds)
        run.log.line(straggler_line(values["straggler"]))
    run.log.record("train", progress.iteration, values)


def validate(run: Run, progress: Progress) -> None:
    """Evaluate the validation sets."""
    for name, evaluated in run.data.valid.items():
        evaluate(run, progress, name, *evaluated)


def evaluate(run: Run, progress: Progress, name: str, batches: Batches, samples: int) -> None:
    """Log the mean token loss over the first `samples`, exact over all ranks.

    Every evaluation of a run reads the same samples. A signal ends it early, without a result.
    """
    size = run.config.training.global_batch_size
    assert size is not None
    total, tokens = torch.zeros((), dtype=torch.float64, device=run.env.device), 0
    for step in batches.once(samples, size):
        agreement = agree(unmasked(step), run.requests, run.env)
        if agreement.stop is not None:
            run.log.line(f" {name} at iteration {progress.iteration} stopped early")
            return
        total += run.engine.evaluate(step)
        tokens += agreement.tokens
    loss = metrics.sum_over_data(total, run.env).item() / max(tokens, 1)
    run.log.line(metrics.evaluation_line(name, loss, progress.iteration))
    values = {"lm_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
    run.log.record(name, progress.iteration, values)
