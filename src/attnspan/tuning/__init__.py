"""Tuning: what was measured on a device, as data. See table.py for what it says, store.py for where it is kept."""

from attnspan.tuning.store import cached, device_name, found, read, write
from attnspan.tuning.table import Rate, Table

__all__ = ["Rate", "Table", "cached", "device_name", "found", "read", "write"]
