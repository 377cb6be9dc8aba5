"""The training progress of one worker: committed steps, rate, batch, and the state that another worker would receive.

Invariants:
- A finished step counts once, when it is committed, also where only the next world tells that it was.
- A finished step for which all members have voted is reported as committed: the members that have not heard of the vote
  take this worker's state, and this worker never repeats it.
- The sampler advances with the steps.
- A rate, batch or epoch that a commit does not name keeps its value until the world is entered. Then all members have
  the rate and the batch of the state source.
- A rate of 0 is a rate; None is no rate.
"""

from __future__ import annotations

from typing import Any

from forged.data.sampling.sampler import ElasticSampler
from forged.elastic.model import GlobalTrainingState
from forged.elastic.rescale.attempt import StopReport
from forged.worker import arguments
from forged.worker.data.sample_usage import SampleUsage
from forged.worker.process.counters import Counters
from forged.worker.worker_state.job_view import Commit


class TrainingProgress:
    """One worker's progress. `counters` make it visible to the pulse."""

    def __init__(
        self,
        learning_rate: float | None,
        global_batch_size: int,
        sampler: ElasticSampler | None = None,
        script_state: Any = None,
    ) -> None:
        self.step = 0
        """Committed steps."""
        self.epoch = 0
        self.worker_count = 0
        """The workers of the training state that was applied last."""
        self.learning_rate = None if learning_rate is None else arguments.rate("learning_rate", learning_rate)
        self._given_batch_size = arguments.count("global_batch_size", global_batch_size)
        self.global_batch_size = 0
        self.use_sampler(sampler)
        self.script_state: Any = {} if script_state is None else script_state
        """What the training script gave as its state."""
        self.counters: Counters | None = None
        self.is_half_changed = False
        """Whether the script has left a step after its commit, and has neither received nor set a state since."""
        self.begin_session(None)

    def begin_session(self, counters: Counters | None) -> None:
        """Keep steps, rate and batch; no other worker takes the state of an earlier session on trust."""
        self.counters = counters
        self.holds_state = self.is_stale = False
        """Stale: the job has gone on without this worker's group, so that the state is of use to no other worker."""
        self.has_finished = False
        """Whether a step is finished that may not be committed."""
        self.is_voted = False
        """Whether all members have voted for the finished step."""
        self.usage = None if self.sampler is None else SampleUsage(self.sampler)

    def use_sampler(self, sampler: ElasticSampler | None) -> None:
        """Draw the samples of the steps from this sampler, from the first step on."""
        self.sampler, self.usage = sampler, None if sampler is None else SampleUsage(sampler)
        self.global_batch_size = self._given_batch_size or (0 if sampler is None else sampler.global_batch)

    def end_session(self) -> None:
        """Count the last finished step as committed: its commit can no longer arrive, and the state includes it."""
        self.step, self.has_finished = self.steps_applied, False
        if self.sampler is not None:
            self.epoch = self.sampler.epoch
        self.counters = None

    @property
    def steps_applied(self) -> int:
        """Steps applied to the state, the finished one included."""
        return self.step + self.has_finished

    @property
    def transferable_state(self) -> Any:
        """What a state transfer carries: the script's state, the sampler and the usage notes."""
        if self.usage is None:
            return self.script_state
        return {"state": self.script_state, "sampler": self.usage.sampler, "usage": self.usage}

    @property
    def stop_report(self) -> StopReport:
        is_voted = self.is_voted and self.holds_state
        return StopReport(
            self.steps_applied if is_voted else self.step,
            self.holds_state,
            self.has_finished and self.holds_state and not is_voted,
            # The epoch of the next step, also where that epoch began after the world did.
            self.epoch if self.sampler is None else self.sampler.epoch,
            self.learning_rate,
            self.global_batch_size,
            self.is_stale,
        )

    def training_state(self, world_size: int, now: float) -> GlobalTrainingState | None:
        """None before the first state; `world_size` is 0 in no world."""
        if not self.holds_state:
            return None
        workers = world_size or self.worker_count
        rate, batch = self.learning_rate or 0.0, self.global_batch_size
        return GlobalTrainingState(self.epoch, self.step, rate, batch, workers, now)

    # Steps.

    def begin_step(self) -> None:
        """A step that was finished and not committed is repeated."""
        self.has_finished = False

    def finish_step(self, *, is_voted: bool = False) -> None:
        """The state includes the step from now on; `is_voted`: all members have voted for it."""
        self.has_finished, self.is_voted = True, is_voted
        if self.usage is not None:
            self.usage.finish()

    def commit_step(self) -> None:
        """The finished step is committed."""
        if self.usage is not None:
            self.usage.commit(self.step)
        self.step, self.has_finished = self.step + 1, False
        if self.sampler is not None:
            self.epoch = self.sampler.epoch
        self._publish_step()

    def _publish_step(self) -> None:
        if self.counters is not None:
            self.counters.step = self.step

    # Between two worlds.

    def receive_state(self, step: int) -> None:
        """The state is the state source's, to which `step` steps are applied."""
        self.step, self.has_finished, self.holds_state, self.is_stale = step, False, True, False
        self.is_half_changed = False

    def give_up_state(self) -> None:
        """The script has left a step after its commit: the state may be that of no step."""
        self.holds_state, self.is_half_changed = False, True

    def distrust_state(self) -> None:
        """The job has gone on without this worker: its state is neither given to others nor kept."""
        self.holds_state, self.is_stale = False, True

    def apply_commit(self, commit: Commit) -> None:
        """Take over what was committed from this worker's own stop report."""
        if commit.step is not None:
            self._set_step(commit.step)
        if commit.epoch is not None:
            self.epoch = commit.epoch
        self.holds_state, self.is_stale = True, False
        rate = self.learning_rate if commit.learning_rate is None else commit.learning_rate
        self._set_rate_and_batch(rate, commit.global_batch_size or self.global_batch_size)

    def apply(self, state: GlobalTrainingState) -> None:
        """Continue from this training state, with its rate and its batch."""
        self._set_step(state.current_step)
        self.epoch, self.holds_state, self.is_stale = state.current_epoch, True, False
        self.worker_count = state.active_worker_count
        self._set_rate_and_batch(state.learning_rate, state.global_batch_size)
        self._publish_step()

    def _set_step(self, step: int) -> None:
        """So many steps are committed: the worker's finished step among them, unless the state was received."""
        if self.has_finished and step == self.step + 1:
            self.commit_step()
        self.step, self.has_finished = step, False

    def _set_rate_and_batch(self, learning_rate: float | None, global_batch_size: int) -> None:
        self.learning_rate = None if learning_rate is None else arguments.rate("learning_rate", learning_rate)
        self.global_batch_size = arguments.count("global_batch_size", global_batch_size)
        if self.sampler is not None and self.global_batch_size:
            self.sampler.take(self.global_batch_size)
