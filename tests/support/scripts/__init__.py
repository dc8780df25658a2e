"""Every script there is: users' loops, a file for each topic. A new file is found by
itself."""

from __future__ import annotations

import importlib
import pkgutil

from registry import SCRIPTS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["SCRIPTS"]
