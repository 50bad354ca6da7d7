"""Command line of the kit: ``maru-engine-kit make-llama DIR --size tiny`` and ``maru-engine-kit prepare``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maru_engine_kit.models import SIZES, make_llama, make_shape
from maru_engine_kit.prepare import prepare_page_hash
from maru_engine_kit.shapes import SHAPES


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="maru-engine-kit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    llama = commands.add_parser("make-llama", help="write a Llama with random weights and its tokenizer")
    llama.add_argument("folder", type=Path)
    llama.add_argument("--size", choices=sorted(SIZES), default="tiny")
    llama.add_argument("--seed", type=int, default=0)
    shape = commands.add_parser("make-shape", help="write a tiny model of another shape, and its tokenizer")
    shape.add_argument("folder", type=Path)
    shape.add_argument("--shape", choices=sorted(SHAPES), required=True)
    shape.add_argument("--seed", type=int, default=0)
    commands.add_parser("prepare", help="compile SGLang's page-hash extension ahead of a server")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "make-llama":
            print(make_llama(chosen.folder, size=chosen.size, seed=chosen.seed))
        elif chosen.command == "make-shape":
            print(make_shape(chosen.folder, chosen.shape, seed=chosen.seed))
        else:
            print(prepare_page_hash())
    except (RuntimeError, OSError) as error:
        parser.exit(1, f"maru-engine-kit: {error}\n")


if __name__ == "__main__":
    main()
