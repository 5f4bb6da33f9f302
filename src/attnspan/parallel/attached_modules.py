"""Which modules of a model are attached, and with which mask each of them attends.

Modules are given as objects or by patterns for their names. If patterns name masks, a module has the mask of the
innermost matching module around it. Modules that cannot call attention themselves, such as Linear, are not attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from attnspan.errors import AttentionError
from attnspan.parallel.session_spec import SessionSpec

ModulePatterns = nn.Module | str | Iterable[nn.Module | str] | Mapping[str, str]
"""Modules, or patterns for their names; with masks, patterns to names of masks."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of module names that torch.compile and checkpoint wrappers add."""

WILD = frozenset("*?[")
"""Characters that make a name a pattern."""


def modules_to_attach(
    spec: SessionSpec, model: nn.Module, modules: ModulePatterns | None, mask: str | None
) -> dict[nn.Module, str | None]:
    """The modules to attach, each with the name of its mask; None where attention is refused."""
    if modules is not None and not isinstance(modules, Mapping):
        wanted = [modules] if isinstance(modules, nn.Module | str) else list(modules)
        return dict.fromkeys(_matching(model, wanted), spec.mask_name(mask))
    refused = modules is not None and mask is None and len(spec.masks) > 1  # all that no pattern fits
    rest = None if refused else spec.mask_name(mask)
    return dict(_inherited(model, rest, _claimed(spec, model, modules or {})))


def _claimed(spec: SessionSpec, model: nn.Module, patterns: Mapping[str, str]) -> dict[nn.Module, str]:
    """The outermost modules that each pattern matches, with the name of its mask; plain names override patterns."""
    by_kind: tuple[dict[nn.Module, str], dict[nn.Module, str]] = {}, {}
    for pattern, mask in patterns.items():
        name, claims = spec.mask_name(mask), by_kind[not WILD.intersection(pattern)]
        for module in _outermost(_matching(model, [pattern])):
            if claims.setdefault(module, name) != name:
                raise AttentionError(
                    f"modules: {pattern!r} gives {_name_in(model, module)} the mask {name!r}, and another pattern "
                    f"{claims[module]!r}; let one pattern fit it"
                )
    return by_kind[0] | by_kind[1]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Modules that are not inside others of the list: "layers.*" also matches everything inside a layer."""
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in inside]


def _inherited(
    model: nn.Module, rest: str | None, claims: Mapping[nn.Module, str]
) -> Iterator[tuple[nn.Module, str | None]]:
    """Every module that may attend, with the mask of the innermost claim around it, its own first."""
    found: dict[nn.Module, str | None] = {}

    def walk(module: nn.Module, mask: str | None) -> None:
        mask = claims.get(module, mask)
        before = found.get(module, mask)
        if None not in (before, mask) and before != mask:
            raise AttentionError(
                f"modules: {_name_in(model, module)} is part of two modules, one with the mask {before!r} and one with "
                f"{mask!r}; name one for it"
            )
        found[module] = before if mask is None else mask
        for child in module.children():
            walk(child, mask)

    walk(model, rest)
    for module, mask in found.items():
        if module is model or module in claims or _may_attend(module):
            yield module, mask


def _name_in(model: nn.Module, module: nn.Module) -> str:
    return next(
        (_plain(name) for name, each in model.named_modules() if each is module and name), type(module).__name__
    )


def _matching(model: nn.Module, wanted: Iterable[nn.Module | str]) -> list[nn.Module]:
    """The modules that are meant; a pattern must fit at least one."""
    by_name = {_plain(name): module for name, module in model.named_modules()}
    found: list[nn.Module] = []
    for one in wanted:
        fitting = [one] if isinstance(one, nn.Module) else [m for name, m in by_name.items() if fnmatchcase(name, one)]
        if not fitting:
            raise AttentionError(
                f"modules: no module's name fits {one!r}; they are {', '.join(list(by_name)[1:9])} ..."
            )
        found += fitting
    return found


def _plain(name: str) -> str:
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def _may_attend(module: nn.Module) -> bool:
    """Whether a module's own forward may call SDPA: torch's small ones, such as Linear, do not."""
    if type(module).forward is nn.Module.forward:  # a list of modules: it is not called
        return False
    theirs = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")]
    return theirs != [object] or bool(list(module.children()))
