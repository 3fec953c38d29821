"""A model's KV pool without an engine."""

import torch
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import Execution, Limits
from millrace_serve.engine.start.startup import kv_layout
from millrace_serve.model.config import ModelConfig

PAGE = 64


def model_pool(config: ModelConfig, num_pages: int, dtype: torch.dtype, device: str | torch.device) -> KvPool:
    """Of zeros, in pages of 64 tokens; with sparse attention they have room for index keys."""
    limits = Limits(num_pages=num_pages, max_model_len=PAGE, page_size=PAGE)
    return KvPool.create(kv_layout(limits, Execution(), config, "", dtype), num_pages, device)
