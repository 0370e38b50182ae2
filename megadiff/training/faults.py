"""Steps that go wrong: losses and gradients that are not finite, and losses that jump.

What is judged here are outcomes that have been read for the log or for a save, so that nothing is
waited for because of it, and every checkpoint holds only steps that have been judged.
"""

import math
from dataclasses import dataclass
from statistics import median

from megadiff.config import Config
from megadiff.training.checkpointing import Progress
from megadiff.training.metrics import Outcome

_MAD_TO_SIGMA = 1.4826  # of a normal distribution, 1 / its upper quartile


@dataclass(frozen=True)
class Spike:
    """A step whose loss stands out from those before it."""

    step: Outcome
    median: float
    deviations: float  # above the median, in robust standard deviations

    def __str__(self) -> str:
        return (
            f"loss spike at iteration {self.step.iteration}: {self.step.loss:.4f} is "
            f"{self.deviations:.1f} robust standard deviations above the median {self.median:.4f}"
        )


class StepWatch:
    """Judges all steps of a run in order. `bad` are the latest in a row that are not finite."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.bad: list[Outcome] = []
        self._any_good = False
        self._in_spike = False

    def judge(self, outcomes: list[Outcome], progress: Progress) -> list[Spike]:
        """The spikes that begin in `outcomes`, which `progress.recent_losses` then includes.

        Returns early when `too_many_bad` is reached.
        """
        spikes = []
        for step in outcomes:
            if self._is_bad(step):
                self.bad.append(step)
                if self.too_many_bad:
                    break
                continue
            self.bad.clear()
            self._any_good = True
            if not step.skipped:
                spike = self._spike(step, progress.recent_losses)
                if spike is not None and not self._in_spike:
                    spikes.append(spike)
                self._in_spike = spike is not None
        return spikes

    def forget(self) -> None:
        """The run went back: what was judged is given up."""
        self.bad.clear()
        self._in_spike = False

    @property
    def too_many_bad(self) -> bool:
        return len(self.bad) >= self.config.training.max_consecutive_skipped_iters

    @property
    def all_bad(self) -> bool:
        """Whether no step that was judged is finite."""
        return bool(self.bad) and not self._any_good

    def _is_bad(self, step: Outcome) -> bool:
        """An overflow that a smaller loss scale of float16 may still cure is part of its search."""
        t, o = self.config.training, self.config.optimizer
        searching = t.fp16 and o.loss_scale is None and step.loss_scale > o.min_loss_scale
        return not math.isfinite(step.loss) or (step.skipped and not searching)

    def _spike(self, step: Outcome, recent: list[float]) -> Spike | None:
        """Compare with a whole window of `recent` losses; the loss is one of them from then on."""
        t = self.config.training
        if t.loss_spike_sigma_factor is None:
            return None
        spike = None
        if len(recent) >= t.loss_spike_window:
            middle = median(recent)
            spread = _MAD_TO_SIGMA * median(abs(x - middle) for x in recent)
            # losses that hardly differ: a thousandth of the median is no spike
            deviations = (step.loss - middle) / max(spread, 1e-3 * abs(middle), 1e-12)
            if deviations > t.loss_spike_sigma_factor:
                spike = Spike(step, middle, deviations)
        recent.append(step.loss)
        del recent[: -t.loss_spike_window]
        return spike


def window_to_skip(spike: Spike, iterations: int) -> tuple[int, int]:
    """Samples `[first, end)` of `iterations` steps, beginning with the step before the spike.

    The loss of a step is that of its own data under weights that the step before has changed: the
    data of either may be to blame.
    """
    size = spike.step.batch_size
    first = max(spike.step.first_sample - size, 0)
    return first, first + iterations * size


def passed_over(progress: Progress, batch_size: int, config: Config) -> bool:
    """Whether the step after `progress` is one of `--iterations-to-skip` or in a skipped window."""
    first, end = progress.consumed_samples, progress.consumed_samples + batch_size
    return progress.iteration + 1 in config.training.iterations_to_skip or any(
        first < stop and start < end for start, stop in progress.skipped_windows
    )
