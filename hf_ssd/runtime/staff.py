"""Who drafts for the rows of a call: one assistant throughout, or whoever a policy asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ..config import SSDConfig
from ..eagle3 import feature_layers
from ..planning import CallPolicy, PlanMemory, needs_policy
from ..protocol import DraftRequest, Speculator, SpeculatorError
from ..recorder import Recorder
from ..row import Conductor, Link, Row
from ..types import Plan
from .conductor import PolicyConductor, RequestMaker
from .cpu_threads import set_own_threads
from .placement import available_cores, split_threads
from .pool import is_busy, speculator_for
from .speculator import LostSpeculator


class Staff(Protocol):
    """The speculators of a call.

    Attributes:
        conductor: Changes them while rows are decoded; `None` where nothing can change.
    """

    conductor: Conductor | None

    def begin(self, rows: Sequence[Row], request: RequestMaker) -> tuple[list[Link], list[DraftRequest]]:
        """The links of rows that are decoded together, and what their speculators need.

        Args:
            rows: The rows, before their prefill.
            request: Says what an assistant, by its number, needs for a row.
        """
        ...


@contextlib.contextmanager
def staff_for(
    assistants: Sequence[PreTrainedModel],
    target: PreTrainedModel,
    config: SSDConfig,
    recorder: Recorder,
    memory: PlanMemory | None = None,
) -> Iterator[Staff]:
    """The staff of one call. It ends with the context, and torch has the CPU threads that it had.

    Args:
        assistants: That may draft; none for plain decoding.
        target: The model whose output is wanted.
        config: Settings of the call.
        recorder: Of the call.
        memory: What earlier calls of the kind have shown.
    """
    if config.mode == "ar":
        assistants = ()
    with _threads() as restore, contextlib.ExitStack() as stack:
        crew = Crew(assistants, target, config, recorder, stack, restore)
        crew.knows_one = memory is not None and memory.home is not None
        if not needs_policy(config, len(assistants)):
            yield FixedStaff(crew, recorder)
            return
        policy = CallPolicy(config, len(assistants), memory, crew.is_available)
        yield ChangingStaff(PolicyConductor(policy, recorder, crew), crew)
        policy.remember()


class Crew:
    """Assistants that are there once they are asked for, and the target's share of the cores.

    Args:
        assistants: In the order of their numbers.
        target: The model that they draft for.
        config: Settings of the call.
        recorder: Of the call.
        stack: Ends them.
        restore_threads: Gives the target all cores.

    Attributes:
        feature_layers: Which of the target's states each assistant reads.
        has_begun: Whether rows are being decoded: an assistant that cannot be had is no longer a reason to raise, and
            one that another call has is not waited for.
        knows_one: Whether earlier calls have shown what works: then one of several assistants is no reason either.
    """

    def __init__(
        self,
        assistants: Sequence[PreTrainedModel],
        target: PreTrainedModel,
        config: SSDConfig,
        recorder: Recorder,
        stack: contextlib.ExitStack,
        restore_threads: Callable[[], None],
    ) -> None:
        self.assistants = assistants
        self.feature_layers: Sequence[tuple[int, ...]] = [feature_layers(target, each) for each in assistants]
        self._target = target
        self._config = config
        self._recorder = recorder
        self._stack = stack
        self._restore_threads = restore_threads
        self.has_begun = self.knows_one = False
        self._stacks: dict[int, contextlib.ExitStack] = {}
        self._speculators: dict[int, Speculator] = {}
        self._of_rows: dict[tuple[int, int], Speculator] = {}

    def speculator(self, assistant: int) -> Speculator:
        """That of an assistant. Before the first row it waits until the calls of other threads are done with it."""
        if assistant not in self._speculators:
            config = self._config
            _, num_threads = split_threads(config.target_threads, config.assistant_threads, available_cores())
            self._stacks[assistant] = stack = self._stack.enter_context(contextlib.ExitStack())
            try:
                self._speculators[assistant] = stack.enter_context(
                    speculator_for(
                        self.assistants[assistant], self._target, config, num_threads, waits=not self.has_begun
                    )
                )
            except (SpeculatorError, MemoryError, ValueError) as error:
                if self._must_have(assistant):
                    raise
                # It is lost to the call, which goes on.
                self._speculators[assistant] = LostSpeculator(str(error))
        speculator = self._speculators[assistant]
        self._recorder.assistant_threads, self._recorder.assistant_device = speculator.threads, speculator.device
        return speculator

    def _must_have(self, assistant: int) -> bool:
        """Whether the call cannot even begin without an assistant."""
        is_given = len(self.assistants) == 1 or (assistant == 0 and not self.knows_one)
        return is_given and not self.has_begun

    def of_row(self, assistant: int, place: int) -> Speculator:
        """One for each row of those that are decoded together, the first of which has the assistant's own."""
        if not place:
            return self.speculator(assistant)
        if (assistant, place) not in self._of_rows:
            self._of_rows[assistant, place] = self.speculator(assistant).another()
        return self._of_rows[assistant, place]

    def release(self, assistant: int) -> None:
        """Gives an assistant up that has failed, so that other calls may have it. It is not asked for again."""
        self._speculators[assistant] = LostSpeculator("the assistant has failed before")
        self._of_rows = {key: each for key, each in self._of_rows.items() if key[0] != assistant}
        self._stacks[assistant].close()

    def is_available(self, plan: Plan) -> bool:
        """Whether an assistant can be had without waiting for the call of another thread."""
        return plan.mode == "ar" or plan.assistant in self._speculators or not is_busy(self.assistants[plan.assistant])

    def set_threads(self, speculator: Speculator | None) -> None:
        """Leaves the target what the assistant leaves it, or everything where there is none."""
        self._restore_threads()
        if speculator is None:
            return
        config = self._config
        num_threads = config.target_threads
        if speculator.threads is not None:
            num_threads = split_threads(config.target_threads, config.assistant_threads, available_cores())[0]
        if num_threads is not None:
            set_own_threads(num_threads)
        self._recorder.target_threads = torch.get_num_threads()


class FixedStaff:
    """One assistant for all rows, or none. Once it has failed no row asks it again.

    Args:
        crew: With one assistant at most.
        recorder: Of the call.
    """

    conductor: Conductor | None = None

    def __init__(self, crew: Crew, recorder: Recorder) -> None:
        self._crew = crew
        self._recorder = recorder
        self._last: Link | None = None
        recorder.target_threads = torch.get_num_threads()

    def begin(self, rows: Sequence[Row], request: RequestMaker) -> tuple[list[Link], list[DraftRequest]]:
        """The links of the rows, and what their speculators need."""
        speculator = None
        if self._crew.assistants:
            speculator = self._crew.speculator(0)
            if self._last is None:
                self._crew.set_threads(speculator)
            elif not self._last.is_drafting:
                speculator = None
        links = [
            Link(
                speculator.another() if speculator is not None and len(rows) > 1 else speculator,
                self._recorder,
                lambda _: self._crew.set_threads(None),
            )
            for _ in rows
        ]
        self._last = links[-1]
        return links, [request(row, 0) for row in rows]


class ChangingStaff:
    """Whoever the policy asks for.

    Args:
        conductor: Carries out what the policy decides.
        crew: Its assistants.
    """

    def __init__(self, conductor: PolicyConductor, crew: Crew) -> None:
        self._crew = crew
        self.conductor: Conductor | None = conductor
        self._conductor = conductor

    def begin(self, rows: Sequence[Row], request: RequestMaker) -> tuple[list[Link], list[DraftRequest]]:
        """The links of the rows, and what their speculators need."""
        begun = self._conductor.begin(rows, request)
        self._crew.has_begun = True
        return begun


@contextlib.contextmanager
def _threads() -> Iterator[Callable[[], None]]:
    """Yields a function that gives torch the CPU threads that it has now, which happens at the end in any case."""
    before = torch.get_num_threads()

    def restore() -> None:
        set_own_threads(before)

    try:
        yield restore
    finally:
        restore()
