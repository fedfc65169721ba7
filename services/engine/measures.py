"""The engine's metrics: after each step, at each request's end, and once a second. Knows the names, not the library."""

from __future__ import annotations

from concurrent.futures import Future

from services.common import metric_names as names
from services.common.metrics import Metrics
from services.engine import nvml
from services.engine.engine import Engine
from services.engine.loop import EngineLoop
from services.engine.memory import heap_facts
from services.engine.outputs import EngineStats, RequestUsage, StepFacts


class Measures:
    """Everything that the engine counts. All methods but the sampler run on the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._asked: Future[EngineStats] | None = None

    def begin(self, engine: Engine, loop: EngineLoop) -> None:
        """States what does not change, and has the rest asked for once a second."""
        metrics, memory = self._metrics, engine.memory
        metrics.set(names.MODEL_MEMORY, memory.weight_bytes, "weights")
        metrics.set(names.MODEL_MEMORY, memory.kv_bytes, "kv")
        metrics.set(names.MODEL_MEMORY, memory.peak_activation_bytes, "activations")
        metrics.set(names.KV_TOKENS_PER_BLOCK, memory.block_size)
        metrics.set(names.SEQUENCES_LIMIT, engine.config.max_num_seqs)
        metrics.each_second(lambda: self._ask(loop))
        metrics.each_second(self._allocator)
        nvml.watch(metrics, engine.gpus)

    def step(self, facts: StepFacts) -> None:
        """A step is done; "mixed" ones carried prompts beside decodes."""
        metrics = self._metrics
        kind = "decode" if not facts.prefill_token_count else "mixed" if facts.decode_token_count else "prefill"
        metrics.observe(names.STEP_DURATION, facts.step_ns / 1e9, kind)
        metrics.observe(names.STEP_SEQUENCES, facts.sequence_count)
        if facts.host_gap_ns is not None:
            metrics.observe(names.HOST_GAP, facts.host_gap_ns / 1e9)
        for of, count in (
            ("prefill", facts.prefill_token_count),
            ("decode", facts.decode_token_count),
            ("draft", facts.draft_token_count),
        ):
            if count:
                metrics.observe(names.STEP_TOKENS, count, of)

    def ended(self, usage: RequestUsage) -> None:
        """A request has ended, however."""
        metrics, clock = self._metrics, usage.clock
        queued_ns = (clock.first_scheduled_ns or clock.finished_ns) - clock.arrival_ns
        metrics.observe(names.QUEUE_DURATION, queued_ns / 1e9, clock.queue_reason.value)
        length = names.length_bucket(usage.prompt_token_count)
        metrics.observe_many(names.INTER_TOKEN, [gap_ns / 1e9 for gap_ns in clock.gaps_ns], length)
        for metric, duration_ns in (
            (names.STALLED, clock.stalled_ns),
            (names.PAUSED, clock.paused_ns),
            (names.PREEMPTED, clock.preempted_ns),
        ):
            metrics.add(metric, duration_ns / 1e9)
        metrics.add(names.RECOMPUTED, clock.recomputed_token_count)

    def _allocator(self) -> None:
        """What the allocator holds, as far as it says."""
        facts = heap_facts()
        for state, size in (
            ("reserved", facts.reserved_bytes),
            ("allocated", facts.allocated_bytes),
            ("largest_free", facts.largest_free_bytes),
        ):
            if size:
                self._metrics.set(names.ALLOCATOR_MEMORY, size, state)

    def _ask(self, loop: EngineLoop) -> None:
        """Has the engine's thread tell its state between two steps; while it has not, it is not asked again."""
        if self._asked is None or self._asked.done():
            self._asked = loop.call(Engine.stats)
            self._asked.add_done_callback(self._told)

    def _told(self, answer: Future[EngineStats]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        stats, metrics = answer.result(), self._metrics
        for state, count in (
            ("running", stats.running_count),
            ("waiting", stats.waiting_count),
            ("paused", stats.paused_count),
        ):
            metrics.set(names.SEQUENCES, count, state)
        used = stats.kv_block_total - stats.kv_block_free - stats.kv_block_cached
        for state, count in (("used", used), ("cached", stats.kv_block_cached), ("free", stats.kv_block_free)):
            metrics.set(names.KV_BLOCKS, count, state)
        metrics.set(names.KV_WASTED, stats.kv_wasted_token_count)
        metrics.set(names.BACKLOG, stats.backlog_token_count)
        metrics.total(names.PREEMPTIONS, stats.preemption_count)
        metrics.total(names.DRAFTED, stats.drafted_token_count)
        metrics.total(names.ACCEPTED, stats.accepted_token_count)
        metrics.total(names.PREFIX_QUERIED, stats.prefix_queried_token_count)
        metrics.total(names.PREFIX_HIT, stats.prefix_hit_token_count)
