"""Tuning: what was measured on a device, as data. See table.py for what it says, store.py for where it is kept."""

from attnspan.tuning.store import cache_path, device_name, is_disabled, read, table_for, write
from attnspan.tuning.table import Rate, Table

__all__ = ["Rate", "Table", "cache_path", "device_name", "is_disabled", "read", "table_for", "write"]
