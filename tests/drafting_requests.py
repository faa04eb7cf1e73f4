"""What a speculator is asked, for tests of the drafting engine."""

from __future__ import annotations

from tiny_models import VOCAB_SIZE, prompt

from hf_ssd import SSDConfig
from hf_ssd.protocol import DraftRequest

PROMPT = tuple(prompt(6)[0].tolist())


def request(config: SSDConfig, **fields: object) -> DraftRequest:
    values = {"prompt_ids": PROMPT, "num_padding": 0, "vocab_size": VOCAB_SIZE, "do_sample": False}
    values |= {"max_new_tokens": 10_000, "takes_trees": True, "processors": (), "seed": 0}
    return DraftRequest(**{**values, "config": config, **fields})
