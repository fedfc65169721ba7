"""The engine without a wire: requests in, tokens out, one step at a time, on the caller's thread.

Knows token ids; nothing of text, tenants, gRPC or threads (see ``loop``). ``step`` is the whole plot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from services.engine.ahead import Flight, Lookahead
from services.engine.block_pool import BlockPool
from services.engine.computing import make_decoder, make_sampler, record_graphs
from services.engine.config import EngineConfig
from services.engine.faults import FaultGuard
from services.engine.gpu_memory import BareRunner, measure, pool_bytes
from services.engine.limits import EngineLimits, fit_request
from services.engine.memory import MemoryLedger, ResidentMemory, fitting_blocks, kv_bytes_per_token, kv_formula
from services.engine.model.config import ModelConfig, load_config
from services.engine.model.shard import Shard
from services.engine.outputs import EngineStats, RequestOutput, RequestUsage, StepFacts, StepMember, StepOutput
from services.engine.placement import Placement
from services.engine.plan import Sampled
from services.engine.prefix_cache import PrefixCache
from services.engine.request import FinishReason, Request, RequestRefused
from services.engine.runner import ModelRunner, allocate_kv
from services.engine.scheduler import Scheduler
from services.engine.step import ScheduledStep
from services.engine.warm_up import ActivationMeter, largest_step

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """One model, one KV pool, one scheduler. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        runner: ModelRunner,
        limits: EngineLimits,
        memory: MemoryLedger,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Put the parts together; ``load`` makes them."""
        self.config = config
        self.model = model
        self.limits = limits
        self.memory = memory
        self._runner = runner
        self._guard = FaultGuard(runner, config.block_size)
        self._clock = clock
        self._computed_ns: int | None = None  # when the last step's computing ended; None: nothing to do since
        self._pool = BlockPool(memory.block_count)
        self._cache = PrefixCache(
            self._pool, config.block_size, model=str(config.model_dir), enabled=config.prefix_cache
        )
        self._scheduler = Scheduler(
            config.scheduling(),
            self._pool,
            self._cache,
            limits.eos_token_ids,
            clock,
        )
        self._steps = Lookahead(self._scheduler, self._launch, ahead=config.plans_ahead(runner.kv[0].device.type))

    @classmethod
    def load(cls, config: EngineConfig, clock: Callable[[], int] = time.monotonic_ns) -> Engine:
        """Read a model directory and allocate the KV pool.

        Raises:
            ModelError: the directory cannot be served; names the file and what was expected.
            ValueError: what is asked for is not possible here; says why.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = load_config(config.model_dir)
        context = min(model.context_length, config.max_model_len or model.context_length)
        placement = Placement.choose(config, model)
        decoder, kernels = make_decoder(config, model, placement, context)
        part, kv_dtype = Shard(0, config.tensor_parallel).of(model), placement.kv_dtype
        sampler = make_sampler(config, model, placement)
        per_token = kv_bytes_per_token(part, kv_dtype)
        memory_bytes = config.kv_memory_bytes
        if placement.device.type == "cuda" and not config.kv_blocks and not memory_bytes:
            bare = BareRunner(decoder, kernels, sampler, placement)
            memory_bytes = pool_bytes(measure(part, context, config, bare), config.gpu_memory_utilization)
        block_count = config.kv_blocks or fitting_blocks(
            block_bytes=per_token * config.block_size,
            memory_bytes=memory_bytes,
            utilization=config.kv_memory_utilization,
            most_useful=2 * config.max_num_seqs * -(-context // config.block_size),
        )
        limits = EngineLimits(
            context_length=context,
            kv_token_capacity=block_count * config.block_size,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        memory = MemoryLedger(
            weight_bytes=decoder.weight_bytes,
            kv_bytes=per_token * config.block_size * (block_count + 1),
            kv_bytes_per_token=per_token,
            kv_formula=kv_formula(part, kv_dtype),
            block_count=block_count,
            block_size=config.block_size,
        )
        kv = allocate_kv(part, block_count, config.block_size, kv_dtype, placement.device)
        record_graphs(decoder, kv)
        runner = ModelRunner(decoder, kernels, sampler, kv, placement.dtype, row_by_row=config.deterministic)
        return cls(config, model, runner, limits, memory, clock)

    # --- between steps --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait; ``max_tokens`` is lowered to what the context (and, unset, the pool) leaves.

        Raises:
            RequestRefused: it can never run here.
        """
        fit_request(request, self.limits)
        try:
            self._scheduler.add(request)
        except KeyError:
            raise RequestRefused("request_id", "DUPLICATE_ID", f"request id {request.request_id} is in use") from None

    def grant(self, request_id: int, token_count: int) -> None:
        """Let the reader take ``token_count`` more output tokens; a no-op for a request that has ended."""
        self._scheduler.roster.grant(request_id, token_count, self._clock())

    def abort(self, request_id: int) -> bool:
        """End a request as CANCELLED, whatever its state; its ending comes with the next step.

        Idempotent: False, and nothing happens, when it has ended or never was.
        """
        return self._scheduler.roster.abort(request_id, self._clock())

    # --- the plot -------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Schedule, launch, wait, commit, publish, release; what is waited for may be the step before (``ahead``)."""
        flight = self._steps.turn()
        known: list[tuple[Request, Sampled]] = []
        before_ns = self._computed_ns
        if flight is not None:
            result = flight.wait()
            self._computed_ns = self._clock()
            known = self._scheduler.commit(flight.step, result)
        ended = self._scheduler.roster.take_ended()
        output = self._publish(flight, known, ended, before_ns)
        for request in ended:
            self._scheduler.roster.release(request)
        return output

    def _launch(self, step: ScheduledStep) -> Flight:
        return self._guard.launch(step, self._clock())

    def rest(self) -> None:
        """Nothing is computed for now: the time until the next step is not the host's to answer for."""
        self._computed_ns = None

    def _publish(
        self,
        flight: Flight | None,
        known: list[tuple[Request, Sampled]],
        ended: list[Request],
        before_ns: int | None,
    ) -> StepOutput:
        """What to tell: a news item for each request with tokens, then for each that ended without.

        ``before_ns`` is when the step before was computed; None: nothing was to be computed since.
        """
        tokens: dict[Request, list[Sampled]] = {}
        for request, sampled in known:
            tokens.setdefault(request, []).append(sampled)
        news = [_news(request, new) for request, new in tokens.items()]
        news.extend(_news(request, []) for request in ended if request not in tokens)
        if flight is None:
            return StepOutput(news)
        step = flight.step
        started_ns = max(step.started_ns, before_ns or 0)
        facts = StepFacts(
            started_ns=started_ns,
            step_ns=self._clock() - started_ns,
            prefill_token_count=step.prefill_token_count,
            decode_token_count=step.decode_token_count,
            draft_token_count=step.draft_token_count,
            sequence_count=step.plan.sequence_count,
            members=tuple(
                StepMember(request.request_id, count + draft.size, decoding)
                for request, count, draft, decoding in zip(
                    step.requests, step.counts, step.drafts, step.decoding, strict=True
                )
            ),
            host_gap_ns=None if before_ns is None else max(0, flight.launched_ns - before_ns),
        )
        return StepOutput(news, facts)

    # --- facts and upkeep -----------------------------------------------------------------------------

    @property
    def dtype(self) -> str:
        """Number format of weights and activations: float32 or bfloat16."""
        return str(self._runner.dtype).removeprefix("torch.")

    @property
    def kv_cache_dtype(self) -> str:
        """Number format of keys and values: the same, or int8."""
        return str(self._runner.kv[0].dtype).removeprefix("torch.")

    @property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that compute, rank by rank; none on a CPU."""
        if self._runner.kv[0].device.type != "cuda":
            return []
        return [str(torch.cuda.get_device_properties(rank).uuid) for rank in range(self.config.tensor_parallel)]

    @property
    def has_work(self) -> bool:
        """True while any request has not ended, or an ending is not published, or a step is in flight."""
        return self._scheduler.roster.has_requests or self._steps.in_flight is not None

    @property
    def runnable(self) -> bool:
        """True when a step would do something now; False when all are paused."""
        return self._scheduler.roster.runnable or self._steps.in_flight is not None

    @property
    def next_deadline_ns(self) -> int | None:
        """When a step is needed even if nothing is runnable."""
        return self._scheduler.roster.next_deadline_ns

    def abort_all(self) -> None:
        """End every request as CANCELLED."""
        self._scheduler.roster.abort_all(self._clock())

    def stats(self) -> EngineStats:
        """Gauges and totals as they are now."""
        counters = self._scheduler.counters
        return EngineStats(
            running_count=self._scheduler.roster.running_count,
            waiting_count=self._scheduler.roster.waiting_count,
            paused_count=self._scheduler.roster.paused_count,
            kv_block_total=self._pool.block_count,
            kv_block_free=self._pool.free_count,
            kv_block_cached=self._pool.cached_count,
            preemption_count=self._scheduler.roster.preemption_count,
            prefilled_token_count=counters.prefilled_token_count,
            decoded_token_count=counters.decoded_token_count,
            drafted_token_count=counters.drafted_token_count,
            accepted_token_count=counters.accepted_token_count,
            step_count=counters.step_count,
            prefix_queried_token_count=self._cache.queried_token_count,
            prefix_hit_token_count=self._cache.hit_token_count,
            kv_wasted_token_count=self._scheduler.roster.wasted_token_count(self.config.block_size),
            backlog_token_count=self._scheduler.roster.backlog_token_count,
        )

    def resident(self) -> ResidentMemory:
        """What of this process is in RAM now; asking takes a millisecond for some gigabytes of pool."""
        here = [layer for layer in self._runner.kv if layer.device.type == "cpu"]
        weight_bytes = self.memory.weight_bytes if here else 0
        return ResidentMemory.measure(weight_bytes, [(layer.data_ptr(), layer.nbytes) for layer in here])

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; how many blocks were forgotten."""
        return self._cache.flush()

    def use_prefix_cache(self, *, enabled: bool) -> None:
        """Turn the prefix cache on or off for what is added from now on. Call it while idle."""
        self._cache.enabled = enabled

    def check_integrity(self) -> None:
        """Hold every invariant of blocks and requests; AssertionError names the first one broken."""
        self._scheduler.roster.check_integrity()

    def on_lost(self, function: Callable[[str], None]) -> None:
        """Have a function called, on some thread, when another rank has ended: nothing can be computed then."""
        self._runner.on_lost(function)

    def close(self) -> None:
        """End the other ranks, if there are any. Nothing can be computed afterwards."""
        self._runner.close()

    def warm_up(self) -> None:
        """Generate once, for real, and leave no trace in statistics or cache; note what memory it took.

        Call it while idle.

        Raises:
            RuntimeError: the generation failed, so the engine is not fit to serve.
        """
        counters = replace(self._scheduler.counters)
        config = self.config
        requests = largest_step(
            self.limits, config.max_num_seqs, config.max_num_batched_tokens, block_size=config.block_size
        )
        for request in requests:
            self.add(request)
        with ActivationMeter() as meter:
            while self.has_work:
                self.step()
        self.flush_prefix_cache()
        self._scheduler.counters = counters
        self._cache.forget_counts()
        self.memory = replace(self.memory, peak_activation_bytes=meter.peak_bytes)
        for request in requests:
            if request.finish is not FinishReason.LENGTH:
                raise RuntimeError(f"the warm-up generation ended {request.finish}: {request.error}")


def _news(request: Request, new: list[Sampled]) -> RequestOutput:
    first = bool(new) and request.output_count == request.resumed_count + len(new)
    explained = first and request.sampling.prompt_logprobs is not None
    logprobs = tuple(sampled.logprobs for sampled in new if sampled.logprobs is not None)
    return RequestOutput(
        request_id=request.request_id,
        token_ids=tuple(sampled.token_id for sampled in new),
        logprobs=logprobs or None,
        prompt_ids=tuple(request.prompt_ids[1:].tolist()) if explained else None,
        prompt_logprobs=tuple(request.prompt_logprobs) if explained else None,
        finish=request.finish,
        matched_stop_id=request.matched_stop_id,
        error=request.error,
        usage=RequestUsage.of(request) if first or request.finish is not None else None,
    )
