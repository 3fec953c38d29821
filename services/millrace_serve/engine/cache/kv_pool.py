"""The memory of the pages: one allocation of [page, layer, token, latent | rope], a page being one contiguous block.

A model with sparse attention has index keys, `index_row_bytes` per token and layer, behind the rows of all layers: the
page is still one block, so whatever moves or keeps pages carries them. Such a page is as long as some number of rows:
seen from a layer, the whole pool is rows, and a chosen one has a number. With the canary or checksums on, a page
has CANARY_BYTES more at its end (engine/cache/canary.py, engine/step/page_sums.py). A pool without torch has the same
bytes, but no tensor: the simulated runner writes canaries only.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
from millrace_common.versions import KV_PROTOCOL

from millrace_serve.engine.cache.canary import CANARY_BYTES, CANARY_WORDS

PoolMemory = Any  # a numpy array or a tensor: a simulated engine runs without torch

PLAIN = "page-layer-token-width"  # layout_id of pages, and of those with checksums
SUMMED = f"{PLAIN}-sum"
ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that two workers must share before pages may travel between them."""

    page_size: int  # tokens
    num_layers: int  # the MTP layer included where it is loaded
    dtype: str
    latent_width: int  # elements
    rope_width: int  # elements
    index_row_bytes: int = 0  # of a token's index key in a layer
    layout_id: str = PLAIN
    canary: bool = False
    model_hash: str  # of the checkpoint that computed the KV
    protocol_version: int = KV_PROTOCOL

    @property
    def width(self) -> int:
        return self.latent_width + self.rope_width

    @property
    def kv_bytes(self) -> int:
        return self.page_bytes - self._canary_bytes

    @property
    def page_bytes(self) -> int:
        row = self.width * ITEM_BYTES[self.dtype]
        used = self.num_layers * self.page_size * (row + self.index_row_bytes) + self._canary_bytes
        return used if not self.index_row_bytes else -(-used // row) * row

    @property
    def _canary_bytes(self) -> int:
        return CANARY_BYTES if self.canary or self.summed else 0

    @property
    def summed(self) -> bool:
        """Whether pages carry checksums."""
        return self.layout_id == SUMMED

    @property
    def fingerprint(self) -> str:
        """32 hex digits; unequal fingerprints never pair."""
        fields = json.dumps(msgspec.to_builtins(self), sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()


class KvPool:
    """num_pages x page_bytes bytes at `address`; `close` is the garbage collector's."""

    def __init__(self, layout: KvLayout, num_pages: int, tensor: PoolMemory = None) -> None:
        """`tensor`: uint8 torch tensor [num_pages * page_bytes]; None allocates numpy memory."""
        self.layout = layout
        self.num_pages = num_pages
        self.nbytes = num_pages * layout.page_bytes
        self._tensor = tensor
        if tensor is None:
            self._bytes: np.ndarray | None = np.zeros(self.nbytes, np.uint8)
        else:
            self._bytes = tensor.numpy() if tensor.device.type == "cpu" else None

    @classmethod
    def create(cls, layout: KvLayout, num_pages: int, device: Any) -> Self:  # a device of torch
        """A pool of torch memory on `device`."""
        import torch  # the simulated engine must work without it

        return cls(layout, num_pages, torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8, device=device))

    @property
    def address(self) -> int:
        return self._tensor.data_ptr() if self._bytes is None else self._bytes.ctypes.data

    @property
    def buffer(self) -> PoolMemory:
        """The uint8 allocation, for registration: a torch tensor, or a numpy array."""
        return self._bytes if self._tensor is None else self._tensor

    @property
    def rows(self) -> PoolMemory:
        """The pages' bytes, uint8 [num_pages, page_bytes]: a numpy array, or a tensor of a device."""
        return (self._tensor if self._bytes is None else self._bytes).reshape(self.num_pages, -1)

    def view(self) -> PoolMemory:
        """Tensor [num_pages, num_layers, page_size, width]; index keys lie between the pages of it."""
        import torch

        layout = self.layout
        typed = self._tensor.view(getattr(torch, layout.dtype))
        token, layer = layout.width, layout.page_size * layout.width
        page = layout.page_bytes // ITEM_BYTES[layout.dtype]
        return typed.as_strided((self.num_pages, layout.num_layers, layout.page_size, token), (page, layer, token, 1))

    def scrub(self, pages: Sequence[int]) -> None:
        """Fill with 0xFF bytes, a NaN in every dtype, and a canary that names nothing."""
        self.rows[np.asarray(pages)] = 0xFF

    def canary_table(self) -> PoolMemory:
        """Tensor int64 [num_pages, CANARY_WORDS]: the canaries on the device."""
        import torch

        words = self._tensor.view(self.num_pages, -1)[:, self.layout.kv_bytes :].view(torch.int64)
        return words[:, :CANARY_WORDS]

    def read_canaries(self, pages: np.ndarray) -> np.ndarray:
        """The canary of each page: u64 [*pages.shape, CANARY_WORDS]. Of a pool in the host's memory."""
        return self._canary_words()[pages, :CANARY_WORDS]

    def write_canaries(self, pages: np.ndarray, words: np.ndarray) -> None:
        """Write canaries into a pool in the host's memory."""
        self._canary_words()[pages, :CANARY_WORDS] = words

    def _canary_words(self) -> np.ndarray:
        """u64 [num_pages, 8]"""
        assert self._bytes is not None, "the pool is on a device"
        return self.rows[:, self.layout.kv_bytes :].view(np.uint64)
