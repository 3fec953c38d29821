"""One folder for all code that is compiled while a worker starts, so that a volume or an image can hold it.

A library reads its variable when it is imported. Entry points therefore set them before anything else, in the frontend;
its ranks inherit them. `millrace compile` fills the folder ahead of time.
"""

from pathlib import Path

FOLDERS = {
    "triton": "TRITON_CACHE_DIR",
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "deep_gemm": "DG_JIT_CACHE_DIR",
    "flashinfer": "FLASHINFER_WORKSPACE_BASE",  # its folder is .cache/flashinfer/VERSION in there
    "cuda": "CUDA_CACHE_PATH",  # the driver's, of PTX
}
SETTINGS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # NVLink multicast of peer memory is never used
    "NVSHMEM_QP_DEPTH": "2048",  # DeepEP: two requests for each row of a low-latency step, and two more
}


def variables(cache_dir: Path) -> dict[str, str]:
    """Environment of a process that computes."""
    folder = cache_dir.expanduser().absolute()
    return SETTINGS | {variable: str(folder / name) for name, variable in FOLDERS.items()}


def sizes(cache_dir: Path) -> dict[str, tuple[int, int]]:
    """Files and bytes by folder."""
    found = {}
    for name in FOLDERS:
        folder = cache_dir.expanduser() / name
        files = [path for path in folder.rglob("*") if path.is_file()]
        found[name] = len(files), sum(path.stat().st_size for path in files)
    return found
