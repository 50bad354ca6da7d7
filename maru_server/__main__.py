"""``python -m maru_server``."""

from maru_server.cli import main

if __name__ == "__main__":
    main()
