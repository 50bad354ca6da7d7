"""``maru pin``, ``unpin``, ``evict``, ``delete``, ``clear``: what an operator can change."""

from __future__ import annotations

import sys

import typer

from maru_core.errors import ConfigError
from maru_core.session import Session
from maru_server.operator.asking import check_namespace, find_page
from maru_server.operator.output import console, number, print_json, size
from maru_server.views import LIMIT_MAX


def pin(session: Session, text: str, namespace: int | None, as_json: bool) -> None:
    where, page = find_page(session, text, namespace)
    pinned = session.pin(where, page)
    if as_json:
        print_json({"namespace": where, "page": page.hex(), "pinned_bytes": pinned})
    else:
        console().print(f"pinned {page.hex()} of namespace {where} and all before it; {size(pinned)} are pinned in all")


def unpin(session: Session, text: str, namespace: int | None, as_json: bool) -> None:
    where, page = find_page(session, text, namespace)
    pinned = session.unpin(where, page)
    if as_json:
        print_json({"namespace": where, "page": page.hex(), "pinned_bytes": pinned})
    else:
        console().print(f"unpinned {page.hex()} of namespace {where}; {size(pinned)} are still pinned in all")


def evict(session: Session, pages: int, namespace: int | None, as_json: bool) -> None:
    check_namespace(session, namespace)
    count = session.evict(pages, namespace)
    if as_json:
        print_json({"evicted_pages": count})
    else:
        less = "" if count == pages else ": no other page may go (in use, pinned, held, or none is left)"
        console().print(f"evicted {number(count)} pages{less}")


def delete(session: Session, text: str, namespace: int | None, as_json: bool) -> None:
    where, page = find_page(session, text, namespace)
    count = session.delete(where, page)
    if as_json:
        print_json({"namespace": where, "page": page.hex(), "deleted_objects": count})
    else:
        console().print(f"deleted {number(count)} objects: {page.hex()} of namespace {where} and what continued it")


def clear(session: Session, namespace: int | None, yes: bool, as_json: bool) -> bool:
    """False if it was not wanted after all."""
    rows = session.inspect("namespaces", namespace, LIMIT_MAX)
    pages, nbytes = sum(row["pages"] for row in rows), sum(row["bytes"] for row in rows)
    what = f"all {len(rows)} namespaces" if namespace is None else f"namespace {namespace}"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"clear would remove {number(pages)} pages of {what}, and nobody can be asked: give --yes"
            )
        question = f"Remove {number(pages)} pages ({size(nbytes)}) of {what}?"
        if not typer.confirm(question, err=True):
            console().print("nothing was removed")
            return False
    count = session.clear(namespace)
    if as_json:
        print_json({"namespace": namespace, "deleted_objects": count})
    else:
        console().print(f"removed {number(count)} objects of {what}")
    return True
