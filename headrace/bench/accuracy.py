"""What int8 costs in accuracy: the same text through the model in bfloat16 and in int8, logits side by side.

What is int8 are weights with activations (``quantization``), keys and values (``kv_cache_dtype``), or both.
Every token of the text is predicted from those before it in its window, so that each is a place of comparison:
perplexity of both, how often their greedy choices agree, and how far logits drift. Knows no text. Imports the services
when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

_SIDES = ("baseline", "candidate")
_ROWS = 64  # of the vocabulary's width that are compared at a time

Tick = Callable[[int], None]  # tokens so far


@dataclass(frozen=True)
class Limits:
    """What int8 may cost. Two bfloat16 implementations of the default model already differ by 1.2 in a logit."""

    perplexity_ratio: float = 1.02
    agreement: float = 0.9
    drift: float = 4.0


@dataclass
class _Sums:
    """Running sums over the places that were compared."""

    places: int = 0
    baseline_loss: float = 0.0  # natural logarithms
    candidate_loss: float = 0.0
    agreed: int = 0
    divergence: float = 0.0
    largest_drift: float = 0.0
    absolute_drift: float = 0.0

    def add(self, baseline: Any, candidate: Any, following: Any) -> None:
        """Takes [n, vocabulary] logits of both, and the [n] tokens that the text goes on with."""
        drift = (candidate - baseline).abs()
        of_baseline, of_candidate = baseline.log_softmax(-1), candidate.log_softmax(-1)
        picked = following[:, None]
        self.places += len(following)
        self.baseline_loss -= float(of_baseline.gather(1, picked).sum())
        self.candidate_loss -= float(of_candidate.gather(1, picked).sum())
        self.agreed += int((baseline.argmax(-1) == candidate.argmax(-1)).sum())
        self.divergence += float((of_baseline.exp() * (of_baseline - of_candidate)).sum())
        self.largest_drift = max(self.largest_drift, float(drift.max()))
        self.absolute_drift += float(drift.mean(-1).sum())


def engine_config(variables: Mapping[str, str]) -> Any:
    """What an engine process with these environment variables would be made from.

    Raises:
        ImportError: the services are not here.
        ValueError: a setting or the model is wrong; the message says which.
    """
    from headrace.models import resolve
    from services.common import settings
    from services.engine.config import EngineConfig
    from services.engine.settings import EngineProcessSettings

    loaded = settings.load(EngineProcessSettings, variables, "engine")
    return EngineConfig(model_dir=resolve(loaded.model.model), **asdict(loaded.engine))


def measure(
    config: Any,
    token_ids: Sequence[int],
    *,
    window: int,
    limits: Limits | None = None,
    tick: Tick = lambda _tokens: None,
) -> dict[str, Any]:
    """Compares an engine's model with the same in bfloat16.

    Args:
        config: the candidate's ``EngineConfig``; its dtype and device are ignored.
        token_ids: the text, at least two tokens.
        window: tokens that are predicted from each other, at least two.
        limits: what is allowed; None: the defaults.
        tick: called after each window.

    Returns:
        The figures, the limits, and `failures`: what is beyond them, empty if the candidate passes.

    Raises:
        ImportError: the services or torch are not here.
        ValueError: the model, the text or the window is wrong, or it cannot be quantised here; the message says which.
    """
    if len(token_ids) < 2 or window < 2:
        raise ValueError(f"a text of {len(token_ids)} tokens in windows of {window}: at least 2 were expected of both")
    limits = limits or Limits()
    on_cpu = replace(config, device="cpu", dtype="bfloat16")
    plain = replace(on_cpu, quantization="none", kv_cache_dtype="auto")
    decoders = [_Decoder(config, window) for config in (plain, on_cpu)]
    sums = _Sums()
    for start in range(0, len(token_ids) - 1, window):
        ids = np.asarray(token_ids[start : start + window], dtype=np.int32)
        if ids.size > 1:
            _compare(decoders, ids, sums)
        tick(start + ids.size)
    perplexities = [math.exp(loss / sums.places) for loss in (sums.baseline_loss, sums.candidate_loss)]
    report = {
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "places": sums.places,
        "window": window,
        "perplexity": dict(zip(_SIDES, perplexities, strict=True)),
        "weight_bytes": {side: decoder.weight_bytes for side, decoder in zip(_SIDES, decoders, strict=True)},
        "kv_bytes_per_token": {
            side: decoder.kv_bytes_per_token for side, decoder in zip(_SIDES, decoders, strict=True)
        },
        "perplexity_ratio": perplexities[1] / perplexities[0],
        "agreement": sums.agreed / sums.places,
        "drift": sums.largest_drift,
        "mean_drift": sums.absolute_drift / sums.places,
        "divergence": sums.divergence / sums.places,
        "limits": asdict(limits),
    }
    return {**report, "failures": failures(report)}


def failures(report: Mapping[str, Any]) -> list[str]:
    """The names of the figures that are beyond their limits; one that is no number is."""
    limits = report["limits"]
    within = {
        "perplexity_ratio": report["perplexity_ratio"] <= limits["perplexity_ratio"],
        "agreement": report["agreement"] >= limits["agreement"],
        "drift": report["drift"] <= limits["drift"],
    }
    return [name for name, good in within.items() if not good]


class _Decoder:
    """A model and just enough of a KV pool for one window."""

    def __init__(self, config: Any, window: int) -> None:
        import torch

        from services.engine.computing import make_decoder
        from services.engine.memory import kv_bytes_per_token
        from services.engine.model.config import load_config
        from services.engine.placement import Placement
        from services.engine.runner import allocate_kv

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = load_config(config.model_dir)
        if window > model.context_length:
            raise ValueError(
                f"a window of {window} tokens is longer than the model's context of {model.context_length}"
            )
        self._block_size = config.block_size
        blocks = -(-window // config.block_size)
        self._table = np.arange(1, blocks + 1, dtype=np.int32)
        placement = Placement.choose(config, model)
        self._decoder, self._kernels = make_decoder(config, model, placement, window)
        self._kv = allocate_kv(model, blocks, config.block_size, placement.kv_dtype)
        self.weight_bytes = self._decoder.weight_bytes
        self.kv_bytes_per_token = kv_bytes_per_token(model, placement.kv_dtype)

    def hidden(self, ids: Any) -> Any:
        """[n, hidden] states of one window."""
        import torch

        from services.engine.plan import PlannedSequence, build_plan

        plan = build_plan([PlannedSequence(ids, 0, self._table, logit_count=0)], self._block_size)
        return self._decoder.forward(
            token_ids=torch.from_numpy(plan.token_ids),
            positions=torch.from_numpy(plan.positions),
            slots=torch.from_numpy(plan.slots).long(),
            kv=self._kv,
            batch=self._kernels.prepare(plan, torch.bfloat16),
        )

    def logits(self, hidden: Any, rows: Any) -> Any:
        """[rows, vocabulary] float32."""
        return self._decoder.logits(hidden, rows).float()


def _compare(decoders: Sequence[_Decoder], ids: Any, sums: _Sums) -> None:
    import torch

    hidden = [decoder.hidden(ids) for decoder in decoders]
    following = torch.from_numpy(ids[1:].astype(np.int64))
    for first in range(0, ids.size - 1, _ROWS):
        rows = torch.arange(first, min(first + _ROWS, ids.size - 1))
        baseline, candidate = (d.logits(h, rows) for d, h in zip(decoders, hidden, strict=True))
        sums.add(baseline, candidate, following[rows])
