"""The controls of a race, each with one line on what it does, and what is made of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from hf_ssd import SSDConfig

from .options import DTYPES, DemoOptions
from .race import ALL_CORES, ARMS, SAME_CORES, RaceSettings

# Settings of SSDConfig that are typed: a number, or one of these words.
WORDS: Mapping[str, Mapping[str, Any]] = {
    "num_assistant_tokens": {"auto": "auto"},
    "draft_tree_size": {"auto": "auto", "none": None},
    "cache_budget": {"auto": "auto"},
    "draft_vocab_size": {"auto": "auto", "none": None},
    "target_threads": {"auto": None},
    "assistant_threads": {"auto": None},
}


class Controls:
    """The controls, made where the object is made: inside a gradio layout.

    Args:
        options: What the page was started with.
    """

    def __init__(self, options: DemoOptions) -> None:
        self._components: dict[str, Any] = {}
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            with gr.Row():
                self._run(options)
            gr.Markdown("#### Sampling")
            with gr.Row():
                self._sampling()
            gr.Markdown("#### Drafting")
            with gr.Row():
                self._drafting()
            gr.Markdown("#### Machine")
            with gr.Row():
                self._machine(options)

    @property
    def components(self) -> list[Any]:
        """As inputs of an event, in the order that [`settings`] takes their values in."""
        return list(self._components.values())

    def settings(self, values: Sequence[Any]) -> RaceSettings:
        """What the values of [`components`] ask for.

        Raises:
            ValueError: If one is not allowed; the message is that of `SSDConfig` where it is a setting of SSD.
            TypeError: If one is of the wrong type.
        """
        return race_settings(dict(zip(self._components, values, strict=True)))

    def _add(self, name: str, component: Any) -> None:
        self._components[name] = component

    def _dropdown(self, name: str, choices: Sequence[str], label: str, info: str, value: str | None = None) -> None:
        self._add(
            name,
            gr.Dropdown(
                list(choices),
                value=choices[0] if value is None else value,
                label=label,
                info=info,
                allow_custom_value=name in WORDS or name == "fan_out",
                elem_id=f"setting-{name}",
                min_width=220,
            ),
        )

    def _number(self, name: str, value: float | None, label: str, info: str, **kwargs: Any) -> None:
        self._add(name, gr.Number(value, label=label, info=info, elem_id=f"setting-{name}", min_width=220, **kwargs))

    def _run(self, options: DemoOptions) -> None:
        self._add(
            "arms",
            gr.CheckboxGroup(
                list(ARMS), value=list(ARMS), label="Modes", info="Which ways to generate race.", min_width=220
            ),
        )
        dtypes = [each for each in DTYPES if each == options.dtype or each != "float16"]
        self._dropdown(
            "dtype",
            dtypes,
            "Precision",
            "bfloat16 is fast, but rounds: near-ties may flip. float32 gives the same text.",
            options.dtype,
        )
        self._add(
            "max_new_tokens",
            gr.Slider(
                8,
                options.max_new_tokens,
                value=min(96, options.max_new_tokens),
                step=8,
                label="Answer length",
                info="Most tokens of an answer.",
                elem_id="setting-max_new_tokens",
                min_width=220,
            ),
        )

    def _sampling(self) -> None:
        self._number("temperature", 0.0, "Temperature", "0 is greedy; higher is more random.", step=0.1)
        self._number("top_k", 0, "Top k", "Sample from the k likeliest tokens; 0 is off.", precision=0)
        self._number(
            "top_p", 1.0, "Top p", "Sample from the likeliest tokens of this joint chance; 1 is off.", step=0.05
        )
        self._number("repetition_penalty", 1.0, "Repetition penalty", "Above 1 makes repeated tokens rarer.", step=0.05)
        self._number("seed", 0, "Seed", "The same seed draws the same text, in every mode under coupled.", precision=0)
        self._dropdown(
            "verification",
            ("auto", "coupled", "token", "block"),
            "Verification rule",
            "How sampled drafts are accepted; all are exact, coupled gives all modes one text.",
        )

    def _drafting(self) -> None:
        number_or = "or type a number."
        self._dropdown(
            "num_assistant_tokens",
            ("auto", "2", "4", "8"),
            "Draft length K",
            f"Most draft tokens per round, {number_or}",
        )
        self._dropdown(
            "draft_tree_size",
            ("auto", "none", "8", "16"),
            "Tree size",
            "Most draft tokens where drafts are trees; none drafts chains.",
        )
        self._dropdown(
            "cache_budget", ("auto", "4", "8", "16"), "Budget B", f"Outcomes prepared for per round, {number_or}"
        )
        self._dropdown(
            "fan_out",
            ("per_instance", "geometric", "uniform"),
            "Fan-out",
            "Which outcomes get the budget; or numbers per accepted length, as 4,2,1.",
        )
        self._number(
            "saguaro_coefficient",
            1.0,
            "Saguaro C",
            "Below 1: fewer accepted tokens, more hits when sampling.",
            step=0.05,
        )
        self._dropdown(
            "backup",
            ("auto", "jit", "ngram", "none"),
            "Backup",
            "What answers a miss: drafting just in time, a copy of earlier text at once, or nothing.",
        )
        self._dropdown(
            "draft_vocab_size",
            ("auto", "none", "4096", "16384"),
            "Draft vocabulary",
            "Tokens that drafts are chosen from; none takes all.",
        )

    def _machine(self, options: DemoOptions) -> None:
        for name, label, value in (
            ("target_threads", "Target threads", options.target_threads),
            ("assistant_threads", "Assistant threads", options.assistant_threads),
        ):
            self._dropdown(
                name,
                ("auto", "1", "2", "4"),
                label,
                "CPU threads beside each other; auto splits the cores.",
                "auto" if value is None else str(value),
            )
        self._dropdown(
            "ar_threads",
            (SAME_CORES, ALL_CORES),
            "AR runs on",
            "As in the paper, or on the assistant's cores too, which it has no use for otherwise.",
        )


def race_settings(values: Mapping[str, Any]) -> RaceSettings:
    """What the controls ask for.

    Args:
        values: By the names of the controls.

    Raises:
        ValueError: If a value is not allowed.
        TypeError: If a value is of the wrong type.
    """
    arms = tuple(name for name in ARMS if name in values["arms"])
    if not arms:
        raise ValueError("`modes` must hold at least one of AR, SD and SSD, but is empty. Tick one.")
    config = {name: _number_or_word(name, values[name]) for name in WORDS}
    config |= {name: values[name] for name in ("verification", "saguaro_coefficient", "seed", "backup")}
    config["fan_out"] = _fan_out(values["fan_out"])
    return RaceSettings(
        arms=arms,
        ssd_config=SSDConfig.from_dict(config),
        sampling=_sampling(values),
        max_new_tokens=int(values["max_new_tokens"]),
        dtype=values["dtype"],
        ar_threads=values["ar_threads"],
    )


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        if values[name] is None:
            raise TypeError(f"`{name}` must be a number, but is empty.")
    if values["temperature"] < 0:
        raise ValueError(f"`temperature` must be 0 or more, but got {values['temperature']}. 0 is greedy.")
    if not 0 < values["top_p"] <= 1:
        raise ValueError(f"`top_p` must lie above 0 and be at most 1, but got {values['top_p']}. 1 is off.")
    if values["top_k"] < 0:
        raise ValueError(f"`top_k` must be 0 or more, but got {values['top_k']}. 0 is off.")
    if values["repetition_penalty"] <= 0:
        raise ValueError(f"`repetition_penalty` must be above 0, but got {values['repetition_penalty']}. 1 is off.")
    penalty = {} if values["repetition_penalty"] == 1 else {"repetition_penalty": float(values["repetition_penalty"])}
    if not values["temperature"]:
        return penalty
    return {
        "temperature": float(values["temperature"]),
        "top_k": int(values["top_k"]),
        "top_p": float(values["top_p"]),
        **penalty,
    }


def _number_or_word(name: str, text: Any) -> Any:
    text = str(text).strip()
    if text in WORDS[name]:
        return WORDS[name][text]
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"`{name}` must be a whole number or one of {sorted(WORDS[name])}, but got {text!r}."
        ) from None


def _fan_out(text: Any) -> Any:
    parts = str(text).strip()
    if not parts or not all(part.strip().isdecimal() for part in parts.split(",")):
        return parts  # one of the names, or for SSDConfig to refuse
    return tuple(int(part) for part in parts.split(","))
