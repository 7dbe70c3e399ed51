"""Continuous batching for a transformers model whose KV cache is a pool of kvplane."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import grpc
import numpy as np
import torch

from kvplane.client.compute import ComputeAccess, open_compute
from kvplane.client.integrations.transformers.attention import PlannedContext
from kvplane.client.integrations.transformers.batch import Batch
from kvplane.client.integrations.transformers.cache import PoolCache
from kvplane.client.integrations.transformers.completions import Completions
from kvplane.client.integrations.transformers.model import LoadedModel, load_model
from kvplane.client.integrations.transformers.queues import Queues
from kvplane.client.integrations.transformers.requests import Event, Output, Request, SamplingParams
from kvplane.client.integrations.transformers.scheduler import Scheduler
from kvplane.client.session import Session
