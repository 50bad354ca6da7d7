"""``python -m maru_server.operator``."""

from maru_server.operator.cli import main

main()
