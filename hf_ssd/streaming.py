"""A streamer that hears of rounds."""

from __future__ import annotations

from abc import abstractmethod

from transformers.generation.streamers import BaseStreamer

from .types import RoundStats


class RoundStreamer(BaseStreamer):
    """A streamer that is also told what each round was, so that live figures and the origin of tokens can be shown.

    `generate()` calls `put` with the prompt, then with each token as soon as it is final, as for any streamer. The
    first token comes from the prefill and belongs to no round. After the tokens of a round comes `put_round` with its
    figures, whose `num_emitted` says how many tokens those were. Both run in the thread that generates, and the target
    waits for them: hand over what they get, and draw elsewhere.

    Where transformers' own decoding runs (greedy `mode="ar"`) there are no rounds, and `put_round` is not called.
    """

    @abstractmethod
    def put_round(self, stats: RoundStats) -> None:
        """Takes the figures of the round whose tokens were put last."""
