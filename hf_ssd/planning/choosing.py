"""Which plan a call should go on with, by what its own rounds and earlier calls have shown.

Pure: figures of rounds in, decisions out. Nothing here knows a model, a process or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..types import Plan, Switch
from .costs import Cost, RoundCosts

SETTLING_ROUNDS = {"ssd": 2, "sd": 2, "ar": 1}  # after a switch, which say nothing: the assistant reads the row
MIN_ROUNDS = 6  # before a plan is compared with another
RECENT_ROUNDS = 10  # that tell that the text has changed
MIN_TRIAL_ROUNDS = {"ssd": 4, "sd": 4, "ar": 3}
MAX_TRIAL_ROUNDS = {"ssd": 16, "sd": 16, "ar": 4}  # how long a round takes without drafts hardly varies
MARGIN = 0.04  # by which another plan has to be faster: what a switch costs is not seen in the rounds
FIRST_INTERVAL = {"ssd": 32, "sd": 96, "ar": 32}  # rounds until another plan is tried
MAX_INTERVAL = 1024
MIN_GAP = 12  # rounds between two trials of a plan, whatever speaks for it
FIRST_TRIAL = 8  # rounds until a plan is tried that was never measured, where it may be the faster one
FAR = 1.5  # times the cost of home: then a plan is tried again after four times as long, not twice
MORE_PREDICTABLE = 0.2  # by which the target's probability of its own tokens has to rise to be a change of the text


@dataclass
class _Track:
    """What is known of a plan."""

    interval: int
    num_waited: int = 0  # rounds since it was last tried
    cost: Cost | None = None  # as last measured, perhaps in an earlier call
    likelihood: float | None = None  # of the text when it was last tried in vain
    rounds: RoundCosts = field(default_factory=RoundCosts)


@dataclass
class PlanMemory:
    """What stays from call to call, for calls of one kind."""

    home: Plan | None = None
    tracks: dict[Plan, _Track] = field(default_factory=dict)


class PlanChooser:
    """Keeps to the plan that costs least per token, and tries others from time to time.

    The plan that is kept to is *home*. Another one gets a *trial* of some rounds

    - when it was not tried for its interval, which doubles or quadruples with each trial that brings nothing;
    - when home has become slower than plain decoding is known to be: the text has become hard to draft for;
    - when, in plain decoding, the target has become surer of its own tokens than it was when drafting was last tried:
      the text has become easy.

    A trial ends as soon as the difference is beyond doubt, or after some rounds; the new plan must then be faster by a
    margin. So nothing goes back and forth by chance, and a trial that was in vain is short.

    Args:
        plans: To choose from. The first one is home at first.
        memory: Of earlier calls. Changed by `remember`.
        is_available: Asked before another plan is begun with.

    Attributes:
        plan: The plan for the next round.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        memory: PlanMemory | None = None,
        is_available: Callable[[Plan], bool] = lambda plan: True,
    ) -> None:
        self._is_available = is_available
        self._memory = memory or PlanMemory()
        self._tracks = {plan: self._track(plan) for plan in plans}
        best = self._memory.home if self._memory.home in self._tracks else plans[0]
        # Rather another assistant than one that would have to be waited for.
        likes = [best, *(plan for plan in plans if plan.mode == best.mode)]
        self._home = self.plan = next((plan for plan in likes if is_available(plan)), best)
        self._stand_in = None if self._home == best else self._home
        self._left: Plan | None = None  # what was home before
        self._is_sudden = False  # whether the trial was caused by the latest rounds
        self._num_here = 0

    def _track(self, plan: Plan) -> _Track:
        known = self._memory.tracks.get(plan)
        if known is None:
            interval = FIRST_INTERVAL[plan.mode]
            return _Track(interval, num_waited=interval - FIRST_TRIAL if plan.mode == "ar" else 0)
        return _Track(known.interval, known.num_waited, known.cost, known.likelihood)

    @property
    def is_trying(self) -> bool:
        """Whether the plan is only being tried."""
        return self.plan != self._home

    def after_round(self, num_tokens: float, duration_ms: float, likelihood: float | None = None) -> Switch | None:
        """Takes in a round.

        Args:
            num_tokens: That it gave.
            duration_ms: That it took, with all that belongs to it.
            likelihood: The target's own probability of these tokens, on average over the latest ones; `None` where it
                was not looked at.

        Returns:
            What was decided, if anything: a trial, its end, or that what was tried is home now.
        """
        self._num_here += 1
        track = self._tracks[self.plan]
        if self._num_here > SETTLING_ROUNDS[self.plan.mode]:
            track.rounds.add(num_tokens, duration_ms)
            track.cost = track.rounds.cost() or track.cost
        return self._judge_trial() if self.is_trying else self._look_around(likelihood)

    def restarted(self) -> None:
        """The assistant has to read the row: the next rounds say nothing about the plan."""
        self._num_here = 0

    def rows_changed(self) -> Switch | None:
        """Another number of rows goes on together: what rounds have cost says nothing about those to come.

        What is remembered is what was known of the rows until now. Returns the end of the trial, where there was one.
        """
        self.remember()
        self._memory = PlanMemory()
        self._tracks = {plan: _Track(track.interval, track.num_waited) for plan, track in self._tracks.items()}
        return self._go_back("other rows than before") if self.is_trying else None

    def drop(self, assistant: int) -> Switch | None:
        """Takes out the plans of an assistant that is lost. Returns where that leads, if `plan` is another now."""
        left = {plan: track for plan, track in self._tracks.items() if plan.mode == "ar" or plan.assistant != assistant}
        self._tracks = left
        if self._home not in self._tracks:
            # An assistant that another call has is tried later: each of the two calls could be waiting for the other.
            free = [plan for plan in left if self._is_available(plan)]
            self._home = min(free, key=lambda plan: (plan.mode == "ar", self._known_ms(plan)), default=Plan("ar"))
            self._tracks.setdefault(self._home, _Track(FIRST_INTERVAL["ar"]))
        if self.plan in self._tracks:
            return None
        return self._go_to(self._home, "its assistant is lost")

    def remember(self) -> None:
        """Leaves what was found out to later calls."""
        if self._home != self._stand_in:
            self._memory.home = self._home
        for plan, track in self._tracks.items():
            self._memory.tracks[plan] = track

    def _known_ms(self, plan: Plan) -> float:
        cost = self._tracks[plan].cost
        return 0.0 if cost is None else cost.ms_per_token

    # At home

    def _look_around(self, likelihood: float | None) -> Switch | None:
        home = self._tracks[self.plan]
        others = {plan: track for plan, track in self._tracks.items() if plan != self.plan}
        for track in others.values():
            track.num_waited += 1
        if len(home.rounds) < MIN_ROUNDS:
            return None
        # What was left last comes first: the text may be again as it was then.
        for plan in sorted(others, key=lambda plan: plan != self._left):
            reason = self._why_now(plan, others[plan], home, likelihood)
            if reason is not None and self._is_available(plan):
                return self._try(plan, likelihood, reason, is_sudden=True)
        due = [plan for plan, track in others.items() if track.num_waited >= track.interval]
        due = [plan for plan in due if self._is_available(plan)]
        if not due:
            return None
        plan = max(due, key=lambda plan: self._tracks[plan].num_waited / self._tracks[plan].interval)
        track = self._tracks[plan]
        reason = "not measured yet" if track.cost is None else f"not tried for {track.num_waited} rounds"
        return self._try(plan, likelihood, reason)

    def _why_now(self, plan: Plan, track: _Track, home: _Track, likelihood: float | None) -> str | None:
        """What speaks for a plan out of turn."""
        if plan.mode == "ar":
            if track.num_waited < MIN_GAP:
                return None
            recent = home.rounds.cost(RECENT_ROUNDS)
            if recent is None or track.cost is None or not recent.is_surely_above(track.cost, MARGIN):
                return None
            return f"the latest rounds took {recent.ms_per_token:.1f} ms per token"
        if self.plan.mode != "ar" or likelihood is None:
            return None
        if track.likelihood is None:
            track.likelihood = likelihood  # of the text for which drafting was left
        if likelihood < track.likelihood + MORE_PREDICTABLE or track.num_waited < MIN_GAP:
            return None
        return f"the text has become more predictable ({track.likelihood:.2f} to {likelihood:.2f})"

    def _try(self, plan: Plan, likelihood: float | None, reason: str, is_sudden: bool = False) -> Switch:
        track = self._tracks[plan]
        track.rounds.clear()
        track.num_waited = 0
        if self.plan.mode == "ar":
            track.likelihood = likelihood
        self._is_sudden = is_sudden
        return self._go_to(plan, reason, is_trial=True)

    # On trial

    def _judge_trial(self) -> Switch | None:
        trial, home = self._tracks[self.plan], self._tracks[self._home]
        num_rounds, new = len(trial.rounds), trial.rounds.cost()
        old = home.rounds.cost(RECENT_ROUNDS if self._is_sudden else None) or home.cost
        if num_rounds < MIN_TRIAL_ROUNDS[self.plan.mode] or new is None or old is None:
            return None
        is_sure = new.is_surely_above(old) or old.is_surely_above(new, MARGIN)
        if not is_sure and num_rounds < MAX_TRIAL_ROUNDS[self.plan.mode]:
            return None
        figures = f"{new.ms_per_token:.1f} instead of {old.ms_per_token:.1f} ms per token"
        if new.ms_per_token * (1.0 + MARGIN) < old.ms_per_token:
            return self._adopt(is_sure, f"faster: {figures}")
        is_far = new.ms_per_token > FAR * old.ms_per_token
        trial.interval = min((4 if is_far else 2) * trial.interval, MAX_INTERVAL)
        word = "slower" if new.ms_per_token > old.ms_per_token else "hardly faster"
        return self._go_back(f"{word}: {figures}")

    def _go_back(self, reason: str) -> Switch:
        return replace(self._go_to(self._home, reason, is_trial=True), is_return=True)

    def _adopt(self, is_sure: bool, reason: str) -> Switch:
        """Makes the plan that is being tried home."""
        before, self._home = self._home, self.plan
        self._left, left = before, self._tracks[before]
        left.num_waited, left.likelihood = 0, None
        # Where it was a close thing the way back is no shorter than before.
        left.interval = FIRST_INTERVAL[before.mode] if is_sure else min(2 * left.interval, MAX_INTERVAL)
        return Switch(before, self.plan, reason)

    def _go_to(self, plan: Plan, reason: str, is_trial: bool = False) -> Switch:
        before, self.plan = self.plan, plan
        self._num_here = 0
        return Switch(before, plan, reason, is_trial)
