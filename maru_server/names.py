"""Namespaces and components: what the pool calls by number, in two tables that all tenants share.

Clients say a namespace's record, or a component's name, and the pool's records have the number. Entries stay as long as the
pool does; only namespaces without a page go, when a server starts. What is *in* a namespace is its tree's, not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from maru_core.errors import ConfigError
from maru_core.namespace import Namespace
from maru_core.protocol import ErrorCode
from maru_server.directory import PoolDirectory, namespace_fits
from maru_server.requests import RefusedError, check_component
from maru_server.sessions import Peer
from maru_server.tree import PrefixTree


class Names:
    """Both tables, as the pool has them."""

    def __init__(self, directory: PoolDirectory) -> None:
        self._directory = directory
        self._geometry = directory.geometry
        #: Numbers of the namespaces, by tenant and record.
        self.namespaces = directory.namespaces()
        #: Numbers of the components, by name.
        self.components = directory.components()
        self._brought: Counter[str] = Counter()  # components that were new, by tenant, since the start

    def drop_unused(self, trees: dict[int, PrefixTree]) -> None:
        """Make room where the table is nearly full. Only at the start: no client knows a number yet."""
        if len(self.namespaces) * 2 > self._geometry.namespace_capacity:
            for name, number in list(self.namespaces.items()):
                if not len(trees[number]):
                    self._directory.drop_namespace(number)
                    del self.namespaces[name], trees[number]

    def records(self) -> dict[int, bytes]:
        """Records of the namespaces, by number."""
        return {number: record for (_, record), number in self.namespaces.items()}

    def add_namespace(self, record: bytes, peer: Peer) -> int:
        """The number of a namespace that is new to ``peer``'s tenant.

        Raises:
            RefusedError: the record is none, or there is no room for it.
        """
        tenant = peer.tenant
        try:
            canonical = Namespace.parse(record).record()
        except ConfigError as error:
            raise RefusedError(ErrorCode.INVALID, str(error)) from error
        if canonical != record:
            raise RefusedError(
                ErrorCode.INVALID, "the namespace record is not canonical: send what Namespace.record() gives"
            )
        if not namespace_fits(canonical, tenant):
            raise RefusedError(
                ErrorCode.INVALID,
                f"the namespace record has {len(canonical)} bytes, too many beside the tenant's name: shorten the tag or model name",
            )
        theirs = sum(owner == tenant for owner, _ in self.namespaces)
        self._check_table(peer, theirs, self._geometry.namespace_capacity, "namespaces")
        number = self._directory.add_namespace(canonical, tenant)
        if number is None:
            raise RefusedError(
                ErrorCode.LIMIT,
                f"the pool knows {len(self.namespaces)} namespaces, as many as it can: restart the server to "
                "drop unused ones, or format the pool anew",
            )
        self.namespaces[tenant, canonical] = number
        return number

    def add_component(self, name: str, peer: Peer) -> int:
        """The number of a component that is new.

        Raises:
            RefusedError: the name is none, or there is no room for it.
        """
        check_component(name)
        tenant = peer.tenant
        self._check_table(peer, self._brought[tenant], self._geometry.component_capacity, "components")
        number = self._directory.add_component(name)
        if number is None:
            raise RefusedError(
                ErrorCode.LIMIT,
                f"component {name!r} is new, and the pool knows {len(self.components)}, as many as it can: "
                "use a known one or format the pool anew",
            )
        self.components[name] = number
        self._brought[tenant] += 1
        return number

    def _check_table(self, peer: Peer, theirs: int, capacity: int, what: str) -> None:
        """No tenant fills a table of the pool that all share, and whose entries stay."""
        if not peer.operator and theirs >= max(1, capacity // 2):
            raise RefusedError(
                ErrorCode.LIMIT,
                f"tenant {peer.tenant!r} has brought {theirs} {what}, as many as one may (half of what the pool can tell apart): use these",
            )

    def check(self, trees: Mapping[int, PrefixTree]) -> None:
        """Compare with the pool and with the trees.

        Raises:
            AssertionError: naming what does not fit.
        """
        assert self.namespaces == self._directory.namespaces()
        assert self.components == self._directory.components()
        assert {number: tree.tenant for number, tree in trees.items()} == {
            number: tenant for (tenant, _), number in self.namespaces.items()
        }
