"""The model card, written from what was measured."""

from __future__ import annotations

from pathlib import Path

from ..bench.markdown import number
from .results import DistillResult
from .settings import SELF


def write_card(result: DistillResult) -> str:
    """The card of an assistant, in Markdown with the hub's front matter."""
    return (
        "\n\n".join(
            [
                _front_matter(result),
                "# An assistant for " + result.target,
                f"A draft model for `{result.target}`, made by `hf-ssd distill`. It guesses the next tokens of that "
                f"one model, so that {_readers(result)} can verify several of them at once. The text stays the "
                "target's. It is not meant to be used on its own.",
                "## Model",
                _model(result),
                "## Training",
                _training(result),
                "## How well it guesses",
                write_figures(result),
                "## Use",
                _usage(result),
            ]
        )
        + "\n"
    )


def write_figures(result: DistillResult) -> str:
    """The figures as tables, with what they mean."""
    found = result.agreement
    temperatures = sorted(found.token_rule)
    greedy = f"{found.agreement:.3f}"
    acceptance = [
        ["token rule", greedy, *(f"{found.token_rule[t]:.3f}" for t in temperatures)],
        ["coupled rule", greedy, *(f"{found.coupled_rule[t]:.3f}" for t in temperatures)],
    ]
    rounds = [
        [f"{t:g}", number(each.tokens_per_round), number(each.acceptance), number(each.hit_rate)]
        for t, each in sorted(result.rounds.items())
    ]
    parts = [
        f"On {found.num_tokens:,} tokens that {_held_out(result)}: the chance that a draft token is accepted, "
        "given the right tokens before it. At temperature 0 it is the share of tokens on which both models agree.",
        _table(["acceptance at temperature", "0", *(f"{t:g}" for t in temperatures)], acceptance),
        *_deeper(result),
        f"Before training the agreement was {result.before.agreement:.3f} and the mean divergence "
        f"{result.before.kl:.2f} nats, after it {found.kl:.2f} nats.",
        f"What SSD makes of it, on {next(iter(result.rounds.values())).num_prompts} prompts that it was not trained on "
        "(tokens per round depend on the machine too):",
        _table(["temperature", "tokens per round", "acceptance", "hit rate"], rounds),
    ]
    parts += [
        f"At temperature {t:g} SSD went on without the assistant, so these are not its figures: {each.degraded}"
        for t, each in sorted(result.rounds.items())
        if each.degraded is not None
    ]
    return "\n\n".join(parts)


def _held_out(result: DistillResult) -> str:
    if result.held_out is None:
        return "were kept from training"
    return f"the target answered to prompts of `{result.held_out}`, which it was not trained on"


def _deeper(result: DistillResult) -> list[str]:
    """How acceptance falls along a draft, where it does."""
    if not result.deeper:
        return []
    temperatures = sorted(result.agreement.token_rule)
    rows, tokens, chance = [], 1.0, 1.0
    for depth, each in enumerate((result.agreement, *result.deeper), start=1):
        chance *= each.agreement
        tokens += chance
        rules = [f"{each.token_rule[t]:.3f}" for t in temperatures]
        rows.append([str(depth), f"{each.agreement:.3f}", *rules, f"{tokens:.2f}"])
    headings = ["draft token", "at temperature 0", *(f"at {t:g}" for t in temperatures), "tokens per round, greedy"]
    return [
        "It guesses worse from one draft token to the next, as the target's states get older. Given that those before "
        "were right, a draft token is accepted (token rule) with the chance below. Drafting so many in a chain gives "
        "the tokens in the last column for each forward of the target.",
        _table(headings, rows),
    ]


def _readers(result: DistillResult) -> str:
    if result.kind == "eagle3":
        return "`hf_ssd` and other programs that read EAGLE-3 heads"
    return "assisted generation and `hf_ssd`"


def _front_matter(result: DistillResult) -> str:
    # The hub knows a target by its name there; a folder is nobody else's business.
    base = [] if Path(result.target).exists() else [f"base_model: {result.target}"]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            *base,
            "tags:",
            "- speculative-decoding",
            "- assisted-generation",
            "- distillation",
            "- draft-model",
            "---",
        ]
    )


def _model(result: DistillResult) -> str:
    first = (
        f"- Type `{result.model_type}`: {result.layers[0]} decoder layers of width {result.width[0]}; the target has "
        f"{result.layers[1]} of width {result.width[1]}."
    )
    if result.kind == "eagle3":
        first = (
            f"- An EAGLE-3 head (arXiv 2503.01840) in the form of vllm-project's `speculators`: one layer of type "
            f"`{result.model_type}` and width {result.width[0]} that reads states of three of the target's "
            f"{result.layers[1]} layers, of width {result.width[1]}. It drafts {result.draft_vocab_size:,} tokens."
        )
    return "\n".join(
        [
            first,
            f"- {result.own_parameters:,} parameters were trained. {_shared(result)}",
            f"- Vocabulary and tokenizer are the target's. Weights are {result.dtype}.",
            "- `frequent_tokens.json` lists the token ids that the target says most often, for the draft vocabulary.",
            "- The target's licence holds for it too.",
        ]
    )


def _shared(result: DistillResult) -> str:
    shares = {"token embedding": result.shares_embedding, "output projection": result.shares_projection}
    stored = " The embedding is not stored again." if result.kind == "eagle3" and result.shares_embedding else ""
    if len(set(shares.values())) == 1:
        whose = "the target's, unchanged" if result.shares_embedding else "its own"
        return f"Token embedding and output projection are {whose}.{stored}"
    same, own = sorted(shares, key=lambda name: not shares[name])
    return f"The {same} is the target's, unchanged; the {own} is its own.{stored}"


def _training(result: DistillResult) -> str:
    own = {"model": "the target's own first layers", "eagle3": "a linear regression of the target's next state"}
    start = f"the assistant in `{result.init_from}`" if result.init_from else own[result.kind]
    how = ", its own states fed back for later draft tokens" if result.kind == "eagle3" else ""
    sources = ", ".join("text that the target wrote itself" if name == SELF else f"`{name}`" for name in result.data)
    minutes = ", ".join(f"{name} {value:.1f} minutes" for name, value in result.minutes.items())
    return (
        f"It began as {start} and was trained by knowledge distillation: forward Kullback-Leibler divergence from the "
        f"target's distribution{how}. Data: {sources}; {result.num_texts:,} texts with {result.num_tokens:,} tokens to "
        f"be learnt, of which about {result.num_seen:,} were seen in {result.num_steps:,} steps, repeats counted. "
        f"Time: {minutes}."
    )


def _usage(result: DistillResult) -> str:
    return f"""```python
from hf_ssd import load_pair

model, assistant, tokenizer = load_pair("{result.target}", "{result.out}")
```

```bash
hf-ssd compare --target {result.target} --assistant {result.out}
```"""


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
