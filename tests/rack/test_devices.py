"""The real /dev/dax: what its kernel demands, what Maru refuses before, and one memory under two names on two hosts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.rack.calls import PAGE_BYTES, contents, digests
from tests.rack.machine import GuestError
from tests.rack.pmem import DATA_OFFSET
from tests.rack.rack import OWN_BYTES, SHARED_BYTES, Client, Rack

MIB = 1 << 20
#: Of the shared device.
SIZE = SHARED_BYTES - DATA_OFFSET
ALIGN = 2 * MIB
EINVAL = "Invalid argument"


@pytest.fixture(scope="module")
def asking(booted: Rack) -> Iterator[tuple[Client, str, str]]:
    """A process on beta that is asked about devices; the shared one there, and beta's own of 4 KiB pages."""
    yield booted.client(booted.beta), booted.shared["beta"], booted.device(booted.beta, OWN_BYTES)
    booted.clear()


def test_two_hosts_share_a_pool_under_two_names(rack: Rack) -> None:
    assert rack.shared["alpha"] != rack.shared["beta"]
    own = rack.device(rack.beta, OWN_BYTES)
    server = rack.server(rack.alpha, "--format")
    endpoint = rack.endpoint(rack.alpha)
    near, other = rack.client(rack.alpha, endpoint), rack.client(rack.beta, endpoint)
    before = sum(rack.switch.carried.values())
    for writer, reader, seed in ((near, other, 1), (other, near, 2)):
        assert writer.ask("put", seed=seed, count=256) == 256
        assert reader.ask("prefix", seed=seed, count=256) == 256
        assert reader.ask("get", seed=seed, count=256) == digests(contents(seed, 256))
    carried = sum(rack.switch.carried.values()) - before
    assert carried < 256 * PAGE_BYTES / 4, "the pages went through memory, and only messages over the network"

    # A device that holds another pool is told by its UUID, for a client and for an agent.
    asked = rack.client(rack.beta)
    uuid = asked.ask("create", pool=f"dax://{own}", format=True)
    refusal = "this is pool .*, the server's is .*: name the path by which this host reaches"
    with pytest.raises(GuestError, match=refusal):
        rack.open(asked, endpoint, pool=f"dax://{own}")
    agent = rack.agent(rack.beta, endpoint, pool=f"dax://{own}")
    assert agent.wait() == 2
    assert uuid in agent.output.replace("-", "")
    assert server.running()


def test_what_the_kernel_says_of_a_device(asking: tuple[Client, str, str]) -> None:
    """What the mapping code is built on: where one of these changes, it has to be looked at again."""
    beta, device, fine = asking
    assert beta.ask("kernel_maps", path=device, length=ALIGN) == ""
    assert beta.ask("kernel_maps", path=device, length=ALIGN, private=True) == EINVAL
    assert beta.ask("kernel_maps", path=device, length=ALIGN + 4096) == EINVAL
    # Of two alignments: for one, the kernel takes the first address that is free, and grants it where that happens to be aligned.
    assert beta.ask("kernel_maps", path=device, length=2 * ALIGN, offset=4096) == EINVAL
    assert beta.ask("kernel_maps", path=fine, length=4096, offset=12288) == ""
    assert beta.ask("kernel_maps", path=device, length=2 * ALIGN, offset=SIZE - ALIGN) == "", "granted past the end"
    assert beta.ask("touch_past_the_end", path=device, size=SIZE, align=ALIGN) == signal.SIGBUS
    said = beta.ask("file_calls", path=device)
    assert said == {"read": EINVAL, "write": EINVAL, "fsync": EINVAL, "ftruncate": EINVAL, "st_size": "0"}


@pytest.mark.parametrize(
    ("offset", "length", "why"),
    [
        (4096, ALIGN, "not multiples of the alignment 2M"),
        (0, ALIGN + 4096, "not multiples of the alignment 2M"),
        (0, 0, "not multiples of the alignment 2M"),
        (SIZE - ALIGN, 2 * ALIGN, f"has {SIZE} bytes"),
        (SIZE, ALIGN, f"has {SIZE} bytes"),
    ],
)
def test_what_maru_does_not_ask_of_the_kernel(
    asking: tuple[Client, str, str], offset: int, length: int, why: str
) -> None:
    beta, device, _ = asking
    with pytest.raises(GuestError, match=why):
        beta.ask("mapped", path=device, offset=offset, length=length)


def test_sizes_and_alignments_are_those_of_sysfs(asking: tuple[Client, str, str]) -> None:
    beta, device, fine = asking
    assert beta.ask("mapped", path=device, offset=SIZE - ALIGN, length=ALIGN) == ALIGN
    assert beta.ask("mapped", path=fine, offset=12288, length=4096) == 4096
    with pytest.raises(GuestError, match=rf"size=1G is more than the {SIZE} bytes"):
        beta.ask("create", pool=f"dax://{device}?size=1G", format=True)
    with pytest.raises(GuestError, match="align=4K is not a multiple of the alignment 2M"):
        beta.ask("create", pool=f"dax://{device}?align=4K", format=True)
    beta.ask("create", pool=f"dax://{fine}?align=4K&extent=256K", format=True)
    assert beta.ask("attach", pool=f"dax://{fine}")["bytes"] == OWN_BYTES - DATA_OFFSET
    # The superblock is read through a mapping of whole pages, also where it would start or end within one.
    beta.ask("poke", path=device, offset=ALIGN - 4, data=b"edge".hex())
    assert bytes.fromhex(beta.ask("read", path=device, offset=ALIGN - 4, length=8))[:4] == b"edge"


def test_a_device_is_never_formatted_without_being_told(rack: Rack) -> None:
    asked, device = rack.client(rack.alpha), rack.shared["alpha"]
    foreign = b"a file system of somebody else".ljust(4096, b"!")
    for head in (bytes(4096), foreign):
        asked.ask("poke", path=device, offset=0, data=head.hex())
        server = rack.begin_server(rack.alpha)
        assert server.wait() == 2
        assert "--format" in server.output
        with pytest.raises(GuestError, match="does not hold a Maru pool"):
            asked.ask("attach", pool=f"dax://{device}")
        assert bytes.fromhex(asked.ask("read", path=device, offset=0, length=4096)) == head, "it was not touched"
    rack.server(rack.alpha, "--format")
    second = rack.begin_server(rack.alpha)
    assert second.wait() in (2, 3)
    assert "it is served by" in second.output


def test_a_device_that_may_only_be_read_is_refused(rack: Rack, asking: tuple[Client, str, str]) -> None:
    beta, device, _ = asking
    beta.ask("create", pool=f"dax://{device}", format=True)
    nobody = 65534
    for mode, refused in (("444", True), ("666", False)):
        rack.beta.run(f"chmod {mode} {device}")
        if refused:
            with pytest.raises(GuestError, match=r"may not open it.*by a udev rule"):
                beta.ask("attach", pool=f"dax://{device}", uid=nobody)
        else:
            assert beta.ask("attach", pool=f"dax://{device}", uid=nobody)["bytes"] == SIZE


def test_nothing_is_flushed_by_a_call_that_devices_refuse(rack: Rack) -> None:
    """The kernel traces the calls: none by anybody while pages are stored, loaded and the server stops."""
    rack.keys()  # files are flushed for these
    trace = "/sys/kernel/tracing"
    rack.alpha.run(
        f"mount -t tracefs trace {trace} 2>/dev/null; cd {trace} && echo >trace && "
        "for call in fsync fdatasync msync; do echo 1 >events/syscalls/sys_enter_$call/enable; done && "
        "echo x >/tmp/file && sync /tmp/file && grep -c 'sys_fsync' trace && echo >trace"
    )  # what is made on purpose is seen
    server = rack.server(rack.alpha, "--format")
    near = rack.client(rack.alpha, rack.endpoint(rack.alpha))
    assert near.ask("put", seed=3, count=20) == 20
    assert near.ask("get", seed=3, count=20) == digests(contents(3, 20))
    near.ask("close_store")
    maps = rack.alpha.run(f"grep {rack.shared['alpha']} /proc/{server.pid}/maps").splitlines()
    assert maps
    assert all(line.split()[1] == "rw-s" for line in maps)
    server.kill("TERM")
    assert server.wait() == 0
    assert rack.alpha.run(f"grep sys_ {trace}/trace", status=None) == ""


def test_a_file_of_a_dax_file_system_cannot_be_served_by_an_agent(rack: Rack) -> None:
    """Engines of that host may map it; the kernel does not let a NIC have it, since the file may be cut at any time."""
    beta = rack.beta
    beta.run(
        "disk=$(ls /dev/pmem*) && mkfs.ext4 -q -b 4096 $disk && mkdir -p /tmp/disk && mount -o dax=always $disk /tmp/disk"
    )
    try:
        endpoint = rack.endpoint(beta)
        rack.server(beta, "--size", "24M", pool="file:///tmp/disk/pool")
        store = rack.client(beta, endpoint, pool="file:///tmp/disk/pool")
        assert store.ask("put", seed=4, count=10) == 10
        assert store.ask("get", seed=4, count=10) == digests(contents(4, 10))
        agent = rack.agent(beta, endpoint, pool="file:///tmp/disk/pool")
        assert agent.wait() == 2
        assert "DAX file system" in agent.output
        said = store.ask("register", path="/tmp/disk/pool", writable=True)
        assert "not be a file of a DAX file system" in said, "the kernel refuses it too"
        assert "Operation not supported" in store.process.output
    finally:
        rack.clear()
        beta.run("umount /tmp/disk")


def test_only_what_is_mapped_read_write_can_be_registered(asking: tuple[Client, str, str]) -> None:
    beta, device, _ = asking
    assert beta.ask("register", path=device, writable=True) == ""
    assert "must be mapped read-write" in beta.ask("register", path=device, writable=False)
