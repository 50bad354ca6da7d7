"""What MkDocs is told of this project: pages that are made of files elsewhere, and tables that are made of the code.

The site's first page is the README, and ``examples.md`` the one of ``examples/``. Links that lead out of ``docs/`` lead to a
copy of the file in the site. In ``protocol.md`` and ``pool-format.md`` a line ``<!-- table: NAME -->`` becomes a table of what
``maru_core/protocol.py`` or ``maru_core/pool/format.py`` says at that moment.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Pages of the site that are files elsewhere.
PAGES = {"index.md": "README.md", "examples.md": "examples/README.md", "engine_kit.md": "engine_kit/README.md"}
#: Folders and files that pages link to, shown as they are.
COPIED = ("deploy", "examples", "LICENSE")
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")


# ---------------------------------------------------------------- pages


def rewritten(text: str, source: str) -> str:
    """The text of ``source`` (a path from the root) with its links as they are in the site."""

    def link(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = (ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        for page, file in PAGES.items():
            if path == file or path + "/README.md" == file:
                return f"{before}{page}{after}"
        if path.startswith("docs/"):
            return f"{before}{path.removeprefix('docs/')}{after}"
        return f"{before}files/{path}{after}"

    # Not inside of code.
    parts = re.split(r"(```.*?```|`[^`\n]+`)", text, flags=re.DOTALL)
    return "".join(part if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for name in COPIED:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md":
                target = f"files/{path.relative_to(ROOT).as_posix()}"
                files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return with_tables(rewritten(markdown, source))


# ---------------------------------------------------------------- tables


def _module(path: str) -> ModuleType:
    """A module by its file alone: what imports it, and what it belongs to, is not needed here."""
    spec = importlib.util.spec_from_file_location(f"maru_docs_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _comments(path: str, owner: str) -> dict[str, str]:
    """What stands beside or above each assignment of a class, by name."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    body: list[ast.stmt] = tree.body
    if owner:
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = {}
    for node in body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if not isinstance(target, ast.Name):
            continue
        beside = lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
        if not beside and node.end_lineno != node.lineno:
            inside = (line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno])
            beside = next((text for text in inside if text), "")
        above = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            above.append(line.strip().removeprefix("#:").strip())
        found[target.id] = beside or " ".join(reversed(above))
    return found


def _prose(text: str | None) -> str:
    """A docstring as Markdown on one line."""
    plain = " ".join((text or "").split())
    plain = re.sub(r":\w+:`~?([^`]*)`", lambda match: f"`{match[1].rpartition('.')[2]}`", plain)
    return plain.replace("``", "`").replace("|", "\\|")


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _enumeration(module: ModuleType, name: str) -> str:
    kind = getattr(module, name)
    notes = _comments("maru_core/protocol.py", name)
    rows = [[f"`{member.value}`", f"`{member.name}`", _prose(notes.get(member.name, ""))] for member in kind]
    doc = _prose(kind.__doc__) if kind.__doc__ and not kind.__doc__.startswith(("An enum", "Enum where")) else ""
    return f"### {name}\n\n{doc}\n\n" + _table(["value", "name", "meaning"], rows)


def _structs(module: ModuleType, union: str) -> list[type[Any]]:
    return list(getattr(module, union).__args__)


def _message(module: ModuleType, kind: type[Any]) -> str:
    import msgspec

    notes = _comments("maru_core/protocol.py", kind.__name__)
    rows = []
    for field in msgspec.structs.fields(kind):
        default = "" if field.required else "has a default"
        note = _prose(notes.get(field.name, ""))
        rows.append([f"`{field.name}`", f"`{_type(field.type)}`", "; ".join(filter(None, [note, default]))])
    doc = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else _prose(kind.__doc__)
    return f"### {kind.__name__}\n\n{doc}\n\n" + _table(["field", "type", ""], rows)


def _type(annotation: Any) -> str:
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", text).replace("|", "\\|").replace("NoneType", "None")


def _dtype(module: ModuleType, name: str) -> str:
    kind = getattr(module, name)
    formats = {"u": "u{}", "S": "{} bytes of text", "V": "{} bytes"}
    rows = []
    for field in kind.names:
        dtype, offset = kind.fields[field][:2]
        size = dtype.itemsize
        rows.append([str(offset), f"`{field}`", formats[dtype.kind].format(8 * size if dtype.kind == "u" else size)])
    return f"{kind.itemsize} bytes each; numbers are little-endian.\n\n" + _table(["offset", "field", "type"], rows)


def _constants(path: str, module: ModuleType) -> str:
    notes = _comments(path, "")
    rows = []
    for name in notes:
        value = getattr(module, name)
        if name.isupper() and not name.startswith("_") and isinstance(value, int | bytes):
            shown = "32 zero bytes" if value == bytes(32) else f"`{value!r}`"
            rows.append([f"`{name}`", shown, _prose(notes[name])])
    return _table(["name", "value", "meaning"], rows)


def tables() -> dict[str, str]:
    """Every table, by the name that pages call it by."""
    protocol, pool = _module("maru_core/protocol.py"), _module("maru_core/pool/format.py")
    enums = [
        name
        for name, value in vars(protocol).items()
        if isinstance(value, type) and issubclass(value, enum.Enum) and value.__module__ == protocol.__name__
    ]
    unions = {"requests": _structs(protocol, "Request"), "replies": _structs(protocol, "Reply")}
    import msgspec

    parts = [
        value
        for value in vars(protocol).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == protocol.__name__
        and not value.__name__.startswith("_")
        and value not in (*unions["requests"], *unions["replies"])
    ]
    made = {name: "\n\n".join(_message(protocol, kind) for kind in kinds) for name, kinds in unions.items()}
    made["parts"] = "\n\n".join(_message(protocol, kind) for kind in parts)
    made["enumerations"] = "\n\n".join(_enumeration(protocol, name) for name in enums)
    made["protocol constants"] = _constants("maru_core/protocol.py", protocol)
    made["format constants"] = _constants("maru_core/pool/format.py", pool)
    for name in ("SUPERBLOCK", "OWNER", "COMPONENT", "NAMESPACE", "RECORD"):
        made[name] = _dtype(pool, name)
    return made


def with_tables(markdown: str) -> str:
    """Raises:
    KeyError: a page asks for a table that there is not.
    """
    if "<!-- table:" not in markdown:
        return markdown
    made = tables()
    return re.sub(r"^<!-- table: (.+) -->$", lambda found: made[found[1]], markdown, flags=re.MULTILINE)
