"""Asks servers one after the other the same prompt, and says where its tokens came from.

    python examples/ask.py sglang=http://127.0.0.1:30000 vllm=http://127.0.0.1:8001 [--tokens 600]

Exits with an error if the servers of one kind do not answer alike. Needs Maru's package `maru_bench` alone.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from maru_bench.engines import SGLangClient, VLLMClient, parse_url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="KIND=URL", help="sglang or vllm, and http://host:port")
    parser.add_argument("--tokens", type=int, default=600, help="length of the prompt")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt")
    parser.add_argument(
        "--pause",
        type=float,
        default=float(os.environ.get("PAUSE", "2")),
        help="seconds between two servers: engines store behind the answer",
    )
    options = parser.parse_args()
    choose = random.Random(options.seed)
    prompt = [choose.randrange(16, 250) for _ in range(options.tokens)]
    answers: dict[str, list[int]] = {}
    alike = True
    for index, server in enumerate(options.servers):
        kind, _, url = server.partition("=")
        client = {"sglang": SGLangClient, "vllm": VLLMClient}[kind](server, *parse_url(url))
        if index:
            time.sleep(options.pause)
        answer = client.generate(prompt, 16)
        parts = f"{answer.computed_tokens} computed, {answer.cached_tokens} from a cache"
        if kind == "sglang":
            parts += f" ({answer.storage_tokens + answer.host_tokens} from Maru or host memory)"
        print(f"{server}: {answer.prompt_tokens} tokens, {parts}; first token after {answer.ttft_s * 1e3:.0f} ms")
        alike &= answers.setdefault(kind, answer.output_ids) == answer.output_ids
    print("the answers are alike" if alike else "THE ANSWERS DIFFER")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
