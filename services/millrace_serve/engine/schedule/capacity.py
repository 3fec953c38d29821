"""How much more a replica takes, for routers."""

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.schedule.expected import Outputs, room
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.sequence import Phase, Sequence
from millrace_serve.engine.schedule.speeds import Speeds

# Of computing, that routers may let wait on a prefill worker. It only has to last from one report to the next, also
# where most of the prompts turn out to be cached; the rest waits in the routers' fair queues.
QUEUE_S = 4.0
ROOM_S = 0.05  # for which the room of outputs that was computed is right, if no request comes or goes
QUEUED = (Phase.EXPECTED, Phase.WAITING)  # without pages


class ReplicaCapacity:
    def __init__(
        self, config: EngineConfig, role: Role, requests: EngineRequests, pages: Pages, outputs: Outputs
    ) -> None:
        self._config, self._requests, self._pages, self._outputs = config, requests, pages, outputs
        self._decodes = role is not Role.PREFILL
        self.max_running = config.max_running if self._decodes else 0
        self._room, self._room_of, self._room_at = 0, -1, 0.0  # tokens, beside so many live requests, when

    @property
    def capacity(self) -> int:
        """Further requests."""
        left = self._requests.room()
        if self._decodes:
            running, waiting = self._config.max_running, self._config.max_waiting
            left = min(left, running + min(running // 8 + 1, waiting) - self._requests.num_active)
        return max(left, 0)

    @property
    def expected_output(self) -> int:
        """Tokens; 0 where nothing is generated."""
        return self._outputs.mean if self._decodes else 0

    def room(self, waiting_tokens: int, speeds: Speeds) -> int:
        """Tokens of further requests: of a prefill worker by its speed, of others by their pages."""
        if not self._decodes:
            speed = speeds.prompt_tokens_per_s
            most = int(speed * QUEUE_S) if speed else self._pages.cache.pool.total * self._pages.size
            return most - waiting_tokens
        live, now = len(self._requests.live), self._requests.clock()
        if live != self._room_of or now >= self._room_at + ROOM_S:
            self._room, self._room_of, self._room_at = self._room_for_outputs(), live, now
        return self._room

    def _room_for_outputs(self) -> int:
        """Tokens that a newcomer like the present ones may have, its expected output included, so that the scheduler
        will find pages for it. Requests that have no pages yet are counted as if they came now.
        """
        live = [seq for seq in self._requests.live.values() if seq.phase is not Phase.DONE]
        size, cache, count, mean = self._pages.size, self._pages.cache, self._pages.count, self._outputs.mean
        if not live:
            return cache.pool.total * size
        streams = [seq for seq in live if not seq.exports]
        queued = sum(count(len(seq.tokens)) for seq in live if seq.phase in QUEUED)
        wanted = [min(mean, seq.request.sampling.max_tokens) for seq in streams]
        typical = sum(wanted) // len(wanted) if wanted else mean
        available = cache.available - queued - 1  # for the newcomer's last page
        return room(available * size, map(self._need, streams), typical)

    def _need(self, seq: Sequence) -> tuple[int, int]:
        """Tokens of the pages that it will get, and of those that it gives back at its end."""
        length, count = len(seq.tokens), self._pages.count
        rest = min(self._outputs.expected(seq.num_outputs, seq.order[1]), seq.limit - length)
        return (count(length + rest) - count(length)) * self._pages.size, length - seq.found.cached_tokens
