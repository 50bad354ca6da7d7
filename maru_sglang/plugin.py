"""Entry point ``sglang.srt.plugins``: makes ``maru`` a storage backend, and a linker backend, that stock SGLang accepts.

SGLang calls :func:`register` once in each of its processes, before it parses arguments. It registers the *name*
``maru`` (rather than rewriting it to ``dynamic``), so that ``/server_info``, metrics and logs say what the user asked
for. What it needs of SGLang (:data:`SEAMS`), and what it does there, only ever for the backend ``maru``:

- the command line accepts ``--hicache-storage-backend maru``, and ``--unified-cache-external-linker-backend maru``, of which
  :mod:`maru_sglang.plugin_linker` does the rest;
- arguments and attach requests are checked early: the extra config, and that chains are passed;
- the backend is built by :class:`maru_sglang.storage.backend.MaruHiCacheStorage` from the host pool;
- pages move by the zero-copy calls;
- whole chains reach the backend (``hicache_storage_pass_prefix_keys``), since Maru keeps a tree of pages;
- the backend is told when the weights are replaced under it: from then on its namespace is wrong.

A seam that is missing in another version of SGLang is an error that names it, at start-up, if ``maru`` was asked for;
otherwise SGLang runs as if the plugin were not there. Nothing here imports torch, SGLang or the rest of Maru before
it is needed.
"""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args, get_origin

from maru_sglang import plugin_linker

logger = logging.getLogger(__name__)

BACKEND: Final = "maru"
TESTED_VERSIONS: Final = ("0.5.23",)

_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_HANDLE_HICACHE = "sglang.srt.arg_groups.hicache_hook.handle_hicache"
_FACTORY = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory"
_CREATE_BUILTIN = f"{_FACTORY}._create_builtin_backend"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_ATTACH_CONTROLLER = f"{_CONTROLLER}.attach_storage_backend"
_ATTACH_HYBRID = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.attach_storage_backend"
)
_ATTACHMENT = "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_ATTACH = f"{_ATTACHMENT}.attach"
_APPLY = f"{_ATTACHMENT}.apply_runtime_config"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
#: ``begin_weight_update`` too: between begin and end a trainer may write the weights by RDMA, with no call of its own.
_WEIGHT_UPDATES = (
    f"{_WEIGHTS}.begin_weight_update",
    # What a server's memory holds after its weights were released and mapped again is anybody's guess until they are updated.
    f"{_WEIGHTS}.release_memory_occupation",
    *(f"{_WEIGHTS}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
)
#: These two do nothing outside a session that was begun.
_IN_SESSION_ONLY = ("update_weights_from_distributed", "update_weights_from_tensor")
_CHAINS = "hicache_storage_pass_prefix_keys"

#: What is used of SGLang: dotted name, and the parameters that it must have.
SEAMS: Final[dict[str, tuple[str, ...]]] = {
    _ARGUMENTS: (),
    _HANDLE_HICACHE: ("server_args",),
    f"{_FACTORY}.register_backend": ("name", "module_path", "class_name"),
    _CREATE_BUILTIN: ("backend_name", "backend_class", "storage_config", "mem_pool_host"),
    _ATTACH_CONTROLLER: ("storage_backend",),
    _ATTACH_HYBRID: ("storage_backend", "host_pools"),
    f"{_CONTROLLER}._page_get_zero_copy": ("hash_values", "host_indices", "extra_info"),
    f"{_CONTROLLER}._page_set_zero_copy": ("hash_values", "host_indices", "extra_info"),
    _ATTACH: ("storage_backend", "storage_backend_extra_config_json"),
    _APPLY: ("storage_backend", _CHAINS),
    **dict.fromkeys(_WEIGHT_UPDATES, ("recv_req",)),
}


class SeamMissingError(RuntimeError):
    """This SGLang lacks something that the plugin needs."""


_problems: list[str] = []
_linker_problems: list[str] = []
_weights_replaced = False


def register() -> None:
    """Called by SGLang once in each process. Never raises for a user who did not ask for ``maru``."""
    _problems[:] = missing_seams()
    _linker_problems[:] = missing_seams(plugin_linker.SEAMS)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    essential = (_ARGUMENTS, _HANDLE_HICACHE, plugin_linker.FIRST_STEP)
    if any(problem.startswith(essential) for problem in (*_problems, *_linker_problems)) or not (
        _accept_name("hicache_storage_backend") and _accept_name("unified_cache_external_linker_backend")
    ):
        # Without these no later check could speak up: SGLang will only say that the name is unknown.
        logger.error(
            "%r is not available, neither as storage nor as linker backend: %s", BACKEND, _problem_text(_problems)
        )
        return
    HookRegistry.register(plugin_linker.FIRST_STEP, _turn_linker_on, HookType.BEFORE)
    HookRegistry.register(_HANDLE_HICACHE, _check_arguments, HookType.BEFORE)
    if not _problems:
        _register_storage(HookRegistry.register, HookType)
    if not _linker_problems:
        plugin_linker.register(HookRegistry.register, HookType)
    if not _problems or not _linker_problems:
        for target in _WEIGHT_UPDATES:
            HookRegistry.register(target, _around_weight_update, HookType.AROUND)


def _register_storage(register: Callable[..., None], kinds: Any) -> None:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    StorageBackendFactory.register_backend(BACKEND, "maru_sglang.storage.backend", "MaruHiCacheStorage")
    register(_CREATE_BUILTIN, _create, kinds.AROUND)
    register(_ATTACH_CONTROLLER, _use_zero_copy, kinds.AFTER)
    register(_ATTACH_HYBRID, _attach_or_not, kinds.AROUND)
    register(_ATTACH, _check_attach, kinds.BEFORE)
    register(_APPLY, _pass_chains, kinds.BEFORE)


def missing_seams(seams: Mapping[str, tuple[str, ...]] = SEAMS) -> list[str]:
    """What this SGLang lacks of ``seams``, in words; empty on a version that fits."""
    problems = []
    for target, parameters in seams.items():
        try:
            found = pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            problems.append(f"{target} ({error})")
            continue
        if parameters:
            known = inspect.signature(found).parameters
            lacking = [name for name in parameters if name not in known]
            if lacking:
                problems.append(f"{target} has no parameter {', '.join(lacking)}")
    return problems


def _problem_text(problems: list[str]) -> str:
    return (
        f"this SGLang ({_sglang_version()}) lacks {'; '.join(problems) or 'the choices of its backends'}. "
        f"Maru's plugin was tested with SGLang {', '.join(TESTED_VERSIONS)}: install that, or a Maru made for yours"
    )


def _sglang_version() -> str:
    try:
        from sglang.version import __version__

        return str(__version__)
    except ImportError:
        return "of unknown version"


def _accept_name(field: str) -> bool:
    """Add ``maru`` to the choices of an argument; False if there is no such list.

    The list is the ``choices`` of the ``Arg`` in the annotation of ``ServerArgs``; the command line is built from it.
    """
    from typing import get_type_hints

    from sglang.srt.server_args import ServerArgs

    hint = get_type_hints(ServerArgs, include_extras=True).get(field)
    for part in get_args(hint) if get_origin(hint) is not None else ():
        choices = getattr(part, "choices", None)
        if isinstance(choices, list):
            if BACKEND not in choices:
                choices.append(BACKEND)
            return True
    return False


# ---------------------------------------------------------------- checks before anything is built


def _check_arguments(server_args: Any) -> None:
    """Before SGLang resolves its cache arguments: refuse what cannot work, while the command line is still in sight."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    if view.unified_cache_external_linker_backend == BACKEND:
        _require_seams(_linker_problems)
        plugin_linker.check_arguments(view)
    if view.hicache_storage_backend != BACKEND:
        return
    _require_seams(_problems)
    if not view.enable_hierarchical_cache:
        raise ValueError(f"--hicache-storage-backend {BACKEND} needs --enable-hierarchical-cache: add it")
    _check_config(view.hicache_storage_backend_extra_config)


def _turn_linker_on(server_args: Any) -> None:
    """Before SGLang resolves anything of its caches: naming the linker backend is enough."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.unified_cache_external_linker_backend == BACKEND and not view.enable_unified_cache_external_linker:
        declare_resolution(server_args, "maru", enable_unified_cache_external_linker=True)


def _check_attach(
    self: Any, storage_backend: str, storage_backend_extra_config_json: str | None = None, *args: Any, **kwargs: Any
) -> None:
    """Before a runtime attach; what is raised here becomes the answer to the HTTP request."""
    if storage_backend != BACKEND:
        return
    _require_seams(_problems)
    if _weights_replaced:
        raise ValueError(
            "the weights of this server were replaced at run time, so Maru cannot tell which weights its KV belongs to: "
            "restart the server with --model-path naming the weights that it shall serve"
        )
    _check_config(storage_backend_extra_config_json)


def _require_seams(problems: list[str]) -> None:
    if problems:
        raise SeamMissingError(_problem_text(problems))
    version = _sglang_version()
    if version not in TESTED_VERSIONS:
        logger.warning(
            "Maru's plugin was tested with SGLang %s; this is %s. All its seams are there, but what they do may have changed.",
            ", ".join(TESTED_VERSIONS),
            version,
        )


def _check_config(text: str | None) -> None:
    from maru_sglang.storage.config import SGLANG_KEYS, parse_extra_config

    config = _read_config(text)
    chains = config.get(_CHAINS, True)
    if chains is not True:
        raise ValueError(
            f"{_CHAINS} is {chains!r} in the extra config, but Maru keeps pages as chains and cannot store without them: "
            "leave the key out (Maru sets it), or set it to true"
        )
    parse_extra_config({key: value for key, value in config.items() if key not in SGLANG_KEYS})


def _read_config(text: str | None) -> dict[str, Any]:
    """The extra config as SGLang reads it: JSON text, or ``@`` and a JSON, TOML or YAML file."""
    if not text:
        return {}
    if text.startswith("@"):
        path = text[1:]
        if path.endswith(".toml"):
            import tomllib

            with open(path, "rb") as binary:
                config: Any = tomllib.load(binary)
        else:
            with open(path, encoding="utf-8") as file:
                if path.endswith((".yaml", ".yml")):
                    import yaml  # type: ignore[import-untyped]

                    config = yaml.safe_load(file)
                else:
                    config = json.load(file)
    else:
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the extra config {text!r} is not JSON ({error}): give an object such as {{}}") from error
    if not isinstance(config, dict):
        raise ValueError(f"the extra config is a {type(config).__name__}: give an object such as {{}}")
    return config


# ---------------------------------------------------------------- what the backend needs


def _create(
    original: Callable[..., Any],
    cls: Any,
    backend_name: str,
    backend_class: Any,
    storage_config: Any,
    mem_pool_host: Any,
) -> Any:
    """Build the backend; SGLang's own function knows its own names only."""
    if backend_name == BACKEND:
        return backend_class(storage_config, mem_pool_host)
    return original(cls, backend_name, backend_class, storage_config, mem_pool_host)


def _use_zero_copy(result: Any, self: Any, storage_backend: str, *args: Any, **kwargs: Any) -> None:
    """After the controller attached: SGLang chooses the zero-copy calls by a fixed list of names.

    The storage threads already run, but have nothing to do before the scheduler's thread, which is here, goes on.
    """
    if storage_backend == BACKEND:
        self.page_get_func = self._page_get_zero_copy
        self.page_set_func = self._page_set_zero_copy


def _attach_or_not(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A refusal when the last pools are registered comes after SGLang has started its storage threads: take that back too."""
    attached = self.enable_storage
    try:
        return original(self, *args, **kwargs)
    except Exception:
        name = kwargs["storage_backend"] if "storage_backend" in kwargs else args[0]
        if name == BACKEND and self.enable_storage and not attached:
            self.detach_storage_backend()
        raise


def _pass_chains(self: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Start-up and runtime attach both publish their settings here; ``self`` and keywords only."""
    if kwargs.get("storage_backend") != BACKEND:
        return None
    return (self, *args), {**kwargs, _CHAINS: True}


def _around_weight_update(original: Callable[..., Any], self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the backend before its namespace becomes wrong, so that nothing computed with new weights is stored in it."""
    global _weights_replaced
    name = original.__name__
    linker = plugin_linker.linker_of(self)
    if linker is not None and name == "release_memory_occupation":
        linker.quiesce()  # the KV pools may be unmapped before SGLang empties its cache
    harmless = name in _IN_SESSION_ONLY and getattr(self, "_session", None) is None
    if name == "release_memory_occupation" and recv_req.tags:
        harmless = "weights" not in recv_req.tags  # no tags: everything
    if not harmless:
        _weights_replaced = True
        _notify_backend(self)
        if linker is not None:
            linker.weights_changed()
    return original(self, recv_req, *args, **kwargs)


def _notify_backend(updater: Any) -> None:
    controller = getattr(getattr(getattr(updater, "scheduler", None), "tree_cache", None), "cache_controller", None)
    backend = getattr(controller, "storage_backend", None)
    seen = 0
    # SGLang's fault injection wraps a backend and passes on only the calls that it knows.
    while backend is not None and not hasattr(backend, "weights_changed") and seen < 8:
        backend, seen = getattr(backend, "_backend", None), seen + 1
    if backend is not None:
        backend.weights_changed()
