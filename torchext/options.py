"""Options of each backend, passed as ``pg_options=`` to ``init_process_group`` or ``new_group``."""

from __future__ import annotations

from torchext._C import DeAROptions, DSSyncOptions, HopOptions, PragueOptions

__all__ = ["DSSyncOptions", "DeAROptions", "HopOptions", "PragueOptions"]
