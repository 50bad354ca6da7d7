"""The files in deploy/ are what systemd and Kubernetes take, and say nothing that Maru does not know."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from maru_agent import cli as agent_cli
from maru_core.pool.uri import parse_pool_uri, parse_size
from maru_core.settings import _KNOWN
from maru_server import cli as server_cli
from maru_server.endpoint import check_endpoint
from maru_server.operator import cli as maru_cli
from maru_server.web import parse_address
from maru_sglang.storage.config import parse_extra_config

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = DEPLOY / "systemd"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
_PROGRAMS: dict[str, Any] = {
    "maru-agent": typer.main.get_command(agent_cli.app),
    "maru-server": typer.main.get_command(server_cli.app),
    "maru": typer.main.get_command(maru_cli.app),
}


def only(value: Any) -> Any:
    """The value of an option that may be given several times, and is not."""
    if not isinstance(value, list | tuple):
        return value
    assert len(value) <= 1
    return value[0] if value else None


def check_command_line(words: list[str]) -> None:
    """Parse it as the program would: unknown options, missing or impossible values are errors."""
    program = _PROGRAMS[Path(words[0]).name]
    arguments = words[1:]
    with program.make_context(words[0], list(arguments), resilient_parsing=False) as context:
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if rest:
            name, command, left = program.resolve_command(context, rest)
            command.make_context(name, left, parent=context).close()
    if Path(words[0]).name == "maru-server":
        values = context.params
        pool, size = only(values["pool"]), only(values["size"])
        uri = parse_pool_uri(pool)
        assert uri.scheme in ("shm", "dax")
        # A device has its own size.
        assert (parse_size(size) >= 1 << 30) if uri.scheme == "shm" else size is None
        check_endpoint(values["bind"], insecure=values["insecure"] or bool(values["keys"]))
        assert (values["keys"] is None) == (values["clients"] is None)
        if values["http"]:
            parse_address(values["http"], insecure=values["insecure_http"])


# ---------------------------------------------------------------- systemd


def service_of(program: str) -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(UNITS / f"{program}.service")
    return parsed["Service"]


@pytest.mark.parametrize("program", ["maru-server", "maru-agent"])
def test_a_units_command_line_is_one_that_the_program_takes(program: str) -> None:
    service = service_of(program)
    environment = dict(pair.split("=", 1) for pair in shlex.split(service["Environment"]))
    line = re.sub(r"\$\{(\w+)\}", lambda match: environment[match[1]], service["ExecStart"])
    assert "$" not in line
    check_command_line(shlex.split(line))
    # The socket's directory is one that systemd makes.
    if program == "maru-server":
        assert environment["BIND"].startswith(f"ipc:///run/{service['RuntimeDirectory']}/")
    # Variables of the unit are not taken for Maru's own, which the program would warn of.
    assert not [name for name in environment if name.startswith("MARU_")]


def test_units_are_not_restarted_where_only_the_operator_can_help() -> None:
    server, agent = service_of("maru-server"), service_of("maru-agent")
    assert server["RestartPreventExitStatus"] == str(server_cli.EXIT_UNUSABLE)
    assert server["Type"] == "notify"
    assert agent["RestartPreventExitStatus"] == str(agent_cli.EXIT_UNUSABLE)
    assert agent["Restart"] == "on-failure"
    assert agent["LimitMEMLOCK"] == "infinity"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("program", ["maru-server", "maru-agent"])
def test_systemd_takes_the_unit(tmp_path: Path, program: str) -> None:
    copy = tmp_path / f"{program}.service"
    # The program and the user are not on this machine.
    text = (UNITS / copy.name).read_text().replace(f"/usr/local/bin/{program}", "/bin/true")
    copy.write_text(text.replace("User=maru\nGroup=maru\n", "User=root\nGroup=root\n"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- Kubernetes


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods(path: Path) -> list[dict[str, Any]]:
    found = []
    for document in documents(path):
        spec = document["spec"]
        if document["kind"] != "Service":
            found.append(spec if document["kind"] == "Pod" else spec["template"]["spec"])
    return found


def over_network(path: Path) -> bool:
    """Whether engines have keys there, and no memory."""
    return path.name == "rdma.yaml"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_what_maru_needs(path: Path) -> None:
    assert pods(path)
    for pod in pods(path):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        containers = [*pod.get("initContainers", []), *pod["containers"]]
        for container in containers:
            if container["command"][0] == "chown":
                continue
            where = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            for variable in container.get("env", []):
                assert variable["name"] in _KNOWN
            if over_network(path):
                # A key file that others can read is refused.
                assert where["/etc/maru"]["secret"]["defaultMode"] == 0o440
                assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
                continue
            assert set(where) >= {"/dev/shm", "/run/maru"}, "the same memory and the same socket"
            shm = where["/dev/shm"]
            assert shm.get("hostPath", {}).get("path") == "/dev/shm" or shm["emptyDir"]["medium"] == "Memory"
        # One user, and a server that can see whether its clients live.
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod.get("hostPID") or pod.get("shareProcessNamespace") or (over_network(path) and len(containers) == 1)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_what_a_manifest_selects_is_there(path: Path) -> None:
    kinds = documents(path)
    labels = [
        document["spec"]["template"]["metadata"]["labels"] for document in kinds if "template" in document["spec"]
    ]
    for document in kinds:
        if document["kind"] == "Pod":
            continue
        selector = document["spec"]["selector"]
        assert selector.get("matchLabels", selector) in labels


@pytest.mark.slow
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_of_kubernetes_schema(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate brings the schemas")
    for document in documents(path):
        validate.validate(document, "1.34", strict=True)


def servers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    found = []
    for path in MANIFESTS:
        for pod in pods(path):
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                if container["command"][0] == "maru-server":
                    found.append((path.name, pod, container))
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    ("name", "pod", "container"), servers(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_manifests_server_has_a_command_line_and_the_memory_for_it(
    name: str, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    line = [*container["command"], *container["args"]]
    check_command_line(line)
    if any(word.startswith("--pool=dax:") for word in line):
        assert any("dax" in resource for resource in container["resources"]["limits"]), "a device plugin's"
        return
    pool = parse_size(next(word.split("=")[1] for word in line if word.startswith("--size=")))
    assert parse_size(container["resources"]["limits"]["memory"] + "B") > pool, "the pool is charged to the server"
    for volume in pod["volumes"]:
        if "emptyDir" in volume and volume["emptyDir"].get("medium") == "Memory":
            assert parse_size(volume["emptyDir"]["sizeLimit"] + "B") > pool
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        if "exec" in probe:
            check_command_line(probe["exec"]["command"])
        if "httpGet" in probe:
            port = {port["name"]: port["containerPort"] for port in container["ports"]}[probe["httpGet"]["port"]]
            assert any(word == f"--http=0.0.0.0:{port}" for word in line)
            assert probe["httpGet"]["path"] == "/healthz"


def test_engines_use_the_address_that_the_server_binds() -> None:
    bound = {
        word.split("=", 1)[1].replace("0.0.0.0", "maru-memory")
        for _, _, container in servers()
        for word in container["args"]
        if word.startswith("--bind=")
    }
    named = {
        variable["value"] for path in MANIFESTS for pod in pods(path) for container in pod["containers"]
        for variable in container.get("env", []) if variable["name"] == "MARU_SERVER"
    }  # fmt: skip
    assert named == bound


def test_the_agents_command_line_and_the_names_of_the_keys() -> None:
    [path] = [path for path in MANIFESTS if over_network(path)]
    service, memory, engine = documents(path)
    assert (service["kind"], service["metadata"]["name"]) == ("Service", "maru-memory")
    server, agent = memory["spec"]["template"]["spec"]["containers"]
    check_command_line([*agent["command"], *agent["args"]])
    port = next(word for word in server["args"] if word.startswith("--bind=")).rpartition(":")[2]
    assert f"--server=tcp://127.0.0.1:{port}" in agent["args"]
    assert [port] == [str(entry["port"]) for entry in service["spec"]["ports"]]
    # What is mounted is what the comment at the top makes.
    made = re.findall(r"--from-file keys/([\w.]+)", path.read_text())
    [far] = engine["spec"]["template"]["spec"]["containers"]
    words = [*server["args"], *agent["args"], *(variable["value"] for variable in far["env"])]
    used = {found for word in words for found in re.findall(r"/etc/maru/([\w.]+)", word)}
    assert used == set(made)
    [extra] = [
        word.partition("=")[2] for word in far["args"] if word.startswith("--hicache-storage-backend-extra-config=")
    ]
    parse_extra_config(json.loads(extra))
