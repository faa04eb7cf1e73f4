"""Draft steps as CUDA graphs: launching a step's kernels one by one from Python takes longer than running them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .. import tree_attention
from ..compat import CACHE_KEY
from ..protocol import DraftRequest, EncoderInputs
from .assistant import AssistantModel
from .reading import make_reading
from .static_slabs import ATTENTION, RowCache, Slabs, StaticCache, make_slabs, register_attention
from .tree_cache import SlabCache

logger = logging.get_logger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 48)  # tokens of a step; fewer are filled up
NUM_SPARE = 256  # entries that branches may take beside the row itself
CAPACITIES = (1024, 2048, 4096, 8192, 16_384)  # entries of a cache; longer rows are drafted without graphs

Mask = torch.Tensor | dict[str, torch.Tensor]


class GraphedAssistant(AssistantModel):
    """An [`AssistantModel`] whose small forwards have fixed shapes and addresses, so that they can be CUDA graphs.

    A step of up to 48 tokens is filled up to a bucket; keys and values go to given slots of slabs of a fixed capacity
    (those of the filling to a scratch slot, the last), and attention is over the whole slab through a full mask. Longer
    forwards, and those of rows that have outgrown the slabs, are the parent's. Graphs are only made in `prepare`.

    Args:
        model: As for [`AssistantModel`].
        capture: Whether to make graphs. Otherwise steps run the same code without them, as tests on the CPU do.
    """

    def __init__(self, model: PreTrainedModel, *, capture: bool = True) -> None:
        self._stages: list[_Stage] = []  # by capacity
        self._first: _Stage | None = None  # where the next row begins
        super().__init__(model)
        self._is_static = self.takes_trees and self._reader is None
        register_attention()
        self._graphs = _GraphMaker(self.device) if capture else None

    @torch.inference_mode()
    def prepare(self, request: DraftRequest) -> None:
        """Makes what a row needs that is not there yet: slabs and graphs of its capacities.

        While it runs, nothing else should use the device's default random generator (torch allows no draws from it
        during a capture), so it may take place beside another process's forward, not beside another thread's.

        Effects: falls back to the parent for good where the model does not allow static steps.
        """
        prompt = make_reading(request.prompt_ids[request.num_padding :], request.translation).tokens
        least = len(prompt) + NUM_SPARE
        most = least + min(request.max_new_tokens, self.max_length or request.max_new_tokens)
        limits = [capacity for capacity in CAPACITIES if capacity >= least]
        needed = [limit for i, limit in enumerate(limits) if i == 0 or limits[i - 1] < most]
        self._first = None
        try:
            for capacity in needed if self._is_static else ():
                if all(stage.capacity != capacity for stage in self._stages):
                    self._add_stage(capacity)
        except Exception as error:  # out of memory, or whatever a model's own code may raise
            self._give_up(repr(error))
        self._first = next((stage for stage in self._stages if stage.capacity in needed[:1]), None)

    def new_cache(self, encoder: EncoderInputs | None = None) -> SlabCache:
        """An empty cache, on the slabs of the one before if `prepare` was called."""
        return super().new_cache(encoder) if self._first is None else RowCache(self._first.slabs)

    def runs_on(self, cache: SlabCache) -> bool:
        """As in [`AssistantModel`]: graphs have slabs of their own."""
        return isinstance(cache, RowCache) or self._first is None

    def forward(
        self,
        tokens: Sequence[int],
        cache: SlabCache,
        positions: Sequence[int] | None = None,
        mask: Mask | None = None,
        num_hidden: int | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in [`AssistantModel`]."""
        stage = self._stage_for(cache, len(tokens)) if states is None else None
        if stage is None:
            return super().forward(tokens, cache, positions, mask, num_hidden, states)
        assert isinstance(cache, RowCache)
        start = cache.get_seq_length()
        end = start + len(tokens)
        positions = range(start, end) if positions is None else positions
        if mask is None:
            mask = self.mask.chain(start, len(tokens))
        hidden = stage.step(len(tokens))(self._known(tokens), positions, range(start, end), mask)
        cache.show(end)
        # A copy: the next step writes to the same place.
        return hidden[-len(tokens) if num_hidden is None else -num_hidden :].clone()

    def _stage_for(self, cache: SlabCache, num_tokens: int) -> _Stage | None:
        """The stage that a forward runs on, the cache moved there; `None` if it is none that can."""
        if not isinstance(cache, RowCache) or num_tokens > BUCKETS[-1]:
            return None
        num_slots = cache.get_seq_length() + num_tokens + 1  # the scratch slot
        roomy = [stage for stage in self._stages if stage.capacity >= num_slots]
        # Where it is if that will do: between two stages, back and forth would cost more than a larger one.
        stage = next((stage for stage in roomy if cache.is_on(stage.slabs)), roomy[0] if roomy else None)
        if stage is not None and not cache.is_on(stage.slabs):
            cache.move(stage.slabs)
        return stage

    def _add_stage(self, capacity: int) -> None:
        like = super().new_cache()
        tokens = self._some_tokens(0, 8)
        expected = super().forward(tokens, like)
        slabs = make_slabs(like, capacity)
        masks = [torch.zeros(1, 1, BUCKETS[-1], capacity, dtype=self.dtype, device=self.device)]
        kinds = sorted(self.mask.layer_types) or [""]
        masks += [torch.zeros_like(masks[0]) for _ in kinds[1:]]
        steps = {bucket: _Step(self._call, slabs, dict(zip(kinds, masks, strict=True)), bucket) for bucket in BUCKETS}
        if self._graphs is not None:
            for step in reversed(steps.values()):  # the largest first: the others fit into its memory
                step.capture(self._graphs)
        stage = _Stage(capacity, slabs, steps)
        self._stages = sorted([*self._stages, stage], key=lambda stage: stage.capacity)
        cache = RowCache(slabs)
        super().forward(tokens[:5], cache)
        found = self.forward(tokens[5:], cache).float()
        tolerance = (1e-3 if self.dtype == torch.float32 else 0.05) * expected.float().abs().max()
        if not (found - expected[5:].float()).abs().max() <= tolerance:
            raise ValueError("a static step gives something else than a plain one")

    def _give_up(self, cause: str) -> None:
        logger.info(f"The assistant's steps are not run as graphs: {cause}")
        self._is_static = False
        self._stages = []

    def _call(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: Mask, cache: StaticCache
    ) -> torch.Tensor:
        """Hidden states of shape `(num_tokens, hidden_size)`, or logits where those stand in for them."""
        kwargs = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask, CACHE_KEY: cache}
        with tree_attention.use(self.config, ATTENTION):
            if self._decoder is not None:
                return self._decoder(**kwargs, use_cache=True, return_dict=True).last_hidden_state[0]
            return self.model(**kwargs, use_cache=True, return_dict=True).logits[0]


class _Stage:
    """Slabs of one capacity and the steps on them."""

    def __init__(self, capacity: int, slabs: Slabs, steps: dict[int, _Step]) -> None:
        self.capacity = capacity
        self.slabs = slabs
        self._steps = steps

    def step(self, num_tokens: int) -> _Step:
        return self._steps[min(bucket for bucket in self._steps if bucket >= num_tokens)]


class _Step:
    """A forward of `bucket` tokens, its inputs at fixed addresses.

    Args:
        call: Runs the model.
        slabs: Read and written.
        masks: Of shape `(1, 1, largest bucket, capacity)`, by layer type, or under "" where all layers share one.
        bucket: Number of tokens.
    """

    def __init__(
        self,
        call: Callable[[torch.Tensor, torch.Tensor, Mask, StaticCache], torch.Tensor],
        slabs: Slabs,
        masks: dict[str, torch.Tensor],
        bucket: int,
    ) -> None:
        self._bucket = bucket
        self._scratch = slabs[0][0].shape[-2] - 1
        self._masks = {kind: mask[..., :bucket, :] for kind, mask in masks.items()}
        device = slabs[0][0].device
        self._inputs = torch.full((3, bucket), self._scratch, dtype=torch.long, device=device)
        tokens, positions, slots = self._inputs[:1], self._inputs[1:2], self._inputs[2]
        self._inputs[:2] = 0
        cache = StaticCache(slabs, slots)
        mask = self._masks.get("", self._masks)
        self._run = lambda: call(tokens, positions, mask, cache)
        self._replay: Callable[[], None] | None = None

    def capture(self, maker: _GraphMaker) -> None:
        """From now on the step is a graph."""
        self._replay, self._output = maker.capture(self._run)

    def __call__(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], mask: Mask
    ) -> torch.Tensor:
        """Hidden states of the tokens; valid until the next step."""
        self._load(tokens, positions, slots, mask)
        if self._replay is None:
            return self._run()[: len(tokens)]
        self._replay()
        return self._output[: len(tokens)]

    def _load(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], mask: Mask) -> None:
        num_tokens, end = len(tokens), slots[-1] + 1
        filling = [0] * (self._bucket - num_tokens)
        scratch = [self._scratch] * len(filling)
        self._inputs.copy_(
            torch.tensor([[*tokens, *filling], [*positions, *filling], [*slots, *scratch]], device="cpu")
        )
        for kind, whole in self._masks.items():
            given = mask[kind] if isinstance(mask, dict) else mask
            first = end - given.shape[-1]  # a mask may leave out what all tokens see
            whole.fill_(float("-inf"))
            whole[..., :num_tokens, :first] = 0.0
            whole[..., :num_tokens, first:end] = given
            whole[..., num_tokens:, :] = 0.0  # a row that sees nothing would be undefined, and so would its entries


class _GraphMaker:
    """Captures functions as CUDA graphs. They share memory: one runs at a time, its output is copied before the next.

    Args:
        device: A CUDA device.
    """

    # One capture at a time is what torch allows in a process.
    _lock = threading.Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._is_tried = False

    def capture(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """What replays `function`, and its output, which each replay writes.

        Raises:
            RuntimeError: If it cannot be captured.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # The outer stream context also restores the caller's stream after a capture that failed.
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries choose kernels and get memory at first
                function()
            self._try(function)
            graph = torch.cuda.CUDAGraph()
            # What other threads do to the device meanwhile is their affair: the mode is not "global".
            capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
            with _spare_generator(self._device), capture:
                output = function()
        current.wait_stream(self._stream)
        return graph.replay, output

    def _try(self, function: Callable[[], torch.Tensor]) -> None:
        """Raises where the function waits for the device, before a capture fails by it: that leaves traces."""
        if self._is_tried:
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self._is_tried = True


@contextmanager
def _spare_generator(device: torch.device) -> Iterator[None]:
    """Gives the device's default generator another state for the time of a capture.

    A capture registers the state, and one that fails leaves it registered: each later draw would be an error.
    """
    generator = torch.cuda.default_generators[device.index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)
