from maru_agent.cli import main

main()
