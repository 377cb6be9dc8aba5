"""The state of one job's training, which all parts of the coordinator read and change.

Invariants:
- There is one committed world at a time, each under its own generation, and at most one attempt at the next one.
- Facts and store writes leave only through the outbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from forged.elastic.compatibility import SharedConfig
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.coordinator.failure_budget import FailureBudget
from forged.elastic.coordinator.step_witnesses import StepWitnesses
from forged.elastic.failure_detector.detector import FailureDetector
from forged.elastic.failure_detector.peer_reports import PeerReports
from forged.elastic.failure_detector.suspicion import Suspicions
from forged.elastic.membership.member import Member
from forged.elastic.membership.registry import MemberRegistry
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.model import GlobalTrainingState
from forged.elastic.outbox import Moment, Outbox
from forged.elastic.phases import OVER, Cause, Phase, next_phase, require_not_over
from forged.elastic.rescale.attempt import Attempt
from forged.elastic.rescale.scaling import ScalingBase
from forged.jobs.model import SettingValue
from forged.kernel.messages import Fact
from forged.phrases import REASONS_MAX

NEVER = math.inf


class JobState:
    """What is known of one job; the parts of the coordinator take it as their first argument."""

    def __init__(self, name: str, settings: Mapping[str, SettingValue], key: bytes = b"") -> None:
        self.name = name
        self.key = key
        """The secret by which the job's workers recognise each other."""
        self.settings = dict(settings)
        self.config = ElasticTrainingConfig.from_settings(settings)
        self.shared_config: SharedConfig | None = None
        """What all workers must agree on; None until a worker has declared it."""
        self.is_stored = False

        self.phase = Phase.FORMING
        self.reason = ""
        """Why the job is in its phase."""
        self.paused = False
        self.pause_reason = ""
        """Why the job is paused, or was paused last."""

        self.training = GlobalTrainingState()
        self.learning_rate: float | None = None
        """The rate that the newest commit has set; None if it has set none, so that only the workers know it."""
        self.reported_step = 0
        """The highest committed step reported while the job did not train; lost if no remaining worker holds it."""
        self.step_witnesses = StepWitnesses()
        self.last_progress_at = -NEVER
        """When a member of the world last reported progress, or was first able to."""
        self.scaling_base = ScalingBase()
        self.failure_budget = FailureBudget()

        self.outbox = Outbox()
        self.membership = WorldMembership(name, self.config)
        self.detector = FailureDetector(self.outbox)
        self.suspicions = Suspicions(self.membership, self.detector)

        self.attempt: Attempt | None = None
        self.attempts = 0
        """The number of the newest attempt."""
        self.interrupted_attempt = 0
        """The newest attempt that was aborted because the daemon restarted."""
        self.failed_join_attempts = 0
        """Attempts that lost only joiners, since a joiner last became a member of a world."""

        self.rescale_reasons: list[str] = []
        """What has happened since the last commit that makes a new world necessary."""
        self.peer_report_reasons: set[str] = set()
        """Those of the reasons that repeat a peer report; a reported failure explains and removes them."""
        self.missing_since: float | None = None
        """When a member that the world, or the attempt, requires was first missing."""
        self.missing_is_reported = False
        """Whether a fact reports the missing member; that fact is the cause of the rescale."""
        self.rescale_requested_at: float | None = None
        """From when a rescale is due because an operator asked for it."""
        self.must_stop = False
        """Whether the next rescale is synchronous in either mode, because the world cannot continue, or must not."""
        self.too_few_since: float | None = None
        self.loaded_at = -NEVER
        """When this daemon loaded the job."""
        self.cause_id = 0
        """The id of the fact that the next rescale, or the rest of the current one, follows from."""

    @property
    def members(self) -> MemberRegistry:
        return self.membership.members

    @property
    def generation(self) -> int:
        return self.membership.topology.generation

    @property
    def peer_reports(self) -> PeerReports:
        return self.suspicions.peer_reports

    @property
    def over(self) -> bool:
        """Whether the job is completed or aborted."""
        return self.phase in OVER

    @property
    def trains(self) -> bool:
        """Whether the committed world makes steps; in a background rescale it does until the commit."""
        return self.phase is Phase.RUNNING or (self.attempt is not None and self.attempt.in_background)

    @property
    def step(self) -> int:
        """The highest committed step that is known, by any report."""
        return max(self.training.current_step, self.reported_step)

    @property
    def member_is_missing(self) -> bool:
        """Whether a required member is missing, so that another attempt must follow."""
        return self.missing_since is not None

    @property
    def missing_is_explained(self) -> bool:
        """Whether a required member is missing and a fact says so."""
        return self.missing_is_reported and self.member_is_missing

    def requires(self, member: Member) -> bool:
        """Whether the world, or the attempt at the next one, cannot continue without this member."""
        attempt = self.attempt
        if attempt is None:
            return self.membership.in_world(member)
        return member.id in attempt and member.id not in attempt.dispensable

    def configure(self, settings: Mapping[str, SettingValue]) -> None:
        """Apply settings; workers apply them once they have heard of them."""
        before, self.config = self.config, ElasticTrainingConfig.from_settings(settings)
        self.membership.config = self.config
        self.settings = dict(settings)
        for member in self.members.values():
            member.allow_for_settings_change(before, self.config)

    def require_not_over(self) -> None:
        require_not_over(self.name, self.phase, self.reason)

    def move_to(self, cause: Cause, reason: str) -> None:
        """Change the phase by the transition table."""
        self.phase, self.reason = next_phase(self.phase, cause), reason
        self.outbox.job = True

    def publish_change(self, fact: Fact) -> None:
        """Publish a fact together with the changed job record."""
        self.outbox.job = True
        self.outbox.publish(fact)

    def add_reason(self, reason: str) -> None:
        """Note why a new world is necessary."""
        if reason not in self.rescale_reasons and len(self.rescale_reasons) < REASONS_MAX:
            self.rescale_reasons.append(reason)
            self.outbox.job = True

    def store_member(self, member: Member) -> None:
        self.outbox.members.add(member.id)

    def remove_member(self, member: Member) -> None:
        self.membership.remove(member)
        self.peer_reports.forget(member.id)
        self.detector.forget(member)
        self.outbox.members.add(member.id)

    def group_broken_without(self, member: Member) -> list[str]:
        """The workers whose group in the world breaks with this member's end; none if it is broken already."""
        membership = self.membership
        if membership.group_size == 1 or not membership.in_world(member) or membership.is_broken(member):
            return []
        return [partner.id for partner in membership.partners(member) if membership.in_world(partner)]

    def note_missing_member(self, reason: str, now: Moment, *, is_reported: bool = False, delay_s: float = 0.0) -> None:
        """Open the failure window, `delay_s` from now unless it is open already.

        `is_reported` says that the last published fact reports the missing member.
        """
        was_explained = self.missing_is_explained
        if is_reported:
            self.peer_reports.explain(self.generation)
            self.rescale_reasons = [known for known in self.rescale_reasons if known not in self.peer_report_reasons]
        if is_reported or not was_explained:
            self.add_reason(reason)
        if is_reported and not was_explained:
            self.outbox.mark_trigger()
        self.missing_is_reported = is_reported or was_explained
        starts_at = now.monotonic + delay_s
        self.missing_since = starts_at if self.missing_since is None else min(starts_at, self.missing_since)

    def extend_deadlines(self, late_s: float, now: float) -> None:
        """Extend all deadlines by the time that the daemon itself was stalled."""
        for member in self.members.values():
            member.extend_deadlines(late_s, now)
        self.detector.extend_deadlines(now)
        self.loaded_at = min(self.loaded_at + late_s, now)
        self.last_progress_at = min(self.last_progress_at + late_s, now)
        if self.too_few_since is not None:
            self.too_few_since = min(self.too_few_since + late_s, now)
        if self.attempt is not None:
            self.attempt.began_at = min(self.attempt.began_at + late_s, now)
            self.attempt.heard_at = min(self.attempt.heard_at + late_s, now)
            if self.attempt.stopped_at is not None:
                self.attempt.stopped_at = min(self.attempt.stopped_at + late_s, now)
