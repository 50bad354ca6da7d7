"""``maru-server`` as it is on another host that maps the same memory: this host's file locks do not reach there.

Everything else is the program itself. Run as a script, with the program's options.
"""

from maru_core.pool.backing import Backing
from maru_server.cli import main


def _lock(backing: Backing) -> bool:
    return True


if __name__ == "__main__":
    Backing.lock = _lock  # type: ignore[method-assign]
    main()
