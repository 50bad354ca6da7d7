"""A pool on a NUMA node that has no CPUs, as memory of CXL devices is one."""

from __future__ import annotations

import re

from tests.rack.calls import contents, digests
from tests.rack.rack import Rack

POOL = "shm://bound?numa=1"
ENDPOINT = "ipc:///tmp/bound.sock"


def test_a_pool_lies_on_the_node_it_is_bound_to(rack: Rack) -> None:
    gpu = rack.gpu
    assert gpu.run("cat /sys/devices/system/node/node1/cpulist").strip() == ""
    server = rack.start(gpu, "maru_server", "--pool", POOL, "--size", "64M", "--bind", ENDPOINT, "--ready-fd", "1")
    server.await_output('"endpoint"')
    client = rack.client(gpu)
    assert client.ask("open_store", server=ENDPOINT) == "cxl"
    assert client.ask("put", seed=1, count=256) == 256
    assert client.ask("get", seed=1, count=256) == digests(contents(1, 256))
    pages: dict[str, int] = {}
    maps = gpu.run(f"grep /dev/shm/bound /proc/{client.process.pid}/numa_maps")
    for node, count in re.findall(r" (N\d+)=(\d+)", maps):
        pages[node] = pages.get(node, 0) + int(count)
    assert set(pages) == {"N1"}, maps
    assert pages["N1"] * 4096 >= 256 * 20_000
    refused = rack.start(gpu, "maru_server", "--pool", "shm://other?numa=7", "--size", "64M", "--bind", ENDPOINT + "7")
    assert refused.wait() == 2
    assert "there is no NUMA node 7" in refused.output
