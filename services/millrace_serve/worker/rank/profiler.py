"""torch.profiler in a rank process; worker/frontend/profiling.py is the frontend's end of it."""

import logging
from pathlib import Path
from typing import Any

from millrace_serve.worker.messages import ProfileDone, StartProfile, StopProfile

log = logging.getLogger(__name__)


class RankProfiler:
    """Torch is imported when it is first started."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: Any = None  # torch.profiler.profile: torch is imported when one starts
        self._path = Path()

    def handle(self, message: StartProfile | StopProfile) -> ProfileDone:
        try:
            if isinstance(message, StartProfile):
                self._start(Path(message.folder), message.label)
            elif self._profile is not None:
                self._stop()
            return ProfileDone(str(self._path), "")
        except (OSError, RuntimeError) as error:
            log.exception("the profiler failed")
            return ProfileDone("", f"rank {self._rank}: {error}")

    def _start(self, folder: Path, label: str) -> None:
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile, supported_activities

        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{label}-rank{self._rank}.json.gz"
        activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
        # a follower gets the message in another thread than the one that computes
        config = _ExperimentalConfig(profile_all_threads=True)
        begun = profile(activities=activities, experimental_config=config)
        begun.start()
        self._profile = begun

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        log.info("profile written to %s", self._path)
