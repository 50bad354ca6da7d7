"""A whole cluster from one seed: clients, servers one after another, a network, and everything that can go wrong.

:func:`simulate` runs it: some thousand switch points of fault and load, then quiet, in which everything must come right again
(clients reach the server, and store and load), then everybody leaves, and every slot must come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sim_checker import Checker
from sim_clients import COMPONENTS, NAMESPACE_WEIGHTS, NAMESPACES, Request, SimClient, chain
from sim_kernel import Kernel, Process, Violation
from sim_network import Network, Weather
from sim_server import CONFIG, SimServer
from sim_shims import SimPool, installed

from maru_core.pool.geometry import Geometry
from maru_server.eviction import POLICIES

SLOT = 4096
CREATED_NS = 1_700_000_000 * 10**9
#: A process is not stopped for longer: its writes must end within the quarantine that its slots are given.
LONGEST_STOP_S = 0.6 * CONFIG.quarantine_s
#: After this long without a fault all quarantine is over.
QUIET_S = CONFIG.lease_s + CONFIG.reservation_s + 1.2 * CONFIG.quarantine_s
DEFAULT_STEPS = 8000


def geometry(extents: int, slots: int) -> Geometry:
    """A pool of ``extents`` extents, each of ``slots`` slots of 4 KiB."""
    nbytes = extents * slots * SLOT
    while True:
        planned = Geometry.plan(
            nbytes, align=SLOT, extent_bytes=slots * SLOT, min_slot_bytes=SLOT, pool_uuid=b"simulated pool..",
            created_ns=CREATED_NS, component_capacity=4, namespace_capacity=3,
        )  # fmt: skip
        if planned.extent_count >= extents:
            return planned
        nbytes += slots * SLOT


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    seed: int
    steps: int
    seconds: float  # simulated
    digest: str
    violation: Violation | None
    tail: list[str]
    puts: int
    gets: int
    checks: int
    servers: int
    kills: int
    longest: dict[str, float]

    def report(self) -> str:
        lines = [
            f"seed {self.seed}, {self.steps} steps, {self.seconds:.1f} simulated seconds: {self.violation}",
            *self.tail,
        ]
        lines.append(f"again: python tests/simulation/run.py --seed {self.seed} --trace")
        return "\n".join(lines)


class Simulation:
    def __init__(self, kernel: Kernel, network: Network, pool: SimPool) -> None:
        self.kernel, self.network, self.pool = kernel, network, pool
        self.checker = Checker(kernel)
        self.clients: list[SimClient] = []
        self.server: SimServer | None = None
        self.servers: list[SimServer] = []
        self.requests: list[Request] = []
        self.fault_s = kernel.random.choice((0.15, 0.3, 0.6))  # mean time between faults
        self.weights = kernel.random.choice(NAMESPACE_WEIGHTS)
        self.config = replace(CONFIG, policy=kernel.random.choice(sorted(POLICIES)))
        self.hot: list[bytes] = []
        self.kills = 0
        self.calm = False
        self._next = 1
        self._last_stop: dict[str, float] = {}

    # ------------------------------------------------------------ processes

    def add_client(self) -> SimClient:
        random = self.kernel.random
        record = random.choices(NAMESPACES, self.weights)[0]
        client = SimClient(self.kernel, self.checker, self.requests, self.hot, self._next, random.randrange(2), record)
        self._next += 1
        self.clients.append(client)
        return client

    def start_server(self) -> None:
        if self.server is not None and self.server.process.alive:
            return
        self.server = SimServer(self.kernel, self.network, self.pool, self.checker, self._gone, self.config)
        self.servers.append(self.server)
        self.server.process.at_end.append(self._server_died)

    def _server_died(self) -> None:
        self.kills += 1
        away = self.kernel.random.choice((0.01, 0.05, 0.05, 0.3, 3.0)) * self.kernel.random.random()
        self.kernel.after(away, self.start_server)
        assert self.server is not None
        if self.server.was_up and self.kernel.random.random() < 0.4:
            self.checker.damage(self.server)

    def _gone(self, pid: int) -> bool:
        """Half of the clients run where the server can see that they are dead."""
        client = self.clients[pid - 1]
        return pid % 2 == 0 and (not client.process.alive or (client.left and not client.busy))

    # ------------------------------------------------------------ what goes wrong

    def nemesis(self) -> None:
        """One fault now, and the next one later."""
        if self.calm:
            return
        random = self.kernel.random
        living = [client for client in self.clients if client.process.alive and not client.leaving]
        what = random.random()
        if what < 0.30 and living:
            self._in_copy(random.choice(living))
        elif what < 0.38 and living:
            self._stop(random.choice(living).process)
        elif what < 0.42 and living:
            self._doom(random.choice(living).process, 80)
        elif what < 0.45 and living:
            random.choice(living).leaving = True
        elif what < 0.47 and living:
            self._close(random.choice(living))
        elif what < 0.53 and self.server is not None:
            self._doom(self.server.process, 400)
        elif what < 0.60 and self.server is not None:
            self.server.dies_after = random.randint(1, 4)
        elif what < 0.65 and self.server is not None:
            process = self.server.process
            process.halt, process.halt_s = random.randint(1, 60), random.choice((0.3, 1.5, 4.0)) * random.random()
        elif what < 0.82:
            self._weather()
        elif what < 0.92 and self.network.sockets:
            sockets = [socket for socket in self.network.sockets if not socket.closed]
            for socket in sockets[:: random.randint(1, 3)]:
                self.network.reset(socket)
        elif living:
            name = random.choice(living).process.name
            self.network.cut_off.add(name)
            self.kernel.after(random.choice((0.1, 0.3, 3.0)), lambda: self.network.cut_off.discard(name))
        while sum(client.process.alive and not client.leaving for client in self.clients) < 5:
            self.add_client()
        self.kernel.after(random.expovariate(1.0) * self.fault_s, self.nemesis)

    def _doom(self, process: Process, points: int) -> None:
        process.doom = self.kernel.random.randint(1, points)

    def _stop(self, process: Process) -> None:
        """At any switch point."""
        seconds = self._may_stop(process)
        if seconds:
            process.halt, process.halt_s = self.kernel.random.randint(1, 60), seconds

    def _may_stop(self, process: Process, share: float | None = None) -> float:
        """For how long a process may be stopped now. Not twice within one quarantine: what counts is how long a copy can take
        from its reserve to its end."""
        if self.kernel.now - self._last_stop.get(process.name, -1e9) < 2 * LONGEST_STOP_S:
            return 0.0
        self._last_stop[process.name] = self.kernel.now
        if share is None:
            share = self.kernel.random.choice((0.05, 1.0, 1.0)) * self.kernel.random.random()
        return share * LONGEST_STOP_S

    def _close(self, client: SimClient) -> None:
        """The engine ends its store while other threads are in the middle of a call."""
        patience_s = self.kernel.random.choice((0.0, 0.3, 2.0))
        client.process.start("closer", lambda: client.leave(patience_s))

    def _in_copy(self, client: SimClient) -> None:
        """Something happens in the middle of a copy of this client."""
        kernel, random, process = self.kernel, self.kernel.random, client.process
        what = random.choice(("stop", "stop", "stop", "stop", "kill", "close", "close", "server"))

        def spring() -> None:
            if self.calm:
                return
            if what == "stop":
                # Long enough to be taken for silent, mostly.
                process.stop(self._may_stop(process, random.uniform(0.4, 1.0)))
            elif what == "kill":
                process.kill()
            elif what == "close":
                client.process.start("closer", lambda: client.leave(0.0))
                kernel.dawdle(kernel.slow_s)
            elif self.server is not None:
                self.server.process.kill()
                kernel.dawdle(kernel.slow_s)

        process.trap = random.randint(0, 20), spring

    def _weather(self) -> None:
        random = self.kernel.random
        self.network.weather = random.choice(
            (
                Weather(),
                Weather(),
                Weather(lost=0.02, doubled=0.05, late=0.02),
                Weather(doubled=0.3, late=0.2, late_s=0.05),
                Weather(lost=0.15, doubled=0.1, late=0.15),
                Weather(late=0.3, late_s=3.0, doubled=0.1),
            )
        )

    # ------------------------------------------------------------ phases

    def begin(self) -> None:
        self.start_server()
        for _ in range(6):
            self.add_client()
        self.kernel.after(0.3, self.nemesis)
        self.kernel.after(1.0, self._look)

    def _look(self) -> None:
        """Nothing hangs."""
        for client in self.clients:
            what = client.overdue()
            if what is not None:
                self.kernel.fail(Violation("hangs", f"{client.process.name}: {what} has not returned"))
        self.kernel.after(1.0, self._look)

    def heal(self) -> None:
        """No more faults: from here on all must come right."""
        self.calm = True
        for client in self.clients:
            client.slow = True
        self.network.weather = Weather()
        self.network.cut_off.clear()
        for process in [client.process for client in self.clients] + [server.process for server in self.servers]:
            process.doom = process.halt = 1 << 62
        self.start_server()

    def prove(self) -> None:
        """Every client that lives can store and load again."""
        self.kernel.log(None, "heal: a fresh page must be stored and loaded by all")
        for client in self.clients:
            if client.process.alive and client.store is not None and not client.leaving:
                client.process.start("prover", lambda client=client: self._prove(client))

    def _prove(self, client: SimClient) -> None:
        number = self.clients.index(client)
        pages = chain((100 + number % 100, number // 100, 0))  # its own: nobody else stores or deletes it
        component = COMPONENTS[1]
        tries = 0
        while client.put(component, pages, 0, exact=True) < 3 or client.get(component, 0, pages, exact=True) < 3:
            tries += 1
            if tries > 12:
                self.kernel.fail(
                    Violation("no recovery", f"{client.process.name} cannot store and load, and nothing is wrong")
                )
            self.kernel.park(0.5)
        client.leaving = True

    def finished(self) -> bool:
        return all(not client.process.alive or client.left for client in self.clients)


def simulate(seed: int, steps: int = DEFAULT_STEPS, *, trace: Callable[[str], None] | None = None) -> Outcome:
    """One run. Equal arguments give equal outcomes, in any process on any machine."""
    kernel = Kernel(seed, trace=trace)
    network = Network(kernel)
    random = kernel.random
    kernel.switch_share = random.choice((0.03, 0.1, 0.3))
    kernel.pause_s = random.choice((50e-6, 200e-6, 1e-3))
    kernel.slow_share, kernel.slow_s = random.choice((0.001, 0.02, 0.05)), 0.2 * CONFIG.quarantine_s
    pool = SimPool(geometry(random.choice((5, 7, 10)), 8))
    simulation = Simulation(kernel, network, pool)
    with installed(kernel, network, pool):
        try:
            simulation.begin()
            kernel.run(lambda: kernel.steps >= steps)
            simulation.heal()
            _for(kernel, QUIET_S)
            simulation.prove()
            deadline = kernel.now + 60
            kernel.run(lambda: simulation.finished() or kernel.now >= deadline)
            if not simulation.finished():
                stuck = [
                    client.process.name for client in simulation.clients if client.process.alive and not client.left
                ]
                kernel.fail(Violation("hangs", f"{', '.join(stuck)} could not leave"))
            _for(kernel, 3 * CONFIG.quarantine_s + 2 * CONFIG.lease_s)
            server = simulation.server
            if kernel.violation is None and server is not None:
                if not server.up:
                    kernel.fail(Violation("no recovery", "no server is up"))
                simulation.checker.at_end(server)
        finally:
            kernel.end()
    clients = simulation.clients
    longest: dict[str, float] = {}
    for client in clients:
        for what, took in client.longest.items():
            longest[what] = max(took, longest.get(what, 0.0))
    return Outcome(
        seed=seed,
        steps=kernel.steps,
        seconds=kernel.now,
        digest=kernel.digest,
        violation=kernel.violation,
        tail=list(kernel.tail),
        puts=sum(client.good["put"] for client in clients),
        gets=sum(client.good["get"] for client in clients),
        checks=simulation.checker.checks,
        servers=len(simulation.servers),
        kills=sum(not client.process.alive for client in clients),
        longest=longest,
    )


def _for(kernel: Kernel, seconds: float) -> None:
    end = kernel.now + seconds
    kernel.after(seconds, lambda: None)
    kernel.run(lambda: kernel.now >= end)
