"""``maru status``, ``namespaces``, ``sessions``, ``tenants``, ``pins``, ``holds``: what the server says, as tables or JSON."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from rich.text import Text

from maru_core.errors import ConfigError
from maru_core.namespace import Namespace, differences
from maru_core.protocol import PROTOCOL_VERSION, WAYS
from maru_core.session import Session
from maru_server.operator import figures
from maru_server.operator.asking import operator_stats
from maru_server.operator.output import age, bar, clean, console, number, print_json, share, short, size, table
from maru_server.views import LIMIT_MAX

Row = dict[str, Any]

#: Fewest pages from which the server's memory for each says something.
_MANY_PAGES: Final = 10_000
_STATUS_MISSES: Final = "miss_"
#: Reasons for not mapping a pool that one screen has room for.
_REASONS: Final = 3
#: Characters of one; `maru status --json` has all of it.
_REASON: Final = 110
CXL, _, NONE = WAYS


def status(session: Session, as_json: bool) -> None:
    """One screen."""
    session.connect()  # saying hello takes longer than asking
    start = time.perf_counter()
    stats = operator_stats(session)
    answer_s = time.perf_counter() - start
    welcome = session.connect()
    pools, clients = session.inspect("pools"), session.inspect("sessions", limit=LIMIT_MAX)
    worked_out = figures.derived(stats)
    if as_json:
        print_json(
            {
                "server": session.endpoint,
                "protocol": PROTOCOL_VERSION,
                "pool_uuid": welcome.pool_uuid.hex(),
                "answer_s": answer_s,
                "stats": stats,
                "derived": worked_out,
                "pools": pools,
                "reaches": [
                    {key: row[key] for key in ("name", "host", "pid", "reaches")} for row in clients if row["reaches"]
                ],
            }
        )
        return
    lines = table("", "")
    lines.show_header = False
    for name, text in _status_lines(session, clean(stats), answer_s):
        lines.add_row(Text(name, "bold"), text)
    lines.columns[0].min_width = 10  # whatever the reasons below are
    for name, text in _reach_lines(clean(pools), clean(clients)):
        lines.add_row(Text(name, "bold"), text)
    console().print(lines)


def _status_lines(session: Session, stats: Row, answer_s: float) -> list[tuple[str, str]]:
    pages = stats["pages"]
    capacity = stats["extents"] * stats["extent_bytes"]
    lines = [
        (
            "server",
            f"{session.endpoint}, incarnation {stats['incarnation']}; this answer took {answer_s * 1e3:.2f} ms",
        ),
        (
            "pool",
            f"{stats['pool_uri']}, {size(capacity)} in {stats['extents']} extents of {size(stats['extent_bytes'])}",
        ),
        (
            "occupancy",
            f"{bar(stats['used_share'])} {share(stats['used_share'], 1)}, {size(stats['bytes_used'])} in slots"
            + _memory_note(stats),
        ),
        (
            "pages",
            f"{number(pages)} in {stats['namespaces']} namespaces, {number(stats['objects'])} objects"
            + (f", {size(stats['pinned_bytes'])} pinned" if stats["pinned_bytes"] else "")
            + (f", {size(stats['held_bytes'])} held" if stats["held_bytes"] else ""),
        ),
        (
            "sessions",
            f"{stats['sessions']} (this command is one of them)"
            + (f", {stats['sessions_silent']} silent" if stats["sessions_silent"] else ""),
        ),
        (
            "hits",
            f"{share(stats['pages_found'], stats['pages_asked'])} of {number(stats['pages_asked'])} pages asked for "
            f"in {number(stats['matches'])} matches",
        ),
    ]
    misses = {
        key.removeprefix(_STATUS_MISSES): value
        for key, value in stats.items()
        if key.startswith(_STATUS_MISSES) and value
    }
    if misses:
        lines.append(("misses", ", ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in misses.items())))
    lines.append(
        (
            "stores",
            f"{number(stats['committed'])} objects; refused for want of room: {number(stats['no_room'])}"
            f" ({share(stats['no_room'], stats['reserved'] + stats['no_room'])})"
            + (f", over a quota: {number(stats['over_quota'])}" if stats["over_quota"] else ""),
        )
    )
    lines.append(
        (
            "eviction",
            f"{number(stats['evicted_pages'])} pages, policy {stats['policy']}",
        )
    )
    if stats["slots_reserved"] or stats["slots_quarantined"]:
        lines.append(
            (
                "slots",
                f"{number(stats['slots_reserved'])} being written, {number(stats['slots_quarantined'])} in quarantine",
            )
        )
    per_page = f", {number(stats['memory_per_page'])} bytes a page" if pages >= _MANY_PAGES else ""
    lines.append(("memory", f"{size(stats['memory_bytes'])} of the server's own for its tables{per_page}"))
    if stats["stalled_s"]:
        lines.append(("stalled", f"{stats['stalled_s']:.1f} s since the start: the server had no CPU, or was stopped"))
    return lines


def _reach_lines(pools: list[Row], clients: list[Row]) -> list[tuple[str, str]]:
    """Each pool where there are several, and how clients reach it: why, where it is not mapped."""
    lines = []
    several = len(pools) > 1
    for row in pools:
        name = f"pool {row['pool']}" if several else "reached"
        if several:
            capacity = row["extents"] * row["extent_bytes"]
            agents = f", {row['agents']} agents" if row["agents"] else ""
            lines.append(
                (
                    name,
                    f"{row['uri']}: {share(row['used_share'], 1)} of {size(capacity)}, {number(row['pages'])} pages{agents}",
                )
            )
            name = ""
        by_way = ", ".join(
            f"{count} by {way}" if way != NONE else f"{count} not at all"
            for way, count in row["clients"].items()
            if count
        )
        if by_way:
            lines.append((name, f"{by_way} (clients)" if several else f"by clients: {by_way}"))
        reasons: dict[tuple[str, str], list[str]] = {}
        for client in clients:
            for told in client["reaches"]:
                if told["pool"] == row["pool"] and told["way"] != CXL:
                    reasons.setdefault((told["way"], told["why"]), []).append(f"{client['name']} on {client['host']}")
        for (way, why), names in list(reasons.items())[:_REASONS]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(("", f"{names[0]}{more}: {way}, {why if len(why) <= _REASON else why[: _REASON - 1] + '…'}"))
    return lines


def _memory_note(stats: Row) -> str:
    if stats["extents_ready"] == stats["extents"]:
        return ""
    return f", memory given to {stats['extents_ready']} of {stats['extents']} extents so far"


# ---------------------------------------------------------------- namespaces


def namespaces(session: Session, only: int | None, limit: int, as_json: bool) -> None:
    """All, or one with all its fields."""
    rows = session.inspect("namespaces", only, limit)
    if as_json:
        print_json({"namespaces": rows})
    elif only is not None:
        _print_whole(clean(rows[0]))
    else:
        lines = table(
            "N",
            "model",
            "dtype",
            "page",
            "layers",
            "heads",
            "layout",
            "shape",
            "tag",
            "tenant",
            "pages",
            "bytes",
            "hits",
            "used",
            right=("N", "page", "pages", "bytes", "hits", "used"),
        )
        for row in clean(rows):
            record, counts = row["record"], row["counts"]
            lines.add_row(
                str(row["namespace"]),
                str(record.get("model", "?")),
                str(record.get("kv_dtype", "?")),
                str(record.get("page_tokens", "?")),
                str(record.get("layers", "?")),
                str(record.get("heads", "?")),
                str(record.get("layout", "?")),
                shape(record),
                str(record.get("tag", "")) or "-",
                row["tenant"] or "-",
                number(row["pages"]),
                size(row["bytes"]),
                share(counts.get("pages_found", 0), counts.get("pages_asked", 0)),
                age(row["idle_s"]),
            )
        console().print(lines if rows else "no engine has opened a namespace yet")


def shape(record: Row) -> str:
    """``tp2 pp1``: the parallel shape, without what is 1."""
    parts = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "dp": "data_parallel"}
    text = " ".join(f"{name}{record[key]}" for name, key in parts.items() if record.get(key, 1) != 1)
    return text or "tp1"


def _print_whole(row: Row) -> None:
    lines = table("", "")
    lines.show_header = False
    for name, value in row["record"].items():
        lines.add_row(Text(name, "bold"), str(value) if value != "" else "-")
    lines.add_row(Text("digest", "bold"), row["digest"])
    if row["tenant"]:
        lines.add_row(Text("tenant", "bold"), row["tenant"])
    lines.add_row(Text("used", "bold"), age(row["idle_s"]))
    for name, part in row["components"].items():
        text = f"{number(part['pages'])} pages, {size(part['bytes'])}, {part['world']} shards of {number(part['object_bytes'])} bytes"
        lines.add_row(Text(name, "bold"), text)
    for name, value in sorted(row["counts"].items()):
        lines.add_row(Text(name, "bold"), number(value))
    console().print(lines)


def difference(session: Session, a: int, b: int, as_json: bool) -> None:
    """Field by field."""
    rows = {row["namespace"]: row for row in session.inspect("namespaces", limit=LIMIT_MAX)}
    for wanted in (a, b):
        if wanted not in rows:
            raise ConfigError(f"namespace {wanted} is not known: `maru namespaces` lists those that are")
    differing = field_differences(rows[a], rows[b])
    if as_json:
        print_json({"a": rows[a], "b": rows[b], "differences": {name: list(pair) for name, pair in differing.items()}})
        return
    if not differing:
        console().print(f"{a} and {b} are one namespace: they share pages")
        return
    lines = table("field", f"namespace {a}", f"namespace {b}")
    for name, (one, other) in differing.items():
        lines.add_row(name, clean(str(one)), clean(str(other)))
    console().print(lines)


def field_differences(a: Row, b: Row) -> dict[str, tuple[object, object]]:
    """Why two namespaces do not share: the fields of their records, and the tenant, in which they differ."""
    parsed = [msgspec.convert(row["record"], Namespace) for row in (a, b)]
    found = differences(*parsed)
    if a["tenant"] != b["tenant"]:
        found["tenant"] = (a["tenant"], b["tenant"])
    return found


# ---------------------------------------------------------------- lists


def sessions(session: Session, limit: int, as_json: bool) -> None:
    rows = session.inspect("sessions", limit=limit)
    if as_json:
        print_json({"sessions": rows})
        return
    lines = table(
        "name",
        "host",
        "pid",
        "tenant",
        "state",
        "reach",
        "writing",
        "quarantine",
        "heard",
        "age",
        right=("pid", "writing", "quarantine", "heard", "age"),
    )
    for row in clean(rows):
        lines.add_row(
            row["name"],
            row["host"],
            str(row["pid"]),
            row["tenant"] or "-",
            "this command"
            if row["you"]
            else "silent"
            if row["silent"]
            else "operator"
            if row["tenant"] and row["operator"]
            else "ok",
            " ".join(told["way"] for told in row["reaches"]) or "-",
            number(row["slots_reserved"]),
            number(row["slots_quarantined"]),
            age(row["heard_s"]),
            age(row["age_s"]),
        )
    console().print(lines)


def tenants(session: Session, limit: int, as_json: bool) -> None:
    rows = session.inspect("tenants", limit=limit)
    if as_json:
        print_json({"tenants": rows})
        return
    lines = table(
        "tenant",
        "namespaces",
        "pages",
        "bytes",
        "of the pool",
        "quota",
        "of quota",
        right=("namespaces", "pages", "bytes", "of the pool", "quota", "of quota"),
    )
    for row in clean(rows):
        quota = row["quota_bytes"]
        lines.add_row(
            row["tenant"] or "-",
            number(row["namespaces"]),
            number(row["pages"]),
            size(row["bytes"]),
            size(row["used_bytes"]),
            "-" if quota is None else size(quota),
            "-" if not quota else share(row["used_bytes"], quota),
        )
    console().print(lines if rows else "nobody has stored anything yet")


def pins(session: Session, namespace: int | None, limit: int, as_json: bool) -> None:
    rows = session.inspect("pins", namespace, limit)
    if as_json:
        print_json({"pins": rows})
        return
    lines = table("namespace", "page", "pages", "bytes", right=("namespace", "pages", "bytes"))
    for row in clean(rows):
        lines.add_row(str(row["namespace"]), row["page"], number(row["pages"]), size(row["bytes"]))
    console().print(lines if rows else "nothing is pinned")


def holds(session: Session, namespace: int | None, limit: int, as_json: bool) -> None:
    rows = session.inspect("holds", namespace, limit)
    if as_json:
        print_json({"holds": rows})
        return
    lines = table(
        "namespace",
        "request",
        "pages",
        "bytes",
        "ranks left",
        "ends in",
        right=("namespace", "pages", "bytes", "ranks left", "ends in"),
    )
    for row in clean(rows):
        lines.add_row(
            str(row["namespace"]),
            short(row["request"]),
            number(row["pages"]),
            size(row["bytes"]),
            str(row["ranks_left"]),
            age(row["left_s"]),
        )
    console().print(lines if rows else "nothing is held")
