"""Energy that the machine used, where it can be read: processors by RAPL, GPUs by NVML."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Final

RAPL: Final = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules since it was made, by source. A source that cannot be read is not there, and :attr:`why` says so."""

    def __init__(self, rapl: Path = RAPL) -> None:
        self.why: dict[str, str] = {}
        self._counters: dict[str, Callable[[], float]] = {}
        self._wraps: dict[str, float] = {}
        self._find_rapl(rapl)
        self._find_nvml()
        self._last = {name: read() for name, read in self._counters.items()}
        self._sums = dict.fromkeys(self._counters, 0.0)

    def read(self) -> dict[str, float]:
        """Joules so far. Call it at least every few minutes: RAPL's counters start anew now and then."""
        for name, read in list(self._counters.items()):
            now = read()
            step = now - self._last[name]
            if step < 0:
                step += self._wraps.get(name, 0.0)
            self._sums[name] += max(0.0, step)
            self._last[name] = now
        return dict(self._sums)

    def _find_rapl(self, root: Path) -> None:
        # The packages alone: what lies below them is part of them.
        zones = sorted(root.glob("intel-rapl:[0-9]*")) if root.is_dir() else []
        zones = [zone for zone in zones if zone.name.count(":") == 1]
        if not zones:
            self.why["cpu"] = f"no RAPL zones in {root}: a virtual machine, or a kernel without them"
            return
        for zone in zones:
            counter = zone / "energy_uj"
            try:
                counter.read_text()
                span = float((zone / "max_energy_range_uj").read_text()) / 1e6
            except OSError as error:
                self.why["cpu"] = f"{counter} cannot be read ({error.strerror}): run as root, or chmod a+r it"
                continue
            name = f"cpu:{zone.name.removeprefix('intel-rapl:')}"
            self._wraps[name] = span
            self._counters[name] = lambda counter=counter: float(counter.read_text()) / 1e6  # type: ignore[misc]

    def _find_nvml(self) -> None:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.why["gpu"] = "no libnvidia-ml.so.1: no NVIDIA driver here"
            return
        if nvml.nvmlInit_v2():
            self.why["gpu"] = "NVML does not start: no NVIDIA driver runs"
            return
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue

            def joules(device: ctypes.c_void_p = device) -> float:
                millijoules = ctypes.c_ulonglong()
                failed = nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
                return 0.0 if failed else millijoules.value / 1e3

            if joules() > 0:
                self._counters[f"gpu:{index}"] = joules
            else:
                self.why["gpu"] = f"GPU {index} does not tell its energy"
