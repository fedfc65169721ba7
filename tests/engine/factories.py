"""Factories with every default given: tiny models on disk, engines, requests, and a model made of symbols."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from services.engine.ahead import Flight, Lookahead
from services.engine.block_pool import BlockPool
from services.engine.budget import BudgetPolicy
from services.engine.engine import Engine, EngineConfig
from services.engine.model.config import load_config
from services.engine.model.weights import expected_tensors
from services.engine.outputs import RequestOutput
from services.engine.plan import Sampled, StepPlan, TokenLogprobs
from services.engine.prefix_cache import PrefixCache
from services.engine.request import Request, SamplingParams
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.step import ScheduledStep, StepResult

GREEDY = SamplingParams(temperature=0.0)


class Clock:
    """Virtual time in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def advance_ms(self, milliseconds: float) -> None:
        self.now_ns += int(milliseconds * 1_000_000)


# --- models on disk -------------------------------------------------------------------------------------


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json of two layers; heads of 16 dimensions."""
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**config, **changes}


def write_model(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    seed: int = 0,
) -> Path:
    """A model directory; random weights unless given, scaled so that outputs are varied and steady."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors is None:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in expected_tensors(load_config(path)).items():
            noise = torch.randn(shape, generator=generator)
            tensors[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
    save_file(dict(tensors), path / "model.safetensors")
    return path


def write_scripted_model(path: Path, successor: Mapping[int, int], vocab_size: int = 64, **changes: Any) -> Path:
    """A model whose greedy next token depends on the last one alone: ``successor[t]``, or t + 1."""
    width = 256
    config = tiny_config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=1,
        intermediate_size=16,
        **changes,
    )
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(load_config(path))
    tensors = {n: torch.ones(s) if n.endswith("norm.weight") else torch.zeros(s) for n, s in shapes.items()}
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randint(0, 2, (vocab_size, width), generator=generator).float() * 2 - 1
    tensors["model.embed_tokens.weight"] = embedding
    head = torch.zeros(vocab_size, width)
    for token in range(vocab_size):
        head[successor.get(token, (token + 1) % vocab_size)] += embedding[token]
    tensors["lm_head.weight"] = head
    return write_model(path, config, tensors)


def make_engine(path: Path, clock: Any = None, *, nan_pool: bool = True, **changes: Any) -> Engine:
    """An fp32 engine with a small pool, filled with NaN."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "threads": 1,
    }
    config = EngineConfig(path, **{**values, **changes})
    engine = Engine.load(config) if clock is None else Engine.load(config, clock)
    if nan_pool:
        spoil(engine._runner.kv)
    return engine


def spoil(kv: list[torch.Tensor]) -> None:
    """Make a pool one in which nothing was written: NaN, or bytes of which NaN is the scale."""
    for layer in kv:
        layer.fill_(float("nan") if layer.is_floating_point() else -1)


# --- requests -------------------------------------------------------------------------------------------


def make_request(request_id: int = 1, prompt: Any = (5, 6, 7), **changes: Any) -> Request:
    """A greedy request for eight tokens that no end-of-sequence token stops."""
    values: dict[str, Any] = {"max_tokens": 8, "sampling": GREEDY, "ignore_eos": True}
    return Request(request_id, prompt, **{**values, **changes})


def finish_all(engine: Engine, *requests: Request, limit: int = 5000) -> dict[int, list[int]]:
    """Add requests, step until all ended, and check integrity after every step; ids by request."""
    tokens: dict[int, list[int]] = {}
    for request in requests:
        tokens[request.request_id] = []
        engine.add(request)
    for _ in range(limit):
        if not engine.has_work:
            return tokens
        for output in engine.step().outputs:
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    raise AssertionError(f"still running after {limit} steps")


def step_outputs(engine: Engine, limit: int = 5000) -> list[RequestOutput]:
    """Every output until nothing is runnable."""
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if not engine.runnable:
            return outputs
        outputs.extend(engine.step().outputs)
        engine.check_integrity()
    raise AssertionError(f"still runnable after {limit} steps")


# --- a model made of symbols ----------------------------------------------------------------------------


class SymbolicModel:
    """Runs plans without tensors.

    A slot holds a digest of the whole prefix that ends there, so a wrong, freed or overwritten block changes
    every later token. Most tokens go round in a short circle, so that they can be guessed; every eighth depends on
    the whole digest.
    """

    def __init__(self, block_count: int, block_size: int, vocab_size: int = 50) -> None:
        self.vocab_size = vocab_size
        self._slots: list[int | None] = [None] * ((block_count + 1) * block_size)

    def run(self, plan: StepPlan, before: list[Sampled | None]) -> list[Sampled | None]:
        for row, source in zip(plan.fed_rows, plan.fed_from, strict=True):
            chosen = before[source]
            assert chosen is not None
            plan.token_ids[row] = chosen.token_id
        assert len(set(plan.slots.tolist())) == plan.token_count, "two tokens share a slot"
        assert (plan.slots >= plan.block_size).all(), "the null block is written"
        wanted = set(plan.logit_rows.tolist())
        sampled: list[Sampled | None] = []
        for s in range(plan.sequence_count):
            table = plan.block_tables[s]
            for row in range(int(plan.query_starts[s]), int(plan.query_starts[s + 1])):
                position = int(plan.positions[row])
                digest = self._extend(
                    None if position == 0 else self._slots[_slot(table, position - 1, plan.block_size)],
                    int(plan.token_ids[row]),
                    position,
                )
                assert plan.slots[row] == _slot(table, position, plan.block_size)
                self._slots[int(plan.slots[row])] = digest
                if row in wanted:
                    sampled.append(Sampled(self._next(int(plan.token_ids[row]), digest)))
        return sampled

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """What a request alone must be answered."""
        digest: int | None = None
        for position, token in enumerate(prompt):
            digest = self._extend(digest, token, position)
        output: list[int] = []
        while len(output) < count:
            assert digest is not None
            output.append(self._next([*prompt, *output][-1], digest))
            digest = self._extend(digest, output[-1], len(prompt) + len(output) - 1)
        return output

    def _next(self, token: int, digest: int) -> int:
        return digest % self.vocab_size if digest % 8 == 0 else self.vocab_size - 5 + (token + 1) % 5

    @staticmethod
    def _extend(parent: int | None, token: int, position: int) -> int:
        assert (parent is None) == (position == 0), "an unwritten slot was read"
        return hash((-1 if parent is None else parent, token, position)) & 0xFFFFFFFF


def _slot(table: np.ndarray[Any, Any], position: int, block_size: int) -> int:
    return int(table[position // block_size]) * block_size + position % block_size


class SymbolicEngine:
    """The scheduler's life without torch: schedule, run symbols, commit, release, check."""

    def __init__(
        self, block_count: int = 24, *, prefix_cache: bool = True, ahead: bool = False, **changes: Any
    ) -> None:
        bounds = {field.name: changes.pop(field.name) for field in fields(BudgetPolicy) if field.name in changes}
        self.budget = BudgetPolicy(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_chunk_tokens": 16, **bounds}  # type: ignore[arg-type]
        )
        self.config = SchedulerConfig(**{"block_size": 4, "budget": self.budget, **changes})
        self.clock = Clock()
        self.pool = BlockPool(block_count)
        self.cache = PrefixCache(self.pool, self.config.block_size, enabled=prefix_cache)
        self.scheduler = Scheduler(self.config, self.pool, self.cache, frozenset(), self.clock)
        self.model = SymbolicModel(block_count, self.config.block_size)
        self.steps = Lookahead(self.scheduler, self._launch, ahead=ahead)
        self._sampled: list[Sampled | None] = []  # of the last step
        self.fed_count = 0
        self.ended: dict[int, Request] = {}
        self.step_ms: Callable[[StepPlan], float] = lambda _plan: 1.0  # virtual time that a step takes

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        return request

    def grant(self, request_id: int, token_count: int) -> None:
        self.scheduler.roster.grant(request_id, token_count, self.clock())

    def abort(self, request_id: int) -> bool:
        return self.scheduler.roster.abort(request_id, self.clock())

    def step(self) -> ScheduledStep | None:
        """As ``Engine.step``; the step that was committed."""
        flight = self.steps.turn()
        if flight is not None:
            self.clock.advance_ms(self.step_ms(flight.step.plan))
            self.scheduler.commit(flight.step, flight.wait())
        for request in self.scheduler.roster.take_ended():
            assert request.request_id not in self.ended, "a request ended twice"
            self.ended[request.request_id] = request
            self.scheduler.roster.release(request)
        self.scheduler.roster.check_integrity()
        return flight.step if flight is not None else None

    def _launch(self, step: ScheduledStep) -> Flight:
        assert step.plan.token_count <= self.budget.max_num_batched_tokens
        assert step.plan.sequence_count <= self.budget.max_num_seqs
        self.fed_count += step.plan.fed_rows.size
        sampled = self._sampled = self.model.run(step.plan, self._sampled)
        result = StepResult(sampled, [[TokenLogprobs(-1.0)] * count for _, count in step.explained])
        return Flight(step, lambda: result, launched_ns=self.clock())

    @property
    def runnable(self) -> bool:
        return self.scheduler.roster.runnable or self.steps.in_flight is not None

    def run(self, limit: int = 2000) -> list[ScheduledStep]:
        """Step until nothing is runnable."""
        steps = []
        for _ in range(limit):
            if not self.runnable:
                return steps
            step = self.step()
            if step is not None:
                steps.append(step)
        raise AssertionError(f"still runnable after {limit} steps")

    def check_answer(self, request: Request) -> None:
        """Assert that what a request was answered is what it is answered alone."""
        expected = self.model.answer(request.prompt_ids.tolist(), request.output_count)
        assert request.output_ids.tolist() == expected
