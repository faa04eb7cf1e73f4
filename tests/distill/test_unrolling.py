from __future__ import annotations

import torch
from tiny_models import tiny_llama

from hf_ssd.compat import CACHE_KEY
from hf_ssd.distill.head_start import make_head
from hf_ssd.distill.teacher import pad_texts
from hf_ssd.distill.unrolling import has_room, unrolled_logits
from hf_ssd.eagle3 import Eagle3Head

DEPTH = 4
TEXTS = [([5, 9, 2, 31, 17, 8, 40, 3], 3), ([7, 7, 1, 22, 6], 1), ([9, 4], 1)]


def noisy_head() -> Eagle3Head:
    head = make_head(tiny_llama(num_hidden_layers=3), torch.arange(0, 64, 2), [1, 2, 3]).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return head


def test_it_is_what_each_chain_gives_alone() -> None:
    head, batch = noisy_head(), pad_texts(TEXTS)
    features = torch.randn(*batch["input_ids"].shape, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = unrolled_logits(head, head.config.layer, batch["input_ids"], features, batch["positions"], DEPTH)
        for depth in range(1, DEPTH + 1):
            alone = [
                chain(head, ids, features[row, : position + 1 - depth], position, depth)
                for row, (ids, num_prompt_tokens) in enumerate(TEXTS)
                for position in range(num_prompt_tokens - 1, len(ids) - 1)
                if position >= depth
            ]
            assert len(alone) == has_room(batch["positions"], depth).sum()
            expected = torch.stack(alone) if alone else torch.zeros(0, 32)
            torch.testing.assert_close(found[depth - 1], expected, atol=1e-4, rtol=1e-4)


def chain(head: Eagle3Head, ids: list[int], features: torch.Tensor, position: int, depth: int) -> torch.Tensor:
    """What is drafted after `position` when the target has given `features` only: token by token, with a cache."""
    cache, known = head.new_cache(), len(features)
    output = head(torch.tensor([ids[1 : known + 1]]), features=features[None], **{CACHE_KEY: cache})
    for token in ids[known + 1 : position + 1]:
        output = head(torch.tensor([[token]]), output.hidden_states[:, -1:], **{CACHE_KEY: cache})
    assert cache.get_seq_length() == known + depth - 1
    return output.logits[0, -1]


def test_masks_are_in_the_heads_precision() -> None:
    """Not every kernel of attention takes another, as those on CUDA do not."""
    head, batch = noisy_head().bfloat16(), pad_texts(TEXTS)
    seen = []
    head.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    features = torch.randn(*batch["input_ids"].shape, 96).bfloat16()
    logits = unrolled_logits(head, head.config.layer, batch["input_ids"], features, batch["positions"], 2)
    assert [mask.dtype for mask in seen] == [torch.bfloat16] * 2
    assert all(each.isfinite().all() for each in logits)


def test_later_draft_tokens_teach_the_fusion_too() -> None:
    head, batch = noisy_head(), pad_texts(TEXTS[:1])
    features = torch.randn(1, 8, 96)
    logits = unrolled_logits(head, head.config.layer, batch["input_ids"], features, batch["positions"], 3)
    logits[2].square().sum().backward()
    assert head.fc.weight.grad.norm() > 0
