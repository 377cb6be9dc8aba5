"""How far one worker is in the training, and at what pace.

Law: a step that was finished counts when it is committed, once, also where only the next world tells of its commit.
What the steps take of the dataset goes with them. A rate, a batch or an epoch that nobody names stays what it was.
"""

from __future__ import annotations

from forged.data.sampling.sampler import ElasticSampler
from forged.elastic.model import GlobalTrainingState
from forged.elastic.rescale.attempt import StopReport
from forged.worker import arguments
from forged.worker.data.sample_usage import SampleUsage
from forged.worker.process.counters import Counters
from forged.worker.worker_state.job_view import Commit


class TrainingProgress:
    """Where a worker is between its steps; `counters` show it to the pulse."""

    def __init__(
        self, learning_rate: float, global_batch_size: int, sampler: ElasticSampler | None, counters: Counters | None
    ) -> None:
        self.step = 0
        """How many steps are committed."""
        self.epoch = 0
        self.learning_rate = arguments.rate("learning_rate", learning_rate)
        self.global_batch_size = arguments.count(
            "global_batch_size", global_batch_size or (0 if sampler is None else sampler.global_batch)
        )
        self.sampler = sampler
        self.counters = counters
        self.begin_anew()

    def begin_anew(self) -> None:
        """Another session begins where the last one ended; to the others it is somebody with a state of its own."""
        self.holds_state = False
        self.has_finished = False
        """Whether a step is finished that may not be committed."""
        self.consumption = None if self.sampler is None else SampleUsage(self.sampler)

    @property
    def behind(self) -> int:
        """Behind how many steps the state is: also behind the one that was finished, whether it counts or not."""
        return self.step + self.has_finished

    @property
    def stop(self) -> StopReport:
        """Where it stops for another world."""
        return StopReport(
            self.step,
            self.holds_state,
            self.has_finished and self.holds_state,
            # That of the next step, also where it began since the world did.
            self.epoch if self.sampler is None else self.sampler.epoch,
            self.learning_rate,
            self.global_batch_size,
        )

    def state(self, world_size: int, now: float) -> GlobalTrainingState | None:
        """How far the training is; None before the first world."""
        if not self.holds_state:
            return None
        return GlobalTrainingState(self.epoch, self.step, self.learning_rate, self.global_batch_size, world_size, now)

    # Steps.

    def begin_step(self) -> None:
        """What was finished and not committed is done again."""
        self.has_finished = False

    def finish_step(self) -> None:
        """The state is that behind the step."""
        self.has_finished = True
        if self.consumption is not None:
            self.consumption.finish()

    def count_step(self) -> None:
        """The step that was finished is committed."""
        if self.consumption is not None:
            self.consumption.count(self.step)
        self.step, self.has_finished = self.step + 1, False
        if self.sampler is not None:
            self.epoch = self.sampler.epoch
        self.show()

    def show(self) -> None:
        """Show how many steps are committed."""
        if self.counters is not None:
            self.counters.step = self.step

    def close(self) -> None:
        """Nobody says any more whether the step that was finished counts; the state is the one behind it."""
        self.step, self.has_finished = self.behind, False
        if self.sampler is not None:
            self.epoch = self.sampler.epoch

    # Between two worlds.

    def become(self, step: int) -> None:
        """The state is that of another, who has so many steps behind it."""
        self.step, self.has_finished, self.holds_state = step, False, True

    def adopt(self, commit: Commit) -> None:
        """What was committed is what this worker has answered."""
        if commit.step is not None:
            self._be_at(commit.step)
        if commit.epoch is not None:
            self.epoch = commit.epoch
        self.holds_state = True
        self._pace(commit.learning_rate, commit.global_batch_size)

    def take_up(self, state: GlobalTrainingState) -> None:
        """Go on where the training is, with its rate and its batch."""
        self._be_at(state.current_step)
        self.epoch, self.holds_state = state.current_epoch, True
        self._pace(state.learning_rate, state.global_batch_size)

    def _be_at(self, step: int) -> None:
        """So many steps are committed. The one that this worker has finished is, or it was somebody else's state."""
        if self.has_finished and step == self.step + 1:
            self.count_step()
        self.step, self.has_finished = step, False

    def _pace(self, learning_rate: float, global_batch_size: int) -> None:
        self.learning_rate = arguments.rate("learning_rate", learning_rate or self.learning_rate)
        self.global_batch_size = arguments.count("global_batch_size", global_batch_size or self.global_batch_size)
        if self.sampler is not None and self.global_batch_size:
            self.sampler.take(self.global_batch_size)
