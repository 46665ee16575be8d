"""Autocast's policy tables, one TOML file a device, and what reads them.

The tables are data, written from the documentation and from torch's sources; `amp_fuzz.reference`
does what they say.
"""
