"""The examination: first what configurations tell, within seconds, then what only loaded models can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import verdict
from .findings import Diagnosis, Findings, Status
from .settings import DoctorSettings
from .surroundings import examine_machine, examine_versions

if TYPE_CHECKING:
    from ..bench.schedule import Progress
    from .checkpoints import Checkpoint
    from .probe import Probe

EMBEDDED_TARGET, EMBEDDED_ASSISTANT = "SmolLM2-135M-Instruct (embedded)", "smollm2-135m-assistant (embedded)"


def examine(settings: DoctorSettings, progress: Progress | None = None) -> Diagnosis:
    """Examines a target, and an assistant for it.

    Nothing is raised for what is wrong with them: that is a finding. After a refusal no weights are loaded.

    Args:
        settings: What to examine.
        progress: Called before each step with what comes next, the steps done and the steps in all (0: not known yet).

    Returns:
        [`Diagnosis`]
    """
    report = progress or (lambda what, done, total: None)
    examination = _Examination(settings, report)
    return examination.run()


class _Examination:
    def __init__(self, settings: DoctorSettings, report: Progress) -> None:
        self.settings = settings
        self.report = report
        self.findings = Findings()
        self.target: Checkpoint | None = None
        self.assistant: Checkpoint | None = None
        self.is_translated = False
        self.probe: Probe | None = None

    def run(self) -> Diagnosis:
        self.report("looking at versions and devices", 0, 0)
        examine_versions(self.findings)
        with self.findings.refusals("checks", "hf_ssd"):  # which a transformers that is too old cannot import
            examine_machine(self.findings)
            names = self._names()
            self._check(*names)
        line = ""
        if self.findings.refused is None:
            with self.findings.refusals("checks", "loading"):
                line = self._measure()
        if self.findings.refused is not None:
            line = verdict.refused(self.findings.refused)
        return Diagnosis(
            target=self.settings.model or EMBEDDED_TARGET,
            assistant=self.settings.assistant or (EMBEDDED_ASSISTANT if self.assistant else None),
            dtype=self.settings.dtype,
            findings=tuple(self.findings.items),
            probe=self.probe,
            verdict=line,
            is_refused=self.findings.refused is not None,
        )

    def _names(self) -> tuple[str, str | None]:
        from ..embedded import assistant_folder, is_target_folder, target_folder

        model, assistant = self.settings.model, self.settings.assistant
        if model is None:
            self.report("preparing the embedded pair (20 s the first time)", 0, 0)
            model = str(target_folder())
        if assistant is None and is_target_folder(model):
            assistant = str(assistant_folder())
        return model, assistant

    def _check(self, model: str, assistant: str | None) -> None:
        """What can be told without weights."""
        from . import checkpoints

        self.report("reading configurations", 0, 0)
        self.target = checkpoints.examine_checkpoint("target", model, self.settings.dtype, self.findings)
        if assistant is not None:
            self.assistant = checkpoints.examine_checkpoint("assistant", assistant, self.settings.dtype, self.findings)
        if self.target is None or (assistant is not None and self.assistant is None):
            return
        checkpoints.examine_target(self.target, self.findings)
        if self.assistant is not None:
            self.is_translated = checkpoints.examine_pair(self.target, self.assistant, self.findings)
        checkpoints.examine_memory(self.target, self.assistant, self.findings)

    def _measure(self) -> str:
        """Loads the models and lets them run; returns the verdict."""
        from . import abilities, loading, probe

        assert self.target is not None
        needs = (self.target.text_config.vocab_size, self.target.num_parameters)
        is_causal = all(each.is_causal for each in (self.target, self.assistant) if each is not None)
        if not is_causal:
            self.findings.add("probe", "not measured", "the built-in prompts are for decoder-only models", Status.NOTE)
        if not (self.settings.probe and is_causal):
            return (
                verdict.unprobed(is_translated=self.is_translated)
                if self.assistant
                else verdict.without_assistant(*needs, None)
            )
        if self.target.tokenizer is None:
            raise ValueError("The probe needs the target's tokenizer, which its folder does not hold. Use --no-probe.")
        self.report("loading the target", 0, 0)
        num_tokens = self.settings.probe_tokens
        if self.assistant is None:
            target = loading.load_target(self.target.name, self.settings.dtype)
            abilities.examine_target_abilities(target, self.findings)
            speed = probe.time_target(target, self.target.tokenizer, num_tokens, self.report)
            return verdict.without_assistant(*needs, speed)
        pair = loading.load_both(self.target.name, self.assistant.name, self.settings.dtype)
        self.report("trying what they can do", 0, 0)
        abilities.examine_target_abilities(pair.target, self.findings)
        abilities.examine_assistant_abilities(pair.assistant, self.findings)
        self.probe = probe.probe_pair(pair, num_tokens, self.report)
        return verdict.measured(self.probe, is_translated=self.is_translated)
