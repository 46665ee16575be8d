"""Shadow arithmetic: how far rounding can move each value of a run.

`mode` has the idea. `run.shadow` follows any call, `band.distance` measures a value.
"""
