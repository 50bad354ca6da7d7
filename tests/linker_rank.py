"""One of two ranks with the direct linker, as a process of its own: ``python linker_rank.py RANK DIRECTORY ENDPOINT``.

Both go through the same steps in step (real ``torch.distributed`` with gloo). Each prints one line of JSON: what it saw. What it
must have seen is asserted by ``tests/sglang/test_linker_ranks.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from linker_support import PAGE, Side, begin, make_tokens, run_loads
from sglang.srt import runtime_context
from sglang.srt.plugins import load_plugins

from maru_core.protocol import HASH_BYTES

PAGES = 5


def main(rank: int, directory: Path, endpoint: str) -> dict[str, Any]:
    load_plugins()
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    arguments = {"model_path": str(directory / "model"), "device": "cpu", "page_size": PAGE}
    with runtime_context.get_context().override_server_args(**arguments):
        return steps(rank, endpoint, group)


def steps(rank: int, endpoint: str, group: Any) -> dict[str, Any]:
    side = Side.make("full", {"server": endpoint, "timeout_ms": 60_000}, tp_cache_group=group)
    side.fill(rank + 1)
    prompts = [make_tokens(seed, PAGES * PAGE) for seed in (1, 2, 3)]
    rows = [side.rows_of(None, side.insert(prompt))["kv"] for prompt in prompts]
    pages = [[side.page("kv", row) for row in some] for some in rows]
    seen: dict[str, Any] = {"stored": side.settle(), "shard": side.linker._placement.shard}
    torch.distributed.barrier()
    forget(side)

    # Both load their own shard.
    request = side.request([*prompts[0], 5], rid="together")
    seen["loaded"] = begin(side, request)
    target = side.cache.linker.private_load_indices[request.rid]
    seen["failed"] = run_loads(side)
    seen["equal"] = [side.page("kv", row) for row in side.rows_of(None, target)["kv"]] == pages[0]
    forget(side)

    # A page goes after one rank has copied it, and before the other has.
    requests = [side.request([*prompt, 5], rid=f"apart-{index}") for index, prompt in enumerate(prompts[:2])]
    seen["accepted"] = [begin(side, request) for request in requests]
    wrapper, loads = side.cache.linker, side.linker._loads
    if rank == 0:
        page = loads._accepted["apart-1"].parts[0].reading.hashes[:HASH_BYTES]
        wrapper.start_layer_wise_loading()
        loads.settle()
        side.linker._store.delete(page)
    torch.distributed.barrier()
    if rank == 1:
        wrapper.start_layer_wise_loading()
        loads.settle()
    seen["failed apart"] = wrapper.finish_loads()
    seen["landed here"] = side.linker.landed(["apart-0", "apart-1"])
    forget(side)

    seen["replicated"] = replicated(endpoint, group, prompts[0])

    # Found by both, and then one of them has no server.
    request = side.request([*prompts[2], 5], rid="alone")
    result = side.match(request)
    seen["found"] = result.host_hit_length
    request.last_node = result.last_device_node
    if rank == 1:
        side.linker._store.close()
    seen["refused"] = side.cache.linker.load_back(request)[0]
    # One rank finds nothing any more: neither does the other.
    seen["found alone"] = side.match(side.request([*prompts[2], 5], rid="again")).host_hit_length
    torch.distributed.barrier()
    side.linker.close()
    torch.distributed.destroy_process_group()
    return seen


def replicated(endpoint: str, group: Any, prompt: list[int]) -> dict[str, Any]:
    """Latent KV is the same on all ranks: one of them stores it, and all load it."""
    side = Side.make("mla", {"server": endpoint, "timeout_ms": 60_000}, tp_cache_group=group)
    side.fill(7)
    pages = [side.page("kv", row) for row in side.rows_of(None, side.insert(prompt))["kv"]]
    stored = side.settle()
    torch.distributed.barrier()
    forget(side)
    request = side.request([*prompt, 5])
    seen = {"stored": stored, "loaded": begin(side, request)}
    target = side.cache.linker.private_load_indices[request.rid]
    seen |= {
        "failed": run_loads(side),
        "equal": [side.page("kv", row) for row in side.rows_of(None, target)["kv"]] == pages,
    }
    torch.distributed.barrier()
    counters = side.linker.counters()
    side.linker.close()
    return seen | {"copied": counters["stored_pages"], "found": counters["existing_pages"]}


def forget(side: Side) -> None:
    """What a server does when its cache is flushed, and other bytes in its memory."""
    side.cache.reset()
    side.params.token_to_kv_pool_allocator.clear()
    side.fill(99)


if __name__ == "__main__":
    print("SEEN " + json.dumps(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])), flush=True)
