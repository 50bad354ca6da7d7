"""The ctypes layer: every return code looked at, no error left behind, both signatures of the batched copy."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_recorder import DEVICE_DELTA, Recorder

from maru_sglang.kernels.numa import gpu_node, nodes_of_pages
from maru_sglang.kernels.runtime import CudaError, Runtime

MIB = 1 << 20


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def recorder(compiled: Recorder) -> Iterator[Recorder]:
    compiled.reset()
    yield compiled
    compiled.reset()


@pytest.fixture
def runtime(recorder: Recorder) -> Runtime:
    return Runtime(recorder.path)


def buffer(nbytes: int = MIB, seed: int = 0) -> np.ndarray:
    return np.frombuffer(bytearray(np.random.default_rng(seed).bytes(nbytes)), np.uint8)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def batch(runtime: Runtime) -> None:
    data = buffer()
    at = int(data.ctypes.data)
    runtime.memcpy_batch_async(u64(at), u64(at + 4096), u64(64), 1)


#: What calls each function of the runtime, when all goes well before.
CALLS: dict[str, Callable[[Runtime], object]] = {
    "cudaRuntimeGetVersion": lambda runtime: Runtime(runtime.library),
    "cudaGetDeviceCount": lambda runtime: Runtime(runtime.library),
    "cudaGetDevice": lambda runtime: Runtime(runtime.library),
    "cudaSetDevice": lambda runtime: Runtime(runtime.library, 1).use_device(),
    "cudaThreadExchangeStreamCaptureMode": lambda runtime: runtime.use_device(),
    "cudaDeviceGetPCIBusId": lambda runtime: runtime.pci_bus_id(),
    "cudaHostRegister": lambda runtime: runtime.host_register(4096, 4096),
    "cudaHostUnregister": lambda runtime: runtime.host_unregister(4096),
    "cudaHostGetDevicePointer": lambda runtime: runtime.host_device_pointer(4096),
    "cudaMemcpyAsync": lambda runtime: runtime.memcpy_async(4096, 8192, 16, 1),
    "cudaMemcpyBatchAsync": batch,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [1, 2, 712, 719])
def test_a_code_of_any_call_is_an_error_that_names_it_and_is_forgotten(
    recorder: Recorder, runtime: Runtime, call: str, code: int
) -> None:
    recorder.fail(call, code)
    with pytest.raises(CudaError, match=rf"{call} failed with {code} \(.+\) for .+: .+") as caught:
        CALLS[call](runtime)
    assert (caught.value.call, caught.value.code, caught.value.broken) == (call, code, False)
    assert recorder.raw_last_error() == 0


def test_every_call_of_the_layer_is_in_the_list_above() -> None:
    source = (Path(__file__).parents[2] / "maru_sglang/kernels/runtime.py").read_text()
    named = set(re.findall(r'"(cuda\w+)"', source))
    assert named == set(CALLS)


def test_an_error_that_stays_is_told_as_the_broken_context_that_it_is(recorder: Recorder, runtime: Runtime) -> None:
    recorder.break_context(700)
    with pytest.raises(CudaError, match="restart the engine") as caught:
        runtime.host_register(4096, 4096)
    assert caught.value.broken


def test_memory_is_registered_and_found_by_the_gpu(recorder: Recorder, runtime: Runtime) -> None:
    data = buffer()
    at = int(data.ctypes.data)
    runtime.host_register(at, MIB)
    assert recorder.ranges() == [(at, MIB, 0, 3)]  # portable and mapped
    assert runtime.host_device_pointer(at + 5) == at + 5 + DEVICE_DELTA
    with pytest.raises(CudaError, match="already mapped"):
        runtime.host_register(at + 4096, 4096)
    runtime.host_unregister(at)
    with pytest.raises(CudaError, match="let Maru do it alone"):
        runtime.host_unregister(at)
    assert recorder.ranges() == []


@pytest.mark.parametrize("version", [12080, 12090, 13000])
def test_a_batch_moves_every_fragment_by_the_signature_of_its_version(recorder: Recorder, version: int) -> None:
    recorder.version(version)
    runtime = Runtime(recorder.path)
    assert runtime.has_batch
    source, target = buffer(seed=1), buffer(seed=2)
    before = target.copy()
    froms, sizes = [0, 9000, 70000], [4096, 17, 1000]
    tos = [500, 200_000, 10_000]
    runtime.memcpy_batch_async(
        u64(*(target.ctypes.data + to for to in tos)), u64(*(source.ctypes.data + at for at in froms)), u64(*sizes), 7
    )
    expected = before
    for to, at, size in zip(tos, froms, sizes, strict=True):
        expected[to : to + size] = source[at : at + size]
    assert np.array_equal(target, expected)


def test_an_older_runtime_has_no_batch_and_an_older_driver_is_found_out_once(recorder: Recorder) -> None:
    recorder.version(12060)
    assert not Runtime(recorder.path).has_batch
    recorder.version(13000)
    runtime = Runtime(recorder.path)
    recorder.fail("cudaMemcpyBatchAsync", 36)
    with pytest.raises(CudaError, match="install a newer driver"):
        batch(runtime)
    assert not runtime.has_batch


def test_a_batch_of_nothing_is_no_call_and_one_of_unequal_lengths_is_refused(
    recorder: Recorder, runtime: Runtime
) -> None:
    nothing = np.zeros(0, np.uint64)
    runtime.memcpy_batch_async(nothing, nothing, nothing, 1)
    assert "cudaMemcpyBatchAsync" not in recorder.calls
    with pytest.raises(ValueError, match="as many targets, sources and sizes"):
        runtime.memcpy_batch_async(u64(4096), u64(4096, 8192), u64(16), 1)


def test_single_copies_move_their_bytes(runtime: Runtime) -> None:
    source, target = buffer(seed=3), buffer(seed=4)
    runtime.memcpy_async(int(target.ctypes.data) + 3, int(source.ctypes.data) + 10, 1000, 0)
    assert np.array_equal(target[3:1003], source[10:1010])
    with pytest.raises(CudaError):
        runtime.memcpy_async(0, int(source.ctypes.data), 10, 0)


def test_a_thread_takes_the_runtimes_gpu_and_the_others_keep_theirs(recorder: Recorder) -> None:
    runtime = Runtime(recorder.path, 1)
    at = buffer()
    seen: list[tuple[int, ...]] = []

    def work() -> None:
        runtime.use_device()
        runtime.use_device()
        runtime.host_register(int(at.ctypes.data), MIB)
        seen.extend(recorder.ranges())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [device for _, _, device, _ in seen] == [1]
    assert recorder.calls.count("cudaSetDevice") == 1
    assert Runtime(recorder.path).device == 0
    assert runtime.pci_bus_id() == "0000:1b:00.0"


def test_no_gpu_is_none_and_a_gpu_that_fails_is_an_error(recorder: Recorder) -> None:
    program = (
        "import sys, ctypes; library = ctypes.CDLL(sys.argv[1]); library.recorder_devices(int(sys.argv[2]))\n"
        "library.recorder_fail(b'cudaGetDeviceCount', int(sys.argv[3]), 0 if int(sys.argv[3]) else 99)\n"
        "from maru_sglang.kernels.runtime import CudaError, Runtime\n"
        "try: found = Runtime.find()\n"
        "except CudaError as error: print('error', error.code)\n"
        "else: print(found and (found.library, found.devices))\n"
        "assert 'torch' not in sys.modules\n"
    )
    # Under the name that the search looks for among the libraries that are loaded already.
    library = recorder.path.with_name("libcudart.so.13")
    library.write_bytes(recorder.path.read_bytes())

    def find(devices: int, code: int) -> str:
        command = [sys.executable, "-c", program, str(library), str(devices), str(code)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert find(2, 0) == str((str(library), 2))
    assert find(0, 0) == "None"
    for code in (35, 100):
        assert find(2, code) == "None"
    assert find(2, 999) == "error 999"


def test_pages_that_are_there_are_found_on_a_node_and_others_are_not_counted() -> None:
    data = np.frombuffer(mmap.mmap(-1, MIB), np.uint8)
    assert not nodes_of_pages(int(data.ctypes.data), MIB, 64)
    data[: MIB // 2] = 1
    nodes = nodes_of_pages(int(data.ctypes.data), MIB, 64)
    assert not nodes or (sum(nodes.values()) == 32 and min(nodes) >= 0)  # none where the kernel does not say
    assert not nodes_of_pages(int(data.ctypes.data), 100, 64)


def test_the_gpus_node_is_read_from_sysfs(tmp_path: Path) -> None:
    for name, text in {"0000:1a:00.0": "1\n", "0000:1b:00.0": "-1\n", "0000:1c:00.0": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert gpu_node("0000:1a:00.0", tmp_path) == 1
    assert gpu_node("0000:1b:00.0", tmp_path) is None
    assert gpu_node("0000:1c:00.0", tmp_path) is None
    assert gpu_node("0000:1d:00.0", tmp_path) is None
