"""Shares of one limited resource: how much each holder uses, and which holder has to give way.

A holder is a principal, or an address before the principal is known. The principals that are bound to the same job form
one group, so that a job gains nothing by many tokens.

Invariants:
- Use never exceeds `limit`, and use by all but operators never exceeds `limit - reserve`.
- A group within its fair share, an equal part for each group that uses the resource, is never displaced by others.
- A group below its fair share displaces one above; within a group the same holds for its principals.
- A take and a return cost O(1). Only a take that does not fit costs O(holders), to find the one to displace.
"""

from __future__ import annotations

from typing import NamedTuple


class Holder(NamedTuple):
    """A principal or address that uses a resource, and the group that it shares with."""

    group: str
    name: str
    is_operator: bool = False

    def __str__(self) -> str:
        return self.name if self.group in ("", self.name) else f"{self.name} ({self.group})"


class Shares:
    """The use of one resource by its holders."""

    def __init__(self, resource: str, limit: int, reserve: int = 0, each_max: int | None = None) -> None:
        self.resource = resource
        """What is counted, as in `connections`; begins the text of a refusal."""
        self.used = 0
        self._tenants_used = 0
        self._limit, self._reserve, self._each_max = limit, reserve, each_max
        self._by_holder: dict[Holder, int] = {}
        self._by_group: dict[str, int] = {}
        self._members: dict[str, dict[Holder, None]] = {}
        """The tenants of each group that use the resource."""

    def resize(self, limit: int, reserve: int, each_max: int | None = None) -> None:
        """Change the limits. What exceeds them stays until it is returned or displaced."""
        self._limit, self._reserve, self._each_max = limit, reserve, each_max

    @property
    def holders(self) -> int:
        """The number of holders that use the resource."""
        return len(self._by_holder)

    def of(self, holder: Holder) -> int:
        """How much this holder uses."""
        return self._by_holder.get(holder, 0)

    def of_group(self, group: str) -> int:
        """How much the tenants of this group use."""
        return self._by_group.get(group, 0)

    def fits(self, holder: Holder, amount: int = 1) -> bool:
        """Whether `take` would succeed."""
        if self.used + amount > self._limit:
            return False
        if holder.is_operator:
            return True
        if self._tenants_used + amount > self._limit - self._reserve:
            return False
        return self._each_max is None or self.of_group(holder.group) + amount <= self._each_max

    def take(self, holder: Holder, amount: int = 1) -> bool:
        """Use so much more, if it fits; returns whether it did."""
        if not self.fits(holder, amount):
            return False
        self.charge(holder, amount)
        return True

    def charge(self, holder: Holder, amount: int) -> None:
        """Count what is in use already, also beyond the limits."""
        if not amount:
            return
        self.used += amount
        self._by_holder[holder] = self._by_holder.get(holder, 0) + amount
        if not holder.is_operator:
            self._tenants_used += amount
            self._by_group[holder.group] = self._by_group.get(holder.group, 0) + amount
            self._members.setdefault(holder.group, {})[holder] = None

    def give_back(self, holder: Holder, amount: int = 1) -> None:
        """Use so much less."""
        left = self._by_holder.get(holder, 0) - amount
        assert left >= 0, f"{holder} returns more {self.resource} than it has"
        self.used -= amount
        if left:
            self._by_holder[holder] = left
        else:
            self._by_holder.pop(holder, None)
        if holder.is_operator or not amount:
            return
        self._tenants_used -= amount
        self._by_group[holder.group] -= amount
        if not left:
            del self._members[holder.group][holder]
            if not self._members[holder.group]:
                del self._members[holder.group], self._by_group[holder.group]

    def to_displace(self, holder: Holder, amount: int = 1) -> Holder | None:
        """The holder that has to give way so that this one gets its fair share; None if it has it already."""
        if holder.is_operator or not self._by_group:
            return None
        mine = self.of_group(holder.group)
        fair = self._fair_share(holder.group)
        largest = max(self._by_group, key=self._by_group.__getitem__)
        if largest != holder.group and mine + amount <= fair < self._by_group[largest]:
            return self._largest_in(largest)
        members = self._members.get(holder.group, {})
        if not members or (holder in members and len(members) == 1):
            return None
        fair_within = mine / len({**members, holder: None})
        rival = self._largest_in(holder.group)
        if rival != holder and self.of(holder) + amount <= fair_within < self.of(rival):
            return rival
        return None

    def shortage(self, holder: Holder) -> str:
        """Why a take of this holder does not fit: which limit it is, and how much of it the holder and others use."""
        return f"{self.resource}: {self._described(holder)}"

    def _described(self, holder: Holder) -> str:
        if holder.is_operator:
            return f"{self.used} in use; limit {self._limit}"
        mine = self.of_group(holder.group)
        if self._each_max is not None and mine >= self._each_max:
            return f"{holder} uses {mine}; limit of one principal or job {self._each_max}"
        limit = self._limit - self._reserve
        return f"{holder} uses {mine} of {self._tenants_used} in use; limit {limit}, and {self._reserve} for operators"

    def _fair_share(self, group: str) -> float:
        groups = len(self._by_group) + (group not in self._by_group)
        return (self._limit - self._reserve) / groups

    def _largest_in(self, group: str) -> Holder:
        return max(self._members[group], key=self._by_holder.__getitem__)
