"""What calls have shown, for later calls of their kind."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from ..config import SSDConfig
from ..fork_lock import ForkLock
from .choosing import PlanMemory
from .policies import needs_policy

MAX_KINDS = 64  # of calls of a target that something is remembered of


class PlanMemories:
    """Of each target the memories of the latest kinds of calls. They hold no model alive, and end with the target."""

    def __init__(self) -> None:
        self._kinds: weakref.WeakKeyDictionary[object, OrderedDict[object, PlanMemory]] = weakref.WeakKeyDictionary()
        self._lock = ForkLock()

    def find(
        self, target: object, assistants: Sequence[object], config: SSDConfig, *, num_rows: int, samples: bool
    ) -> PlanMemory | None:
        """What calls of the kind have shown; `None` where nothing can change within them.

        Args:
            target: Decides.
            assistants: That may draft, in order.
            config: Settings. Those that say nothing about what tokens cost do not matter.
            num_rows: Rows of the batch.
            samples: Whether tokens are sampled.
        """
        if not needs_policy(config, len(assistants)):
            return None
        settings = replace(config, seed=None, trace=False, token_budget=None)
        kind = (tuple(map(weakref.ref, assistants)), settings, num_rows, samples)
        with self._lock:
            kinds = self._kinds.setdefault(target, OrderedDict())
            memory = kinds.setdefault(kind, PlanMemory())
            kinds.move_to_end(kind)
            if len(kinds) > MAX_KINDS:
                kinds.popitem(last=False)
        return memory
