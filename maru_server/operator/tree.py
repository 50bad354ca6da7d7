"""``maru tree``: the hottest prefixes, as a tree of runs of pages."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from rich.tree import Tree

from maru_core.session import Session
from maru_server.operator.asking import check_namespace
from maru_server.operator.output import age, bar, clean, console, number, print_json, short, size
from maru_server.views import LIMIT_MAX

Row = dict[str, Any]


def tree(session: Session, namespace: int | None, limit: int, sort: str, as_json: bool) -> None:
    check_namespace(session, namespace)
    rows = session.inspect("tree", namespace, limit, sort)
    if as_json:
        print_json({"nodes": rows})
        return
    if not rows:
        console().print("nothing is stored")
        return
    models = {row["namespace"]: clean(row["record"]) for row in session.inspect("namespaces", namespace, LIMIT_MAX)}
    drawn: list[Tree] = []
    whole = sum(row["subtree_bytes"] for row in rows if row["kind"] == "namespace")
    out = console()
    tops = []
    for row in clean(rows):
        text = _line(row, models.get(row["namespace"], {}), whole)
        if row["parent"] < 0:
            drawn.append(Tree(text, guide_style="dim"))
            tops.append(drawn[-1])
        else:
            drawn.append(drawn[row["parent"]].add(text))
    for top in tops:
        out.print(top)


def _line(row: Row, record: Row, whole: int) -> Text:
    part = bar(row["subtree_bytes"] / whole if whole else 0, 8)
    total = f"{part} {size(row['subtree_bytes'])}"
    if row["kind"] == "namespace":
        return Text.assemble(
            (f"namespace {row['namespace']}", "bold"),
            f" {record.get('model', '?')}: {total}, {number(row['subtree_pages'])} pages in {number(row['nodes'])} runs, "
            f"used {age(row['idle_s'])} ago",
        )
    if row["kind"] == "other":
        text = (
            f"{total}, {number(row['pages'])} pages in {number(row['nodes'])} more runs, used {age(row['idle_s'])} ago"
        )
        return Text(text, "dim")
    end = "" if row["first"] == row["last"] else f" … {short(row['last'])}"
    notes = [
        f"pages {row['depth']}-{row['depth'] + row['pages'] - 1}" if row["pages"] > 1 else f"page {row['depth']}",
        f"used {age(row['idle_s'])} ago",
        *([", ".join(row["components"])] if row["components"] != ["kv"] else []),
        *([f"{row['guarded']} pinned or held"] if row["guarded"] else ["kept"] if row["kept"] else []),
    ]
    return Text.assemble(f"{total} ", (f"{short(row['first'])}{end}", "bold"), f" {', '.join(notes)}")
