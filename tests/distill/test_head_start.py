from __future__ import annotations

import pytest
import torch
from tiny_models import prompt, tiny_llama
from tiny_zoo import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

from hf_ssd.distill.head_kind import HeadStudent
from hf_ssd.distill.head_start import calibrate, draft_tokens, make_head, regress
from hf_ssd.distill.measuring import measure
from hf_ssd.distill.projection import Projection
from hf_ssd.distill.teacher import Teacher, pad_texts
from hf_ssd.eagle3 import capture_features, default_layer_ids

LAYERS = [1, 2, 2]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(num_hidden_layers=3).requires_grad_(False)


@pytest.fixture(scope="module")
def teacher(target) -> Teacher:
    return Teacher(target, Projection(target), LAYERS)


@pytest.fixture(scope="module")
def batches(target) -> list[dict[str, torch.Tensor]]:
    """What the target says greedily, after many prompts."""
    prompts = torch.cat([prompt(5, seed=seed) for seed in range(96)])
    texts = target.generate(prompts, max_new_tokens=24, do_sample=False).tolist()
    return [pad_texts([(ids, 5) for ids in texts[start : start + 24]]) for start in range(0, 96, 24)]


def test_the_draft_vocabulary_is_what_is_frequent_then_the_lowest_ids() -> None:
    assert draft_tokens([9, 4, 30], 2, 50).tolist() == [4, 9]
    assert draft_tokens([9, 4, 30], 5, 50).tolist() == [0, 1, 4, 9, 30]


def test_it_begins_as_the_regression(target, teacher, batches) -> None:
    head = make_head(target, torch.arange(64), LAYERS).eval()
    regress(head, teacher, batches)
    batch = batches[0]
    ids, at = batch["input_ids"][:, 1:], batch["positions"][:, 1:]
    outputs = teacher.outputs(batch)
    with torch.no_grad():
        states = head(ids, features=outputs.features[:, :-1]).hidden_states[at]
        fused = head.fuse(outputs.features[:, :-1][at])
    # Of four heads of attention one adds what the embedding gives, with a quarter of its rank, and it sees a little of
    # other tokens.
    expected = regression(target, teacher, batches)[: len(states)]
    assert (states - expected).norm() < 0.7 * (fused - expected).norm()


def regression(target, teacher, batches) -> torch.Tensor:
    """The target's next states, each dimension scaled to 1, as a regression in double precision gives them."""
    rows, states = [], []
    for batch in batches:
        at, outputs = batch["positions"][:, 1:], teacher.outputs(batch)
        features = outputs.features[:, :-1][at].double().unflatten(-1, (3, -1))
        embeddings = target.get_input_embeddings().weight[batch["input_ids"][:, 1:][at]].double()
        parts = [*features.unbind(1), embeddings]
        rows.append(torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() for part in parts], dim=-1))
        states.append(outputs.hidden.double())
    inputs, wanted = torch.cat(rows), torch.cat(states)
    gram = inputs.T @ inputs
    gram += 0.01 * gram.diagonal().mean() * torch.eye(len(gram))
    return (inputs @ torch.linalg.solve(gram, inputs.T @ (wanted / wanted.square().mean(0).sqrt()))).float()


def test_it_knows_more_than_before_and_is_as_sure_as_it_should_be(target, teacher, batches) -> None:
    def figures(head):
        student = HeadStudent(head.eval(), teacher, 2)
        return measure(batches, lambda batch: student.logits(head, batch))

    head = make_head(target, torch.arange(64), LAYERS)
    nothing, _ = figures(head)
    regress(head, teacher, batches)
    regressed, later = figures(head)
    calibrate(HeadStudent(head, teacher, 2), batches[0])
    calibrated, _ = figures(head)
    assert regressed.agreement > 3 * nothing.agreement
    assert later.agreement > nothing.agreement
    assert calibrated.agreement == pytest.approx(regressed.agreement, abs=0.01)
    assert calibrated.kl <= regressed.kl


def test_texts_that_are_shorter_than_drafts_are_left_out(target, teacher) -> None:
    head = make_head(target, torch.arange(64), LAYERS)
    student, batch = HeadStudent(head.eval(), teacher, 6), pad_texts([([5, 9, 2, 31, 17], 2), ([7, 4, 8], 1)])
    loss = student.loss(head, batch)
    loss.backward()
    assert loss.isfinite()
    assert head.fc.weight.grad.isfinite().all()
    found = measure([batch], lambda batch: student.logits(head, batch))
    assert [each.num_tokens for each in found] == [4, 2, 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_targets_of_other_families_get_a_head_too(name: str) -> None:
    model_type, settings = FAMILIES[name]
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    ids = default_layer_ids(target.config.num_hidden_layers)
    head = make_head(target, torch.arange(16), ids).eval()
    with torch.no_grad(), capture_features(target, ids) as captured:
        target(prompt(6))
        logits = head(prompt(6)[:, 1:], features=captured()[:, :-1]).logits
    assert logits.shape == (1, 5, 16)
    assert logits.isfinite().all()
