"""How a head begins: as a linear regression of the target's next state, with which training starts well on its way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..eagle3 import Eagle3Config, Eagle3Head
from .kinds import Student
from .measuring import Batch
from .teacher import Teacher
from .unrolling import has_room

SELF_SHARE = 3  # of the heads of attention, one in so many looks at its own token at first
SELF_SCORE = 16.0  # before the softmax, where a token meets itself
RIDGE = 1e-2  # of the mean variance of the inputs
FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MAX_TOKENS = 100_000  # to regress on; several times the number of inputs, for targets of up to 4096 dimensions


def draft_tokens(frequent: Sequence[int], size: int, vocab_size: int) -> torch.Tensor:
    """The draft vocabulary: the most frequent tokens, filled up with the lowest ids; in ascending order."""
    known = set(frequent)
    tokens = [*frequent, *(token for token in range(vocab_size) if token not in known)]
    return torch.tensor(sorted(tokens[:size]))


def make_head(
    target: PreTrainedModel, tokens: torch.Tensor, layer_ids: Sequence[int], *, depth: int = 4, seed: int = 0
) -> Eagle3Head:
    """A head in float32 with the target's embedding and output projection, and a layer of noise that changes nothing.

    Args:
        target: What it is to draft for.
        tokens: Its draft vocabulary.
        layer_ids: Of which layers it reads the target's states.
        depth: How many tokens programs that read `speculators_config` shall draft.
        seed: Of the noise.
    """
    config = Eagle3Config(
        transformer_layer_config=_layer(target.config.get_text_config(decoder=True)),
        draft_vocab_size=len(tokens),
        fc_norm=True,  # states of high layers are many times larger
        eagle_aux_hidden_state_layer_ids=list(layer_ids),
        speculators_config=_speculators_config(target, depth),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config)
    head.set_draft_tokens(tokens)
    head.share_embedding(target)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[tokens])
        head.layer.self_attn.o_proj.weight.zero_()
        head.layer.mlp.down_proj.weight.zero_()
    return head


@torch.no_grad()
def regress(head: Eagle3Head, teacher: Teacher, batches: Iterable[Batch]) -> None:
    r"""Sets a head to the ridge regression of the target's last state on what the head is given.

    With the features \\(f\\) of a token and the embedding \\(e\\) of the next one, the fusion becomes \\(A\\) and a
    third of the heads of attention \\(B\\) of the best \\(A f + B e\\), as far as \\(B\\) fits in: these heads look at
    their own token.

    Effects: the head's fusion, attention and final norm are set.

    Args:
        head: As [`make_head`] makes it.
        teacher: Says what the target thinks.
        batches: Texts.
    """
    gram, products, energy = _moments(head, teacher, batches)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    scale = energy.sqrt().clamp_min(1e-6)
    solution = torch.linalg.solve(gram, products / scale).T
    head.norm.weight.copy_(scale * teacher.projection.scale)
    head.fc.weight.copy_(solution[:, : head.config.feature_size])
    _look_at_own_token(head, solution[:, head.config.feature_size :])


@torch.no_grad()
def calibrate(student: Student, batch: Batch) -> None:
    """Makes a student that is surer than it should be as sure as it should be.

    Effects: the final norm of its head is scaled by the factor that gives the least loss.

    Args:
        student: Of a head.
        batch: Texts to choose by.
    """
    weight = student.model.norm.weight
    scale = weight.clone()

    def loss(factor: float) -> float:
        weight.copy_(factor * scale)
        return float(student.loss(student.model, batch))

    weight.copy_(min(FACTORS, key=loss) * scale)


def _moments(
    head: Eagle3Head, teacher: Teacher, batches: Iterable[Batch]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Second moments of what the head is given at each position: with itself, and with the state the target has there.

    The third is the mean square of each dimension of these states.
    """
    num_tokens = 0
    sums = [torch.zeros((), device=head.device)] * 3
    for batch in batches:
        outputs = teacher.outputs(batch)
        assert outputs.features is not None
        at = batch["positions"].clone()
        at[:, 0] = False  # no token before
        features = outputs.features[at.roll(-1, dims=1)].float().chunk(head.config.num_features, dim=-1)
        embeddings = head.layer.input_layernorm(head.embed_tokens(batch["input_ids"][at]))
        normed = [norm(part) for norm, part in zip(head.fc_norm, features, strict=True)]
        inputs = torch.cat([*normed, embeddings], dim=-1)
        states = outputs.hidden[has_room(batch["positions"], 1)].float()
        found = inputs.T @ inputs, inputs.T @ states, states.square().sum(dim=0)
        sums = [total + each for total, each in zip(sums, found, strict=True)]
        num_tokens += len(inputs)
        if num_tokens >= MAX_TOKENS:
            break
    gram, products, energy = sums
    return gram, products, energy / num_tokens


def _look_at_own_token(head: Eagle3Head, map_: torch.Tensor) -> None:
    """Lets some heads of attention add `map_ @ e` to the state, `e` the normed embedding of the token itself."""
    attention, config = head.layer.self_attn, head.config.layer
    size, hidden_size = attention.head_dim, config.hidden_size
    count = max(1, config.num_attention_heads // SELF_SHARE)
    left, values, right = torch.linalg.svd(map_, full_matrices=False)
    rank = min(count * size, len(values))
    # Queries that are the keys: a token is most like itself.
    alike = torch.linalg.qr(attention.q_proj.weight[: count * size, :hidden_size].T).Q.T
    alike *= (SELF_SCORE / size**0.5) ** 0.5
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[: count * size] = 0.0
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[: len(alike), :hidden_size] = alike
    root = values[:rank].sqrt()
    attention.v_proj.weight[:rank, :hidden_size] = root[:, None] * right[:rank]
    attention.o_proj.weight[:, :rank] = left[:, :rank] * root


def _layer(target: PreTrainedConfig) -> dict[str, Any]:
    """A Llama's layer of the target's size. Published heads have that for targets of other families too."""
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    layer = {name: getattr(target, name) for name in sizes if getattr(target, name, None) is not None}
    rope = getattr(target, "rope_parameters", None) or {}
    return {
        **layer,
        "model_type": "llama",
        "num_hidden_layers": 1,
        # A token's embedding gets into the head's state through the values alone, and with few of them only in part.
        "num_key_value_heads": target.num_attention_heads,
        "intermediate_size": getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
        **({"rope_parameters": dict(rope)} if "rope_theta" in rope else {}),
    }


def _speculators_config(target: PreTrainedModel, depth: int) -> dict[str, Any]:
    """What `speculators` and vLLM want to know: the target, and how many tokens to draft."""
    method = {"proposal_type": "greedy", "speculative_tokens": depth, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target.name_or_path, "architectures": [type(target).__name__]},
    }
