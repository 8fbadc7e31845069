"""FlashInfer's `cutlass_fused_moe(..., backend="cake")` run by this package.

FlashInfer (0.7.1 or newer) has a backend of this name with the same contract. After
:func:`install`, its functions hand such calls to :mod:`cake.api`::

    import cake.integrations.flashinfer

    cake.integrations.flashinfer.install()

Install before `from flashinfer.fused_moe import ...`: a name that another module has taken before
stays FlashInfer's own function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from cake import api
from cake.config import ActivationType
from cake.errors import UnsupportedError

_Function = Callable[..., Any]

# cutlass_fused_moe_prepare_workspace: the name in FlashInfer 0.7.1.
_OURS: Final[dict[str, _Function]] = {
    "cutlass_fused_moe": api.cutlass_fused_moe,
    "cutlass_fused_moe_workspace_size": api.cutlass_fused_moe_workspace_size,
    "cake_fused_moe_prepare_workspace": api.cake_fused_moe_prepare_workspace,
    "cutlass_fused_moe_prepare_workspace": api.cutlass_fused_moe_prepare_workspace,
}


@dataclass(frozen=True)
class _Route:
    name: str
    original: _Function
    replacement: _Function


# Every route ever made. One that was taken out may live on under a name that somebody imported; it
# then calls the original, and is used again by the next install().
_routes: list[_Route] = []
_installed = False
_lock = threading.RLock()


def install() -> None:
    """Make `backend="cake"` of the installed FlashInfer run this package.

    Replaces `cutlass_fused_moe` and, where FlashInfer has them, its
    `cutlass_fused_moe_workspace_size` and `cake_fused_moe_prepare_workspace`, under every name in
    the modules of `flashinfer`. Calls of another backend reach the original with the very arguments
    that were given. So do calls of `backend="cake"` with an activation other than SiTU: FlashInfer
    has a second operation there (BF16 activations with SwiGLU), and its own refusals.

    A second call does nothing, except for functions that FlashInfer got anew, as by a reload. To be
    called before a model runs, in each process.

    Raises
    ------
    UnsupportedError
        FlashInfer is missing, cannot be imported, or its functions do not have the parameters that
        this package knows; says what to do. Nothing is replaced then.

    Notes
    -----
    The devices are those of `cake.is_supported`; on another GPU the call is refused, also where
    FlashInfer's own kernels would run. Workspaces are cake's: query the size, allocate and prepare
    after this call. No GPU is touched here.
    """
    global _installed
    with _lock:
        package = _import_flashinfer()
        wanted = []
        for name, ours in _OURS.items():
            theirs = vars(package).get(name)
            if theirs is None and name != "cutlass_fused_moe":
                continue
            if not any(route.replacement is theirs for route in _routes):
                wanted.append(_route(name, theirs, ours))
        for route in wanted:
            _rebind(route.name, route.original, route.replacement)
        _installed = True


def uninstall() -> None:
    """Give FlashInfer its functions back; without :func:`install` before, do nothing."""
    global _installed
    with _lock:
        _installed = False
        for route in reversed(_routes):
            _rebind(route.name, route.replacement, route.original)


def _import_flashinfer() -> ModuleType:
    """Import `flashinfer.fused_moe` and check the number of its SiTU activation."""
    try:
        package = importlib.import_module("flashinfer.fused_moe")
    except Exception as error:  # a broken one raises anything
        raise UnsupportedError(
            f"flashinfer: expected a FlashInfer that can be imported, got {error!r}: "
            "pip install flashinfer-python"
        ) from error
    situ = getattr(getattr(package, "ActivationType", None), "Situ", ActivationType.Situ)
    if situ != ActivationType.Situ:
        raise _different(f"ActivationType.Situ = {int(ActivationType.Situ)}, got {situ!r}")
    return package


def _route(name: str, original: object, ours: _Function) -> _Route:
    """Find or make the route from a function of FlashInfer's to ours."""
    for route in _routes:
        if route.name == name and route.original is original:
            return route
    if not callable(original):
        raise _different(f"a function {name}, got {original!r}")
    try:
        theirs = inspect.signature(original).parameters
    except ValueError as error:
        raise _different(f"a function {name} with a signature, got {error}") from None
    backend = theirs.get("backend")
    if backend is None or backend.kind is not backend.KEYWORD_ONLY:
        raise _different(f"{name}(..., *, backend=...), got {backend or 'no such parameter'}")
    known = inspect.signature(ours).parameters
    required, needed = _required(theirs), _required(known)
    if set(required) != set(needed):
        raise _different(f"{name}({', '.join(needed)}, ...), got {', '.join(required)}")
    replacement = _replacement(original, theirs, ours, frozenset(known))
    route = _Route(name, original, replacement)
    _routes.append(route)
    return route


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


def _replacement(
    original: _Function,
    theirs: Mapping[str, inspect.Parameter],
    ours: _Function,
    known: frozenset[str],
) -> _Function:
    """Make the function that chooses between the original and ours."""
    names = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {name: p.default for name, p in theirs.items()}
    # FlashInfer's default of this one is a private object, which says "not given".
    droppable = (defaults.keys() - known) | {"nvfp4_4over6"}

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        if not _installed or kwargs.get("backend", defaults["backend"]) != "cake":
            return original(*args, **kwargs)
        # By name: an argument's place may change between releases of FlashInfer.
        call = dict(zip(names, args, strict=False))
        if len(call) < len(args) or call.keys() & kwargs.keys():
            return original(*args, **kwargs)  # raises the TypeError of a call that cannot be
        call.update(kwargs)
        call["backend"] = "cake"
        if "activation_type" in defaults:
            activation = call.get("activation_type", defaults["activation_type"])
            activation = getattr(activation, "value", activation)
            if activation != ActivationType.Situ:
                return original(*args, **kwargs)
            call["activation_type"] = activation
        for name in droppable & call.keys():
            value, default = call[name], defaults.get(name)
            if value is default or (isinstance(value, int | float | str) and value == default):
                del call[name]
            elif name not in known:
                raise UnsupportedError(f"{name}: expected its default, got {value!r}")
        return ours(**call)

    return routed


def _rebind(name: str, old: _Function, new: _Function) -> None:
    """Replace `old` by `new` where a module of FlashInfer has it under this name."""
    for path, module in list(sys.modules.items()):
        ours = path == "flashinfer" or path.startswith("flashinfer.")
        # vars(), because getattr() would make a lazy module import something.
        if ours and isinstance(module, ModuleType) and vars(module).get(name) is old:
            setattr(module, name, new)


def _different(expected: str) -> UnsupportedError:
    version = getattr(sys.modules.get("flashinfer"), "__version__", "of unknown version")
    return UnsupportedError(
        f"flashinfer: expected {expected}; FlashInfer {version} is too different from 0.7.1 to "
        "0.7.4, which this package knows: pip install 'flashinfer-python>=0.7.1', or upgrade cake"
    )
