"""Do engines ask, do they find, and if two do not share: in which fields do they differ?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from maru_core.errors import MaruError
from maru_core.protocol import MissReason
from maru_server.operator.findings import FAIL, OK, WARN, Finding
from maru_server.operator.output import age, number, share
from maru_server.operator.show import field_differences

Row = dict[str, Any]

#: Most pairs of namespaces that are told.
_PAIRS: Final = 8
#: Fields in which namespaces differ on purpose.
_ON_PURPOSE: Final = frozenset({"tag", "tenant"})
#: Most characters of a value of several words that are shown.
_LONG: Final = 200
#: Fewest pages asked for from which a hit rate says something.
_ENOUGH: Final = 64

_WHY: Final = {
    MissReason.NOT_STORED: "nobody had stored them",
    MissReason.EVICTED: "they were evicted",
    MissReason.REMOVED: "they were deleted or cleared",
    MissReason.INCOMPLETE: "some shard or component was missing",
    MissReason.OTHER_NAMESPACE: "they are stored under other settings",
}
_MISS_CURES: Final = {
    MissReason.NOT_STORED: "the prompts have no prefix in common, or the other engine does not store: look at its namespace",
    MissReason.EVICTED: "the pool is too small for the prompts: make it larger, or pin what matters (`maru pin`)",
    MissReason.REMOVED: "see who clears: `maru clear`, or /hicache/storage-backend/clear of an engine, which removes for all that share",
    MissReason.INCOMPLETE: "one rank does not store: see the logs of all ranks, and `maru sessions`",
    MissReason.OTHER_NAMESPACE: "run the engines with equal settings: see the finding `namespaces`, or `maru namespaces --diff A B`",
}


def check_sessions(sessions: list[Row]) -> list[Finding]:
    """Who is connected besides this command."""
    engines = [row for row in sessions if not row["you"] and not row["name"].startswith("maru ")]
    if not engines:
        return [
            Finding(
                "sessions",
                FAIL,
                "no engine is connected to this server",
                "see the engine's log for its first line about Maru: it names the server that it uses; "
                "SGLang needs --enable-hierarchical-cache --hicache-storage-backend maru",
            )
        ]
    silent = [row for row in engines if row["silent"]]
    if silent:
        who = ", ".join(
            f"{row['name']} (pid {row['pid']} on {row['host']}, {age(row['heard_s'])})" for row in silent[:_PAIRS]
        )
        return [
            Finding(
                "sessions",
                WARN,
                f"{len(silent)} of {len(engines)} engines are silent: {who}",
                "see whether they are stopped, starved of CPU, or cut off; what they were writing is in quarantine",
            )
        ]
    return [
        Finding(
            "sessions",
            OK,
            f"{len(engines)} engines are connected: " + ", ".join(row["name"] for row in engines[:_PAIRS]),
        )
    ]


def check_namespaces(namespaces: list[Row]) -> list[Finding]:
    """Namespaces of one model between which nothing is shared, and the fields that keep them apart."""
    if not namespaces:
        return [
            Finding(
                "namespaces",
                FAIL,
                "no engine has ever opened a namespace here",
                "the engine has not come as far as its storage: see its log",
            )
        ]
    known = [row for row in namespaces if row["record"]]
    found: list[Finding] = []
    wanted = meant = 0
    for a, b in combinations(known, 2):
        if not _same_model(a["record"], b["record"]):
            continue
        try:
            fields = field_differences(a, b)
        except (MaruError, ValueError):
            continue
        if not fields or _before_its_draft(a, b, fields) or _before_its_draft(b, a, fields):
            continue
        if fields.keys() & _ON_PURPOSE:
            meant += 1
            continue
        wanted += 1
        if len(found) < _PAIRS:
            told = ", ".join(f"{name}: {' / '.join(_apart(*values))}" for name, values in fields.items())
            found.append(
                Finding(
                    "namespaces",
                    WARN,
                    f"namespaces {a['namespace']} and {b['namespace']} are both {_brief(a['record']['model'])} and share nothing. They differ in {told}",
                    "start both engines with equal settings for these fields, if their pages should be shared",
                )
            )
    if wanted > len(found):
        found.append(Finding("namespaces", WARN, f"{wanted - len(found)} more pairs differ", "see `maru namespaces`"))
    if found:
        return found
    apart = f"; {meant} pairs are kept apart by tag or tenant" if meant else ""
    return [
        Finding(
            "namespaces",
            OK,
            f"{len(namespaces)} namespaces, none of which should share with another and does not{apart}",
        )
    ]


def _before_its_draft(a: Row, b: Row, fields: Mapping[str, object]) -> bool:
    """Whether ``a`` is what an engine of ``b`` opened before the pool of its draft model was there, and left at once."""
    if fields.keys() != {"layout"} or not a["record"]["draft"] or a["pages"] or a["counts"].get("matches"):
        return False
    words = str(a["record"]["layout"]).split(), str(b["record"]["layout"]).split()
    return set(words[0]) < set(words[1])


def _apart(one: object, other: object) -> tuple[str, str]:
    """Both values; of long ones made of words only the words that the other one lacks."""
    words = str(one).split(), str(other).split()
    if max(len(words[0]), len(words[1])) < 2:
        return _brief(one), _brief(other)
    mine = " ".join(word for word in words[0] if word not in words[1])
    theirs = " ".join(word for word in words[1] if word not in words[0])
    return _brief(mine, _LONG) if mine else "(nothing)", _brief(theirs, _LONG) if theirs else "(nothing)"


def _same_model(a: Row, b: Row) -> bool:
    # Two releases of one engine are told; two engines never share.
    if str(a.get("engine")).split(" ")[0] != str(b.get("engine")).split(" ")[0]:
        return False
    # One model may lie under several paths, and a path may be given with or without its owner.
    names = [str(record.get("model", "")).rstrip("/").rsplit("/", 1)[-1].lower() for record in (a, b)]
    return names[0] == names[1] or a.get("weights") == b.get("weights")


def _brief(value: object, most: int = 40) -> str:
    text = str(value)
    text = text if len(text) <= most else text[: most - 3] + "..."
    return repr(text) if text == "" or " " in text else text


def check_asks(namespaces: list[Row]) -> list[Finding]:
    """Engines that store and never ask, ask and never find, or find and cannot read."""
    findings = [found for row in namespaces if (found := _check_asks_of(row)) is not None]
    if findings:
        return findings
    asked = sum(row["counts"].get("pages_asked", 0) for row in namespaces)
    hits = sum(row["counts"].get("pages_found", 0) for row in namespaces)
    if not asked:
        return [
            Finding(
                "hits",
                OK,
                "nobody has asked for or stored anything since the server's start",
                "send a prompt of at least some hundred tokens, to one engine and then to another",
            )
        ]
    return [Finding("hits", OK, f"{share(hits, asked)} of {number(asked)} pages that engines asked for were there")]


def _check_asks_of(row: Row) -> Finding | None:
    counts, name = row["counts"], f"namespace {row['namespace']} ({_brief(row['record'].get('model', '?'))})"
    asked, found, stored = (
        counts.get("pages_asked", 0),
        counts.get("pages_found", 0),
        max(counts.get("committed", 0), counts.get("client_stored_pages", 0)),
    )
    if stored and not counts.get("matches", 0):
        return Finding(
            "hits",
            WARN,
            f"{name}: {number(stored)} objects were stored, and no engine has ever asked for one",
            "SGLang asks its storage only about prompts with at least prefetch_threshold new tokens (256; a key of the extra config), "
            "and only about what its own GPU and host caches have lost or never had",
        )
    if counts.get("miss_other_namespace", 0):
        return Finding(
            "hits",
            FAIL,
            f"{name}: {number(counts['miss_other_namespace'])} pages were asked for that are stored under other settings",
            _MISS_CURES[MissReason.OTHER_NAMESPACE],
        )
    if asked >= _ENOUGH and not stored and not row["pages"]:
        return Finding(
            "hits",
            WARN,
            f"{name}: {number(asked)} pages were asked for, and none was ever stored",
            "see the engine's log for why it does not store; --hicache-write-policy write_through stores what is computed at once",
        )
    if asked >= _ENOUGH and not found:
        reason = max(_WHY, key=lambda why: counts.get(f"miss_{why.name.lower()}", 0))
        told = _WHY[reason] if counts.get(f"miss_{reason.name.lower()}", 0) else "no reason is known"
        return Finding(
            "hits",
            WARN,
            f"{name}: {number(asked)} pages were asked for, and none was found: {told}",
            _MISS_CURES[reason],
        )
    return _check_reads(name, counts, found)


def _check_reads(name: str, counts: Row, found: int) -> Finding | None:
    """What clients say of their reads: pages that were found and could not be used."""
    if found < _ENOUGH:
        return None
    for key, text, cure in (
        (
            "client_miss_checksum",
            "failed their checksum",
            "give verify=checksum to every engine or to none; with all: the memory may be bad",
        ),
        (
            "client_miss_length",
            "had another length than the engine's pages",
            "this should not be: tell the developers, with `maru namespaces`",
        ),
        (
            "client_miss_evicted",
            "were evicted while they were read",
            "the pool is too small for what is read and stored at once: make it larger",
        ),
        (
            "client_miss_unavailable",
            "came too late: the server did not answer in time",
            "raise timeout_ms, or give the server a core of its own",
        ),
    ):
        late = counts.get(key, 0)
        if late > found * 0.05:
            return Finding("hits", WARN, f"{name}: {number(late)} pages {text}, against {number(found)} found", cure)
    return None
