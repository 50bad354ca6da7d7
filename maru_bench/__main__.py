"""``python -m maru_bench`` is ``maru-bench``."""

from maru_bench.cli import main

if __name__ == "__main__":
    main()
