"""An engine for Hugging Face transformers models whose KV cache is a pool of kvplane (extra `[transformers]`).

`Engine.open()` loads a model and serves it: continuous batching, chunked prefill, prefix hits, preemption and resume,
parallel sampling by fork, streaming. Decoder models run unmodified: see `support`.
"""

from kvplane.client.integrations.transformers.attention import IMPLEMENTATION, AttentionShape
from kvplane.client.integrations.transformers.engine import Engine, StepTiming
from kvplane.client.integrations.transformers.model import LoadedModel, adopt_model, load_model, load_tokenizer
from kvplane.client.integrations.transformers.packaged import default_model
from kvplane.client.integrations.transformers.requests import (
    Completion,
    Event,
    FinishedBy,
    Output,
    Request,
    RequestMetrics,
    SamplingParams,
)

__all__ = [
    "IMPLEMENTATION",
    "AttentionShape",
    "Completion",
    "Engine",
    "Event",
    "FinishedBy",
    "LoadedModel",
    "Output",
    "Request",
    "RequestMetrics",
    "SamplingParams",
    "StepTiming",
    "adopt_model",
    "default_model",
    "load_model",
    "load_tokenizer",
]
