"""Questions to the shards of a cluster: each goes to one replica of its shard, and to the next if that fails.

    question ─▶ replica 0 ──▶ answer
                  │ dead, damaged, or silent for LATE_SECONDS
                  └─▶ replica 1 ──▶ answer

Shards are plain actors and no deployments of Serve, since a call through a deployment's handle takes several
times as long. Those on the same machine are asked over connections of their own, see ``direct_line``. Ray
starts a dead actor again; one whose machine is gone is started on another one here. Both ways carry bytes
that :mod:`cairn.jobs.ray_serve.wire` makes: Ray takes a third of the time for them that it takes for arrays.
An actor opens its part when it is asked for it. A question changes nothing, so it may be asked twice.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from cairn.jobs.ray_serve.direct_line import DirectLine, Listener, Listening
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.jobs.ray_serve.wire import pack, unpack
from cairn.pipeline.errors import CairnError, StorageError, TryAgainError
from cairn.pipeline.faiss_library import faiss
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.search.shards.parts import HeldParts, PartKey, Question, ShardUnreachableError
from cairn.pipeline.search.shards.sharded_generation import open_on_shards
from cairn.pipeline.serve.settings import ServeSettings
from threadpoolctl import threadpool_limits

log = logging.getLogger(__name__)

NAMESPACE: Final = "cairn-shards"
QUESTIONS_AT_A_TIME: Final = 8
"""Threads of a shard."""
LATE_SECONDS: Final = 2.0
"""A replica that is silent for so long is passed over, and the next one is asked."""
START_SECONDS: Final = 60.0
"""How long a start waits for all processes; then requests are told to try again until they run."""
OPEN_SECONDS: Final = 60.0
"""How long a new generation waits for all replicas to open it; then one of each shard is enough."""
PAUSE_SECONDS: Final = 0.1
"""Between two rounds in which every replica of a shard failed."""
REST_SECONDS: Final = 2.0
"""How long a replica that failed is asked last, and those of a machine of which one was silent."""

HEAD: Final = "node:__internal_head__"
"""The resource by which Ray marks the head."""
MACHINES_SECONDS: Final = 300.0
"""How long a start waits for other machines: on Kubernetes their images are pulled first."""

Place = tuple[int, int]
"""A shard and one of its replicas."""
Answer = Callable[[], bytes | bytearray]
"""Waits for the answer to a question that was sent."""


class ShardActor:
    """One process of shards: it holds the parts it is asked for, and answers several questions at once."""

    def __init__(self, root: str, *, verify: bool = False) -> None:
        import ray  # not before it is connected: Ray reads its token when it is imported

        # One question is one processor's work, as a search is in a server without shards.
        threadpool_limits(limits=1)
        self._held = HeldParts(Path(root), verify=verify)
        self._listener = Listener(self.answer, ray.get_runtime_context().get_node_id())

    def listening(self) -> Listening:
        """Return where the process listens for questions of its machine."""
        return self._listener.listening

    def answer(self, message: bytes | bytearray) -> bytes:
        """Answer a question about a part; an error of Cairn is an answer, too."""
        faiss.omp_set_num_threads(1)
        try:
            return pack(self._held.answer(*unpack(message)))
        except CairnError as error:
            return pack(error)


class ShardCalls:
    """Asks the shards that settings ask for; safe to share between threads.

    ``ray`` is the connected module. The actors outlive the process that starts them, and others that ask for
    the same root find them: :func:`stop_shards` ends them.
    """

    def __init__(self, ray: Any, settings: ServeSettings, cluster: ClusterSettings) -> None:
        self._ray, self._settings = ray, settings
        self._num_replicas = cluster.shard_replicas
        self._num_shards = cluster.shards
        self._prefix = fingerprint(root=str(settings.root), version=version("cairn-index"))[:12]
        await_machines(ray, self._num_replicas)
        places = [*itertools.product(range(cluster.shards), range(self._num_replicas))]
        self._machines: dict[Place, str] = {}
        self._actors = {place: self._start(place) for place in places}
        started = [actor.listening.remote() for actor in self._actors.values()]
        ray.wait(started, num_returns=len(started), timeout=START_SECONDS)
        node = ray.get_runtime_context().get_node_id()
        self._lines = {place: DirectLine(node, LATE_SECONDS) for place in places}
        self._turn = itertools.count()
        self._failed_at: dict[Place | str, float] = {}

    def open(self, layout: CollectionLayout, number: int, checks: Checks) -> Generation:
        """Open a generation on the shards.

        Raises :class:`StorageError` where a shard has no replica that opens it.
        """
        try:
            return open_on_shards(layout, number, checks, self._num_shards, self.ask, self._open_all)
        except TryAgainError as error:
            raise StorageError(
                f"generation {number} of {layout.name!r} must be open on every shard, "
                f"got one without it: {error}"
            ) from error

    def _open_all(self, keys: Sequence[PartKey]) -> None:
        opened = [
            self._actors[shard, replica].answer.remote(pack((key, "facts", ())))
            for shard, key in enumerate(keys)
            for replica in range(self._num_replicas)
        ]
        self._ray.wait(opened, num_returns=len(opened), timeout=OPEN_SECONDS)

    def ask(self, questions: Sequence[Question]) -> list[Any]:
        """Ask all questions at once, each again where a replica fails; return the answers in their order.

        Raises :class:`ShardUnreachableError` where no replica of a shard answers in time.
        """
        turn = next(self._turn)
        asked = [(question, self._order(question.shard, turn)) for question in questions]
        under_way = [self._send(question, order[0]) for question, order in asked]
        return [
            self._settle(question, order, answer)
            for (question, order), answer in zip(asked, under_way, strict=True)
        ]

    def _settle(self, question: Question, order: list[Place], answer: Answer | None) -> Any:
        seconds = self._settings.deadline_seconds
        end = time.monotonic() + seconds
        while True:
            failures: list[Exception] = []
            for place in order:
                try:
                    found = unpack((answer or self._send(question, place))())
                    if not isinstance(found, CairnError):
                        return found
                    failures.append(self._failed(question, place, found))
                except (self._ray.exceptions.RayError, OSError) as error:
                    failures.append(self._failed(question, place, error))
                answer = None
            causes = [failure for failure in failures if isinstance(failure, CairnError)]
            if len(causes) == len(failures):  # every replica lives, and says why it has no answer
                raise causes[-1]
            if time.monotonic() > end or not question.waits:
                raise ShardUnreachableError(
                    f"shard {question.shard} must answer within {seconds:g} seconds, got no answer of "
                    f"{self._num_replicas} replica(s); try again"
                )
            time.sleep(PAUSE_SECONDS)

    def _failed(self, question: Question, place: Place, error: Exception) -> Exception:
        """Note that a replica failed, and start one that is gone for good again; return why it failed."""
        self._failed_at[place] = time.monotonic()
        exceptions = self._ray.exceptions
        if not isinstance(error, CairnError):
            self._failed_at[self._machines[place]] = time.monotonic()
            self._lines[place].forget()
        log.warning(
            "serve.shard_failed shard=%d replica=%d method=%s error=%s",
            *place,
            question.method,
            type(error).__name__,
        )
        if isinstance(error, (exceptions.ActorDiedError, exceptions.ActorUnschedulableError)):
            self._actors[place] = self._start(place)
        return error

    def _order(self, shard: int, turn: int) -> list[Place]:
        """Return the replicas of a shard in the order to ask them: by turns, those that failed last."""
        rested = time.monotonic() - REST_SECONDS
        places = [(shard, (turn + step) % self._num_replicas) for step in range(self._num_replicas)]

        def is_resting(what: Place | str) -> bool:
            return self._failed_at.get(what, rested) > rested

        # A lost machine had replicas of other shards, too: their questions are not to wait for it again.
        return sorted(places, key=lambda place: (is_resting(place), is_resting(self._machines[place])))

    def _send(self, question: Question, place: Place) -> Answer:
        actor, message = self._actors[place], pack((question.key, question.method, question.arguments))
        answer = self._lines[place].send(actor, message)
        if answer is not None:
            return answer
        asked, end = actor.answer.remote(message), time.monotonic() + LATE_SECONDS
        # What is under way waits side by side: the time runs from the question on.
        return lambda: self._ray.get(asked, timeout=max(end - time.monotonic(), PAUSE_SECONDS))

    def _start(self, place: Place) -> Any:
        """Return the actor of a replica, started where there is none.

        Replicas of a shard start on different machines while there are enough. Ray's own strategies for
        this, "SPREAD" and a soft affinity, are not kept for actors that ask for no processor.
        """
        shard, replica = place
        machines = computing_machines(self._ray)
        self._machines[place] = machine = machines[(shard + replica) % len(machines)]
        make = self._ray.remote(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=QUESTIONS_AT_A_TIME,
            scheduling_strategy=self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                machine, soft=False
            ),
        )(ShardActor)
        return make.options(
            name=f"{self._prefix}-{shard}-{replica}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
        ).remote(str(self._settings.root), verify=self._settings.verify)


def await_machines(ray: Any, wanted: int) -> None:
    """Wait for so many machines with processors, where the head has none and others are to come."""
    end = time.monotonic() + MACHINES_SECONDS
    while time.monotonic() < end:
        computing = [node["Resources"] for node in ray.nodes() if node["Alive"] and _has_processors(node)]
        if len(computing) >= wanted or any(HEAD in resources for resources in computing):
            return
        time.sleep(PAUSE_SECONDS)


def computing_machines(ray: Any) -> list[str]:
    """Return the ids of living machines with processors for tasks, in a fixed order; all where none has."""
    living = [node for node in ray.nodes() if node["Alive"]]
    return sorted(node["NodeID"] for node in [*filter(_has_processors, living)] or living)


def _has_processors(node: Mapping[str, Any]) -> bool:
    return node["Resources"].get("CPU", 0) > 0


def stop_shards(ray: Any) -> None:
    """End all shards of a cluster."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE:
            try:
                ray.kill(ray.get_actor(each["name"], namespace=NAMESPACE))
            except ValueError:  # it ended meanwhile
                continue
